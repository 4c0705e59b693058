"""Arguments of the commands about endpoints and the service itself. Parses only; the work is imported late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diamond.core.home import DEFAULT_PORT

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Host = Annotated[str | None, typer.Option("--host", help="Address to listen on; 127.0.0.1 when left out.")]
Port = Annotated[
    int | None, typer.Option("--port", "-p", min=0, max=65535, help=f"Port to listen on; {DEFAULT_PORT} when left out.")
]
Database = Annotated[
    str | None,
    typer.Option(
        "--database-url",
        help="sqlite:///… or postgresql://…; left out: DIAMOND_DATABASE_URL, else SQLite in Diamond's home.",
    ),
]

endpoint_app = typer.Typer(help="Clusters and machines that tasks run on.", no_args_is_help=True, rich_markup_mode=None)
agent_app = typer.Typer(
    help="The process on a machine that runs its tasks.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@endpoint_app.command("create")
def endpoint_create(
    name: Annotated[str, typer.Argument(help="What tasks will call it in resources.infra.")],
    token_file: Annotated[Path | None, typer.Option("--token-file", help="Write the agent's token here.")] = None,
    json: Json = False,
) -> None:
    """Register an endpoint and get the token for its agent."""
    from diamond.cli import endpoints as act

    act.create(name, token_file=token_file, as_json=json)


@endpoint_app.command("ls")
def endpoint_ls(json: Json = False) -> None:
    """List endpoints (also: endpoint list)."""
    from diamond.cli import endpoints as act

    act.ls(as_json=json)


endpoint_app.command("list", hidden=True)(endpoint_ls)


@endpoint_app.command("show")
def endpoint_show(name: Annotated[str, typer.Argument()], json: Json = False) -> None:
    """Show what an endpoint has and how it is used."""
    from diamond.cli import endpoints as act

    act.show(name, as_json=json)


@agent_app.command("run")
def agent_run(
    server: Annotated[str, typer.Option("--server", metavar="URL", help="Address of the Diamond server.")],
    token_file: Annotated[Path, typer.Option("--token-file", help="File with the endpoint's token.")],
    home: Annotated[Path, typer.Option("--home", help="Folder of this agent: journal, jobs, cache, policy.toml.")],
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Replace another agent of this endpoint whose home is lost.")
    ] = False,
    json: Json = False,
) -> None:
    """Run an agent in the foreground. Only connects out; stopping it does not stop its jobs."""
    from diamond.cli import agent as act

    act.run(server, token_file, home, take_over=take_over)


def gpus(json: Json = False) -> None:
    """Show GPUs by endpoint: how many, and how many are free."""
    from diamond.cli import endpoints as act

    act.gpus(as_json=json)


def check(json: Json = False) -> None:
    """Check this installation and say how to mend what is wrong."""
    from diamond.cli import check as act

    act.check(as_json=json)


def up(
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Run in the background.")] = False,
    host: Host = None,
    port: Port = None,
    database_url: Database = None,
    json: Json = False,
) -> None:
    """Start Diamond, with this machine as an endpoint.

    That is a server and an agent. What runs already is left as it is.
    """
    from diamond.cli import serve as act

    act.up(detach=detach, where=act.Where(host=host, port=port, database_url=database_url), as_json=json)


def down(json: Json = False) -> None:
    """Stop what `up` started. Jobs that run go on."""
    from diamond.cli import serve as act

    act.down(as_json=json)


def serve(host: Host = None, port: Port = None, database_url: Database = None, json: Json = False) -> None:
    """Run the server alone, in the foreground."""
    from diamond.cli import serve as act

    act.serve(act.Where(host=host, port=port, database_url=database_url))


def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write; must not exist.")],
    database_url: Database = None,
    json: Json = False,
) -> None:
    """Save everything the server keeps into one file.

    The server may run meanwhile. A server on PostgreSQL is saved as well: name its database as it was given to the
    server, with --database-url or DIAMOND_DATABASE_URL.
    """
    from diamond.cli import serve as act

    act.backup(file, database_url=database_url, as_json=json)


def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File that `backup` wrote.")],
    database_url: Database = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Put back what `backup` saved. The server must be down.

    Into SQLite, or into the PostgreSQL database that --database-url or DIAMOND_DATABASE_URL names, whichever of the
    two it was saved from.
    """
    from diamond.cli import serve as act

    act.restore(file, database_url=database_url, yes=yes, as_json=json)


def version(json: Json = False) -> None:
    """Show the versions of this command and of the server."""
    from diamond.cli import check as act

    act.version(as_json=json)


def register(app: typer.Typer) -> None:
    app.command()(gpus)
    app.add_typer(endpoint_app, name="endpoint")
    app.add_typer(agent_app, name="agent")
    for command in (up, down, check, serve, backup, restore, version):
        app.command()(command)
