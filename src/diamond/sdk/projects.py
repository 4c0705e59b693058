"""Projects seen from a client: who works together, and what they share."""

from __future__ import annotations

import builtins
from urllib.parse import quote

from diamond.core.codec import decode
from diamond.core.projects import Project, Role, Transferred
from diamond.core.tasks import Task
from diamond.sdk.transport import API, Transport


class Projects:
    """Reached as `Client.projects`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def list(self) -> builtins.list[Project]:
        """Those you are in, by name."""
        answer = self._transport.json("GET", f"{API}/projects")
        return [decode(Project, raw) for raw in answer["projects"]]

    def list_all(self) -> builtins.list[Project]:
        """Everybody's, but for those that are one person's own. For administrators."""
        return [decode(Project, raw) for raw in self._transport.json("GET", f"{API}/admin/projects")["projects"]]

    def get(self, name: str) -> Project:
        """One with its members and the endpoints shared with it. Raises NotFound."""
        return decode(Project, self._transport.json("GET", _path(name)))

    def create(self, name: str, title: str = "") -> Project:
        """Make a project, of which you are the first owner.

        Raises:
            Conflict: the name is taken.
            InvalidInput: the name cannot be used.
        """
        return decode(Project, self._transport.json("POST", f"{API}/projects", body={"name": name, "title": title}))

    def rename(self, name: str, title: str) -> Project:
        """Give it another title; its name stays. Owners can."""
        return decode(Project, self._transport.json("PATCH", _path(name), body={"title": title}))

    def set_member(self, name: str, user: str, role: Role | str = Role.MEMBER) -> Project:
        """Let somebody in, or change what they may do. May be repeated.

        Raises:
            NotFound: there is no such project of yours, or no such user.
            Conflict: the last owner would be none any more.
        """
        path = f"{_path(name)}/members/{quote(user, safe='')}"
        return decode(Project, self._transport.json("PUT", path, body={"role": str(Role(role))}))

    def remove_member(self, name: str, user: str) -> None:
        """Put somebody out; what they have in the project stays theirs. Raises Conflict for the last owner."""
        self._transport.json("DELETE", f"{_path(name)}/members/{quote(user, safe='')}")

    def leave(self, name: str) -> None:
        """The same for yourself."""
        self._transport.json("POST", f"{_path(name)}/leave")

    def remove(self, name: str) -> int:
        """End a project; how many tasks and images went to their owners' own projects.

        Raises:
            Conflict: it has live tasks.
        """
        return int(self._transport.json("DELETE", _path(name))["moved"])

    def share_endpoint(self, name: str, endpoint: str) -> Project:
        """Let the project's tasks run at an endpoint of yours, as far as its own policy file lets them.

        At once where you are an owner of the project; else it waits in `Project.shares` for one to approve. May be
        repeated.
        """
        return decode(Project, self._transport.json("PUT", _share(name, endpoint)))

    def approve_endpoint(self, name: str, endpoint: str, *, owner: str | None = None) -> Project:
        """Let the project's tasks go to an endpoint that a member shares, who can then read what is sent there, secrets
        included. Owners of the project can. May be repeated.

        Args:
            owner: whose the endpoint is, as you saw it.

        Raises:
            NotFound: nobody asked for that.
            Conflict: it is another's by now.
        """
        path, query = f"{_share(name, endpoint)}/approve", {"owner": owner} if owner is not None else {}
        return decode(Project, self._transport.json("POST", path, params=query))

    def decline_endpoint(self, name: str, endpoint: str) -> Project:
        """Turn down what a member asked for; they are told. Owners of the project can.

        Raises:
            NotFound: nobody asked for that.
            Conflict: it is approved already: `unshare_endpoint` ends that.
        """
        return decode(Project, self._transport.json("POST", f"{_share(name, endpoint)}/decline"))

    def unshare_endpoint(self, name: str, endpoint: str) -> Project:
        """No longer, or withdraw what was asked for; what runs there goes on."""
        return decode(Project, self._transport.json("DELETE", _share(name, endpoint)))

    def transfer(self, kind: str, ref: str, to: str) -> Transferred:
        """Give something to another user; who has it now, and what an image is called there.

        Args:
            kind: "task", "image", "endpoint" or "project".
            ref: its id or name.
            to: a member of its project; for administrators, anybody.

        Raises:
            Conflict: it is live.
        """
        path = f"{API}/{kind}s/{quote(ref, safe='/' if kind == 'image' else '')}/transfer"
        return decode(Transferred, self._transport.json("POST", path, body={"to": to}))

    def hand_over(self, user: str, to: str) -> dict[str, int]:
        """Give all that somebody has to somebody else; how many of each kind. For administrators."""
        path = f"{API}/users/{quote(user, safe='')}/hand-over"
        return {str(key): int(count) for key, count in self._transport.json("POST", path, body={"to": to}).items()}

    def live_tasks(self) -> builtins.list[Task]:
        """Everybody's tasks that have not ended, without what their owners wrote. For administrators."""
        return [decode(Task, raw) for raw in self._transport.json("GET", f"{API}/admin/tasks")["tasks"]]

    def stop_any(self, task_id: str) -> Task:
        """Stop a task, whosever it is. For administrators."""
        path = f"{API}/admin/tasks/{quote(task_id, safe='')}/cancel"
        return decode(Task, self._transport.json("POST", path, repeatable=True))


def _share(name: str, endpoint: str) -> str:
    return f"{_path(name)}/endpoints/{quote(endpoint, safe='')}"


def _path(name: str) -> str:
    return f"{API}/projects/{quote(name, safe='')}"
