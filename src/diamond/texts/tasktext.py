"""The text of a task file: read with its mistakes placed, and written so that reading it gives the same again.

Knows which fields of a task have which form in a file; what they mean is in `diamond.core.tasks`. Paths in the text are
not looked at: where those lie is a matter of whoever has the files (`diamond.sdk.taskfile`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import yaml

from diamond.core.codec import encode
from diamond.core.errors import InvalidInput
from diamond.core.recipes import Recipe
from diamond.core.secrets import SecretUse
from diamond.core.tasks import RetryPolicy, TaskSpec
from diamond.texts import yamltext
from diamond.texts.slips import check_slips

KIND = yamltext.Kind(
    name="a task file",
    given="give the path of a task file, e.g. diamond launch task.yaml",
    empty="a task needs at least a `run` field",
    start="run: python train.py",
)
_STAND_IN = "scratch"  # a base for a recipe that is only there to say what the other fields are by default
_UNITS = (("d", 86400), ("h", 3600), ("m", 60))


def read(text: str, path: str = "<text>") -> yamltext.Document:
    """Turn YAML text into plain values. Raises InvalidInput with the place, also for the slips people make."""
    document = yamltext.parse(text, path, KIND)
    try:
        check_slips(document.raw)
    except InvalidInput as error:
        raise document.located(error) from error
    return document


def fields_of(spec: TaskSpec) -> dict[str, Any]:
    """What somebody would write in a file to get this spec: only what is not so by default."""
    usual = encode(TaskSpec(run="x"))
    found: dict[str, Any] = {}
    for name, value in encode(spec).items():
        if name == "run" or value != usual[name]:
            found[name] = _written(name, value, usual[name], spec)
    return found


def _written(name: str, value: Any, usual: Any, spec: TaskSpec) -> Any:
    if name == "secrets":
        return _secrets(spec.secrets)
    if name == "image" and spec.image is not None:
        plain = encode(Recipe(base=_STAND_IN))
        return {key: item for key, item in value.items() if key == "base" or item != plain[key]}
    if name == "max_duration":
        return duration(value)
    if name == "curves":
        return value or False  # an empty list says the same, to those who know
    if name == "retry":
        spans = {one.name for one in fields(RetryPolicy)} & {"backoff", "max_backoff"}
        return {key: duration(item) if key in spans else item for key, item in value.items() if item != usual[key]}
    if name in ("resources", "slurm"):
        kept = {key: item for key, item in value.items() if item != usual[key]}
        if name == "slurm" and isinstance(kept.get("warning"), int):
            kept["warning"] = duration(kept["warning"])
        return {key: _number(item) for key, item in kept.items()}
    return value


def _number(item: Any) -> Any:
    """``cpus: 4`` instead of ``cpus: "4"``; an account called 007 stays what it is."""
    return int(item) if isinstance(item, str) and item.isdecimal() and str(int(item)) == item else item


def _secrets(uses: Mapping[str, SecretUse]) -> Any:
    if all(use.secret == variable and not use.file for variable, use in uses.items()):
        return list(uses)
    return {
        variable: {"secret": use.secret, "file": True} if use.file else use.secret for variable, use in uses.items()
    }


def duration(seconds: int) -> str:
    """Exactly as long, in the largest unit that says so: ``2h``, ``90m``, ``45s``."""
    for unit, size in _UNITS:
        if seconds % size == 0:
            return f"{seconds // size}{unit}"
    return f"{seconds}s"


class _Dumper(yaml.SafeDumper):
    """Text of several lines as a block; quotes around what our reader would not take for text."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None
    if "\n" in text:
        style = "|"
    elif not isinstance(yamltext.resolve(text), str) or text in ("~", "<<"):
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def write(found: Mapping[str, Any]) -> str:
    """YAML of a task's fields, in the order in which documents show them. `read` gives the same values back."""
    order = [one.name for one in fields(TaskSpec)]
    known = {name: found[name] for name in order if name in found}
    rest = {name: value for name, value in found.items() if name not in known}
    dumped: str = yaml.dump(
        {**known, **rest}, Dumper=_Dumper, sort_keys=False, allow_unicode=True, default_flow_style=False, width=100
    )
    return dumped if found else ""
