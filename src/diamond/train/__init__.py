"""The in-task library: what a training script may use while Diamond runs it, and can keep using without Diamond.

It lives in the user's environment, so it imports nothing outside the standard library at module level, runs on
Python 3.8 and newer, and never talks to the network.
"""

from __future__ import annotations

from diamond.train.metrics import Context, context, log

__all__ = ["Context", "context", "log"]
