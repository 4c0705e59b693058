"""Arguments of the commands about the audit log and about notices. Parses only; the work is imported late."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Rule = Annotated[str, typer.Argument(metavar="RULE", help="Its id, from `diamond notify ls`.")]
HeadOption = Annotated[
    str | None, typer.Option("--head", metavar="SEQ:HASH", help="Where it ended once: must still be part of it.")
]

audit_app = typer.Typer(
    help="Who did what, from where; and proof of it.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
notify_app = typer.Typer(
    help="Be told of what happened, by e-mail or webhook.", no_args_is_help=True, rich_markup_mode=None
)


@audit_app.command("ls")
def audit_ls(
    user: Annotated[str | None, typer.Option("--user", help="Only of this user.")] = None,
    mine: Annotated[bool, typer.Option("--mine", help="Only your own; needs no administrator.")] = False,
    action: Annotated[
        str | None, typer.Option("--action", help="Only this (task.created), or all about a noun (task).")
    ] = None,
    object: Annotated[str | None, typer.Option("--object", metavar="ID", help="Only what was done to this.")] = None,
    since: Annotated[str | None, typer.Option("--since", help="From when on: 2h, 7d, 2026-01-31, or a time.")] = None,
    until: Annotated[str | None, typer.Option("--until", help="Until when, written likewise.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most this many.")] = 50,
    json: Json = False,
) -> None:
    """List entries, newest first (also: audit list)."""
    from diamond.cli import audit as act

    act.ls(
        user=user, mine=mine, action=action, object=object, since=since, until=until, limit=limit, as_json=json
    )  # fmt: skip


audit_app.command("list", hidden=True)(audit_ls)


@audit_app.command("head")
def audit_head(json: Json = False) -> None:
    """Show where the log ends, as SEQ:HASH.

    Keep it somewhere else; `verify --head` finds out later whether the log still holds it.
    """
    from diamond.cli import audit as act

    act.head(as_json=json)


@audit_app.command("verify")
def audit_verify(
    file: Annotated[
        Path | None, typer.Option("--file", help="Check this export instead, without a server. - is standard input.")
    ] = None,
    head: HeadOption = None,
    json: Json = False,
) -> None:
    """Recompute every hash and say what does not fit. Exits with 1 when something does not."""
    from diamond.cli import audit as act

    act.verify(file, head=head, as_json=json)


@audit_app.command("export")
def audit_export(
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="File to write; left out: standard output.")
    ] = None,
    after: Annotated[int, typer.Option("--after", min=0, metavar="SEQ", help="Only entries after this one.")] = 0,
    json: Json = False,
) -> None:
    """Write the log as lines of JSON."""
    from diamond.cli import audit as act

    act.export(file, after=after, as_json=json)


@notify_app.command("add")
def notify_add(
    channel: Annotated[str, typer.Argument(help="email or webhook.")],
    target: Annotated[str, typer.Argument(help="A mail address, or an https:// URL.")],
    on: Annotated[
        str,
        typer.Option("--on", metavar="EVENTS", help="What to be told of, by commas: failed, succeeded, … or all."),
    ] = "failed,succeeded",
    json: Json = False,
) -> None:
    """Be told of events from now on.

    Events: started, succeeded, failed, cancelled and retrying (of tasks), image.ready, image.failed, offline (an
    endpoint), near (a quota); or all. A webhook's messages are signed with a key that is shown this once.
    """
    from diamond.cli import notify as act

    act.add(channel, target, on=on, as_json=json)


@notify_app.command("ls")
def notify_ls(json: Json = False) -> None:
    """List your rules (also: notify list)."""
    from diamond.cli import notify as act

    act.ls(as_json=json)


notify_app.command("list", hidden=True)(notify_ls)


@notify_app.command("set")
def notify_set(
    rule: Rule,
    on: Annotated[str | None, typer.Option("--on", metavar="EVENTS", help="Be told of these instead.")] = None,
    paused: Annotated[bool | None, typer.Option("--pause/--resume", help="Stop it for now, or have it go on.")] = None,
    json: Json = False,
) -> None:
    """Change a rule, or have one that was paused go on."""
    from diamond.cli import notify as act

    act.change(rule, on=on, paused=paused, as_json=json)


@notify_app.command("rm")
def notify_rm(rule: Rule, json: Json = False) -> None:
    """Be told no more."""
    from diamond.cli import notify as act

    act.remove(rule, as_json=json)


@notify_app.command("test")
def notify_test(rule: Rule, json: Json = False) -> None:
    """Send a test message now and say whether it arrived."""
    from diamond.cli import notify as act

    act.test(rule, as_json=json)


def register(app: typer.Typer) -> None:
    app.add_typer(notify_app, name="notify")
    app.add_typer(audit_app, name="audit")
