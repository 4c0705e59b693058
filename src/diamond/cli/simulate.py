"""`diamond simulate`: a trace through policies, a table, and pictures where they are wanted."""

from __future__ import annotations

import json as jsonlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from diamond.cli import native_output, render
from diamond.cli.session import emit, say
from diamond.core.durations import parse_duration
from diamond.core.errors import InvalidInput
from diamond.core.pool_records import PoolRecord
from diamond.planner.pools.policies import named
from diamond.planner.pools.simulation import pictures
from diamond.planner.pools.simulation.applications import ANY, Application, pollux_applications, sia_applications
from diamond.planner.pools.simulation.engine import simulate as run
from diamond.planner.pools.simulation.outcomes import Outcome
from diamond.planner.pools.simulation.recorded import node_times
from diamond.planner.pools.simulation.replaying import Agreement, replay
from diamond.planner.pools.simulation.workloads import Arrival, read_arrivals
from diamond.planner.pools.snapshot import Node

_NODES = re.compile(r"(\d{1,5})x(\d{1,3})(?::([A-Za-z0-9._-]{1,40}))?", re.ASCII)
_KNOWLEDGE = ("estimated", "warm", "oracle")
_MOST_GPUS = 100_000  # a pool with more is a slip of the finger
_MOST_BARS = 20_000  # a picture with more is larger than anybody's browser likes
_MOST_LANES = 5_000
_MOST_ROWS = 50  # tasks of a record that are shown one by one
_MOST_RECORD_BYTES = 512 * 1024 * 1024
_OPTIONS = {
    "applications": "--traces",
    "interval_s": "--interval",
    "knowledge": "--knowledge",
    "nodes": "--nodes",
    "noise": "--noise",
    "policy": "--policy",
    "restart_s": "--restart",
    "seed": "--seed",
}
"""What arguments of the simulator are called here."""


def simulate(
    trace: Path,
    *,
    policies: Sequence[str],
    nodes: Sequence[str],
    traces: Path | None,
    interval: str,
    restart: str | None,
    knowledge: str,
    noise: float,
    seed: int,
    first: int | None,
    out: Path | None,
    as_json: bool,
) -> None:
    pool = _pool(nodes)
    with _in_words_of_the_command():
        chosen = [named(name) for name in dict.fromkeys(policies)]
    interval_s = _seconds("--interval", interval)
    restart_s = None if restart is None else _seconds("--restart", restart)
    if knowledge not in _KNOWLEDGE:
        raise InvalidInput(
            f"{knowledge[:40]!r} is not known", hint=f"one of {', '.join(_KNOWLEDGE)}", field="--knowledge"
        )
    if out is not None:
        _check_folder(out)
    arrivals = read_arrivals(trace, gpus_per_node=max(node.gpus for node in pool))[:first]
    applications = _applications(arrivals, pool, traces)
    outcomes = []
    for policy in chosen:
        if not as_json and sys.stderr.isatty():
            say(f"{policy.name}: {render.count(len(arrivals), 'task')} on {sum(one.gpus for one in pool)} GPUs …")
        with _in_words_of_the_command(), native_output.to_stderr():
            outcomes.append(
                run(
                    arrivals,
                    policy,
                    pool,
                    applications=applications,
                    interval_s=interval_s,
                    restart_s=restart_s,
                    knowledge=knowledge,  # type: ignore[arg-type]
                    noise=noise,
                    seed=seed,
                )
            )
    files = _files(outcomes, pool) if out is not None else {}
    if out is not None:
        _write(out, files)
    if as_json:
        emit({"outcomes": [{"policy": one.policy, **one.summary()} for one in outcomes], "files": sorted(files)})
        return
    _show(outcomes)
    if out is not None:
        say(f"pictures and every task's times are in {render.clean(out)}")
        undrawn = [one.policy for one in outcomes if f"gantt-{one.policy}.svg" not in files]
        if undrawn:
            say(f"too much for a picture of who had which GPUs: {', '.join(undrawn)}")


def is_record(trace: Path) -> bool:
    """Whether it is JSON, by its first character: what else can be simulated is lines of columns."""
    try:
        with trace.open("rb") as file:
            return file.read(64).lstrip(b"\xef\xbb\xbf \t\r\n")[:1] == b"{"
    except OSError:
        return False  # whoever reads it says why


