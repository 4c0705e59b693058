"""Arguments of the commands about pools. Parses only; the work is imported late."""

from __future__ import annotations

from typing import Annotated

import typer

from diamond.cli.parse_pool_records import pool_record

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Name = Annotated[str, typer.Argument(metavar="NAME", help="Its name or id.")]

pool_app = typer.Typer(
    help="Nodes that are held, and shared between tasks.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@pool_app.command("create")
def pool_create(
    endpoint: Annotated[str, typer.Argument(metavar="ENDPOINT", help="Whose nodes are held.")],
    name: Annotated[str | None, typer.Option("--name", "-n", help="[default: ENDPOINT-pool]")] = None,
    nodes: Annotated[str, typer.Option("--nodes", help="At least and at most so many, e.g. 2..8; or 4.")] = "1",
    gpus: Annotated[
        str | None, typer.Option("--gpus", help="GPUs of each node, e.g. A100:4 or 4: as many slots.")
    ] = None,
    slots: Annotated[int | None, typer.Option("--slots", help="Of each node, for a pool of cores.")] = None,
    cpus: Annotated[str | None, typer.Option("--cpus", help="Cores of each slot. [default: 1]")] = None,
    memory: Annotated[str | None, typer.Option("--memory", help="GiB of each slot.")] = None,
    walltime: Annotated[
        str | None, typer.Option("--walltime", "-t", help="How long one job holds its node. [default: 4h]")
    ] = None,
    idle: Annotated[
        str | None, typer.Option("--idle", help="When a node with nothing to do is let go. [default: 10m]")
    ] = None,
    project: Annotated[
        str | None, typer.Option("--project", help="Whose members may use it; left out: DIAMOND_PROJECT, else yours.")
    ] = None,
    partition: Annotated[str | None, typer.Option("--partition", "-p", help="Slurm partition.")] = None,
    account: Annotated[str | None, typer.Option("--account", "-A", help="Slurm account to charge.")] = None,
    qos: Annotated[str | None, typer.Option("--qos", help="Slurm quality of service.")] = None,
    json: Json = False,
) -> None:
    """Hold nodes of an endpoint, for tasks to share.

    For example:  diamond pool create hpc --nodes 2..8 --gpus A100:4 --walltime 4h
    """
    from diamond.cli import pools as act

    slurm = {"partition": partition, "account": account, "qos": qos}
    wanted = {
        "name": name, "nodes": nodes, "slots": slots, "cpus": cpus, "memory": memory, "walltime": walltime,
        "idle": idle, "project": project,
    }  # fmt: skip
    act.create(endpoint, wanted, gpus=gpus, slurm=slurm, as_json=json)


@pool_app.command("ls")
def pool_ls(
    all_: Annotated[bool, typer.Option("--all", "-a", help="Also closed ones, newest first.")] = False,
    json: Json = False,
) -> None:
    """List pools (also: pool list)."""
    from diamond.cli import pools as act

    act.ls(everything=all_, as_json=json)


pool_app.command("list", hidden=True)(pool_ls)


@pool_app.command("show")
def pool_show(name: Name, json: Json = False) -> None:
    """Show who has what in a pool, and why."""
    from diamond.cli import pools as act

    act.show(name, as_json=json)


@pool_app.command("set")
def pool_set(
    name: Name,
    nodes: Annotated[str | None, typer.Option("--nodes", help="At least and at most so many, e.g. 2..8.")] = None,
    walltime: Annotated[
        str | None, typer.Option("--walltime", "-t", help="Of jobs that are asked for from now on.")
    ] = None,
    idle: Annotated[str | None, typer.Option("--idle", help="When a node with nothing to do is let go.")] = None,
    json: Json = False,
) -> None:
    """Change a pool. What is left out stays."""
    from diamond.cli import pools as act

    act.change(name, {"nodes": nodes, "walltime": walltime, "idle": idle}, as_json=json)


@pool_app.command("close")
def pool_close(name: Name, json: Json = False) -> None:
    """Let a pool's nodes go once its tasks have saved their state.

    Tasks that are not done wait afterwards, until they are stopped.
    """
    from diamond.cli import pools as act

    act.close(name, as_json=json)


def register(app: typer.Typer) -> None:
    pool_app.command("record")(pool_record)
    app.add_typer(pool_app, name="pool")
