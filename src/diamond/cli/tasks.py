"""Commands about tasks: ps, show, stop, rerun, rm."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from diamond.cli import render
from diamond.cli import spec as spec_text
from diamond.cli.describe import metric_rank, next_text, note_lines, reason_lines, waiting_text, work_dir
from diamond.cli.describe_training import training_lines
from diamond.cli.session import confirm, connect, emit, leave, program, say, show_error, task_json
from diamond.core.codec import encode
from diamond.core.errors import DiamondError, InvalidInput, NotFound
from diamond.core.states import TaskState, parse_task_states
from diamond.core.tasks import Task
from diamond.sdk.task_refs import chosen_project

if TYPE_CHECKING:
    from diamond.core.training import Training
    from diamond.sdk.client import Client

LIVE = tuple(state for state in TaskState if not state.is_final)


@dataclass(frozen=True, kw_only=True)
class Whose:
    """Which tasks: your own, unless one of these is named. A project that the environment chose counts as named,
    unless `mine` says otherwise or somebody is named."""

    project: str | None = None
    owner: str | None = None
    mine: bool = False

    def filters(self, client: Client) -> dict[str, str]:
        project = self.project or (None if self.mine or self.owner else chosen_project())
        owner = self.owner
        if self.mine and project:
            owner = client.accounts.me().name
        return {key: value for key, value in (("project", project), ("owner", owner)) if value}


def ps(
    *,
    everything: bool,
    states: list[str],
    name: str | None,
    images: bool,
    limit: int,
    as_json: bool,
    whose: Whose = Whose(),
) -> None:
    wanted = parse_task_states(",".join(states), "--state") or (() if everything or name else LIVE)
    kind = "all" if images else None
    if whose.mine and whose.owner:
        raise InvalidInput("is somebody's, --mine your own", hint="leave one of them out", field="--owner")
    with connect() as client:
        others = whose.filters(client)
        tasks, cursor, total = client.tasks.page(states=wanted, name=name, limit=min(limit, 1000), kind=kind, **others)
        while cursor and len(tasks) < limit:
            more, cursor, _ = client.tasks.page(
                states=wanted, name=name, limit=min(limit - len(tasks), 1000), cursor=cursor, kind=kind, **others
            )
            tasks += more
        plain = not (images or as_json or name or states or others)
        building = client.tasks.page(states=LIVE, limit=1, kind="build")[2] if plain else 0
    if as_json:
        rows = [{k: v for k, v in task_json(task).items() if k not in ("spec", "jobs", "outputs")} for task in tasks]
        emit({"tasks": rows, "total": total})
        return
    if not tasks:
        where = f" in project {render.clean(others['project'])}" if "project" in others else ""
        say(f"No tasks{where}." if wanted != LIVE else f"Nothing runs or waits{where}. All tasks: diamond ps -a")
        _say_building(building)
        return
    now = time.time()
    rows_shown = [
        (
            task.id,
            render.clean(task.name),
            *([render.clean(task.owner)] if others else []),
            str(task.state),
            render.clean(task.endpoint or ""),
            str(task.attempt or ""),
            render.duration(task.started_at, task.ended_at, now),
            render.ago(task.created_at, now),
            _why(task),
        )
        for task in tasks
    ]
    heads = ("ID", "NAME", *(["OWNER"] if others else []), "STATE", "ENDPOINT", ">TRY", ">TIME", "CREATED", "WHY")
    droppable = ("CREATED", "TRY", "TIME", "ENDPOINT", "WHY")
    render.print_table(heads, rows_shown, flexible={"NAME": 10, "WHY": 24}, droppable=droppable)
    if total > len(tasks):
        say(f"{len(tasks)} of {total}; more with --limit {total}")
    _say_building(building)


def ps_everybody(*, as_json: bool) -> None:
    """For administrators: whose tasks are live, and where. What they are called stays their owners'."""
    with connect() as client:
        tasks = client.projects.live_tasks()
    if as_json:
        emit({"tasks": tasks})
        return
    rows = [
        (task.id, render.clean(task.owner), render.clean(task.project), str(task.state), task.kind,
         render.clean(task.endpoint or ""), render.duration(task.started_at, None), render.ago(task.created_at))
        for task in tasks
    ]  # fmt: skip
    heads = ("ID", "OWNER", "PROJECT", "STATE", "KIND", "ENDPOINT", ">TIME", "CREATED")
    render.print_table(heads, rows, flexible={"OWNER": 8, "PROJECT": 8}, droppable=("CREATED", "KIND", "TIME"))


