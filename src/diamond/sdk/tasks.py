"""Tasks seen from a client: launching them, watching them, and fetching what they left behind."""

from __future__ import annotations

import builtins
import math
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from diamond.core.codec import decode, encode
from diamond.core.errors import InvalidInput, Unavailable
from diamond.core.projects import Visibility
from diamond.core.shells import NewShell
from diamond.core.states import TaskState
from diamond.core.tasks import Output, Task, TaskSpec
from diamond.core.training import Training
from diamond.sdk import task_refs, uploads
from diamond.sdk.bundles import Bundles
from diamond.sdk.downloads import Download, Downloader, choose
from diamond.sdk.folders import Progress
from diamond.sdk.follow import CHUNK_BYTES, Follower, FollowItem, StateChange
from diamond.sdk.metrics import Curve, Series
from diamond.sdk.shells import Completed, ShellSession, open_shell, run
from diamond.sdk.transport import API, Transport

SpecLike = TaskSpec | Mapping[str, Any] | str | os.PathLike[str]


class Tasks:
    """Reached as `Client.tasks`."""

    def __init__(self, transport: Transport, bundles: Bundles) -> None:
        self._transport = transport
        self._bundles = bundles

    def create(
        self,
        spec: SpecLike,
        *,
        envs: Mapping[str, str] | None = None,
        idempotency_key: str | None = None,
        progress: Progress | None = None,
        scan_progress: Progress | None = None,
    ) -> Task:
        """Upload a task's files and launch it.

        Args:
            spec: a TaskSpec, the same as a dictionary, or the path of a YAML file. Local paths in a file are relative
                to the file, otherwise to the current folder.
            envs: environment variables that are added to the spec's, or replace them.
            idempotency_key: names this launch: a second call with the same key and spec gives the same task. None: a
                new one is made, which keeps the client's own retries from launching twice.
            progress: called with (bytes sent, bytes to send, files sent) during the upload.
            scan_progress: the same while files are read.

        Returns:
            The task, PENDING or QUEUED.

        Raises:
            InvalidInput: the spec or one of its files cannot be accepted; names the field.
            IdempotencyMismatch: the key was used for another spec.
            ServerUnreachable: the task may or may not have been made; repeat with the same key to find out.
        """
        wanted = self.read(spec, envs=envs)
        ready = uploads.sent(self._bundles, wanted, progress, scan_progress)
        raw = self._transport.json(
            "POST",
            f"{API}/tasks",
            body={"spec": encode(ready)},
            headers={"Idempotency-Key": idempotency_key or f"sdk-{secrets.token_hex(16)}"},
            repeatable=True,
        )
        return decode(Task, raw)

    def create_many(
        self,
        specs: Sequence[SpecLike],
        *,
        idempotency_key: str | None = None,
        progress: Progress | None = None,
    ) -> builtins.list[Task]:
        """Launch several tasks in one step: all of them, or none when one cannot be accepted.

        A folder that several of them name is read and uploaded once.

        Raises:
            InvalidInput: naming the spec by its number, as `specs[3].resources.cpus`.
            IdempotencyMismatch: the key was used for other specs.
        """
        ready = uploads.all_sent(self._bundles, [self.read(spec) for spec in specs], progress)
        answer = self._transport.json(
            "POST",
            f"{API}/tasks/batch",
            body={"specs": [encode(spec) for spec in ready]},
            headers={"Idempotency-Key": idempotency_key or f"sdk-{secrets.token_hex(16)}"},
            repeatable=True,
        )
        return [decode(Task, raw) for raw in answer["tasks"]]

    def plan(
        self, spec: SpecLike, *, envs: Mapping[str, str] | None = None, scan_progress: Progress | None = None
    ) -> dict[str, Any]:
        """What `create` would do: ``{"spec", "endpoint", "why", "others", "script", "files", "envs", "time_limit_s"}``.

        Nothing is uploaded and nothing is written. Raises InvalidInput as `create` does.
        """
        wanted = self.read(spec, envs=envs)
        ready = uploads.named(self._bundles, wanted, scan_progress)
        return dict(self._transport.json("POST", f"{API}/tasks/plan", body={"spec": encode(ready)}, repeatable=True))

    def read(self, spec: SpecLike, *, envs: Mapping[str, str] | None = None) -> TaskSpec:
        """Validate a spec in any of its forms, without the server; local paths become absolute."""
        # Here and not above: listing tasks needs no YAML.
        from diamond.sdk import taskfile

        if isinstance(spec, str | os.PathLike):
            file = taskfile.load(spec)
            read = taskfile.TaskFile(file.path, taskfile.with_envs(file.raw, envs or {}), file.positions).spec()
            return taskfile.in_project(read)
        raw = encode(spec) if isinstance(spec, TaskSpec) else spec
        if not isinstance(raw, Mapping):
            raise InvalidInput("a task spec is a TaskSpec, a dictionary or the path of a YAML file")
        return taskfile.in_project(TaskSpec.parse(taskfile.with_envs(taskfile.localise(raw, Path.cwd()), envs or {})))

    def get(self, task_id: str) -> Task:
        """A task with its spec, jobs and outputs. Raises NotFound."""
        return decode(Task, self._transport.json("GET", _path(task_id)))

    def page(
        self,
        *,
        states: Sequence[TaskState | str] = (),
        name: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
        id_prefix: str | None = None,
        kind: str | None = None,
        project: str | None = None,
        owner: str | None = None,
    ) -> tuple[builtins.list[Task], str | None, int]:
        """One page of tasks, newest first: (tasks, cursor of the next page or None, number of tasks in all)."""
        params = {
            "state": ",".join(str(TaskState(state)) for state in states) or None,
            "name": name,
            "limit": limit,
            "cursor": cursor,
            "id_prefix": id_prefix,
            "kind": kind,
            "project": project,
            "owner": owner,
        }
        answer = self._transport.json("GET", f"{API}/tasks", params=params)
        return [decode(Task, raw) for raw in answer["tasks"]], answer["next_cursor"], int(answer["total"])

    def list(
        self,
        *,
        states: Sequence[TaskState | str] = (),
        name: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
        id_prefix: str | None = None,
        kind: str | None = None,
        project: str | None = None,
        owner: str | None = None,
    ) -> Iterator[Task]:
        """Tasks, newest first, fetching pages as needed.

        Args:
            states: only tasks in one of these.
            name: only tasks of exactly this name.
            limit: stop after so many; None: all there are.
            cursor: start where an earlier `page` ended.
            id_prefix: only tasks whose id begins so.
            kind: "command" (when None), "build" or "transfer" of images, or "all".
            project: everybody's in this project that you may see, instead of your own.
            owner: those of this user that you may see.
        """
        left = limit
        while left is None or left > 0:
            size = 200 if left is None else min(left, 200)
            tasks, cursor, _ = self.page(
                states=states, name=name, limit=size, cursor=cursor, id_prefix=id_prefix, kind=kind,
                project=project, owner=owner,
            )  # fmt: skip
            yield from tasks
            left = None if left is None else left - len(tasks)
            if cursor is None or not tasks:
                return

    def resolve(self, ref: str | None = None, *, project: str | None = None) -> Task:
        """The task a person means: its id, the beginning of its id if only one begins so, or the newest of that name:
        of your own, else of those you see in the project.

        Args:
            ref: None means your newest task of all.
            project: where to look for others' tasks by name; None: DIAMOND_PROJECT, else nowhere.

        Raises:
            NotFound: nothing fits.
            Conflict: several ids begin so.
        """
        return task_refs.resolve(self, ref, project or task_refs.chosen_project())

    def cancel(self, task_id: str) -> Task:
        """Ask for a task to be stopped. Harmless when it has ended, or was asked before. Raises NotFound."""
        return decode(Task, self._transport.json("POST", f"{_path(task_id)}/cancel", repeatable=True))

    def rerun(self, task_id: str, *, name: str | None = None, idempotency_key: str | None = None) -> Task:
        """Launch what a task was asked to be once more, as a new task of yours.

        Nothing is uploaded: it gets the files that were uploaded then. Secrets have the values of now.

        Args:
            name: of the new task; None: that of the old one.
            idempotency_key: as for `create`.

        Raises:
            NotFound: there is no such task.
            InvalidInput: it looks after an image, or can no longer be launched as it is.
        """
        raw = self._transport.json(
            "POST",
            f"{_path(task_id)}/rerun",
            params={"name": name},
            headers={"Idempotency-Key": idempotency_key or f"sdk-{secrets.token_hex(16)}"},
            repeatable=True,
        )
        return decode(Task, raw)

    def remove(self, task_id: str) -> None:
        """Forget a task of yours that has ended, for good: its log, curves, events and outputs at the server.

        What it used stays counted; what lies at its endpoint stays there. Files that other tasks, images or templates
        need as well are kept.

        Raises:
            NotFound: there is no such task.
            Forbidden: it is another's.
            Conflict: it has not ended.
        """
        self._transport.request("DELETE", _path(task_id))

    def share(self, task_id: str, visibility: Visibility | str | None = None, *, project: str | None = None) -> Task:
        """Say who sees a task ("private", "project" or "public"), and which project it is in; what is None stays.

        Raises:
            Forbidden: it is another's.
            Conflict: it is live, and would move.
        """
        body = {"visibility": str(visibility) if visibility else None, "project": project}
        return decode(Task, self._transport.json("PATCH", _path(task_id), body=body, repeatable=True))

    def wait(self, task_id: str, timeout_s: float | None = None, poll_s: float = 10.0) -> Task:
        """Block until a task has ended; server restarts are waited out.

        Args:
            timeout_s: give up after so many seconds; the task goes on.
            poll_s: most seconds between two looks; a change is usually noticed at once.

        Raises:
            TimeoutError: it has not ended in time.
        """
        ends_at = None if timeout_s is None else time.monotonic() + timeout_s
        path = f"{_path(task_id)}/events"
        cursor = 0
        while True:
            left = math.inf if ends_at is None else ends_at - time.monotonic()
            try:
                # The cursor is taken before the look at the task: what happens in between ends the wait at once.
                while events := self._transport.json("GET", path, params={"since": cursor, "limit": 500})["events"]:
                    cursor = int(events[-1]["seq"])
                task = self.get(task_id)
                if task.state.is_final:
                    return task
                if left <= 0:
                    raise TimeoutError(f"task {task_id} is still {task.state} after {timeout_s:g} s")
                wait_s = max(0.0, min(poll_s, left))
                self._transport.json("GET", path, params={"since": cursor, "limit": 1, "wait_s": wait_s}, wait_s=wait_s)
            except Unavailable:
                if left <= 0:
                    raise
                time.sleep(min(1.0, max(0.0, left)))

    def follow(
        self, task_id: str, *, logs: bool = True, from_start: bool = True, metrics: bool = True
    ) -> Iterator[FollowItem]:
        """What happens to a task, as it happens, until it has ended.

        Gives `StateChange` (the present state first), `LogChunk` (every byte of every attempt's log exactly once, in
        order), `AttemptEnded` between attempts, `MetricPoint` and, when the server stops answering for a while,
        `LinkChange`. Server restarts and agent outages are waited out.

        Args:
            logs: whether to give log bytes.
            from_start: begin with the first attempt's first byte; otherwise with what is written from now on.
            metrics: whether to give metric values.

        Raises:
            NotFound: there is no such task.
        """
        return Follower(self._transport, task_id, logs=logs, from_start=from_start, metrics=metrics).items()

    def logs(self, task_id: str, attempt: int | None = None, *, tail: int | None = None) -> Iterator[bytes]:
        """The log of one attempt as far as it is written, in pieces. Does not wait for more.

        Args:
            attempt: from 1; None: the newest.
            tail: only the last so many bytes.

        Raises:
            NotFound: there is no such task or attempt.
        """
        params: dict[str, Any] = {"attempt": attempt, "limit": CHUNK_BYTES}
        params |= {"offset": 0} if tail is None else {"tail": tail}
        while True:
            answer = self._transport.request("GET", f"{_path(task_id)}/logs", params=params)
            if answer.content:
                yield answer.content
            following = int(answer.headers["Diamond-Next-Offset"])
            if following <= int(answer.headers["Diamond-Offset"]) and not answer.content:
                return
            # The attempt is pinned, so that a retry between two pieces does not join two logs.
            params = {"attempt": answer.headers.get("Diamond-Attempt"), "limit": CHUNK_BYTES, "offset": following}

    def exec(
        self,
        task_id: str,
        argv: Sequence[str],
        *,
        stdin: bytes | Iterable[bytes] = b"",
        node: int = 0,
        wait: bool = False,
    ) -> Completed:
        """Run a program in a running task, in its environment and work directory, and wait for its end.

        Args:
            argv: the program and its arguments; no shell looks at them.
            stdin: what it reads, at once or in pieces.
            node: on which of the job's nodes, from 0.
            wait: wait until the task runs, if it does not yet.

        Raises:
            NotFound: there is no such task.
            Conflict: it does not run, or too many shells are open.
            PolicyRefused: the endpoint allows no shells.
        """
        with self.shell(task_id, argv, node=node, wait=wait) as session:
            return run(session, stdin)

    def shell(
        self,
        task_id: str,
        argv: Sequence[str],
        *,
        tty: bool = False,
        rows: int = 24,
        cols: int = 80,
        term: str = "xterm-256color",
        node: int = 0,
        wait: bool = False,
    ) -> ShellSession:
        """As `exec`, but the caller types and reads; with `tty`, through a terminal of `rows` by `cols`."""
        asked = NewShell(argv=tuple(argv), tty=tty, rows=rows, cols=cols, term=term, node=node)
        return open_shell(self._transport, task_id, asked, wait=wait)

    def outputs(self, task_id: str) -> builtins.list[Output]:
        """Files the task left behind; those not `stored` are on the endpoint alone."""
        answer = self._transport.json("GET", f"{_path(task_id)}/outputs")
        return [decode(Output, raw) for raw in answer["outputs"]]

    def download(
        self,
        task_id: str,
        dest: str | os.PathLike[str],
        *,
        paths: Sequence[str] | None = None,
        progress: Progress | None = None,
    ) -> builtins.list[Download]:
        """Fetch outputs into a folder. Repeating it fetches only what is missing or differs.

        Every file appears complete and with its checksum verified, or not at all; a broken transfer is resumed.

        Args:
            dest: folder; made if need be.
            paths: files, folders or patterns among the outputs; None: all that the server holds.
            progress: called with (bytes done, bytes in all, files done).

        Raises:
            NotFound: a path names no output, or one that is only on the endpoint.
            DigestMismatch: the bytes that arrive are not those the task reported.
            ProtocolError: the server sends more or fewer bytes than it said, or names an impossible checksum.
        """
        items = choose(self.outputs(task_id), paths)
        return Downloader(self._transport, task_id).fetch_all(items, Path(dest).expanduser(), progress)

    def download_file(
        self, task_id: str, path: str, dest: str | os.PathLike[str], *, progress: Progress | None = None
    ) -> Download:
        """Fetch one output to exactly the file `dest`; otherwise as `download`."""
        (item, *more) = choose(self.outputs(task_id), [path])
        if more:
            raise InvalidInput(f"{path!r} names {len(more) + 1} outputs", hint="give a folder to put them into")
        tell = (lambda done: progress(done, item.size_bytes, 0)) if progress else (lambda done: None)
        return Downloader(self._transport, task_id).fetch(item, Path(dest).expanduser(), tell)

    def metrics(self, task_id: str, attempt: int | None = None) -> builtins.list[Series]:
        """Every metric of an attempt (None: the newest) with its newest value."""
        answer = self._transport.json("GET", f"{_path(task_id)}/metrics", params={"attempt": attempt})
        return [Series.of(raw) for raw in answer["series"]]

    def metric_notes(self, task_id: str, attempt: int | None = None) -> builtins.list[str]:
        """What an attempt logged that is in no curve, and why, in sentences."""
        answer = self._transport.json("GET", f"{_path(task_id)}/metrics", params={"attempt": attempt})
        return [str(note) for note in answer.get("notes", ())]

    def curve(
        self,
        task_id: str,
        key: str,
        *,
        attempt: int | None = None,
        max_points: int = 2000,
        x: str = "step",
        x_min: float | None = None,
        x_max: float | None = None,
    ) -> Curve:
        """One metric over time, thinned by the server to at most `max_points` points.

        Args:
            x: "step", or "time" for Unix seconds.

        Raises:
            NotFound: the task has no such metric.
        """
        params = {"key": key, "attempt": attempt, "max_points": max_points, "x": x, "x_min": x_min, "x_max": x_max}
        return Curve.of(self._transport.json("GET", f"{_path(task_id)}/metrics/curve", params=params))

    def training(self, task_id: str) -> Training:
        """What a program that uses `diamond.train` measured of itself, over all jobs; empty for any other."""
        return decode(Training, self._transport.json("GET", f"{_path(task_id)}/training"))


def _path(task_id: str) -> str:
    return f"{API}/tasks/{quote(task_id, safe='')}"


__all__ = ["Download", "Progress", "SpecLike", "StateChange", "Tasks"]
