"""Arguments of the commands about projects and of sharing tasks. Parses only; the work is imported late."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Name = Annotated[str, typer.Argument(metavar="PROJECT", help="Name of a project you are in.")]
User = Annotated[str, typer.Argument(metavar="USER", help="Name of a user of this server.")]

project_app = typer.Typer(help="Who works together, and what they share.", no_args_is_help=True, rich_markup_mode=None)
task_app = typer.Typer(help="Who sees a task, and whose it is.", no_args_is_help=True, rich_markup_mode=None)


@project_app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="Lower-case letters, digits, dots, dashes and underscores.")],
    title: Annotated[str, typer.Option("--title", help="One line that says more.")] = "",
    json: Json = False,
) -> None:
    """Make a project, of which you are the owner."""
    from diamond.cli import projects as act

    act.create(name, title, as_json=json)


@project_app.command("ls")
def ls(
    everybody: Annotated[bool, typer.Option("--everybody", help="All there are. For administrators.")] = False,
    json: Json = False,
) -> None:
    """List the projects you are in (also: project list)."""
    from diamond.cli import projects as act

    act.ls(everybody=everybody, as_json=json)


project_app.command("list", hidden=True)(ls)


@project_app.command("show")
def show(name: Name, json: Json = False) -> None:
    """Show a project: its members, and the endpoints it may use."""
    from diamond.cli import projects as act

    act.show(name, as_json=json)


@project_app.command("title")
def title(
    name: Name, text: Annotated[str, typer.Argument(metavar="TEXT", help="The new title.")], json: Json = False
) -> None:
    """Change the title of a project. Owners can."""
    from diamond.cli import projects as act

    act.rename(name, text, as_json=json)


@project_app.command("add")
def add(
    name: Name,
    user: User,
    role: Annotated[str, typer.Option("--role", help="owner, member (runs tasks in it) or viewer (looks).")] = "member",
    json: Json = False,
) -> None:
    """Let somebody into a project. Owners can."""
    from diamond.cli import projects as act

    act.set_member(name, user, role, as_json=json)


@project_app.command("role")
def role(
    name: Name,
    user: User,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="owner, member or viewer.")],
    json: Json = False,
) -> None:
    """Change what a member may do. The last owner stays one."""
    from diamond.cli import projects as act

    act.set_member(name, user, role, as_json=json)


@project_app.command("remove")
def remove(name: Name, user: User, json: Json = False) -> None:
    """Put somebody out of a project. What they have in it stays theirs."""
    from diamond.cli import projects as act

    act.remove_member(name, user, as_json=json)


@project_app.command("leave")
def leave(name: Name, yes: Yes = False, json: Json = False) -> None:
    """Leave a project."""
    from diamond.cli import projects as act

    act.leave(name, yes=yes, as_json=json)


@project_app.command("rm")
def rm(name: Name, yes: Yes = False, json: Json = False) -> None:
    """Remove a project without live tasks. What is in it goes to its owners."""
    from diamond.cli import projects as act

    act.remove(name, yes=yes, as_json=json)


@project_app.command("share-endpoint")
def share_endpoint(
    name: Name,
    endpoint: Annotated[str, typer.Argument(metavar="ENDPOINT", help="One of yours.")],
    stop: Annotated[bool, typer.Option("--stop", help="Share it no more, or withdraw what you asked for.")] = False,
    json: Json = False,
) -> None:
    """Let a project's tasks run at your endpoint.

    They run under your account there, and only if the endpoint's policy.toml says `allow_others = true`, with
    `containers_only = true` or `allow_others_on_host = true`. Unless you own the project, one of its owners has to
    approve first.
    """
    from diamond.cli import projects as act

    act.share_endpoint(name, endpoint, stop=stop, as_json=json)


@project_app.command("approve")
def approve(
    name: Name,
    endpoint: Annotated[str, typer.Argument(metavar="ENDPOINT", help="One that a member asks to share.")],
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Let a project's tasks go to a member's endpoint. Owners can.

    Whoever owns the endpoint can read what is sent there, secrets included.
    """
    from diamond.cli import projects as act

    act.approve(name, endpoint, yes=yes, as_json=json)


@project_app.command("decline")
def decline(
    name: Name,
    endpoint: Annotated[str, typer.Argument(metavar="ENDPOINT", help="One that a member asks to share.")],
    json: Json = False,
) -> None:
    """Turn down an endpoint that a member asks to share. Owners can."""
    from diamond.cli import projects as act

    act.decline(name, endpoint, as_json=json)


@project_app.command("give")
def give(
    kind: Annotated[str, typer.Argument(metavar="KIND", help="task, image, endpoint or project.")],
    ref: Annotated[str, typer.Argument(metavar="NAME", help="Its name or id.")],
    user: User,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Give something of yours to a member of its project.

    An image arrives as NAME-from-YOU, so that it never stands for one of theirs; what an administrator gives keeps its
    name where that is free.
    """
    from diamond.cli import projects as act

    act.give(kind, ref, user, yes=yes, as_json=json)


@project_app.command("hand-over")
def hand_over(
    user: User,
    to: Annotated[str, typer.Argument(metavar="TO", help="Who gets it all.")],
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Give all that somebody has to somebody else. For administrators."""
    from diamond.cli import projects as act

    act.hand_over(user, to, yes=yes, as_json=json)


@task_app.command("share")
def share(
    task: Annotated[str, typer.Argument(metavar="TASK", help="Id, beginning of an id, or name.")],
    private: Annotated[bool, typer.Option("--private", help="For you alone.")] = False,
    project: Annotated[
        str | None, typer.Option("--project", metavar="NAME", help="For the members of this project.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="For everybody with an account here.")] = False,
    json: Json = False,
) -> None:
    """Say who sees a task. Others can look at it, not change it."""
    from diamond.cli import projects as act

    act.share_task(task, private=private, project=project, public=public, as_json=json)


def register(app: typer.Typer) -> None:
    app.add_typer(project_app, name="project")
    app.add_typer(task_app, name="task")
