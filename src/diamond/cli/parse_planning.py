"""Arguments of the commands that plan without a server. Parses only; the work is imported late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]


def simulate(
    trace: Annotated[
        Path, typer.Argument(help="A workload as CSV, Slurm's accounting (`sacct -P`), or a pool's record.")
    ],
    policy: Annotated[
        list[str] | None, typer.Option("--policy", "-p", help="Which to try; several are compared. [diamond, fifo]")
    ] = None,
    nodes: Annotated[
        list[str] | None, typer.Option("--nodes", "-n", help="The pool: 16x4, or 6x4:a100 for a kind of GPU. [16x4]")
    ] = None,
    traces: Annotated[
        Path | None, typer.Option("--traces", help="Folder with the measured behaviour of the trace's applications.")
    ] = None,
    interval: Annotated[str, typer.Option("--interval", help="Time between decisions.")] = "60s",
    restart: Annotated[
        str | None, typer.Option("--restart", help="What a move costs a task; left out: what its application says.")
    ] = None,
    knowledge: Annotated[
        str, typer.Option("--knowledge", help="Of speeds: estimated, warm (with history) or oracle.")
    ] = "warm",
    noise: Annotated[float, typer.Option("--noise", help="Of measurements, e.g. 0.1 for 10 %.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", help="Of all that is random.")] = 0,
    first: Annotated[int | None, typer.Option("--first", min=1, help="Only so many tasks of the trace.")] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Folder for pictures and all results.")] = None,
    json: Json = False,
) -> None:
    """Try a scheduling policy on a log of your own.

    Replays the tasks of a trace through the same policy that decides in a pool, and shows when they would have been
    done. Needs no server. What `diamond pool record` wrote is replayed on the nodes that the pool had, and shown beside
    what really happened.
    """
    from diamond.cli import simulate as act

    if act.is_record(trace):
        act.replay_record(
            trace, policies=policy or ["diamond"], out=out, as_json=json,
            unused={"--nodes": nodes, "--traces": traces, "--restart": restart, "--first": first},
        )  # fmt: skip
        return
    act.simulate(
        trace, policies=policy or ["diamond", "fifo"], nodes=nodes or ["16x4"], traces=traces, interval=interval,
        restart=restart, knowledge=knowledge, noise=noise, seed=seed, first=first, out=out, as_json=json,
    )  # fmt: skip


def register(app: typer.Typer) -> None:
    app.command("simulate")(simulate)
