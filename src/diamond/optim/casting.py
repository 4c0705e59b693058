"""Autocast: left for the optimizer's own arithmetic, and entered again for a forward pass that is repeated."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Autocast:
    """Whether and how a forward pass was autocast."""

    device_type: str
    dtype: torch.dtype
    enabled: bool

    def entered(self) -> contextlib.AbstractContextManager[object]:
        """The same precision again.

        Casts of weights are not cached. The numbers are the same, and a cache would outlive the weights: they are moved
        between one repeated pass and the next.
        """
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=False)


def autocast_now(device_type: str) -> Autocast | None:
    """The caller's autocast on this kind of device; None where there is none."""
    if not torch.amp.is_autocast_available(device_type) or not torch.is_autocast_enabled(device_type):
        return None
    return Autocast(device_type, torch.get_autocast_dtype(device_type), True)


@contextlib.contextmanager
def without_autocast(device_type: str) -> Iterator[None]:
    """The optimizer's arithmetic, which chooses its own precision, also where the caller is inside of autocast.

    Casts of weights that the caller's autocast has cached are dropped at the end: they may have been changed.
    """
    if autocast_now(device_type) is None:
        yield
        return
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        torch.clear_autocast_cache()