def replay_record(
    trace: Path, *, policies: Sequence[str], unused: Mapping[str, object], out: Path | None, as_json: bool
) -> None:
    """What really happened in a pool beside what the simulator predicts, on the nodes that it had."""
    for option, given in unused.items():
        if given:
            raise InvalidInput("is not for a pool's record", hint="leave it out: the record says so", field=option)
    with _in_words_of_the_command():
        chosen = [named(name) for name in dict.fromkeys(policies)]
    if out is not None:
        _check_folder(out)
    record = _record(trace)
    with native_output.to_stderr():
        found = [replay(record, policy) for policy in chosen]
    pool = [Node(name=one.name, gpu_type=record.slot_kind, gpus=one.slots) for one in node_times(record)]
    files = _files([one.outcome for one in found], pool) if out is not None else {}
    if out is not None:
        _write(out, files)
    if as_json:
        emit({"replays": [one.to_json() for one in found], "files": sorted(files)})
        return
    _show_replays(found)
    if out is not None:
        say(f"pictures and every task's times are in {render.clean(out)}")


def _record(trace: Path) -> PoolRecord:
    try:
        if trace.stat().st_size > _MOST_RECORD_BYTES:
            raise InvalidInput(f"{trace.name} is too large for a pool's record", hint="name another file")
        raw = jsonlib.loads(trace.read_bytes())
    except OSError as error:
        raise InvalidInput(f"{trace}: {error.strerror}", hint="name another file") from error
    except (ValueError, RecursionError):
        raise InvalidInput(
            f"{trace.name} begins like JSON, and is none", hint="give what `diamond pool record NAME` wrote"
        ) from None
    try:
        return PoolRecord.parse(raw)
    except InvalidInput as error:
        raise InvalidInput(f"{trace.name}: {error.message}", hint=error.hint, field=error.field) from error


def _show_replays(found: Sequence[Agreement]) -> None:
    render.print_table(
        ("POLICY", ">RECORDED", ">PREDICTED", ">RATIO", ">BUSY", ">PREDICTED BUSY"),
        [
            (
                one.policy,
                _time(one.recorded_mean_s),
                _time(one.predicted_mean_s),
                f"{one.ratio:.2f}",
                f"{100 * one.recorded_utilisation:.0f} %",
                f"{100 * one.predicted_utilisation:.0f} %",
            )
            for one in found
        ],
    )
    say("mean times from submission to end, of tasks that succeeded; ratio: predicted over recorded")
    say()
    tasks = found[0].tasks[:_MOST_ROWS]
    render.print_table(
        ("TASK", ">RECORDED", *(f">{part}" for one in found for part in (one.policy.upper(), "RATIO"))),
        [
            (
                str(task.task),
                _time(task.recorded_s),
                *(part for one in found for part in (_time(one.tasks[row].predicted_s), f"{one.tasks[row].ratio:.2f}")),
            )
            for row, task in enumerate(tasks)
        ],
    )
    if len(found[0].tasks) > len(tasks):
        say(f"and {len(found[0].tasks) - len(tasks)} more; --json has all of them")
    if found[0].left_out:
        say(f"left out, as they never ran: {render.count(found[0].left_out, 'task')}")


@contextmanager
def _in_words_of_the_command() -> Iterator[None]:
    """What is wrong with an argument is said of the option that it came from."""
    try:
        yield
    except InvalidInput as error:
        field = _OPTIONS.get(error.field, error.field)
        raise InvalidInput(error.message, hint=error.hint, field=field) from error


def _pool(texts: Sequence[str]) -> list[Node]:
    found: list[Node] = []
    for text in texts:
        said = _NODES.fullmatch(text)
        if said is None or not int(said[1]) or not int(said[2]):
            raise InvalidInput(
                f"{text[:40]!r} is no pool", hint="nodes times GPUs, such as 16x4 or 6x4:a100", field="--nodes"
            )
        if sum(node.gpus for node in found) + int(said[1]) * int(said[2]) > _MOST_GPUS:
            raise InvalidInput(f"more than {_MOST_GPUS:,} GPUs", hint="give a smaller pool", field="--nodes")
        kind = said[3] or ANY
        found += [
            Node(name=f"{'' if kind == ANY else kind + '-'}{len(found) + number:03}", gpu_type=kind, gpus=int(said[2]))
            for number in range(1, int(said[1]) + 1)
        ]
    return found


def _seconds(option: str, text: str) -> float:
    if text in ("0", "0s"):
        return 0.0
    try:
        return parse_duration(text)
    except ValueError as error:
        raise InvalidInput(str(error), hint="such as 60s, 5m or 1h", field=option) from None