def stop_any(ids: list[str], *, as_json: bool) -> None:
    """For administrators: stop tasks of anybody's, by their ids."""
    if not ids:
        raise InvalidInput("say which, by id", hint="`diamond ps --everybody` lists what is live", field="TASK")
    with connect() as client:
        stopped = [client.projects.stop_any(task_id) for task_id in ids]
    if as_json:
        emit({"tasks": stopped})
        return
    for task in stopped:
        say(f"Stopping {task.id} of {render.clean(task.owner)}")


def _say_building(number: int) -> None:
    if number:
        say(f"{render.count(number, 'image')} {'is' if number == 1 else 'are'} being built ({program()} ps --images)")


def _why(task: Task) -> str:
    if task.state is TaskState.FAILED:
        return f"{task.reason or ''}" + (f" ({task.exit_code})" if task.exit_code else "")
    if task.desired == "cancel" and not task.state.is_final:
        return "stopping"
    if task.next_attempt_at and task.state is TaskState.PENDING:
        return f"{task.reason}; {next_text(task.next_attempt_at)}" if task.reason else next_text(task.next_attempt_at)
    return render.clean(task.pending_reason) if not task.state.is_final else ""


def show(ref: str | None, *, as_json: bool) -> None:
    with connect() as client:
        task = client.tasks.resolve(ref)
        if as_json:
            found = _training(client, task)
            emit({**task_json(task), "training": encode(found) if found else None})
            return
        _show(client, task)


def _show(client: Client, task: Task) -> None:
    took = render.duration(task.started_at, task.ended_at)
    print(f"{render.state_word(str(task.state))} {render.paint(render.clean(task.name), '1')}  {task.id}")
    waits = waiting_text(task)
    for line in (*reason_lines(task), *note_lines(task), *([waits] if waits else [])):
        print(f"  {line}")
    rows = [
        ("created", f"{render.clock(task.created_at)} ({render.ago(task.created_at)})"),
        ("started", render.clock(task.started_at)),
        ("ended", render.clock(task.ended_at)),
        ("time", took),
        ("owner", render.clean(task.owner)),
        ("project", render.clean(task.project)),
        ("seen by", {"project": "its project", "public": "everybody here"}.get(task.visibility, "")),
        ("endpoint", render.clean(task.endpoint or "")),
        ("image", render.clean(" ".join(filter(None, (task.image, task.image_id))))),
        ("priority", str(task.priority or "")),
    ]
    _pairs([row for row in rows if row[1]])
    if task.jobs:
        _section("Attempts")
        for job in task.jobs:
            why = f" {job.reason}" if job.reason and job.reason not in ("COMPLETED", job.state) else ""
            code = f" exit {job.exit_code}" if job.exit_code else ""
            code += f" signal {job.signal}" if job.signal else ""
            where = f"{render.clean(job.endpoint)} {render.clean(','.join(job.hosts))}".strip()
            # Where there are partitions, the scheduler's own number is what squeue and sacct want.
            number = f"{render.clean(job.partition)} {render.clean(job.scheduler_id or '')}" if job.partition else ""
            spent = render.duration(job.started_at, job.ended_at)
            state = f"{render.state_word(str(job.state))}{why}{code}"
            print("  " + "  ".join(filter(None, (str(job.attempt), state, spent, where, number.strip(), job.id))))
            if job.detail and job.detail != task.detail:
                print(f"     {render.clean(job.detail)}")
            if job.run_dir:
                print(f"     {render.clean(job.run_dir)}")
    if task.spec:
        _section("Spec")
        for line in spec_text.lines(encode(task.spec), without=("name",)):
            print(f"  {line}")
    metrics = [each for each in client.tasks.metrics(task.id) if each.stream == "metrics"] if task.attempt else []
    if metrics:
        _section("Metrics")
        _pairs(
            [
                (render.clean(m.key), render.measured(m.key, m.last_value))
                for m in sorted(metrics, key=lambda m: metric_rank(m.key))
            ]
        )
    if found := _training(client, task):
        _section("Training")
        for line in training_lines(found):
            print(f"  {line}")
    if task.outputs:
        _section("Outputs")
        for item in task.outputs:
            note = "" if item.stored else "  (on the endpoint only)"
            print(f"  {render.size(item.size_bytes):>10}  {render.clean(item.path)}{note}")
        if not all(item.stored for item in task.outputs) and (folder := work_dir(task)):
            print(f"  those on the endpoint are in {folder}")


def _training(client: Client, task: Task) -> Training | None:
    """What it measured of itself, if it trains something; an older server has never heard of it."""
    if not task.attempt:
        return None
    try:
        found = client.tasks.training(task.id)
    except NotFound:
        return None
    return found if found.latest is not None else None


def _section(title: str) -> None:
    print(render.paint(title, "1"))


def _pairs(rows: list[tuple[str, str]]) -> None:
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")


