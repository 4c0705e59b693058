"""Optimizers for science: second order that wins in wall time, communication compressed, and a plan for the hardware.

Everything here needs PyTorch and nothing else, and loads it when it is asked for.
"""

from __future__ import annotations

from typing import Any

_WHERE = {
    "KFAC": "kfac",
    "AdamW": "kfac",
    "plan": "plans",
    "Plan": "planning",
    "coverage": "covered",
    "Compress": "compress",
    "attach": "compress",
    "OptimError": "errors",
    "Outcome": "losses",
    "make": "peers",
    "LAMB": "peers",
    "LARS": "peers",
    "SOAP": "peers",
    "Muon": "peers",
    "ScheduleFreeAdamW": "peers",
}
__all__ = [  # noqa: RUF022 - in the order in which people meet them
    "KFAC", "AdamW", "plan", "Plan", "coverage", "Compress", "attach", "OptimError", "Outcome", "make",
    "LAMB", "LARS", "SOAP", "Muon", "ScheduleFreeAdamW",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"diamond.optim.{_WHERE[name]}"), name)
