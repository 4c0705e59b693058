"""Templates: tasks to begin with. Some come with Diamond; users save others, and share them as they share images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diamond.core.errors import InvalidInput, TooLarge
from diamond.core.fields import parse_name
from diamond.core.projects import Visibility

MAX_DESCRIPTION = 2000


@dataclass(frozen=True, kw_only=True)
class Template:
    """As its reader sees it.

    Attributes:
        id: ``tpl_…``; of one that comes with Diamond, its name in lower case: ``fine-tune``.
        version: grows with every change: whoever changes it says from which they began.
        spec: fields of a task file; only in the detail view.
        text: the same as the text of a task file, with its comments where it has any; only in the detail view.
        is_mine: whether the reader may change and remove it.
        changed_by: a user's name.
    """

    id: str
    name: str
    description: str = ""
    version: int = 1
    owner: str = ""
    project: str = ""
    visibility: Visibility = Visibility.PRIVATE
    builtin: bool = False
    is_mine: bool = False
    created_at: float = 0.0
    updated_at: float = 0.0
    changed_by: str = ""
    spec: dict[str, Any] | None = None
    text: str = ""


def check_template_name(raw: object) -> str:
    try:
        return parse_name(raw)
    except InvalidInput as error:
        raise type(error)(error.message, hint=error.hint, field="name") from error
    except ValueError as error:
        message = "must not be empty" if isinstance(raw, str) and not raw.strip() else str(error)
        raise InvalidInput(message, hint="say in a few words what it is for", field="name") from error


def check_description(raw: object) -> str:
    if not isinstance(raw, str) or "\x00" in raw:
        raise InvalidInput("must be text", field="description")
    if len(raw) > MAX_DESCRIPTION:
        raise TooLarge(f"is {len(raw)} characters long; at most {MAX_DESCRIPTION} are allowed", field="description")
    return raw.strip()
