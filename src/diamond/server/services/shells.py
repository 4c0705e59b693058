"""Shells in running jobs: who may open one, and the two bounded buffers through which its bytes pass.

Nothing of a shell is stored but two events, that it was opened (by whom, in which task) and how it ended; never its
bytes. Each direction is a `Pipe`, addressed by byte offset: a reader that names an offset has everything before it, a
writer is told how much was taken. So either side may lose its connection at any moment and go on without a byte lost
or doubled, and whoever is slow makes the other wait instead of filling memory.

`ShellTable` and `Pipe` belong to the event loop; the functions that use the database run in a thread. Shells live in
one server process: where several share a database, a client and an agent must reach the same one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa

from diamond.core.durations import format_duration
from diamond.core.errors import Conflict, Forbidden, InvalidInput, NotFound, PolicyRefused, ProtocolError, Unavailable
from diamond.core.ids import new_id
from diamond.core.shells import NewShell, Shell, ShellEnd, ShellOrder
from diamond.core.states import FINAL_JOB_STATES, JobState, TaskState
from diamond.server.services import tasks
from diamond.server.services.context import Context
from diamond.server.services.snapshots import facts_of, is_online
from diamond.server.store.db import record_event
from diamond.server.store.models import EndpointRow, JobRow, TaskRow, UserRow

PIPE_BYTES = 512 * 1024
_MAX_MESSAGE = 500


@dataclass(frozen=True, kw_only=True)
class ShellLimits:
    """How many shells there may be at once, and how long silence is borne, in seconds."""

    per_task: int = 8
    per_user: int = 16
    per_endpoint: int = 64
    patience_s: float = 60.0  # for a client or an agent that has gone quiet
    idle_s: float = 43_200.0  # without a byte either way


@dataclass(frozen=True, kw_only=True)
class Place:
    """The running job a shell goes into, and for whom."""

    task_id: str
    job_id: str
    owner_id: str
    owner: str
    endpoint_id: str
    endpoint: str


class Pipe:
    """Some bytes of an endless stream: those written and not yet known to be received."""

    def __init__(self, capacity: int = PIPE_BYTES) -> None:
        self._capacity = capacity
        self._data = bytearray()
        self._changed = asyncio.Event()
        self.start = 0  # offset of the first byte held

    @property
    def end(self) -> int:
        return self.start + len(self._data)

    def write(self, offset: int, data: bytes) -> int:
        """Take in what is new of `data` and fits; returns up to where everything is here. A gap takes nothing."""
        known = self.end - offset
        if 0 <= known < len(data):
            fresh = data[known : known + self._capacity - len(self._data)]
            if fresh:
                self._data += fresh
                self.wake()
        return self.end

    def read(self, offset: int, limit: int) -> bytes:
        """Bytes from `offset` on; the reader has all before it, and they are dropped.

        Raises:
            ProtocolError: no reader that kept its own count can ask for this.
        """
        if not self.start <= offset <= self.end:
            raise ProtocolError(f"bytes {self.start} to {self.end} of this stream are held, not {offset}")
        if offset > self.start:
            del self._data[: offset - self.start]
            self.start = offset
            self.wake()
        return bytes(self._data[:limit])

    def wake(self) -> None:
        """Make everybody who waits look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def change(self, timeout_s: float) -> None:
        """Wait for the next change. Look before awaiting this: nothing else runs in between."""
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._changed.wait()


class LiveShell:
    """One shell, from being asked for until its client has seen how it ended."""

    def __init__(self, shell_id: str, place: Place, asked: NewShell, now: float) -> None:
        self.id = shell_id
        self.place = place
        self.order = ShellOrder(
            shell_id=shell_id,
            job_id=place.job_id,
            argv=asked.argv,
            tty=asked.tty,
            rows=asked.rows,
            cols=asked.cols,
            term=asked.term,
            node=asked.node,
            user=place.owner,
        )
        self.created_at = time.time()
        self.input = Pipe()
        self.output = Pipe()
        self.runner = ""  # the agent process that took it up
        self.end: ShellEnd | None = None
        self.client_seen = self.agent_seen = self.used_at = now  # on the table's clock

    def show(self) -> Shell:
        return Shell(
            id=self.id,
            task_id=self.place.task_id,
            job_id=self.place.job_id,
            endpoint=self.place.endpoint,
            tty=self.order.tty,
            state="over" if self.end else "running" if self.runner else "waiting",
            created_at=self.created_at,
            end=self.end,
        )


