"""Which task a person means by what they typed: an id, the beginning of one, or a name."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from diamond.core.errors import Conflict, NotFound
from diamond.core.ids import is_id
from diamond.core.projects import PROJECT_ENV
from diamond.core.tasks import Task

if TYPE_CHECKING:
    from diamond.sdk.tasks import Tasks


def chosen_project() -> str | None:
    """The project that the environment names for this shell."""
    return os.environ.get(PROJECT_ENV, "").strip() or None


def resolve(tasks: Tasks, ref: str | None, project: str | None) -> Task:
    """As `Tasks.resolve` promises."""
    if ref is None:
        newest = next(tasks.list(limit=1), None)
        if newest is None:
            raise NotFound("there are no tasks yet", hint="launch one with: diamond launch task.yaml")
        return tasks.get(newest.id)
    if is_id(ref, "tsk"):
        try:
            return tasks.get(ref)
        except NotFound:
            pass  # may still be the beginning of one
    if ref.startswith("tsk_"):
        begins = [task for task in tasks.list(id_prefix=ref, limit=5) if task.id.startswith(ref)]
        if len(begins) > 1:
            shown = ", ".join(f"{task.id} ({task.name[:40]})" for task in begins[:4])
            more = ", …" if len(begins) > 4 else ""
            raise Conflict(
                f"{ref!r} is ambiguous: several tasks begin with it: {shown}{more}",
                hint="give more of the id, or the name; see: diamond ps -a",
            )
        if begins:
            return tasks.get(begins[0].id)
    return tasks.get(_by_name(tasks, ref, project).id)


def _by_name(tasks: Tasks, name: str, project: str | None) -> Task:
    """One's own come first, so that nobody's task can stand in the way of a name; others only where a project was
    chosen, so that no stranger's public task is ever meant."""
    if mine := next(tasks.list(name=name, limit=1), None):
        return mine
    if project is None:
        hint = "give an id, the beginning of one, or a name; see: diamond ps -a"
        raise NotFound(
            f"there is no task {name[:80]!r} of yours", hint=f"{hint}; for a project's, set {PROJECT_ENV} to it"
        )
    if theirs := next(tasks.list(name=name, project=project, limit=1), None):
        return theirs
    raise NotFound(
        f"there is no task {name[:80]!r} of yours, nor one that you see in project {project}",
        hint=f"give an id, the beginning of one, or a name; see: diamond ps -a --project {project}",
    )
