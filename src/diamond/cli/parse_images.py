"""Arguments of the commands about images. Parses only; the work is in the modules it imports late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def _json(shape: str) -> Any:
    """The option --json of one command. Its objects are those of the REST API, described in docs/rest.md."""
    return typer.Option("--json", help=f"As JSON: {shape}.")


_FOLLOWED = (
    'a line for each event, {"type": "image", "image": Image} last; one Build with -d, or where nothing is to be made'
)
Ref = Annotated[
    str, typer.Argument(metavar="IMAGE", help="NAME, NAME@sha256:…, OWNER/NAME of another's shared one, or an id.")
]
Infra = Annotated[str | None, typer.Option("--infra", help="The endpoint; left out: chosen, or the best one.")]
Detach = Annotated[bool, typer.Option("--detach", "-d", help="Do not wait for it.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

image_app = typer.Typer(
    help="Software environments: build once, use and share everywhere.", no_args_is_help=True, rich_markup_mode=None
)


@image_app.command("build")
def build(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE",
            help="Recipe (YAML), a folder that has one, requirements.txt, pyproject.toml or environment.yml; - reads "
            "standard input. Left out: the options say it all.",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option("--name", "-n", help="Name of the image.")] = None,
    base: Annotated[
        str | None,
        typer.Option("--base", help="What it starts from: python:3.12-slim, image:NAME, suggested:pytorch, host, …"),
    ] = None,
    pip: Annotated[
        list[str] | None, typer.Option("--pip", metavar="PACKAGE", help="A Python package more; repeatable.")
    ] = None,
    system: Annotated[
        list[str] | None,
        typer.Option("--system", metavar="PACKAGE", help="A package of the distribution more; repeatable."),
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", "-e", metavar="K=V", help="Set a variable in the image; repeatable."),
    ] = None,
    infra: Annotated[str | None, typer.Option("--infra", help="Endpoint to build on; left out: chosen.")] = None,
    where: Annotated[
        str | None, typer.Option("--where", help="Where there: login or batch; left out: as its policy prefers.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do all steps anew, also those that were kept.")] = False,
    detach: Detach = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what would be built where, and why; build nothing.")
    ] = False,
    json: Annotated[bool, _json(_FOLLOWED + "; with --dry-run an ImagePlan")] = False,
) -> None:
    """Build an image and follow the build. Ctrl-C stops following, not the build."""
    from diamond.cli import image_build as act

    options = act.Options(
        name=name, base=base, pip=tuple(pip or ()), system=tuple(system or ()), env=tuple(env or ()),
        infra=infra, where=where, fresh=fresh,
    )  # fmt: skip
    act.build(file, options, detach=detach, dry_run=dry_run, as_json=json)


@image_app.command("ls")
def ls(
    all_: Annotated[bool, typer.Option("--all", "-a", help="Also older ones, and those that failed.")] = False,
    infra: Annotated[str | None, typer.Option("--infra", help="Only those at this endpoint, with disk use.")] = None,
    json: Annotated[bool, _json('{"images": [Image, …]}; with --infra also "endpoint": EndpointImages')] = False,
) -> None:
    """List images you may use (also: image list).

    Yours, and those that others share with you.
    """
    from diamond.cli import images as act

    act.ls(everything=all_, infra=infra, as_json=json)


image_app.command("list", hidden=True)(ls)


@image_app.command("show")
def show(image: Ref, json: Annotated[bool, _json("an Image")] = False) -> None:
    """Show one image: where it is, what is in it, how it was built."""
    from diamond.cli import images as act

    act.show(image, as_json=json)


@image_app.command("logs")
def logs(
    image: Ref,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as the build writes.")] = False,
    infra: Infra = None,
    json: Annotated[bool, _json('{"task_id": …, "text": …}; with -f a line for each event')] = False,
) -> None:
    """Show the log of an image's build."""
    from diamond.cli import images as act

    act.logs(image, follow=follow, infra=infra, as_json=json)


@image_app.command("stop")
def stop(
    image: Ref,
    infra: Annotated[str | None, typer.Option("--infra", help="Only at this endpoint.")] = None,
    json: Annotated[bool, _json('{"tasks": [Task, …]}')] = False,
) -> None:
    """Stop the build, copy or import that makes an image."""
    from diamond.cli import images as act

    act.stop(image, infra=infra, as_json=json)


