"""Dataclasses to and from plain JSON values, in two moods (ADR 0002).

*Strict*, for what a person wrote: an unknown field is an error that lists the valid ones and guesses the
one that was meant; every error names its field by a dotted path. *Lenient*, for messages between versions of
Diamond: unknown fields are ignored, missing ones take their defaults.

A field may carry ``metadata={"parse": f}``: ``f(raw)`` turns the raw value into the canonical one and raises
ValueError with a sentence when it cannot. Only the standard library, since agents decode with this too.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import types
import typing
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar, cast

from diamond.core.errors import InvalidInput

T = TypeVar("T")

_LARGEST = 1e300


_PLAIN = (str, int, float, bool, type(None))


def encode(value: Any) -> Any:
    """A dataclass (or container of them) as JSON values; enums by value."""
    if type(value) in _PLAIN:
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: encode(getattr(value, name)) for name in _field_names(type(value))}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value


def shallow(value: Any) -> Any:
    """What `json.dumps` cannot write itself, one level deep: for its `default`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: getattr(value, name) for name in _field_names(type(value))}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def decode(cls: type[T], raw: Any, *, strict: bool = False, path: str = "") -> T:
    """Build `cls` from JSON values.

    Raises:
        InvalidInput: with the dotted path of the first field that does not fit.
    """
    if not isinstance(raw, Mapping):
        raise InvalidInput(f"must be a mapping of fields, not {_kind(raw)}", field=path)
    fields = _fields(cast(type, cls))
    if strict:
        _refuse_unknown(raw, list(fields), path)
    values: dict[str, Any] = {}
    for name, (hint, field) in fields.items():
        where = f"{path}.{name}" if path else name
        if name in raw:
            values[name] = _decode_field(hint, field, raw[name], strict, where)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise InvalidInput("is required", field=where)
    try:
        return cls(**values)
    except ValueError as error:  # from __post_init__: a rule over several fields
        raise InvalidInput(str(error), field=path) from error


def _decode_field(hint: Any, field: dataclasses.Field[Any], raw: Any, strict: bool, path: str) -> Any:
    parse = field.metadata.get("parse")
    if parse is None:
        return _convert(hint, raw, strict, path)
    if raw is None and _allows_none(hint):
        return None
    try:
        return parse(raw)
    except InvalidInput as error:
        inner = f"{path}.{error.field}" if error.field else path
        raise type(error)(error.message, hint=error.hint, field=inner) from error
    except ValueError as error:
        raise InvalidInput(str(error), field=path) from error


def _convert(hint: Any, raw: Any, strict: bool, path: str) -> Any:
    origin = typing.get_origin(hint)
    if hint is Any:
        return raw
    if origin in (types.UnionType, typing.Union):
        if raw is None and _allows_none(hint):
            return None
        (inner,) = [arg for arg in typing.get_args(hint) if arg is not type(None)]
        return _convert(inner, raw, strict, path)
    if dataclasses.is_dataclass(hint):
        return decode(cast(type[Any], hint), raw, strict=strict, path=path)
    if origin in (tuple, list):
        if not isinstance(raw, list | tuple):
            raise InvalidInput(f"must be a list, not {_kind(raw)}", field=path)
        inner = typing.get_args(hint)[0]
        return origin(_convert(inner, item, strict, f"{path}[{i}]") for i, item in enumerate(raw))
    if origin in (dict, Mapping) or hint is dict:
        if not isinstance(raw, Mapping):
            raise InvalidInput(f"must be a mapping, not {_kind(raw)}", field=path)
        inner = typing.get_args(hint)[1] if typing.get_args(hint) else Any
        return {str(key): _convert(inner, item, strict, f"{path}.{key}") for key, item in raw.items()}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        try:
            return hint(raw)
        except ValueError:
            valid = ", ".join(str(member.value) for member in hint)
            raise InvalidInput(f"{_show(raw)} is not one of {valid}", field=path) from None
    return _scalar(hint, raw, path)


def _scalar(hint: Any, raw: Any, path: str) -> Any:
    # bool is an int to Python, but `num_nodes: yes` is a slip, not a number.
    if hint is float and isinstance(raw, int | float) and not isinstance(raw, bool):
        if not abs(raw) < _LARGEST:  # NaN is not either; no database and no JSON takes them
            raise InvalidInput("must be a finite number", field=path)
        return float(raw)
    if type(raw) is hint:
        return raw
    names = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
    raise InvalidInput(f"must be {names.get(hint, hint)}, not {_kind(raw)}", field=path)


def _refuse_unknown(raw: Mapping[Any, Any], valid: list[str], path: str) -> None:
    for key in raw:
        if key in valid:
            continue
        near = difflib.get_close_matches(str(key), valid, n=1)
        guess = f"did you mean {near[0]!r}? " if near else ""
        shown = _show(key).strip("'\"")
        raise InvalidInput(
            f"unknown field {_show(key)}",
            hint=f"{guess}valid fields here: {', '.join(valid)}",
            field=f"{path}.{shown}" if path else shown,
        )


def _allows_none(hint: Any) -> bool:
    return type(None) in typing.get_args(hint)


def _kind(raw: Any) -> str:
    names = {bool: "true/false", int: "a number", float: "a number", str: "text", type(None): "nothing"}
    if isinstance(raw, list | tuple):
        return "a list"
    if isinstance(raw, Mapping):
        return "a mapping"
    name = names.get(type(raw), type(raw).__name__)
    return f"{name} ({_show(raw)})" if isinstance(raw, str | int | float) else name


def _show(raw: Any) -> str:
    """A user's value inside an error text: quoted, and never ten megabytes of it."""
    text = repr(raw)
    return text if len(text) <= 80 else text[:77] + "..."


@lru_cache(maxsize=256)
def _fields(cls: type) -> dict[str, tuple[Any, dataclasses.Field[Any]]]:
    hints = typing.get_type_hints(cls)
    return {f.name: (hints[f.name], f) for f in dataclasses.fields(cls) if f.init}


@lru_cache(maxsize=256)
def _field_names(cls: type) -> tuple[str, ...]:
    return tuple(f.name for f in dataclasses.fields(cls))
