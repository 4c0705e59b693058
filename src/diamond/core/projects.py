"""Projects: who works together, what they share, and how far.

Every object belongs to a user and to a project. Somebody who works alone has a project of their own, under their name.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from diamond.core.compat import StrEnum
from diamond.core.errors import InvalidInput

PROJECT_ENV = "DIAMOND_PROJECT"  # where clients work, when nothing else is said
PROJECT_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


class Role(StrEnum):
    """What a member may do; each may do what the ones below may."""

    OWNER = "owner"  # changes the project and who is in it, stops and hands on what it shares
    MEMBER = "member"  # launches in it, uses its endpoints and secrets
    VIEWER = "viewer"  # sees what it shares

    @property
    def at_least(self) -> tuple[Role, ...]:
        """The roles that may do what this one may."""
        return tuple(Role)[: tuple(Role).index(self) + 1]


class Visibility(StrEnum):
    """Who, beside its owner, sees an object and may use it."""

    PRIVATE = "private"  # nobody
    PROJECT = "project"  # the members of its project
    PUBLIC = "public"  # everybody with an account here


def parse_project(raw: object) -> str:
    """The name of a project, as people write it."""
    if not isinstance(raw, str) or not PROJECT_NAME.fullmatch(raw):
        raise ValueError(
            f"{str(raw)[:60]!r} is not the name of a project: lower-case letters, digits, dots, dashes and "
            "underscores, at most 63"
        )
    return raw


def parse_role(raw: str, field: str = "role") -> Role:
    try:
        return Role(raw)
    except ValueError:
        raise InvalidInput(f"{raw[:40]!r} is none of {', '.join(Role)}", field=field) from None


def parse_visibility(raw: str, field: str = "visibility") -> Visibility:
    try:
        return Visibility(raw)
    except ValueError:
        raise InvalidInput(f"{raw[:40]!r} is none of {', '.join(Visibility)}", field=field) from None


@dataclass(frozen=True, kw_only=True)
class Member:
    user: str
    role: Role
    since: float
    full_name: str = ""


@dataclass(frozen=True, kw_only=True)
class EndpointShare:
    """An endpoint that a member offers to a project. Whoever owns it can read what is sent there, secrets included.

    Attributes:
        owner: whose it is; `approved_by`: an owner of the project. Names of users.
        approved_at: None while it waits to be approved; until then the project's tasks do not go there.
        proven: whether anything has succeeded there; until then, others' tasks go there only if they name it.
    """

    endpoint: str
    owner: str
    asked_at: float
    approved_at: float | None = None
    approved_by: str = ""
    proven: bool = False


@dataclass(frozen=True, kw_only=True)
class Project:
    """As a member sees it. `members` only in the detail view."""

    id: str
    name: str
    title: str = ""
    personal: bool = False
    role: Role | None = None  # of who is asking; None: an administrator who is not in it
    created_at: float
    num_members: int = 1
    members: tuple[Member, ...] = ()
    # Only in the detail view: the endpoints its tasks may go to, by name; and these with whose they are, beside those
    # that wait to be approved (for owners, and for who asked).
    endpoints: tuple[str, ...] = ()
    shares: tuple[EndpointShare, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Transferred:
    """Whose something is now. `name`: of an image, what it is called there."""

    owner: str
    name: str = ""