@image_app.command("test")
def run_test(
    image: Ref,
    command: Annotated[
        str | None, typer.Argument(metavar="COMMAND", help="Left out: the recipe's own validation command.")
    ] = None,
    infra: Infra = None,
    json: Annotated[bool, _json("a line for each event of the task")] = False,
) -> None:
    """Run a command in an image, as a task."""
    from diamond.cli import images as act

    act.test(image, command, infra=infra, as_json=json)


@image_app.command("share")
def share(
    image: Ref,
    private: Annotated[bool, typer.Option("--private", help="For you alone.")] = False,
    project: Annotated[
        str | None, typer.Option("--project", metavar="NAME", help="For the members of this project.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="For every user of this server.")] = False,
    json: Annotated[bool, _json("the Image")] = False,
) -> None:
    """Say who may use an image. Others can use it, not change it."""
    from diamond.cli import images as act

    given = (("private", private), ("project", project is not None), ("public", public))
    act.share(image, [name for name, is_given in given if is_given], project, as_json=json)


@image_app.command("copy")
def copy(
    image: Ref,
    to: Annotated[str, typer.Option("--to", metavar="ENDPOINT", help="Where it shall be.")],
    detach: Detach = False,
    json: Annotated[bool, _json(_FOLLOWED)] = False,
) -> None:
    """Bring an image to another endpoint.

    Taken over where it lies, copied through the server, or built anew with the same versions: whichever fits.
    """
    from diamond.cli import image_build as act

    act.copy(image, to, detach=detach, as_json=json)


@image_app.command("export")
def export(
    image: Ref,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File to write.")],
    infra: Infra = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it is there.")] = False,
    json: Annotated[bool, _json('{"file": …, "size_bytes": …, "contents": …}')] = False,
) -> None:
    """Write an image with all that is known of it to one file."""
    from diamond.cli import image_files as act

    act.export(image, file, infra=infra, force=force, as_json=json)


@image_app.command("import")
def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File that `image export` wrote, anywhere.")],
    name: Annotated[str | None, typer.Option("--name", "-n", help="Another name for it.")] = None,
    infra: Annotated[str | None, typer.Option("--infra", help="Endpoint to bring it to; left out: chosen.")] = None,
    detach: Detach = False,
    json: Annotated[bool, _json(_FOLLOWED)] = False,
) -> None:
    """Take in an image from a file.

    Also one that another installation exported.
    """
    from diamond.cli import image_files as act

    act.import_(file, name=name, infra=infra, detach=detach, as_json=json)


@image_app.command("rm")
def rm(
    image: Ref,
    infra: Annotated[str | None, typer.Option("--infra", help="Only its result at this endpoint.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Even if tasks use it, which then fail.")] = False,
    yes: Yes = False,
    json: Annotated[bool, _json('{"removed": [endpoint, …], "tasks": [id, …]}')] = False,
) -> None:
    """Remove an image and its files. Says which tasks use it."""
    from diamond.cli import images as act

    act.remove(image, infra=infra, force=force, yes=yes, as_json=json)


@image_app.command("prune")
def prune(
    infra: Annotated[str, typer.Option("--infra", metavar="ENDPOINT", help="Where to make room.")],
    yes: Yes = False,
    json: Annotated[bool, _json('{"task": Task, "before": EndpointImages, "after": EndpointImages}')] = False,
) -> None:
    """Remove kept steps of builds that no image needs."""
    from diamond.cli import images as act

    act.prune(infra, yes=yes, as_json=json)


@image_app.command("bases")
def bases(
    infra: Infra = None,
    json: Annotated[bool, _json('{"bases": [{"key": …, "title": …, "reference": …, "note": …}, …]}')] = False,
) -> None:
    """List suggested bases, those for an endpoint's GPUs first."""
    from diamond.cli import images as act

    act.bases(infra, as_json=json)


@image_app.command("definition")
def definition(
    source: Annotated[str, typer.Argument(metavar="FILE|IMAGE", help="A recipe, or an image by name.")],
    infra: Infra = None,
    json: Annotated[bool, _json('{"builder": …, "endpoint": …, "definition": …}')] = False,
) -> None:
    """Show a recipe in its builder's own language.

    A definition file, a Containerfile or a list of commands.
    """
    from diamond.cli import image_build as act

    act.definition(source, infra=infra, as_json=json)


def register(app: typer.Typer) -> None:
    app.add_typer(image_app, name="image")
