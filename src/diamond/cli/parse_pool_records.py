"""Arguments of `diamond pool record`. Parses only; the work is imported late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def pool_record(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Its name or id.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File to write; standard output if left out."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Machine-readable output: with --output, which file was written.")
    ] = False,
) -> None:
    """Write down what went on in a pool, to replay it.

    Nodes, tasks and what they measured, over time, as JSON; no names, no code. `diamond simulate FILE` replays it.
    """
    from diamond.cli import pool_records as act

    act.record(name, output=output, as_json=json)
