"""Commands about pools: create, ls, show, set, close. How one looks in the terminal is in `diamond.cli.pool_page`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from diamond.cli import pool_page, render
from diamond.cli.session import connect, emit, program, say
from diamond.core.errors import Conflict, InvalidInput
from diamond.core.pools import Pool, PoolSpec

_SLURM = "slurm."


def create(
    endpoint: str, wanted: Mapping[str, Any], *, gpus: str | None, slurm: Mapping[str, str | None], as_json: bool
) -> None:
    raw = {key: value for key, value in wanted.items() if value is not None}
    raw = {"name": f"{endpoint}-pool", "endpoint": endpoint, **raw}
    if gpus is not None:
        raw["accelerators"] = f"gpu:{gpus}" if gpus.isdecimal() else gpus
    raw["slurm"] = {key: value for key, value in slurm.items() if value is not None}
    with _errors_of_options():
        spec = PoolSpec.parse(raw)
        with connect() as client:
            made = client.pools.create(spec)
    if as_json:
        emit(made)
        return
    name = render.clean(made.name)
    print(f"made pool {name} ({made.id})")
    say(f"  run in it:    {program()} launch task.yaml --pool {_quoted(made.name)}")
    say(f"  look at it:   {program()} pool show {_quoted(made.name)}")


def ls(*, everything: bool, as_json: bool) -> None:
    with connect() as client:
        found = client.pools.list(closed=everything)
    if as_json:
        emit({"pools": found})
        return
    if not found:
        none = "No pools." if everything else "No open pools."
        say(f"{none} Make one: {program()} pool create ENDPOINT --nodes 1..4 --gpus A100:4")
        return
    render.print_table(
        ("NAME", "ENDPOINT", "OWNER", "PROJECT", "NODES", "SLOTS", "", ">RUNNING", ">WAITING", "GAIN", "STATE", "AGE"),
        [_row(pool) for pool in found],
        flexible={"NAME": 12, "ENDPOINT": 8},
        droppable=("AGE", "PROJECT", "OWNER", "GAIN", "ENDPOINT", ""),
        below=[render.clean(pool.note) if pool.closed_at is None else "" for pool in found],
    )


def _row(pool: Pool) -> tuple[str, ...]:
    return (
        render.clean(pool.name),
        render.clean(pool.endpoint),
        render.clean(pool.owner),
        render.clean(pool.project),
        f"{pool.nodes} ({pool.spec.nodes})",
        f"{pool.used}/{pool.slots} {render.clean(pool.spec.kind)}",
        pool_page.bar(pool.used, pool.slots),
        str(pool.running),
        str(pool.waiting),
        pool_page.times(pool.goodput),
        "closed" if pool.closed_at is not None else "open",
        render.since(pool.created_at),
    )


def show(name: str, *, as_json: bool) -> None:
    with connect() as client:
        found = client.pools.get(name)
    emit(found) if as_json else pool_page.print_page(found)


def change(name: str, changes: Mapping[str, str | None], *, as_json: bool) -> None:
    given = {key: value for key, value in changes.items() if value is not None}
    if not given:
        raise InvalidInput(
            "nothing to change was given",
            hint=f"for example: {program()} pool set {_quoted(name)} --nodes 2..8",
            field="--nodes",
        )
    with _errors_of_options(), connect() as client:
        found = client.pools.change(name, given)
    if as_json:
        emit(found)
        return
    spec = found.spec
    print(
        f"{render.clean(found.name)}: nodes {spec.nodes}, walltime {render.written_duration(spec.walltime)}, "
        f"idle {render.written_duration(spec.idle)}"
    )


def close(name: str, *, as_json: bool) -> None:
    with connect() as client:
        found = client.pools.close(name)
    if as_json:
        emit(found)
        return
    print(f"closed {render.clean(found.name)}")
    left = found.running + found.waiting
    if found.running:
        say(f"  {render.count(found.running, 'task')} in it: asked to save, then the nodes are let go.")
    if left:
        say(f"  What is not done waits: {program()} stop TASK ends it; launch it again elsewhere.")


@contextmanager
def _errors_of_options() -> Iterator[None]:
    """An error about a field of the spec names the option that gave it."""
    try:
        yield
    except (InvalidInput, Conflict) as error:
        raise type(error)(error.message, hint=error.hint, field=_option(error.field)) from error


def _option(field: str) -> str:
    if field == "endpoint":
        return "ENDPOINT"
    name = {"accelerators": "gpus"}.get(field, field.removeprefix(_SLURM))
    known = {"name", "nodes", "gpus", "slots", "cpus", "memory", "walltime", "idle", "project"}
    if name in known or field.startswith(_SLURM):
        return f"--{name}"
    return field


def _quoted(name: str) -> str:
    import shlex

    return shlex.quote(render.clean(name))
