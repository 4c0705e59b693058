"""Arguments of `diamond exec` and `diamond ssh`. Parses only; the work is in `diamond.cli.exec`."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from diamond.cli.parse_tasks import Json, Ref
from diamond.cli.usage import Command

Tty = Annotated[
    bool | None,
    typer.Option(
        "--tty/--no-tty",
        "-t/-T",
        help="With or without a terminal; by default with one if this is one.",
        show_default=False,
    ),
]
Wait = Annotated[bool, typer.Option("--wait", "-w", help="Wait until the task runs.")]
Node = Annotated[int | None, typer.Option("--node", min=0, help="On this node of the job, counted from 0.")]
Rank = Annotated[int | None, typer.Option("--rank", min=0, help="On the node where this rank runs.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Say where you are.")]


class WithCommand(Command):
    """What follows ``--`` is another program's command line, word for word; nothing in it is ours to parse."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index("--") if "--" in args else len(args)
        ctx.meta["diamond.argv"] = args[at + 1 :]
        return super().parse_args(ctx, args[:at])

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- COMMAND...]" if self.name == "ssh" else "-- COMMAND..."]


def exec_(
    ctx: typer.Context,
    task: Ref = None,
    tty: Tty = None,
    wait: Wait = False,
    node: Node = None,
    rank: Rank = None,
    verbose: Verbose = False,
    interactive: Annotated[bool, typer.Option("-i", hidden=True, help="Input is always passed on.")] = False,
    json: Json = False,
) -> None:
    """Run a command in a running task. Exits as the command does.

    In the task's environment and work directory, through its agent: diamond exec TASK -- nvidia-smi
    """
    from diamond.cli import exec as act
    from diamond.core.errors import InvalidInput

    argv = ctx.meta["diamond.argv"]
    if not argv:
        raise InvalidInput(
            "no command was given", hint="write it after two dashes: diamond exec TASK -- nvidia-smi", field="--"
        )
    act.execute(task, argv, tty=tty, wait=wait, node=node, rank=rank, verbose=verbose, as_json=json)


def ssh(
    ctx: typer.Context,
    task: Ref = None,
    tty: Tty = None,
    wait: Wait = False,
    node: Node = None,
    rank: Rank = None,
    verbose: Verbose = False,
    json: Json = False,
) -> None:
    """Open a shell in a running task.

    An interactive bash in the task's environment and work directory. ~. at the beginning of a line leaves.
    """
    from diamond.cli import exec as act

    act.execute(task, ctx.meta["diamond.argv"], tty=tty, wait=wait, node=node, rank=rank, verbose=verbose, as_json=json)


def register(app: typer.Typer) -> None:
    app.command("exec", cls=WithCommand)(exec_)
    app.command("ssh", cls=WithCommand)(ssh)
