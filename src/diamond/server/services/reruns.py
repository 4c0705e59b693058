"""Running a task once more: a new task from the same description, of whoever asks."""

from __future__ import annotations

from diamond.core.errors import InvalidInput
from diamond.core.tasks import Task
from diamond.server.services import tasks
from diamond.server.services.context import Context


def rerun(
    ctx: Context, user_id: str, task_id: str, idempotency_key: str | None = None, *, name: str | None = None
) -> Task:
    """Launch what that task was asked to be, again. Secrets are named, so they have the values of now; files are those
    that were uploaded then. With a key, repeating the call is harmless.

    Args:
        name: of the new task; None: that of the old one.

    Raises:
        NotFound: there is no such task.
        InvalidInput: it looks after an image, or can no longer be launched as it is.
    """
    with ctx.db.read() as session:
        row = tasks.find(session, user_id, task_id, whole=True)
        if row.kind != "command":
            raise InvalidInput(f"task {task_id} looks after an image", hint="build the image again instead")
        spec = dict(row.spec) if name is None else {**row.spec, "name": name}
    task, _ = tasks.create(ctx, user_id, spec, idempotency_key)
    return task
