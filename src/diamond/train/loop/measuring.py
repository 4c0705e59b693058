"""What a run knows about itself while it goes: where the time of a step goes, how noisy gradients are, how much memory
it takes, which rank is slow. Always on, so it must cost next to nothing.

Clocks of the host say how long a step took, how long it waited for data and for checkpoints. What of the rest is
computing and what is waiting for other ranks, only probes tell (`probing`). Rank 0 writes a line about it now and then
(`diamond.train.measures`); what other ranks know comes to it beside the training, in one small message a line.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import struct
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from statistics import median, median_low
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from diamond.train import measures
from diamond.train.ending import job_ends_at
from diamond.train.loop.batches import Batches, Piece
from diamond.train.loop.buckets import Buckets
from diamond.train.loop.probing import Probes
from diamond.train.metrics import Context
from diamond.train.scaling import End

FIRST_LINE_S, EVERY_S = 2.0, 10.0
PARTS = ("compute_s", "comm_s", "data_s", "save_s", "other_s")
_WARM_UP = 2  # steps of a job that say nothing about the others: memory is taken, kernels are chosen
_TOLD = struct.Struct("<ddq64s")  # seconds of computing and of exchanging, bytes, name of the host
_SLOW, _SLOW_OF_TWO = 1.2, 1.5


@dataclass
class Window:
    """Some steps in a row, and how many seconds they took together, by the host's clock."""

    steps: int = 0
    samples: int = 0
    wall_s: float = 0.0
    data_s: float = 0.0
    save_s: float = 0.0
    compute_s: float = 0.0

    def add(self, other: Window) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))


@dataclass(frozen=True)
class Told:
    """What a rank says about itself; 0 where it does not know."""

    compute_s: float
    sync_s: float
    memory_bytes: int
    host: str


