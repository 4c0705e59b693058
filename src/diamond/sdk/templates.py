"""Templates seen from a client: tasks to begin with."""

from __future__ import annotations

import builtins
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from diamond.core.codec import decode, encode
from diamond.core.projects import Visibility
from diamond.core.templates import Template
from diamond.sdk import uploads
from diamond.sdk.transport import API, Transport

if TYPE_CHECKING:
    from diamond.sdk.bundles import Bundles
    from diamond.sdk.tasks import SpecLike, Tasks


class Templates:
    """Reached as `Client.templates`."""

    def __init__(self, transport: Transport, bundles: Bundles, tasks: Tasks) -> None:
        self._transport = transport
        self._bundles = bundles
        self._tasks = tasks

    def list(self, *, search: str = "") -> builtins.list[Template]:
        """Those that come with Diamond, then all that users saved and you see, newest first; without specs."""
        found: builtins.list[Template] = []
        cursor: str | None = None
        while True:
            page = self._transport.json(
                "GET", f"{API}/templates", params={"search": search or None, "cursor": cursor, "limit": 200}
            )
            found += [decode(Template, raw) for raw in [*page["builtin"], *page["templates"]]]
            cursor = page["next_cursor"]
            if cursor is None:
                return found

    def get(self, template: str) -> Template:
        """One with its `spec`, by id; your own also by name.

        Example:
            >>> diamond.tasks.create(diamond.templates.get("parameter-sweep").spec)

        Raises:
            NotFound: there is none that you see.
        """
        return decode(Template, self._transport.json("GET", _path(template)))

    def save(
        self,
        name: str,
        spec: SpecLike,
        *,
        description: str = "",
        visibility: Visibility | str | None = None,
        project: str | None = None,
    ) -> Template:
        """Keep a task to begin with. Its files are uploaded, as for a launch.

        Args:
            visibility: "private" (the default), "project" (members of `project`) or "public".

        Raises:
            InvalidInput: the spec or one of its files cannot be accepted; names the field.
            Conflict: one of yours has that name already.
        """
        ready = uploads.sent(self._bundles, self._tasks.read(spec), None)
        body: dict[str, Any] = {"name": name, "spec": encode(ready), "description": description}
        body |= {"visibility": str(visibility)} if visibility is not None else {}
        body |= {"project": project} if project is not None else {}
        return decode(Template, self._transport.json("POST", f"{API}/templates", body=body))

    def change(self, template: str, *, version: int, **changes: Any) -> Template:
        """Change `name`, `description`, `spec`, `visibility` or `project`.

        Args:
            version: of the template that you looked at.

        Raises:
            Conflict: somebody changed it since.
            Forbidden: you may use it, not change it.
        """
        if "spec" in changes:
            changes["spec"] = encode(uploads.sent(self._bundles, self._tasks.read(changes["spec"]), None))
        body = {"version": version, **changes}
        return decode(Template, self._transport.json("PATCH", _path(template), body=body))

    def remove(self, template: str) -> None:
        """Tasks that were begun with it stay.

        Raises:
            NotFound: there is none that you see.
            Forbidden: it is another's, or comes with Diamond.
        """
        self._transport.request("DELETE", _path(template))


def _path(template: str) -> str:
    return f"{API}/templates/{quote(template, safe='')}"
