"""Inviting somebody from a page: administrators do it under Users, owners of a project on its own page.

The link is shown once, and sent by e-mail where this server sends any.
"""

from __future__ import annotations

from typing import NamedTuple

from starlette.requests import Request

from diamond.core.accounts import Invitation
from diamond.core.errors import Conflict, DiamondError
from diamond.server import mail
from diamond.server.hosts import base_url
from diamond.server.services import invitations
from diamond.server.services.identity import Identity
from diamond.server.web.forms import Form, once_of
from diamond.server.web.pages import ctx_of, settings_of
from diamond.server.web.settings import me

FIELDS = ("name", "email", "project", "role")


class Given(NamedTuple):
    """An invitation as `given_link` of templates/people_parts.html shows it."""

    invitation: Invitation
    link: str
    mailed: str  # the address to which the link went
    problem: DiamondError | None  # why it did not


def invite(request: Request, who: Identity, form: Form, project: str, *, is_admin: bool = False) -> Given:
    """Make an invitation of what was typed. Raises what `invitations.invite` does, and Conflict without accounts."""
    if not settings_of(request).multi_user:
        raise Conflict(
            "this server has one user, and listens on this machine only",
            hint="for many, start it with `diamond serve --multi-user`",
        )
    made = invitations.invite(
        ctx_of(request), me(who), name=form.get("name", "").strip(), email=form.get("email", "").strip(),
        project=project, role=form.get("role", "") if project else "", is_admin=is_admin,
        once=once_of(form),
    )  # fmt: skip
    link = address(request, "invitation", made.code)
    if not made.email or not sends_mail(request):
        return Given(made, link, "", None)
    try:
        _send(request, made, link)
    except DiamondError as error:
        return Given(made, link, "", error)
    return Given(made, link, made.email, None)


def sends_mail(request: Request) -> bool:
    settings = settings_of(request)
    return bool(settings.smtp_host and settings.mail_from)


def address(request: Request, page: str, code: str) -> str:
    """Where a code is used; after the #, which browsers keep to themselves."""
    return f"{base_url(request)}/{page}#{code}"


def _send(request: Request, made: Invitation, link: str) -> None:
    settings, ctx = settings_of(request), ctx_of(request)
    to_address = mail.check_allowed(settings, made.email, "email")
    text = (
        f"{made.invited_by} invites you to Diamond, which runs training tasks on HPC clusters.\n\n"
        f"Make your account here, within a week:\n\n  {link}\n\n"
        "The link works once. If you do not know what this is about, do nothing.\n"
    )
    letter = mail.compose(
        settings.mail_from, to_address, "An account at Diamond", text, message_id=made.id, at=ctx.clock()
    )
    mail.send(settings, letter)