class ShellTable:
    """The shells of this server process. Use on the event loop."""

    def __init__(
        self, limits: ShellLimits, notify: Callable[[str], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`notify` wakes whoever waits on a topic of the hub: an agent that waits for orders."""
        self.limits = limits
        self._notify = notify
        self._clock = clock
        self._shells: dict[str, LiveShell] = {}

    def add(self, place: Place, asked: NewShell) -> LiveShell:
        """A new shell, which its agent will take up. Raises Conflict when there are too many."""
        for what, limit, number in (
            ("this task", self.limits.per_task, self._count("task_id", place.task_id)),
            ("you", self.limits.per_user, self._count("owner_id", place.owner_id)),
            (f"endpoint {place.endpoint}", self.limits.per_endpoint, self._count("endpoint_id", place.endpoint_id)),
        ):
            if number >= limit:
                have = "have" if what == "you" else "has"
                raise Conflict(f"{what} {have} {number} shells open, as many as may be", hint="close one of them first")
        shell = LiveShell(new_id("shl"), place, asked, self._clock())
        self._shells[shell.id] = shell
        self._notify(f"endpoint:{place.endpoint_id}")
        return shell

    def _count(self, field: str, value: str) -> int:
        return sum(getattr(shell.place, field) == value for shell in self._shells.values())

    def of_user(self, user_id: str, shell_id: str) -> LiveShell:
        """A user's own shell, over or not; says that its client is there."""
        shell = self._shells.get(shell_id)
        if shell is None or shell.place.owner_id != user_id:
            raise NotFound(f"there is no shell {shell_id[:60]!r}", hint="a restart of the server ends every shell")
        shell.client_seen = self._clock()
        return shell

    def of_agent(self, endpoint_id: str, shell_id: str, runner: str) -> LiveShell:
        """A shell of this agent's endpoint that is not over. The first process to ask has taken it up.

        Raises:
            NotFound: it is over, or the server was restarted: end the program.
            Conflict: another process has taken it up.
        """
        shell = self._shells.get(shell_id)
        if shell is None or shell.place.endpoint_id != endpoint_id or shell.end is not None:
            raise NotFound(f"there is no shell {shell_id[:60]!r}", hint="it is over")
        if not shell.runner:
            shell.runner = runner
        elif shell.runner != runner:
            raise Conflict(f"shell {shell_id} was taken up by another agent process")
        shell.agent_seen = self._clock()
        return shell

    def used(self, shell: LiveShell) -> None:
        shell.used_at = self._clock()

    def orders(self, endpoint_id: str, known: Collection[str]) -> tuple[ShellOrder, ...]:
        """Shells that wait for this endpoint's agent, without those it says it knows."""
        return tuple(
            shell.order
            for shell in self._shells.values()
            if shell.place.endpoint_id == endpoint_id
            and not shell.runner
            and shell.end is None
            and shell.id not in known
        )

    def orphans(self, endpoint_id: str, runner: str) -> list[LiveShell]:
        """Shells that an earlier process of this endpoint's agent ran."""
        return [
            shell
            for shell in self._shells.values()
            if shell.place.endpoint_id == endpoint_id and shell.runner not in ("", runner) and shell.end is None
        ]

    def live(self) -> list[LiveShell]:
        return [shell for shell in self._shells.values() if shell.end is None]

    def finish(self, shell: LiveShell, end: ShellEnd) -> bool:
        """The shell is over; False when it already was. Its output stays until the client has it."""
        if shell.end is not None:
            return False
        shell.end = end
        self.used(shell)
        shell.input.wake()
        shell.output.wake()
        return True

    def drop(self, shell: LiveShell) -> None:
        self._shells.pop(shell.id, None)

    def sweep(self) -> list[tuple[LiveShell, ShellEnd]]:
        """Which shells must end now for somebody's silence. Those over and never collected are forgotten."""
        now, found = self._clock(), []
        silence = format_duration(self.limits.patience_s)
        for shell in list(self._shells.values()):
            where = shell.place.endpoint
            if shell.end is not None:
                if now - max(shell.used_at, shell.client_seen) > self.limits.patience_s:
                    self.drop(shell)
            elif now - shell.client_seen > self.limits.patience_s:
                found.append((shell, ShellEnd(message=f"its client has been silent for {silence}")))
            elif now - shell.agent_seen > self.limits.patience_s:
                what = "has been silent" if shell.runner else "did not take the shell up"
                found.append((shell, ShellEnd(message=f"the agent of endpoint {where} {what} for {silence}")))
            elif now - shell.used_at > self.limits.idle_s:
                idle = format_duration(self.limits.idle_s)
                found.append((shell, ShellEnd(message=f"nothing was typed or shown for {idle}")))
        return found


def find_place(ctx: Context, user_id: str, task_id: str, asked: NewShell) -> Place:
    """The running job of a user's task.

    Raises:
        NotFound: the user sees no such task.
        Forbidden: it is another's.
        Conflict: it does not run.
        PolicyRefused: the endpoint allows no shells.
        Unavailable: its agent is away.
    """
    with ctx.db.read() as session:
        task = tasks.find(session, user_id, task_id)
        if task.owner_id != user_id:  # a shell in it is everything its owner can do there
            whose = session.get_one(UserRow, task.owner_id).name
            raise Forbidden(
                f"task {task_id} is {whose}'s: you can look at it; only its owner opens shells in it",
                hint=f"ask {whose}; diamond logs {task_id} shows what it writes",
            )
        # Not simply the newest: of a chain, the next job may already wait behind the one that runs.
        running = [JobRow.task_id == task.id, JobRow.state == JobState.RUNNING.value]
        job = session.scalars(sa.select(JobRow).where(*running).order_by(JobRow.attempt.desc()).limit(1)).one_or_none()
        if job is None:
            raise _not_running(task)
        endpoint = session.get(EndpointRow, job.endpoint_id)
        owner = session.get(UserRow, user_id)
        assert endpoint is not None and owner is not None
        facts = facts_of(endpoint)
        if facts is not None and not facts.allows_shells:
            raise PolicyRefused(
                f"endpoint {endpoint.name} allows no shells",
                hint="its owner can change that with allow_shells in policy.toml",
            )
        is_guest = endpoint.owner_id != user_id
        if facts is not None and is_guest and not facts.allows_shells_of_others:
            raise PolicyRefused(
                f"endpoint {endpoint.name} is shared with you, and allows shells only to its owner",
                hint="its owner can change that with allow_shells_of_others in policy.toml",
            )
        if not is_online(endpoint.last_seen_at, ctx.clock()):
            raise Unavailable(f"endpoint {endpoint.name} is offline", hint="try again when its agent is back")
        num_nodes = max(1, len(job.hosts))
        if asked.node >= num_nodes:
            count = f"{num_nodes} nodes" if num_nodes > 1 else "one node"
            raise InvalidInput(
                f"the job has {count}; there is no number {asked.node}", hint="counted from 0", field="node"
            )
        return Place(
            task_id=task.id,
            job_id=job.id,
            owner_id=user_id,
            owner=owner.name,
            endpoint_id=endpoint.id,
            endpoint=endpoint.name,
        )


def _not_running(task: TaskRow) -> Conflict:
    state = TaskState(task.state)
    if state.is_final or state is TaskState.FINISHING:
        ended = "has ended" if state.is_final else "has just ended"
        return Conflict(f"task {task.name!r} {ended} ({state}); a shell needs one that runs", field="task")
    why = f": {task.pending_reason}" if task.pending_reason else ""
    return Conflict(
        f"task {task.name!r} is {state}{why}; a shell needs one that runs",
        hint="wait for it to start (diamond exec --wait)",
        field="task",
    )


def record_opened(ctx: Context, shell: LiveShell) -> None:
    """Write down who opened it, where. Its arguments are left out: they may hold secrets."""
    data = {"shell": shell.id, "user": shell.place.owner, "tty": shell.order.tty, "program": shell.order.argv[0][:200]}
    _record(ctx, shell, "shell.opened", data)


def record_closed(ctx: Context, shell: LiveShell) -> None:
    end = shell.end or ShellEnd()
    data = {"shell": shell.id, "exit_code": end.exit_code, "signal": end.signal, "why": end.message[:_MAX_MESSAGE]}
    _record(ctx, shell, "shell.closed", data)


def _record(ctx: Context, shell: LiveShell, kind: str, data: dict[str, Any]) -> None:
    place = shell.place
    with ctx.db.write() as session:
        record_event(
            session,
            at=ctx.clock(),
            kind=kind,
            owner_id=place.owner_id,
            task_id=place.task_id,
            job_id=place.job_id,
            endpoint_id=place.endpoint_id,
            data=data,
        )
    ctx.hub.notify("events", f"task:{place.task_id}")


def clean_end(raw: ShellEnd) -> ShellEnd:
    """What an agent says of an end, as a database and a terminal can take it."""
    message = "".join(char if char.isprintable() else "?" for char in raw.message[:_MAX_MESSAGE])
    code = raw.exit_code if raw.exit_code is not None and 0 <= raw.exit_code <= 255 else None
    number = raw.signal if raw.signal is not None and 0 < raw.signal <= 64 else None
    return ShellEnd(exit_code=code, signal=number, message=message.encode(errors="replace").decode())


def ended_jobs(ctx: Context, job_ids: Iterable[str]) -> set[str]:
    """Of these jobs, those that are over."""
    final = [state.value for state in FINAL_JOB_STATES]
    with ctx.db.read() as session:
        query = sa.select(JobRow.id).where(JobRow.id.in_(set(job_ids)), JobRow.state.in_(final))
        return set(session.scalars(query))
