"""What every command shares: the client, output as JSON, errors, and exit codes. Imports nothing heavy by itself."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from diamond.cli.render import clean, paint
from diamond.cli.startup import skip_httpx_cli
from diamond.core.accounts import SCOPE_FIELD
from diamond.core.codec import encode
from diamond.core.errors import DiamondError, Forbidden
from diamond.core.states import TaskState
from diamond.core.tasks import Task

if TYPE_CHECKING:
    from diamond.sdk.client import Client

EXIT_FAILED = 1
EXIT_CANCELLED = 3


@contextmanager
def connect(*, patient: bool = False) -> Iterator[Client]:
    """The client of this command. `patient`: for work that must survive a restart of the server.

    Otherwise a server that is down is said at once, since a person waits.
    """
    skip_httpx_cli()
    from diamond.sdk.client import Client
    from diamond.sdk.transport import RETRIES

    with Client(retries=RETRIES if patient else 1) as client:
        yield client


def emit(value: Any, *, line: bool = False) -> None:
    """A JSON document on standard output; with `line`, as one line of a stream. ASCII, so any terminal is safe."""
    text = json.dumps(_plain(value), indent=None if line else 2, allow_nan=False)
    sys.stdout.write(text.replace("\x7f", "\\u007f") + "\n")
    sys.stdout.flush()


def task_json(task: Task) -> dict[str, Any]:
    """A task as the API gives it, with the sentence that explains its end."""
    return {**encode(task), "sentence": task.sentence}


def _plain(value: Any) -> Any:
    """JSON values; a float that JSON cannot write becomes null."""
    value = encode(value)
    if isinstance(value, float):
        return value if value - value == 0 else None
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, str | int | bool | type(None)) else str(value)


def say(text: str = "") -> None:
    """A line for the person at the terminal; standard output stays for results."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def program() -> str:
    """How the user can type this command: by its name, or by its path where a shell would not find it."""
    called = sys.argv[0] if sys.argv else ""
    if os.path.basename(called) != "diamond" or shutil.which("diamond"):
        return "diamond"
    return shlex.quote(called)


def show_error(error: DiamondError, *, as_json: bool) -> None:
    if as_json:
        emit(error.to_json())
        return
    field = f"{clean(error.field)}: " if error.field else ""
    say(f"{paint('error:', '31;1', sys.stderr)} {field}{clean(error.message)}")
    if hint := _hint(error):
        say(f"{paint('hint:', '2', sys.stderr)} {clean(hint)}")


def _hint(error: DiamondError) -> str:
    """What to type. A sign-in changes nothing while the environment has a token of its own."""
    if not isinstance(error, Forbidden) or error.field != SCOPE_FIELD:
        return error.hint
    hint = error.hint.replace("diamond login", f"{program()} login", 1)
    return f"the token is that of DIAMOND_TOKEN: unset it, then {hint}" if os.environ.get("DIAMOND_TOKEN") else hint


def exit_code_of(state: TaskState) -> int:
    return {TaskState.FAILED: EXIT_FAILED, TaskState.CANCELLED: EXIT_CANCELLED}.get(state, 0)


def leave(code: int) -> NoReturn:
    raise typer.Exit(code)


def confirm(question: str, *, yes: bool) -> bool:
    """Ask, unless told beforehand. Without a terminal there is nobody to ask, so the answer is no."""
    if yes:
        return True
    return sys.stdin.isatty() and typer.confirm(question, err=True)
