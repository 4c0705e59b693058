"""Commands about the audit log: ls, head, verify, export."""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from diamond.cli import render
from diamond.cli.session import EXIT_FAILED, connect, emit, leave, say
from diamond.core.audit import AuditVerdict, parse_head, verify_export
from diamond.core.durations import parse_duration
from diamond.core.errors import Conflict, InvalidInput


def ls(
    *,
    user: str | None,
    mine: bool,
    action: str | None,
    object: str | None,
    since: str | None,
    until: str | None,
    limit: int,
    as_json: bool,
) -> None:
    if mine and user:
        raise InvalidInput("is about somebody else, and --mine about you", hint="leave one out", field="--user")
    now = time.time()
    start, end = _when(since, now, "--since"), _when(until, now, "--until")
    with connect() as client:
        found = list(
            client.audit.entries(
                mine=mine, user=user, action=action, object=object, since=start, until=end, limit=limit
            )
        )
    if as_json:
        emit({"entries": found})
        return
    if not found:
        say("No entries fit.")
        return
    rows = [
        (
            str(entry.seq),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(entry.at)),
            render.clean(entry.user),
            render.clean(entry.action),
            render.clean(entry.object),
            render.clean(entry.address),
            render.clean(entry.via),
            render.clean(_short(entry.data)),
        )
        for entry in found
    ]
    render.print_table(
        (">#", "WHEN", "WHO", "ACTION", "OBJECT", "FROM", "VIA", "DETAIL"),
        rows,
        flexible={"DETAIL": 12, "WHO": 8, "FROM": 9},
        droppable=("VIA", "DETAIL", "FROM", "OBJECT"),
    )


def _short(data: dict[str, Any]) -> str:
    return " ".join(f"{key}={_value(value)}" for key, value in data.items() if value not in (None, "", [], {}))


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _when(text: str | None, now: float, field: str) -> float | None:
    """``2h`` ago, or a date or time of this machine's clock."""
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        pass
    try:
        return max(0.0, now - parse_duration(text))
    except ValueError:
        raise InvalidInput(
            f"{text[:40]!r} is neither a duration nor a time", hint="write 2h, 7d, 2026-01-31 or 2026-01-31T18:00",
            field=field,
        ) from None  # fmt: skip


def head(*, as_json: bool) -> None:
    with connect() as client:
        found = client.audit.head()
    if as_json:
        emit(found)
        return
    print(found)


def verify(file: Path | None, *, head: str | None, as_json: bool) -> None:
    expected = parse_head(head, "--head") if head else None
    if file is None:
        with connect() as client:
            verdict = client.audit.verify(expected)
    elif str(file) == "-":
        verdict = verify_export(sys.stdin.buffer, expected)
    else:
        try:
            with open(file, "rb") as lines:
                verdict = verify_export(lines, expected)
        except OSError as error:
            raise InvalidInput(f"{file}: {error.strerror}", field="--file") from error
    _show(verdict, as_json=as_json)
    if not verdict.ok:
        leave(EXIT_FAILED)


def _show(verdict: AuditVerdict, *, as_json: bool) -> None:
    if as_json:
        emit(verdict)
    elif verdict.ok:
        print(f"{render.count(verdict.entries, 'entry', 'entries')} as they were written; the last is")
        print(f"{verdict.seq}:{verdict.hash}")
    else:
        say(f"{render.paint('broken:', '31;1', sys.stderr)} {render.clean(verdict.problem)}")
        say(f"{render.count(verdict.entries, 'entry', 'entries')} before that are as they were written.")


def export(file: Path | None, *, after: int, as_json: bool) -> None:
    if file is None:
        with connect() as client:
            for piece in client.audit.export(after):
                sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
        return
    if file.exists():
        raise Conflict(
            f"{file} is there already",
            hint="choose another name: an earlier export is what later ones are held against",
        )
    unfinished = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        with connect() as client, open(unfinished, "xb", opener=_private) as out:
            for piece in client.audit.export(after):
                out.write(piece)
        with open(unfinished, "rb") as lines:
            verdict = verify_export(lines)
        os.replace(unfinished, file)
    except OSError as error:
        raise InvalidInput(f"{file}: {error.strerror}", hint="choose another file", field="FILE") from error
    finally:
        unfinished.unlink(missing_ok=True)
    if as_json:
        emit({"file": str(file), **verdict.__dict__})
    else:
        say(f"Wrote {render.count(verdict.entries, 'entry', 'entries')} to {file}.")
        _show(verdict, as_json=False)
    if not verdict.ok:
        leave(EXIT_FAILED)


def _private(path: str, flags: int) -> int:
    """Names and addresses of people: for whoever asked, and nobody else on this machine."""
    return os.open(path, flags, 0o600)
