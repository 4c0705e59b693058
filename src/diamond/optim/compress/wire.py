"""The line that gradients take: averages buffers over a process group, remembers errors, counts bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from diamond.optim.compress.codec import Dice, Layout
from diamond.optim.compress.collectives import Flight
from diamond.optim.compress.counting import Count, ErrorMeter, RelativeError
from diamond.optim.compress.exchange import Untouched, exchange_for
from diamond.optim.compress.memory import ErrorMemory, Room
from diamond.optim.compress.spec import Compress
from diamond.optim.errors import OptimError

_VERSION = 1


class Wire:
    """What `attach` gives back.

    A gradient with a NaN or an infinity arrives as NaN on all ranks and leaves no trace in what is remembered.
    """

    def __init__(self, compress: Compress) -> None:
        self.compress = compress
        self.count = Count()
        self.steps: dict[str, int] = {}
        self._memory = ErrorMemory()
        self._warm: dict[str, torch.Tensor] = {}
        self._exchange = exchange_for(compress, self._warm)
        self._uncompressed = Untouched()
        self._room = Room()
        self._meter = ErrorMeter()

    # ---- what it reports ---------------------------------------------------------------------------------------------

    @property
    def bytes_sent(self) -> int:
        """Bytes of the tensors this rank handed to collectives; by kind in `count.sent`."""
        return sum(self.count.sent.values())

    @property
    def bytes_plain(self) -> int:
        """Bytes of the tensors it would have handed over uncompressed."""
        return sum(self.count.plain.values())

    @property
    def ratio(self) -> float:
        """How many times fewer bytes leave this rank; an all-gather counts once for each receiver."""
        return self.count.plain_traffic / self.count.traffic if self.count.traffic else 1.0

    @property
    def relative_error(self) -> RelativeError:
        """Of the last measured step and the mean of all. Reading it waits for the device."""
        return self._meter.read()

    # ---- what is kept ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """All that a run needs to go on exactly. Each rank has its own: its errors are of its own gradients."""
        return {
            "version": _VERSION,
            "grad": self.compress.grad,
            "steps": dict(self.steps),
            "memory": self._memory.state_dict(),
            "warm": {name: one.detach().clone() for name, one in self._warm.items()},
            "count": self.count.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """
        Raises:
            OptimError: it is the state of another way to compress.
        """
        if state.get("version") != _VERSION or state.get("grad") != self.compress.grad:
            raise OptimError(
                f"the state is of grad={state.get('grad')!r} (version {state.get('version')!r}), this wire has "
                f"grad={self.compress.grad!r} (version {_VERSION}); load a state that the same Compress has written"
            )
        self.steps = dict(state["steps"])
        self._memory.load_state_dict(state["memory"])
        self._warm.clear()
        self._warm.update({name: one.detach().clone() for name, one in state["warm"].items()})
        self.count.load_state_dict(state["count"])

    def scale_memory(self, factor: float) -> None:
        """Errors are in the unit of the gradients: call this with new/old when a GradScaler changes its scale."""
        self._memory.scale(factor)

    # ---- what it does ------------------------------------------------------------------------------------------------

    def depart(
        self, buffer: torch.Tensor, layout: Layout, group: dist.ProcessGroup, *, site: str, scatter: bool = False
    ) -> Passage:
        """Begin to average a flat buffer; with `scatter` it is a row for each rank, and `layout` that of a row."""
        whole = Layout((site,), (0,), ((buffer.numel(),),)) if scatter else layout
        how = "scatter" if scatter else "sum"
        world = group.size()
        self.count.add_plain("grad", buffer.numel() * buffer.element_size(), how, world)
        dice = Dice(self.compress.seed, step=self.steps.get(site, 0), rank=group.rank(), device=buffer.device)
        compressed = self._compresses(dice.step)
        memory = self._memory.flat(whole, buffer.device) if self.compress.remembers and compressed else None
        exchange = self._exchange if compressed else self._uncompressed
        if not compressed:
            wanted = buffer
        elif memory is None:
            wanted = buffer.to(torch.float32, copy=True)
        else:
            wanted = torch.add(memory, buffer, out=self._room.like(memory, whole))
        if compressed:
            spread(nothing_or_nan(buffer), wanted)
        if scatter:
            rounds = exchange.scatter(wanted.view(world, -1), layout, dice, world)
        else:
            rounds = exchange.reduce(wanted, layout, dice, world)
        meter = self._meter if self._measures(dice.step) else None
        return Passage(Flight(rounds, group, self.count, "grad"), wanted, memory, meter, dice.step)

    def step_done(self, site: str) -> None:
        self.steps[site] = self.steps.get(site, 0) + 1

    def _compresses(self, step: int) -> bool:
        return self.compress.method.name != "none" and step >= self.compress.start_after

    def _measures(self, step: int) -> bool:
        return self._compresses(step) and step % self.compress.report_every == 0


class Passage:
    """One buffer on its way."""

    def __init__(
        self,
        flight: Flight,
        wanted: torch.Tensor,
        memory: torch.Tensor | None,
        meter: ErrorMeter | None,
        step: int,
    ) -> None:
        self._flight, self._wanted, self._memory = flight, wanted, memory
        self._meter, self._step = meter, step

    def advance(self) -> bool:
        return self._flight.advance()

    def arrive(self, target: torch.Tensor, factor: float = 1.0) -> None:
        """Wait for the average and put it, times `factor`, into `target`."""
        rebuilt = self._flight.finish()
        spoiled = nothing_or_nan(rebuilt.average)
        if self._memory is not None or self._meter is not None:
            wanted, own = self._wanted.view(-1), rebuilt.own.reshape(-1)
            # In place where nobody needs it any more, because fresh memory is slow.
            lost = wanted - own if self._meter is not None else wanted.sub_(own)
            if self._memory is not None:
                replace_if_finite(self._memory, lost, spoiled + nothing_or_nan(lost))
            if self._meter is not None:
                self._meter.add(self._step, lost, self._wanted)
        target.copy_(rebuilt.average.view_as(target))
        if factor != 1.0:
            target.mul_(factor)
        spread(spoiled, target)


def nothing_or_nan(values: torch.Tensor) -> torch.Tensor:
    """Zero where all values are finite, NaN otherwise, without asking the device."""
    if not values.numel():
        return torch.zeros((), device=values.device)
    least, most = torch.aminmax(values)
    return least * 0 + most * 0


def spread(nothing: torch.Tensor, target: torch.Tensor) -> None:
    """Make all of `target` NaN where `nothing` is. Asking costs nothing on a CPU, and a pass over memory does."""
    if nothing.device.type != "cpu" or bool(nothing.isnan()):
        target.add_(nothing.to(target.dtype))


def replace_if_finite(old: torch.Tensor, new: torch.Tensor, nothing: torch.Tensor) -> None:
    if nothing.device.type != "cpu":
        old.copy_(torch.where(torch.isfinite(nothing), new, old))
    elif not bool(nothing.isnan()):
        old.copy_(new)
