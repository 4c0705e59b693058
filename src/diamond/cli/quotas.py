"""`diamond quota`: how one stands, and what administrators set."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from diamond.cli import render
from diamond.cli.session import connect, emit, program, say
from diamond.core.codec import decode, encode
from diamond.core.errors import InvalidInput
from diamond.core.quotas import EVERYBODY, KINDS, NAMES, WARN_FRACTION, Limits, Quota, shown

_NOUNS = {
    "tasks": "unfinished tasks",
    "nodes": "nodes at once",
    "gpus": "GPUs at once",
    "gpu_hours": "GPU-hours a month",
    "storage_bytes": "storage",
}
_OPTIONS = {name: f"--{name.replace('_', '-')}" for name in NAMES} | {"storage_bytes": "--storage"}
_NO_LIMIT = "none"


def mine(*, as_json: bool) -> None:
    with connect() as client:
        found = client.quotas.list()
    if as_json:
        emit({"quotas": found})
        return
    for number, quota in enumerate(found):
        if number:
            print()
        _print(quota)


def show(kind: str, name: str | None, *, as_json: bool) -> None:
    kind, name = _whose(kind, name)
    with connect() as client:
        found = client.quotas.get(kind, name)
    emit(found) if as_json else _print(found)


def ls(*, as_json: bool) -> None:
    with connect() as client:
        found = client.quotas.all()
    if as_json:
        emit({"quotas": found})
        return
    if not found:
        say(f"Nothing is limited. Set a default: {program()} quota set every-user --gpus 8")
        return
    rows = [
        (
            render.clean(one.kind),
            render.clean(one.name),
            *(shown(each, limit) if (limit := getattr(one.limits, each)) is not None else "" for each in NAMES),
            render.ago(one.updated_at),
        )
        for one in found
    ]
    heads = ("KIND", "NAME", ">TASKS", ">NODES", ">GPUS", ">GPU-HOURS", ">STORAGE", "SET")
    render.print_table(heads, rows, flexible={"NAME": 12}, droppable=("SET",))


def change(kind: str, name: str | None, changes: Mapping[str, str | None], *, as_json: bool) -> None:
    kind, name = _whose(kind, name)
    given = {each: _parse(each, text) for each, text in changes.items() if text is not None}
    if not given:
        raise InvalidInput(
            "no limit was given", hint=f"for example: {program()} quota set {kind} {name} --gpus 8", field="--gpus"
        )
    with connect() as client:
        before = client.quotas.get(kind, name)
        # What was the default until now goes on to hold beside what is set.
        found = client.quotas.set(kind, name, decode(Limits, {**encode(before.limits), **given}, strict=True))
    emit(found) if as_json else _print(found)


def clear(kind: str, name: str | None, *, as_json: bool) -> None:
    kind, name = _whose(kind, name)
    with connect() as client:
        found = client.quotas.clear(kind, name)
    emit(found) if as_json else _print(found)


def _whose(kind: str, name: str | None) -> tuple[str, str]:
    if kind not in KINDS:
        raise InvalidInput(f"{kind[:40]!r} is none of {', '.join(KINDS)}", field="KIND")
    if name is None and not kind.startswith("every-"):
        raise InvalidInput(f"which {kind}?", hint=f"give its name: {program()} quota show {kind} NAME", field="NAME")
    return kind, name or EVERYBODY


def _parse(name: str, text: str) -> Any:
    """What an option says, as JSON has it; None: no limit."""
    option = _OPTIONS[name]
    if text.strip().lower() == _NO_LIMIT:
        return None
    try:
        raw: Any = text if name == "storage_bytes" else float(text) if name == "gpu_hours" else int(text)
        return encode(decode(Limits, {name: raw}, strict=True))[name]
    except InvalidInput as error:
        raise InvalidInput(error.message, hint=error.hint, field=option) from error
    except ValueError:
        hint = f"write a number, or {_NO_LIMIT} for no limit"
        raise InvalidInput(f"{text[:40]!r} is not a number", hint=hint, field=option) from None


def _print(quota: Quota) -> None:
    is_default = quota.kind.startswith("every-")
    whose = quota.kind.replace("-", " ") if is_default else f"{quota.kind} {quota.name}"
    note = "" if quota.own or is_default or not quota.limits.given() else "  (the default)"
    print(render.paint(render.clean(whose[0].upper() + whose[1:]), "1") + note)
    width = max(map(len, _NOUNS.values()))
    for name in NAMES:
        limit, used = getattr(quota.limits, name), getattr(quota.used, name)
        noun = _NOUNS[name].ljust(width)
        if is_default:
            print(f"  {noun}  {shown(name, limit) if limit is not None else 'no limit'}")
        elif limit is None:
            print(f"  {noun}  {' ' * 10}  {shown(name, used)}, no limit")
        else:
            fraction = used / limit if limit else 1.0
            bar = render.gauge(fraction)
            bar = render.paint(bar, "33" if fraction < 1 else "31") if fraction > WARN_FRACTION else bar
            renews = f", renewed on {_day(quota.renews_at)}" if name == "gpu_hours" else ""
            print(f"  {noun}  {bar}  {shown(name, used)} of {shown(name, limit)}{renews}")


def _day(at: float) -> str:
    return time.strftime("%-d %B (UTC)", time.gmtime(at))
