"""The in-task library: what a training script may use while Diamond runs it, and can keep using without Diamond.

It lives in the user's environment, so it imports nothing outside the standard library at module level, runs on
Python 3.8 and newer, and never talks to the network. `run` needs PyTorch, and loads it when it is asked for.
"""

from __future__ import annotations

from typing import Any

from diamond.train.errors import TrainError
from diamond.train.metrics import Context, context, log

__all__ = ["Context", "Run", "TrainError", "context", "log", "run"]


def __getattr__(name: str) -> Any:
    if name not in ("run", "Run"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("diamond.train.loop.running"), name)