class Measuring:
    """Of one run, on every rank. All ranks call the same methods at the same step; only rank 0 decides when.

    Attributes:
        last: the newest line; on rank 0 only.
        facts: gives what else belongs into a line and others know.
    """

    def __init__(self, place: Context, device: torch.device, *, by_group: bool) -> None:
        self.last: dict[str, Any] = {}
        self.facts: Callable[[], dict[str, Any]] = dict
        self._place, self._device, self._by_group = place, device, by_group
        self._group: Any = None
        self._probes: Probes | None = None
        self._known: dict[str, Any] = {}
        self._loader: Batches | None = None
        self._until = 0
        self._until_samples: int | None = None
        self._done = 0  # steps of this process
        self._opened = self._next_line = self._piece_began = self._compute_s = self._saved_s = self._waited_s = 0.0
        self._ended = 0.0  # when the last step was done
        self._window, self._life = Window(), Window()
        self._asked: tuple[Window, tuple[int, int], Any, list[torch.Tensor]] | None = None

    # ---- what the loop calls -----------------------------------------------------------------------------------------

    def watch(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, buckets: Buckets, group: Any, kind: str,
        precision: str,
    ) -> None:  # fmt: skip
        """From `prepare` on. `group` is for messages that the training's must not mix with."""
        world, nodes = self._place.world_size, self._place.num_nodes
        copies = {"fsdp": 1, "hybrid": nodes}.get(kind, world)  # how many ranks hold the same gradients
        self._group = group
        self._probes = Probes(
            model, optimizer, device=self._device, world=world, copies=copies, by_group=self._by_group,
            buckets=buckets,
        )  # fmt: skip
        self._known = {
            "job": self._place.job_id or "",
            "world": world,
            "nodes": nodes,
            "device": torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu",
            "parallel": kind,
            "precision": precision,
        }

    def opens(self, loader: Batches, end: End, step: int) -> None:
        """The loop begins, or begins again, after so many steps: what was between is no part of a step."""
        now = time.perf_counter()
        self._loader, self._waited_s, self._saved_s = loader, loader.waited_s, 0.0
        self._until, self._until_samples = end.last_step(step, loader.seen, loader.global_batch), end.samples
        if not self._done:
            self._opened, self._next_line = now, now + FIRST_LINE_S
        else:
            self._opened += now - self._ended

    def begins(self, step: int, piece: Piece) -> bool:
        """Before a piece of the step that will have this number. Whether ranks exchange gradients after it as usual."""
        assert self._probes is not None
        self._piece_began = time.perf_counter()
        return self._probes.begins(step, piece)

    def computed(self, step: int, piece: Piece) -> None:
        """After a backward pass, before anybody changes its gradients."""
        assert self._probes is not None
        self._probes.computed(step, piece)

    def stepped(self, step: int, *, is_last: bool) -> None:
        """After a piece, and after the optimizer's step if it was the last."""
        assert self._probes is not None
        self._compute_s += time.perf_counter() - self._piece_began
        self._probes.stepped(step, is_last=is_last)

    def waited(self, seconds: float, *, in_step: bool = False) -> None:
        """For a checkpoint."""
        self._saved_s += seconds
        if in_step:
            self._compute_s -= seconds

    def after(self, step: int, samples: int) -> None:
        """A step is done, and has this number now."""
        assert self._probes is not None and self._loader is not None
        now = self._ended = time.perf_counter()
        window = self._window
        window.steps += 1
        window.samples += samples
        window.wall_s = now - self._opened
        window.compute_s += self._compute_s
        window.save_s += self._saved_s
        window.data_s += self._loader.waited_s - self._waited_s
        self._compute_s, self._saved_s, self._waited_s = 0.0, 0.0, self._loader.waited_s
        self._probes.after(step)
        self._done += 1
        if self._done == _WARM_UP:
            self._window, self._opened = Window(), now
        if self._asked is not None and self._asked[2].is_completed():
            self._hear()

    def keeps_gradients(self, step: int) -> bool:
        """Whether gradients are zeroed, not given up, before the step that will have this number."""
        return self._probes is not None and self._probes.keeps_gradients(step)

    # ---- what others ask ---------------------------------------------------------------------------------------------

    @property
    def noise_scale(self) -> float | None:
        """In samples; at every step the same on every rank."""
        return self._probes.noise.scale if self._probes is not None else None

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return self._probes.state() if self._probes is not None else {}

    def load(self, state: dict[str, Any]) -> None:
        if self._probes is not None and state:
            with contextlib.suppress(KeyError, TypeError, ValueError):  # of another version: it is measured anew
                self._probes.load(state)

    def is_due(self) -> bool:
        """Whether rank 0 wants to write a line."""
        return self._place.rank == 0 and self._window.steps > 0 and time.perf_counter() >= self._next_line

    # ---- lines -------------------------------------------------------------------------------------------------------

    def tell(self, step: int) -> None:
        """On every rank at the same step: rank 0 writes a line as soon as it has heard of all."""
        window = self._turned()
        done = (step, self._loader.seen if self._loader is not None else 0)
        self._next_line = time.perf_counter() + EVERY_S
        if self._group is None:
            self._write(window, done, [self._own()])
            return
        self._hear()  # of the last time; it came long ago
        message = torch.frombuffer(bytearray(self._packed()), dtype=torch.uint8)
        heard = [torch.empty_like(message) for _ in range(self._place.world_size)]
        work = dist.all_gather(heard, message, group=self._group, async_op=True)
        self._asked = (window, done, work, heard)

    def finish(self, step: int, say: Callable[[str], None]) -> None:
        """The last line, on every rank when all have ended alike, and a word about the whole of it."""
        with contextlib.suppress(RuntimeError):  # a rank that is gone by now takes nothing from the training
            if self._window.steps:
                self.tell(step)
            self._hear()
        if self._life.steps and self._life.wall_s > 0:
            say(self._told())

    def _told(self) -> str:
        split = self._split(self._life)
        shares = (("computing", "compute_s"), ("exchanging gradients", "comm_s"), ("waiting for data", "data_s"),
                  ("saving", "save_s"), ("other things", "other_s"))  # fmt: skip
        parts = [f"{100 * split[name] / split['step_s']:.0f} % {word}" for word, name in shares if split[name] > 0]
        speed = self._life.samples / self._life.wall_s
        return f"{speed:.4g} samples/s, {split['step_s']:.3g} s a step: {', '.join(parts)}"

    def _turned(self) -> Window:
        window, self._window = self._window, Window()
        self._opened += window.wall_s
        self._life.add(window)
        return window

    def _hear(self) -> None:
        if self._asked is None:
            return
        window, done, work, heard = self._asked
        self._asked = None
        work.wait()
        if self._place.rank == 0:
            self._write(window, done, [_unpacked(one) for one in heard])

    def _write(self, window: Window, done: tuple[int, int], told: Sequence[Told]) -> None:
        """`done`: steps and samples at the end of the window."""
        assert self._probes is not None and self._loader is not None
        noise, loader = self._probes.noise, self._loader
        exchanged = [one.sync_s for one in told if one.sync_s > 0]
        self.last = {
            "t": round(time.time(), 3),
            "step": done[0],
            "until": self._until,
            "samples": done[1],
            "until_samples": self._until_samples,
            "steps": window.steps,
            **self._known,
            "global_batch": loader.global_batch,
            "per_rank": loader.per_rank,
            "accumulate": -(-loader.global_batch // (loader.per_rank * self._place.world_size)),
            **self._split(window),
            "sync_s": min(exchanged) if exchanged else None,  # of who came last: without waiting for others
            "samples_per_s": window.samples / window.wall_s if window.wall_s > 0 else None,
            "noise_scale": noise.scale,
            "noise_scale_least": noise.least_scale,
            "grad_sqr": noise.grad_sqr,
            "grad_var": noise.grad_var,
            "noise_looks": noise.count,
            "memory_peak_bytes": max(one.memory_bytes for one in told),
            "slowest": slowest(told) if self._probes.exchanges else None,
            "generation": _count("DIAMOND_GENERATION", 0),
            "restarts": _count("DIAMOND_RESTARTS", self._place.attempt - 1),
            "ends_at": job_ends_at(),
            **self.facts(),
        }
        if self._by_group:
            self.last["noise_by_group"] = noise.by_group
        measures.write(self.last)

    def _split(self, window: Window) -> dict[str, float]:
        """Seconds of a step by what they went into.

        Shards (FSDP) are exchanged all through the computing; there both count as computing.
        """
        assert self._probes is not None
        steps = max(1, window.steps)
        probed: Sequence[float] = self._probes.compute_s if self._probes.times else ()
        return split(
            window.wall_s / steps,
            save_s=window.save_s / steps,
            data_s=window.data_s / steps,
            compute_s=_usual(probed) if probed else window.compute_s / steps,
            sync_s=_usual(self._probes.sync_s),
            hides_data=self._device.type == "cuda" and bool(probed),
        )

    def _own(self) -> Told:
        assert self._probes is not None
        return Told(
            compute_s=_usual(self._probes.compute_s),
            sync_s=_usual(self._probes.sync_s),
            memory_bytes=_peak_bytes(self._device),
            host=platform.node(),
        )

    def _packed(self) -> bytes:
        own = self._own()
        return _TOLD.pack(own.compute_s, own.sync_s, own.memory_bytes, own.host.encode()[:64])


def split(
    step_s: float, *, save_s: float, data_s: float, compute_s: float, sync_s: float, hides_data: bool
) -> dict[str, float]:
    """The parts of a step, whose sum it is.

    Args:
        compute_s: as probes have it; steps between them may have been shorter.
        sync_s: exchanging gradients with nothing beside it: ordinary steps hide some of that and never wait longer.
        hides_data: a GPU goes on computing while its host waits for data, and only what is left held anybody up.
    """
    left = step_s
    parts = {}
    order = ("save_s", "compute_s", "data_s") if hides_data else ("save_s", "data_s", "compute_s")
    wanted = {"save_s": save_s, "data_s": data_s, "compute_s": compute_s, "comm_s": sync_s}
    for name in (*order, "comm_s"):
        parts[name] = min(max(wanted[name], 0.0), left)
        left -= parts[name]
    return {"step_s": step_s, **{name: parts.get(name, left) for name in PARTS}}


def slowest(told: Sequence[Told]) -> dict[str, Any] | None:
    """The rank that the others wait for, if it computes for much longer than they do."""
    times = [one.compute_s for one in told]
    if len(told) < 2 or min(times) <= 0:
        return None
    rank = max(range(len(told)), key=times.__getitem__)
    ratio = times[rank] / (min(times) if len(told) == 2 else median(times))
    if ratio < (_SLOW_OF_TWO if len(told) == 2 else _SLOW):
        return None
    return {"rank": rank, "host": told[rank].host, "ratio": round(ratio, 3)}


def _usual(probed: Sequence[float]) -> float:
    """Of the last probes. The very first one loads kernels and takes several times as long: of two, the smaller."""
    return median_low(probed) if probed else 0.0


def _unpacked(message: torch.Tensor) -> Told:
    compute_s, sync_s, memory, host = _TOLD.unpack(bytes(message.tolist()))
    return Told(compute_s, sync_s, memory, host.rstrip(b"\0").decode(errors="replace"))


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _count(name: str, default: int) -> int:
    try:
        return max(0, int(os.environ[name]))
    except (KeyError, ValueError):
        return max(0, default)
