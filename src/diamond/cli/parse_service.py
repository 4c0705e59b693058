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

PublicUrl = Annotated[
    str | None, typer.Option("--url", help="Address of the server as that machine sees it; left out: as here.")
]
Tls = Annotated[
    bool | None,
    typer.Option("--tls/--no-tls", help="Speak HTTPS, with DIAMOND_TLS_CERT or a certificate of its own."),
]
MultiUser = Annotated[
    bool | None,
    typer.Option(
        "--multi-user/--single-user",
        help="Accounts and sign-in for many people; left out: DIAMOND_MULTI_USER, else one user on this machine.",
    ),
]
AgentHome = Annotated[Path | None, typer.Option("--home", help="Folder of the agent.")]
AgentName = Annotated[str | None, typer.Option("--name", help="The endpoint, where several are enrolled here.")]
Via = Annotated[str, typer.Option("--via", help="How to keep it running: auto, systemd, cron, tmux or plain.")]

endpoint_app = typer.Typer(help="Clusters and machines that tasks run on.", no_args_is_help=True, rich_markup_mode=None)
agent_app = typer.Typer(
    help="The process on a machine that runs its tasks.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@endpoint_app.command("create")
def endpoint_create(
    name: Annotated[str, typer.Argument(help="What tasks will call it in resources.infra.")],
    url: PublicUrl = None,
    token_file: Annotated[
        Path | None, typer.Option("--token-file", help="Write a token for the agent here, instead of a line to paste.")
    ] = None,
    json: Json = False,
) -> None:
    """Register an endpoint and get the line that starts its agent."""
    from diamond.cli import enrolment as act

    act.create(name, url=url, token_file=token_file, as_json=json)


@endpoint_app.command("enroll")
def endpoint_enroll(name: Annotated[str, typer.Argument()], url: PublicUrl = None, json: Json = False) -> None:
    """Get a new line for an endpoint's agent.

    The present agent goes on until it is used.
    """
    from diamond.cli import enrolment as act

    act.enroll(name, url=url, as_json=json)


@endpoint_app.command("rotate")
def endpoint_rotate(name: Annotated[str, typer.Argument()], url: PublicUrl = None, json: Json = False) -> None:
    """Give an endpoint's agent a new token; the old one dies."""
    from diamond.cli import enrolment as act

    act.rotate(name, url=url, as_json=json)


@endpoint_app.command("revoke")
def endpoint_revoke(
    name: Annotated[str, typer.Argument()],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Cut off an endpoint's agent at once. Its jobs go on."""
    from diamond.cli import enrolment as act

    act.revoke(name, yes=yes, as_json=json)


@endpoint_app.command("rm")
def endpoint_rm(
    name: Annotated[str, typer.Argument()],
    force: Annotated[bool, typer.Option("--force", help="Even with live jobs, which are given up.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: Json = False,
) -> None:
    """Remove an endpoint. Finished tasks keep their record."""
    from diamond.cli import enrolment as act

    act.remove(name, force=force, yes=yes, as_json=json)


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


@endpoint_app.command("sites")
def endpoint_sites(
    key: Annotated[str | None, typer.Argument(help="Show this one with all that is known of it.")] = None,
    json: Json = False,
) -> None:
    """List the computing centres Diamond recognises, or show one."""
    from diamond.cli import sites as act

    if key is None:
        act.ls(as_json=json)
    else:
        act.show(key, as_json=json)


@agent_app.command("enroll")
def agent_enroll(
    server: Annotated[str, typer.Argument(metavar="URL", help="Address of the Diamond server.")],
    code: Annotated[str | None, typer.Option("--code", help="The one-time code; - reads standard input.")] = None,
    pin: Annotated[str, typer.Option("--pin", help="SHA-256 of the server's private authority.")] = "",
    ca: Annotated[Path | None, typer.Option("--ca", help="Its certificate, instead of --pin.")] = None,
    name: AgentName = None,
    home: AgentHome = None,
    scheduler: Annotated[
        str | None,
        typer.Option("--scheduler", help="What runs the jobs: auto, slurm or local; left out: what is found."),
    ] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Replace another agent of this endpoint whose home is lost.")
    ] = False,
    start: Annotated[bool, typer.Option("--start", help="Also start the agent.")] = False,
    via: Via = "auto",
) -> None:
    """Make this machine an endpoint, with a one-time code."""
    from diamond.cli import agent as act

    act.enroll(
        server,
        code=code,
        pin=pin,
        ca_file=ca,
        name=name,
        home=home,
        scheduler=scheduler,
        take_over=take_over,
        start=start,
        via=via,
    )


@agent_app.command("start")
def agent_start(
    foreground: Annotated[bool, typer.Option("--foreground", help="Run it here instead, until Ctrl-C.")] = False,
    via: Via = "auto",
    name: AgentName = None,
    home: AgentHome = None,
) -> None:
    """Run an agent in the background; it survives logout."""
    from diamond.cli import agent as act

    act.start(home, name, via=via, foreground=foreground)


@agent_app.command("stop")
def agent_stop(name: AgentName = None, home: AgentHome = None) -> None:
    """Stop the agent and whatever keeps it running. Jobs go on."""
    from diamond.cli import agent as act

    act.stop(home, name)


@agent_app.command("status")
def agent_status(name: AgentName = None, home: AgentHome = None, json: Json = False) -> None:
    """Say how the agent stands and what is wrong."""
    from diamond.cli import agent as act

    act.status(home, name, as_json=json)


@agent_app.command("logs")
def agent_logs(
    lines: Annotated[int, typer.Option("--lines", "-n", help="How many lines.")] = 40,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as it grows.")] = False,
    name: AgentName = None,
    home: AgentHome = None,
) -> None:
    """Show the agent's log."""
    from diamond.cli import agent as act

    act.logs(home, name, lines=lines, follow=follow)


@agent_app.command("upgrade")
def agent_upgrade(
    sha256: Annotated[
        str, typer.Option("--sha256", metavar="HEX", help="Refuse a new agent with any other SHA-256.")
    ] = "",
    file: Annotated[
        Path | None,
        typer.Option("--file", metavar="FILE", help="Take the new agent from here; do not ask the server."),
    ] = None,
    name: AgentName = None,
    home: AgentHome = None,
) -> None:
    """Bring a one-file agent to the server's version, or a file's."""
    from diamond.cli import agent as act

    act.upgrade(home, name, sha256=sha256, source=file)


@agent_app.command("policy")
def agent_policy(
    check: Annotated[
        Path | None, typer.Option("--check", metavar="FILE", help="Say whether this file would be accepted instead.")
    ] = None,
    name: AgentName = None,
    home: AgentHome = None,
    json: Json = False,
) -> None:
    """Show the rules of policy.toml, or check a file of rules."""
    from diamond.cli import agent as act

    act.policy(home, name, check=check, as_json=json)


@agent_app.command("bundle")
def agent_bundle(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write, e.g. diamond-agent.pyz.")],
) -> None:
    """Write the agent as one file for Python 3.10 or newer."""
    from diamond.cli import agent as act

    act.bundle(file)


@agent_app.command("run")
def agent_run(
    server: Annotated[str, typer.Option("--server", metavar="URL", help="Address of the Diamond server.")],
    token_file: Annotated[Path, typer.Option("--token-file", help="File with the endpoint's token.")],
    home: Annotated[Path, typer.Option("--home", help="Folder of this agent: journal, jobs, cache, policy.toml.")],
    ca: Annotated[Path | None, typer.Option("--ca", help="Certificate of the one authority to trust.")] = None,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Replace another agent of this endpoint whose home is lost.")
    ] = False,
    json: Json = False,
) -> None:
    """Run an agent in the foreground. Only connects out; stopping it does not stop its jobs."""
    from diamond.cli import agent as act

    act.run(server, token_file, home, ca_file=ca, take_over=take_over)


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
    tls: Tls = None,
    json: Json = False,
) -> None:
    """Start Diamond, with this machine as an endpoint.

    That is a server and an agent. What runs already is left as it is.
    """
    from diamond.cli import serve as act

    act.up(detach=detach, where=act.Where(host=host, port=port, database_url=database_url, tls=tls), as_json=json)


def down(json: Json = False) -> None:
    """Stop what `up` started. Jobs that run go on."""
    from diamond.cli import serve as act

    act.down(as_json=json)


def serve(
    host: Host = None,
    port: Port = None,
    database_url: Database = None,
    tls: Tls = None,
    multi_user: MultiUser = None,
    json: Json = False,
) -> None:
    """Run the server alone, in the foreground.

    With --multi-user it prints, until there is an administrator, a code that makes the first one.
    """
    from diamond.cli import serve as act

    act.serve(act.Where(host=host, port=port, database_url=database_url, tls=tls, multi_user=multi_user))


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