def _applications(arrivals: Sequence[Arrival], pool: Sequence[Node], traces: Path | None) -> dict[str, Application]:
    """True behaviour of those that the trace names; what was recorded by Slurm needs none."""
    names = sorted({one.application for one in arrivals if one.application})
    if not names:
        return {}
    if traces is None:
        raise InvalidInput(
            f"the trace names applications ({', '.join(name[:40] for name in names[:4])}), and not how they behave",
            hint="give --traces FOLDER, with a folder for each that holds placements.csv, scalability.csv and "
            "validation-*.csv",
            field="--traces",
        )
    if not traces.is_dir():
        raise InvalidInput(
            f"{traces} is no folder", hint="name the folder that holds one for each application", field="--traces"
        )
    kinds = sorted({node.gpu_type for node in pool})
    return pollux_applications(traces, names) if kinds == [ANY] else sia_applications(traces, names, kinds)


def _show(outcomes: Sequence[Outcome]) -> None:
    rows = []
    for one in outcomes:
        found = one.summary()
        rows.append(
            (
                one.policy,
                _time(found["completion_mean_s"]),
                _time(found["completion_median_s"]),
                _time(found["completion_p99_s"]),
                _time(found["makespan_s"]),
                _time(found["wait_mean_s"]),
                f"{found['gpu_hours']:,.0f}",
                f"{100 * found['utilisation']:.0f} %",
                f"{found['restarts_mean']:.1f}",
                f"{found['rho_mean']:.2f}",
                f"{found['rho_worst']:.1f}",
                f"{1000 * found['decision_mean_s']:.0f} ms",
            )
        )
    render.print_table(
        (
            "POLICY",
            "MEAN",
            "MEDIAN",
            "P99",
            "ALL DONE",
            "WAIT",
            "GPU-HOURS",
            "BUSY",
            "MOVES",
            "RHO",
            "WORST",
            "DECIDES",
        ),
        rows,
        droppable=("DECIDES", "WORST", "RHO", "BUSY"),
    )
    say("times from submission to end; moves a task; rho: over what a fair share alone would have taken")


def _time(seconds: float) -> str:
    return f"{seconds / 3600:.2f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def _check_folder(out: Path) -> None:
    """Before hours of simulation, not after."""
    try:
        nearest = next(path for path in (out, *out.absolute().parents) if path.exists())
    except OSError as error:
        raise _unwritable(out, error) from None
    if not nearest.is_dir():
        raise InvalidInput(f"{nearest} is there, and is no folder", hint="name another folder", field="--out")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise InvalidInput(f"{nearest} may not be written to", hint="name another folder", field="--out")


def _files(outcomes: Sequence[Outcome], pool: Sequence[Node]) -> dict[str, str]:
    lanes = {node.name: node.gpus for node in pool}
    files: dict[str, str] = {
        "completion.svg": pictures.completion({one.policy: [t.completion_s for t in one.tasks] for one in outcomes}),
        "gpus.svg": pictures.utilisation(
            {one.policy: pictures.busy_of(one.timeline) for one in outcomes}, sum(lanes.values())
        ),
    }
    for one in outcomes:
        bars = pictures.bars_of(one.timeline, lanes) if sum(lanes.values()) <= _MOST_LANES else None
        if bars is not None and len(bars) <= _MOST_BARS:
            files[f"gantt-{one.policy}.svg"] = pictures.gantt(f"Who had which GPUs: {one.policy}", bars, lanes)
        files[f"{one.policy}.json"] = _lines(one.to_json())
    return files


def _write(out: Path, files: Mapping[str, str]) -> None:
    """All of them, or none: each is written beside its place, and they go there together."""
    beside = {name: out / f".{name}.{os.getpid()}.part" for name in files}
    try:
        out.mkdir(parents=True, exist_ok=True)
        taken = [name for name in files if (out / name).is_dir()]
        if taken:
            raise InvalidInput(f"{out / taken[0]} is a folder", hint="name another folder", field="--out")
        for name, text in files.items():
            beside[name].write_text(text, encoding="utf-8")
        for name, path in beside.items():
            os.replace(path, out / name)
    except OSError as error:
        raise _unwritable(out, error) from error
    finally:
        for path in beside.values():
            with suppress(OSError):
                path.unlink()


def _unwritable(out: Path, error: OSError) -> InvalidInput:
    return InvalidInput(f"{out}: {error.strerror}", hint="name another folder", field="--out")


def _lines(document: dict[str, Any]) -> str:
    return jsonlib.dumps(document, separators=(",", ":")) + "\n"
