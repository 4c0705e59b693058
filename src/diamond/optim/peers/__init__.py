"""Optimizers to compare with, all behind torch.optim.Optimizer: LARS, LAMB, SOAP, Muon and Schedule-Free AdamW.

`make` builds any of them, and torch's SGD, AdamW and L-BFGS, by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from diamond.optim.errors import OptimError
from diamond.optim.peers.layerwise import LAMB, LARS
from diamond.optim.peers.muon import Muon
from diamond.optim.peers.peer import Params, Peer
from diamond.optim.peers.schedule_free import ScheduleFreeAdamW
from diamond.optim.peers.soap import SOAP

__all__ = ["LAMB", "LARS", "NAMES", "SOAP", "Muon", "Peer", "ScheduleFreeAdamW", "make"]

_MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
    "lamb": LAMB,
    "lars": LARS,
    "soap": SOAP,
    "muon": Muon,
    "schedule-free": ScheduleFreeAdamW,
    "lbfgs": torch.optim.LBFGS,
}
NAMES = tuple(_MAKERS)


def make(name: str, params_or_model: Params, **options: Any) -> torch.optim.Optimizer:
    """The optimizer of that name.

    Args:
        name: one of `NAMES`.
        params_or_model: a model, or what torch's optimizers take. Muon knows embeddings and heads from a model alone.
        options: the optimizer's own.

    Raises:
        OptimError: there is no such optimizer, or it has no such option.
    """
    if name not in _MAKERS:
        raise OptimError(f"name={name!r} is no optimizer: give one of {', '.join(NAMES)}")
    maker = _MAKERS[name]
    known = [option for option in inspect.signature(maker).parameters if option not in ("self", "params")]
    for option in options:
        if option not in known:
            raise OptimError(f"{name} has no option {option!r}: it takes {', '.join(known)}")
    if isinstance(params_or_model, nn.Module) and not _takes_models(maker):
        params_or_model = list(params_or_model.parameters())
    return maker(params_or_model, **options)


def _takes_models(maker: Callable[..., torch.optim.Optimizer]) -> bool:
    return isinstance(maker, type) and issubclass(maker, Peer)
