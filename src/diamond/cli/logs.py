"""`diamond logs`: exact bytes into files and pipes, harmless text onto terminals."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from diamond.cli import render
from diamond.cli.session import connect, emit, leave, say
from diamond.core.errors import InvalidInput
from diamond.core.tasks import Task

if TYPE_CHECKING:
    from diamond.sdk.client import Client

_FIRST_TAIL_BYTES = 64 * 1024
_MAX_TAIL_BYTES = 1024 * 1024


def logs(ref: str | None, *, follow: bool, attempt: int | None, tail: int | None, as_json: bool) -> None:
    if follow and attempt is not None:
        raise InvalidInput("follow goes through all attempts", hint="leave --attempt or -f out", field="--attempt")
    with connect() as client:
        task = client.tasks.resolve(ref)
        if follow:
            leave(_follow(client, task, tail, as_json))
        if not task.jobs:
            say(f"{render.clean(task.name)} is {task.state}; it has no log yet." + _pending(task))
            if as_json:
                emit({"task_id": task.id, "attempt": attempt, "text": ""})
            return
        pieces = _tail(client, task.id, attempt, tail) if tail is not None else client.tasks.logs(task.id, attempt)
        if as_json:
            text = b"".join(pieces).decode("utf-8", errors="replace")
            emit({"task_id": task.id, "attempt": attempt or task.attempt, "text": text})
        else:
            wrote = write(pieces)
            if not wrote and tail != 0 and sys.stdout.isatty():
                job = next((job for job in task.jobs if job.attempt == attempt), task.jobs[-1])
                say("the task wrote nothing" if job.state.is_final else "the log is empty so far")


def _pending(task: Task) -> str:
    return f" {render.clean(task.pending_reason)}" if task.pending_reason and not task.state.is_final else ""


def _follow(client: Client, task: Task, tail: int | None, as_json: bool) -> int:
    from diamond.cli import live

    if tail is not None and task.jobs and not as_json:
        write(_tail(client, task.id, None, tail))
    return live.follow(client, task, as_json=as_json, from_start=tail is None, summary=sys.stdout.isatty())


def _tail(client: Client, task_id: str, attempt: int | None, lines: int) -> Iterator[bytes]:
    """The last `lines` lines; what is fetched grows until they are in it."""
    if lines == 0:
        return
    want = _FIRST_TAIL_BYTES
    while True:
        data = b"".join(client.tasks.logs(task_id, attempt, tail=want))
        if len(data) < want or want >= _MAX_TAIL_BYTES or data.count(b"\n") > lines:
            break
        want = min(want * 8, _MAX_TAIL_BYTES)
    yield b"".join(data.splitlines(keepends=True)[-lines:])


def write(pieces: Iterable[bytes]) -> bool:
    """To a terminal cleaned, line by line; to anything else byte for byte. Whether there was anything."""
    wrote = False
    if not sys.stdout.isatty():
        sys.stdout.flush()
        for piece in pieces:
            sys.stdout.buffer.write(piece)
            wrote = wrote or bool(piece)
        sys.stdout.buffer.flush()
        return wrote
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    rest = ""
    for piece in pieces:
        wrote = wrote or bool(piece)
        *lines, rest = (rest + decoder.decode(piece)).split("\n")
        if lines:
            sys.stdout.write("\n".join(map(render.clean_log, lines)) + "\n")
    rest += decoder.decode(b"", final=True)
    if rest:
        sys.stdout.write(render.clean_log(rest) + "\n")
    sys.stdout.flush()
    return wrote
