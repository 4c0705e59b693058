"""How much an agent may say: a bound on every list, mapping, text and number of what it sends.

The bounds stand beside the fields (`text`, `items`, `number`), far above what the largest centres need. What is more is
cut, and a note says so: a centre that outgrew a bound keeps its endpoint, and an agent of another version is not locked
out. Where cutting would lose something that is owed, the message is refused instead, and names the field.

`MAX_ENTRIES` bounds all lists of one message together, since bounds of lists within lists multiply.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from diamond.core.errors import TooLarge

T = TypeVar("T")
MAX_ENTRIES = 20_000
MAX_NOTES = 20
_NAME = 255
_LARGEST = 2**53  # what JSON's other readers hold exactly, and no sum of them leaves 64 bits soon


@dataclasses.dataclass(frozen=True)
class Bound:
    """`chars` of a text, or of each in a list or mapping; `count` of entries; `least` and `most` of a number."""

    chars: int = _NAME
    count: int = 0
    least: float = 0
    most: float = _LARGEST
    refuses: bool = False


def text(chars: int) -> dict[str, Any]:
    return {"bound": Bound(chars=chars)}


def items(count: int, *, chars: int = _NAME, most: float = _LARGEST, refuses: bool = False) -> dict[str, Any]:
    """Of a list or mapping: how many entries, and how long their texts are, or how large their numbers."""
    return {"bound": Bound(count=count, chars=chars, most=most, refuses=refuses)}


def number(most: float = _LARGEST, *, least: float = 0) -> dict[str, Any]:
    return {"bound": Bound(least=least, most=most)}


def fitted(message: T) -> tuple[T, tuple[str, ...]]:
    """The message within its bounds, and what was cut to get it there.

    Raises:
        TooLarge: a list that cannot be cut has too many entries; names the field.
    """
    fitter = _Fitter()
    return fitter.fit(message, ""), tuple(fitter.notes)


class _Fitter:
    def __init__(self) -> None:
        self.notes: list[str] = []
        self._left = MAX_ENTRIES

    def fit(self, value: Any, path: str) -> Any:
        changes = {}
        for field in dataclasses.fields(value):
            old = getattr(value, field.name)
            new = self._field(old, field.metadata.get("bound", _PLAIN), f"{path}.{field.name}" if path else field.name)
            if new is not old:
                changes[field.name] = new
        return dataclasses.replace(value, **changes) if changes else value

    def _field(self, value: Any, bound: Bound, path: str) -> Any:
        kind = type(value)
        if kind is str:
            return self._text(value, bound, path)
        if kind is int or kind is float:
            return self._number(value, bound, path)
        if kind is tuple:
            return self._list(value, bound, path)
        if isinstance(value, Mapping):
            return self._mapping(value, bound, path)
        return self.fit(value, path) if dataclasses.is_dataclass(value) else value

    def _text(self, value: str, bound: Bound, path: str) -> str:
        if len(value) <= bound.chars:
            return value
        self._note(path, f"a text of {len(value)} characters was cut to {bound.chars}")
        return value[: bound.chars]

    def _number(self, value: float, bound: Bound, path: str) -> float:
        if bound.least <= value <= bound.most:
            return value
        self._note(path, f"{value!r:.30} is no such number; it counts as the nearest that is")
        nearest = bound.least if math.isnan(value) else min(max(value, bound.least), bound.most)
        return type(value)(nearest)

    def _list(self, value: tuple[Any, ...], bound: Bound, path: str) -> tuple[Any, ...]:
        kept = value[: self._room(len(value), bound, path)]
        fitted = tuple(self._field(item, bound, f"{path}[{number}]") for number, item in enumerate(kept))
        same = len(fitted) == len(value) and all(new is old for new, old in zip(fitted, value, strict=True))
        return value if same else fitted

    def _mapping(self, value: Mapping[str, Any], bound: Bound, path: str) -> Mapping[str, Any]:
        room = self._room(len(value), bound, path)
        fitted = {
            self._text(key, bound, path): self._field(item, bound, f"{path}.{key[:40]}")
            for key, item in list(value.items())[:room]
        }
        return value if fitted == value else fitted

    def _room(self, count: int, bound: Bound, path: str) -> int:
        room = min(count, bound.count, self._left)
        if room < count:
            if bound.refuses:
                raise TooLarge(f"has {count} entries; at most {bound.count} are taken", field=path)
            if self._left:
                self._note(path, f"of {count} entries the first {room} were taken")
        self._left -= room
        return room

    def _note(self, path: str, what: str) -> None:
        if len(self.notes) < MAX_NOTES:
            self.notes.append(f"{path[:100]}: {what}")


_PLAIN = Bound()


def unbounded(cls: type) -> list[str]:
    """Lists and mappings in a type of message, and in those within it, that say nothing of how many entries."""
    found: list[str] = []
    _walk(cls, cls.__name__, found, set())
    return found


def _walk(cls: type, path: str, found: list[str], seen: set[type]) -> None:
    if cls in seen:
        return
    seen.add(cls)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        bound = field.metadata.get("bound")
        if _holds_many(hints[field.name]) and (bound is None or bound.count <= 0):
            found.append(f"{path}.{field.name}")
        for inner in _classes_in(hints[field.name]):
            _walk(inner, inner.__name__, found, seen)


def _holds_many(hint: Any) -> bool:
    return (
        typing.get_origin(hint) in (tuple, list, dict, Mapping)
        or hint in (tuple, list, dict)
        or any(_holds_many(inner) for inner in typing.get_args(hint))
    )


def _classes_in(hint: Any) -> list[type]:
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return [hint]
    return [found for inner in typing.get_args(hint) for found in _classes_in(inner)]
