"""The six steps of the Image Builder as forms: what a browser sends, as contents of a draft, and back again.

Lists of packages stay the text that was typed, comments included; a recipe takes them so. Nothing here decides whether
the contents are right: services.image_drafts does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from diamond.core.durations import format_duration
from diamond.core.image_views import FieldError
from diamond.core.recipes import DEFAULT_TIME_LIMIT_S

_PLAIN = {
    "endpoint": ("endpoint", "builder", "where", "time_limit"),
    "dependencies": ("system", "conda", "channels", "pip", "constraints"),
    "commands": ("build", "test"),
}
_NEEDS_QUOTES = re.compile(r'^[\s"]|\s$|[\r\n]')
DROP = "drop_"


class Step(NamedTuple):
    """One page of the builder. `key` is the draft's own name for it, `path` the end of its address."""

    path: str
    title: str
    key: str


STEPS = (
    Step("endpoint", "Select Endpoint", "endpoint"),
    Step("base", "Base Image", "base"),
    Step("dependencies", "Dependencies", "dependencies"),
    Step("environment", "Environment Variables", "envs"),
    Step("commands", "Build Commands", "commands"),
    Step("review", "Review", "review"),
)
BY_PATH = {step.path: step for step in STEPS}
BY_KEY = {step.key: step for step in STEPS}


def contents_of(
    step: str, form: Mapping[str, str], stored: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, FieldError]]:
    """The contents of a step as typed, and what in the form cannot be read at all, by field."""
    errors: dict[str, FieldError] = {}
    found: dict[str, Any] = {name: form.get(name, "").replace("\r\n", "\n").strip() for name in _PLAIN.get(step, ())}
    if step == "endpoint":
        found |= {name: "" for name in ("builder", "where") if found[name] == "auto"}
    if step == "base":
        found = {"name": form.get("name", "").strip(), "base": _base(form), "labels": _pairs(form, "labels", errors)}
    if step == "envs":
        found = {"envs": _pairs(form, "envs", errors)}
    if step == "dependencies":
        dropped = {value for name, value in form.items() if name.startswith(DROP)}
        files = {target: ref for target, ref in (stored.get("files") or {}).items() if target not in dropped}
        found["files"] = files
    return {name: value for name, value in found.items() if value}, errors


def typed_of(step: str, contents: Mapping[str, Any]) -> dict[str, str]:
    """The fields of a step's form that show these contents."""
    typed = {name: _text(contents.get(name)) for name in _PLAIN.get(step, ())}
    if step == "endpoint" and not isinstance(contents.get("time_limit", ""), str):
        seconds = int(contents["time_limit"])
        typed["time_limit"] = "" if seconds == DEFAULT_TIME_LIMIT_S else format_duration(seconds)
    if step == "base":
        base = _text(contents.get("base"))
        typed = {"name": _text(contents.get("name")), "base": base, "labels": _lines(contents.get("labels"))}
        typed["choice"] = base if base == "host" or base.startswith("suggested:") else ""
        typed["other"] = typed["image"] = ""
        if base.startswith("image:"):
            typed |= {"choice": "image", "image": base}
        elif base and not typed["choice"]:
            typed |= {"choice": "other", "other": base}
    if step == "envs":
        typed = {"envs": _lines(contents.get("envs"))}
    return typed


def _base(form: Mapping[str, str]) -> str:
    choice, other, image = (form.get(name, "").strip() for name in ("choice", "other", "image"))
    if choice == "image":
        return image
    return other if choice in ("", "other") else choice


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "\n".join(str(line) for line in value)
    return "" if value is None else str(value)


def _lines(value: Any) -> str:
    """NAME=value, one a line; a value that would not survive that is written as JSON writes texts."""
    pairs = value.items() if isinstance(value, Mapping) else ()
    shown = ((name, str(each)) for name, each in pairs)
    return "\n".join(
        f"{name}={json.dumps(text, ensure_ascii=False) if _NEEDS_QUOTES.search(text) else text}" for name, text in shown
    )


def _pairs(form: Mapping[str, str], field: str, errors: dict[str, FieldError]) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, line in enumerate(form.get(field, "").splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.removeprefix("export ").partition("=")
        if not equals:
            hint = "write NAME=value, one a line"
            errors[field] = FieldError(field=field, message=f"line {number}, {text[:60]!r}, has no “=”", hint=hint)
            return {}
        if name.strip() in found:
            errors[field] = FieldError(field=field, message=f"line {number}: {name.strip()[:60]} is there twice")
            return {}
        found[name.strip()] = _unquoted(value.strip())
    return found


def _unquoted(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] == '"':
        try:
            read = json.loads(value, strict=False)
        except ValueError:
            return value[1:-1]
        return str(read)
    return value[1:-1] if len(value) >= 2 and value[0] == value[-1] == "'" else value


def errors_by_field(errors: Iterable[FieldError]) -> dict[str, FieldError]:
    """Beside each field its first error; of a list, with the number of the line."""
    found: dict[str, FieldError] = {}
    for error in errors:
        field, _, rest = error.field.partition(".")
        name, bracket, number = field.partition("[")
        message = error.message
        if bracket and number.rstrip("]").isdecimal():
            message = f"line {int(number.rstrip(']')) + 1}: {message}"
        elif rest:
            message = f"{rest}: {message}"
        found.setdefault(name or "problem", FieldError(field=name, message=message, hint=error.hint))
    return found
