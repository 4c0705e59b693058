"""The `diamond` command: its entry point, the layout of its help, and the one place that shows errors.

Parsing is in the `parse_*` modules; what a command does is in the module of its noun, imported when it runs. Neither
httpx, rich, yaml nor the SDK may be imported here: `diamond --help` and shell completion must be immediate.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from diamond import __version__

SECTIONS = {
    "Tasks": (
        "launch",
        "import",
        "ps",
        "show",
        "logs",
        "exec",
        "ssh",
        "stop",
        "rerun",
        "rm",
        "queue",
        "events",
        "task",
        "template",
    ),
    "Results": ("outputs", "cp", "metrics"),
    "Environments": ("image", "secret"),
    "Machines": ("gpus", "endpoint", "pool", "agent", "simulate"),
    "People": ("login", "logout", "whoami", "token", "session", "user", "notify", "audit", "quota", "project"),
    "Service": ("up", "down", "check", "serve", "backup", "restore", "version"),
}


# An error about an option or argument (--state, TASK) is wrong usage; one about a field of a file or the server is not.
_WORD_OF_COMMAND = re.compile(r"--[a-z-]*|TASK|TASK:PATH|FILE|IMAGE|URL|CHANNEL|TARGET|RULE|KIND|NAME")


class Group(TyperGroup):
    """Commands in sections, most used first."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(len(name) for name in self.commands)
        for title, names in SECTIONS.items():
            rows = [(n.ljust(width), self.commands[n].get_short_help_str(formatter.width - width - 6)) for n in names]
            with formatter.section(title):
                formatter.write_dl(rows)


app = typer.Typer(
    name="diamond",
    cls=Group,
    help="Train any model, with any dataset, on any machine.",
    epilog="Start here:  diamond up -d  &&  diamond launch task.yaml",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"diamond {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks. May stand anywhere.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


def build() -> typer.Typer:
    """The application with all its commands."""
    from diamond.cli import (
        parse_accounts,
        parse_images,
        parse_planning,
        parse_pools,
        parse_projects,
        parse_quotas,
        parse_secrets,
        parse_service,
        parse_shells,
        parse_tasks,
        parse_templates,
        parse_trust,
    )
    from diamond.cli.usage import Command

    if not app.registered_commands:
        parse_tasks.register(app)
        parse_shells.register(app)
        parse_images.register(app)
        parse_secrets.register(app)
        parse_templates.register(app)
        parse_accounts.register(app)
        parse_projects.register(app)
        parse_trust.register(app)
        parse_quotas.register(app)
        parse_service.register(app)
        parse_planning.register(app)
        parse_pools.register(app)
        for each in (app, *(group.typer_instance for group in app.registered_groups)):
            for command in each.registered_commands if each else ():
                own = command.cls is not None and issubclass(command.cls, Command)
                command.cls = command.cls if own else Command
    return app


def main(argv: list[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 failed, 2 wrongly used, 3 the task was cancelled."""
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a locale without ▁▂▃ shows question marks; it must not end a command
            stream.reconfigure(errors="replace")
    args = list(sys.argv[1:] if argv is None else argv)
    own = args[: args.index("--")] if "--" in args else args
    debug = "--debug" in own or bool(os.environ.get("DIAMOND_DEBUG"))
    args = [arg for i, arg in enumerate(args) if not (arg == "--debug" and i < len(own))]
    sys.exit(_run(args, as_json="--json" in own, debug=debug))


def _run(args: list[str], *, as_json: bool, debug: bool) -> int:
    from diamond.core.errors import DiamondError, InvalidInput

    try:
        command = typer.main.get_command(build())
        code = command.main(args=args, prog_name="diamond", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except DiamondError as error:
        if debug:
            raise
        _session().show_error(error, as_json=as_json)
        return 2 if isinstance(error, InvalidInput) and _WORD_OF_COMMAND.fullmatch(error.field) else 1
    except typer.TyperException as error:
        if as_json:
            _session().emit(InvalidInput(error.format_message()).to_json())
        elif hasattr(error, "show"):
            error.show()
        return error.exit_code if error.exit_code != 1 else 2
    except typer.Abort:
        sys.stderr.write("aborted\n")
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone (`diamond logs … | head`); the interpreter must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:
        if debug:
            raise
        _session().show_error(
            DiamondError(f"{type(error).__name__}: {error}", hint="run with --debug for the traceback"),
            as_json=as_json,
        )
        return 1


def _open_standard_streams() -> None:
    """A stream that the caller closed (``>&-``) goes nowhere; otherwise the next file opened would take its place."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free number is this one, since those before it are open by now.
            os.open(os.devnull, os.O_RDWR)
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "r" if fd == 0 else "w", closefd=False))  # noqa: SIM115


def _session() -> Any:
    from diamond.cli import session

    return session


if __name__ == "__main__":
    main()