def _perhaps_image(client: Client, ref: str, error: DiamondError) -> DiamondError:
    """No task has this name, but an image may: its build is stopped by another command."""
    try:
        client.images.get(ref)
    except DiamondError:
        return error
    hint = f"it is an image; {program()} image stop {ref} stops its making"
    return type(error)(error.message, hint=hint, field=error.field)


def stop(refs: list[str], *, everything: bool, yes: bool, as_json: bool) -> None:
    if bool(refs) == everything:
        raise InvalidInput(
            "say which tasks to stop", hint="name tasks, e.g. diamond stop NAME, or use --all", field="TASK"
        )
    failures: list[DiamondError] = []
    stopped: list[Task] = []
    with connect() as client:
        tasks = list(client.tasks.list(states=LIVE)) if everything else []
        for ref in refs:
            try:
                tasks.append(client.tasks.resolve(ref))
            except NotFound as error:
                failures.append(_perhaps_image(client, ref, error))
            except DiamondError as error:
                failures.append(error)
        if everything and tasks and not confirm(f"Stop {render.count(len(tasks), 'task')}?", yes=yes):
            say("Nothing was stopped; -y stops without asking.")
            leave(1)
        for task in tasks:
            if task.state.is_final:
                stopped.append(task)
                if not as_json:
                    say(f"{render.clean(task.name)} ({task.id}) has ended already: {task.state}")
                    for other in client.tasks.list(states=LIVE, name=task.name) if task.name in refs else ():
                        say(f"  one of the same name has not: {program()} stop {other.id}")
                continue
            task = client.tasks.cancel(task.id)
            stopped.append(task)
            if not as_json:
                word = "stopped" if task.state.is_final else "stopping"
                whose = f" of {render.clean(task.owner)}" if chosen_project() else ""
                print(f"{word} {render.clean(task.name)} ({task.id}){whose}")
    if as_json:
        emit({"tasks": [task_json(task) for task in stopped], "errors": [e.to_json()["error"] for e in failures]})
    elif everything and not tasks:
        say("Nothing runs or waits.")
    if failures:
        for failure in failures if not as_json else ():
            show_error(failure, as_json=False)
        leave(1)


def _resolved(client: Client, refs: list[str]) -> tuple[list[Task], list[DiamondError]]:
    """The tasks that are meant, each once, and what cannot be meant: one wrong word does not hold up the others."""
    found: dict[str, Task] = {}
    failures: list[DiamondError] = []
    for ref in refs:
        try:
            task = client.tasks.resolve(ref)
            found[task.id] = task
        except DiamondError as error:
            failures.append(error)
    return list(found.values()), failures


def _leave_with(failures: list[DiamondError], *, as_json: bool) -> None:
    for failure in failures if not as_json else ():
        show_error(failure, as_json=False)
    if failures:
        leave(1)


def rerun(refs: list[str], *, name: str | None, as_json: bool) -> None:
    made: list[Task] = []
    with connect() as client:
        tasks, failures = _resolved(client, refs)
        for task in tasks:
            try:
                again = client.tasks.rerun(task.id, name=name)
            except DiamondError as error:
                failures.append(type(error)(error.message, hint=error.hint, field=error.field or task.id))
                continue
            made.append(again)
            if not as_json:
                print(f"launched {render.clean(again.name)} ({again.id}) as {task.id} was", flush=True)
                for warning in again.warnings:
                    say(f"Note: {render.clean(warning)}")
    if as_json:
        emit({"tasks": [task_json(task) for task in made], "errors": [e.to_json()["error"] for e in failures]})
    _leave_with(failures, as_json=as_json)


def remove(refs: list[str], *, yes: bool, as_json: bool) -> None:
    removed: list[Task] = []
    with connect() as client:
        tasks, failures = _resolved(client, refs)
        if tasks and not confirm(_question(tasks), yes=yes):
            if as_json:
                raise InvalidInput(
                    "nothing was removed: nobody said yes", hint="-y removes without asking", field="--yes"
                )
            say("Nothing was removed; -y removes without asking.")
            leave(1)
        for task in tasks:
            try:
                client.tasks.remove(task.id)
            except DiamondError as error:
                failures.append(error)
                continue
            removed.append(task)
            if not as_json:
                print(f"removed {render.clean(task.name)} ({task.id})", flush=True)
    if as_json:
        shown = [{"id": task.id, "name": task.name} for task in removed]
        emit({"removed": shown, "errors": [e.to_json()["error"] for e in failures]})
    _leave_with(failures, as_json=as_json)


def _question(tasks: list[Task]) -> str:
    names = [f"{render.clean(task.name)} ({task.id})" for task in tasks[:5]]
    more = f" and {len(tasks) - 5} more" if len(tasks) > 5 else ""
    return f"Remove {', '.join(names)}{more}, with logs, curves and outputs?"
