"""Keeps the start of a command short where a library would make it long. Everything here is optional: without it
commands do the same, only later.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


def skip_httpx_cli() -> None:
    """httpx imports its own command line (click, pygments, rich) with itself: 40 ms that this program never uses."""
    if "httpx" not in sys.modules:
        unused = ModuleType("httpx._main")
        unused.main = lambda: None  # type: ignore[attr-defined]
        sys.modules.setdefault("httpx._main", unused)


def skip_pydantic() -> None:
    """typer 0.29 loads pydantic (60 ms) even to find that text is text. Let it, only for what needs converting.

    Relies on internal names of typer; where a version has them no longer, nothing is changed.
    """
    try:
        import typer.core
        from typer._coercion import RuntimeParam, build_runtime_param
    except ImportError:
        return
    if getattr(typer.core, "build_runtime_param", None) is not build_runtime_param:
        return

    class AsGiven(RuntimeParam):
        """Takes values that already have their type; hands all others to typer's own conversion."""

        def _coerce_value(self, value: Any, param: Any, ctx: Any) -> Any:
            if self.annotation in (str, int) and type(value) is self.annotation:
                return value
            if self.annotation == list[str] and all(type(item) is str for item in value):
                return list(value)
            if self.annotation is int and isinstance(value, str) and value.isascii() and value.isdecimal():
                low, high = self.parameter_info.min, self.parameter_info.max
                if (low is None or int(value) >= low) and (high is None or int(value) <= high):
                    return int(value)
            return build_runtime_param(param.type_descriptor)._coerce_value(value, param=param, ctx=ctx)

    def build(descriptor: Any) -> RuntimeParam:
        return AsGiven(parameter_info=descriptor.parameter_info, annotation=descriptor.annotation)

    typer.core.build_runtime_param = build  # type: ignore[attr-defined]
