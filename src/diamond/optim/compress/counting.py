"""How many bytes were sent, how many it would have been, and how much was lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from diamond.optim.compress.codec import Send

_HOWS = {"sum": "all_reduce", "gather": "all_gather", "scatter": "all_to_all"}


class RelativeError(NamedTuple):
    """Size of what was lost against the size of what was to be sent, of this rank; NaN before the first measurement."""

    last: float
    mean: float


@dataclass
class Count:
    """Bytes of one rank.

    Attributes:
        sent: bytes of the tensors handed to collectives, by kind of content and collective ("grad all_gather").
        plain: bytes of the tensors that would have been handed over uncompressed, by kind of content.
        traffic: bytes that leave this rank for `sent` when rings carry all-reduce and all-gather.
        plain_traffic: the same for `plain`.
    """

    sent: dict[str, int] = field(default_factory=dict)
    plain: dict[str, int] = field(default_factory=dict)
    traffic: float = 0.0
    plain_traffic: float = 0.0

    def add(self, kind: str, send: Send, world: int) -> None:
        nbytes = send.tensor.numel() * send.tensor.element_size()
        where = f"{kind} {_HOWS[send.how]}"
        self.sent[where] = self.sent.get(where, 0) + nbytes
        self.traffic += nbytes * _leaving(send.how, world)

    def add_plain(self, kind: str, nbytes: int, how: str, world: int) -> None:
        """`how` "scatter" is a reduce-scatter, which moves as many bytes as an all-to-all."""
        self.plain[kind] = self.plain.get(kind, 0) + nbytes
        self.plain_traffic += nbytes * _leaving(how, world)

    def state_dict(self) -> dict[str, Any]:
        return {
            "sent": dict(self.sent),
            "plain": dict(self.plain),
            "traffic": self.traffic,
            "plain_traffic": self.plain_traffic,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.sent, self.plain = dict(state["sent"]), dict(state["plain"])
        self.traffic, self.plain_traffic = state["traffic"], state["plain_traffic"]


def _leaving(how: str, world: int) -> float:
    """How often each byte of a tensor leaves a rank."""
    return {"sum": 2 * (world - 1) / world, "gather": float(world - 1), "scatter": (world - 1) / world}[how]


class ErrorMeter:
    """Sums squares on the device; they are read when somebody asks, and never hold up a step."""

    def __init__(self) -> None:
        self._steps: dict[int, list[torch.Tensor]] = {}
        self._sum, self._count, self._last = 0.0, 0, float("nan")

    def add(self, step: int, lost: torch.Tensor, wanted: torch.Tensor) -> None:
        pair = torch.stack([lost.float().square().sum(), wanted.float().square().sum()])
        self._steps.setdefault(step, []).append(pair)
        if len(self._steps) > 2:
            self._read(keep=1)

    def read(self) -> RelativeError:
        self._read(keep=0)
        return RelativeError(self._last, self._sum / self._count if self._count else float("nan"))

    def _read(self, *, keep: int) -> None:
        """Take in what was summed, except the newest `keep` steps, which may lack buckets."""
        for step in sorted(self._steps)[: len(self._steps) - keep]:
            lost, wanted = torch.stack(self._steps.pop(step)).sum(0).tolist()
            # A step without finite gradients says nothing about compression.
            if wanted > 0 and wanted < float("inf") and lost < float("inf"):
                self._last = (lost / wanted) ** 0.5
                self._sum, self._count = self._sum + self._last, self._count + 1
