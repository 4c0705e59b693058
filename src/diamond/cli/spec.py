"""A task's spec as people read it: what differs from the defaults, with units, in the form of a task file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from diamond.cli import render
from diamond.cli.image_page import recipe_lines
from diamond.core.bundles import digest_of_ref, is_bundle_ref
from diamond.core.codec import decode, encode
from diamond.core.recipes import Recipe
from diamond.core.tasks import TaskSpec

_DURATIONS = frozenset({"max_duration", "retry.backoff", "retry.max_backoff"})


def lines(spec: Mapping[str, Any], *, without: tuple[str, ...] = ()) -> Iterator[str]:
    """Lines of cleaned text; fields in `without` are left out."""
    default: dict[str, Any] = encode(TaskSpec(run="x"))
    for key, value in spec.items():
        if key in without or value is None or (key != "run" and value == default.get(key)):
            continue
        if key == "curves" and not value:
            yield "curves: off"
        elif key == "image":
            yield "image:"
            yield from (f"  {line}" for line in recipe_lines(decode(Recipe, value)))
        elif isinstance(value, dict):
            usual = default.get(key) or {}
            inner = [(name, item) for name, item in value.items() if item is not None and item != usual.get(name)]
            if inner:
                yield f"{key}:"
            for name, item in inner:
                yield f"  {render.clean(name)}: {_text(f'{key}.{name}', item)}"
        elif isinstance(value, str) and "\n" in value:
            yield f"{key}: |"
            for line in render.clean_block(value).rstrip("\n").split("\n"):
                yield f"  {line}".rstrip()
        else:
            yield f"{key}: {_text(key, value)}"


def _text(path: str, value: Any) -> str:
    if path in _DURATIONS and isinstance(value, int | float):
        return render.written_duration(value)
    if path == "resources.memory":
        return memory(str(value))
    if isinstance(value, str) and (path == "workdir" or path.startswith("file_mounts.")) and is_bundle_ref(value):
        return f"uploaded, sha256:{digest_of_ref(value).removeprefix('sha256:')[:4]}…"
    return render.clean(", ".join(map(str, value)) if isinstance(value, list) else value)


def memory(text: str) -> str:
    """``16 GiB``, ``500 MiB``; ``16 GiB or more`` for ``16+``."""
    try:
        shown = render.amount(float(text.rstrip("+")) * 1024**3)
    except ValueError:
        return render.clean(text)
    return f"{shown} or more" if text.endswith("+") else shown
