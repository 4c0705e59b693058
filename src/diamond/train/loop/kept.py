"""What of a run is kept in a checkpoint, and how it comes back: into the same model on any number of ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from diamond.train.errors import TrainError
from diamond.train.loop import surroundings
from diamond.train.loop.buckets import Buckets
from diamond.train.loop.saving import Found, Saver, read_part


@dataclass
class Kept:
    """`others` are schedulers and whatever else has a state, in the order given; `averages` are averages of the model's
    weights, which are as large; `own` is the user's dictionary;
    `buckets` is the order in which gradients are exchanged, `data` gives what the data's position needs.

    Parameters are the same on every rank, or each rank's shards. Buffers are not: every rank has running statistics
    (BatchNorm) of its own batches. A checkpoint holds rank 0's, as DDP goes by them, and each rank's own beside them.
    """

    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    others: list[Any] = field(default_factory=list)
    averages: list[nn.Module] = field(default_factory=list)
    own: dict[str, Any] = field(default_factory=dict)
    buckets: Buckets | None = None
    data: Callable[[], Any] = lambda: None
    _before: dict[str, torch.Tensor] = field(default_factory=dict)
    _changed: set[str] = field(default_factory=set)

    def tensors(self, *, rank: int = 0) -> dict[str, Any]:
        """The large part, sharded as it is. It must not change until it is copied. Without buffers for ranks other than
        0: of several that say what something is, nobody knows which is written."""
        assert self.model is not None
        own = self._keeps_itself()
        if own is not None:
            model, optimizer = get_model_state_dict(self.model), own.sharded_state()
        else:
            model, optimizer = get_state_dict(self.model, self._optimizers())
        learnt = set(self.shapes())
        kept = _with_copied_buffers(model, learnt, rank)
        averages = {
            str(at): _with_copied_buffers(get_model_state_dict(one), {name for name, _ in one.named_parameters()}, rank)
            for at, one in enumerate(self.averages)
        }
        return {"model": kept, "optimizer": optimizer, **({"averages": averages} if averages else {})}

    def small(self) -> dict[str, Any]:
        """The rest, the same on every rank."""
        return {
            "state": self.own,
            "others": [one.state_dict() for one in self.others],
            "buckets": self.buckets.order if self.buckets is not None else None,
            "data": self.data(),
            "averages": len(self.averages),
        }

    def shapes(self) -> dict[str, list[int]]:
        assert self.model is not None
        return {name.removeprefix("module."): list(one.shape) for name, one in self.model.named_parameters()}

    def are_numbers(self) -> bool:
        """Whether all of the weights here are finite, and what BatchNorm counts. The device is asked once."""
        assert self.model is not None
        parts = [one.to_local() if isinstance(one, DTensor) else one for one in self._parameters()]
        for part in itertools.chain.from_iterable(one.modules() for one in (self.model, *self.averages)):
            if isinstance(part, _NormBase):
                parts += [one for one in (part.running_mean, part.running_var) if one is not None]
        parts = [one.detach() for one in parts if one.numel() and (one.is_floating_point() or one.is_complex())]
        if not parts:
            return True
        largest = torch._foreach_norm(parts, math.inf)
        return bool(torch.stack([one.double() for one in largest]).isfinite().all())

    def _parameters(self) -> Iterator[nn.Parameter]:
        assert self.model is not None
        for model in (self.model, *self.averages):
            yield from model.parameters()

    # ---- buffers -----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """The model is ready, and nothing was loaded yet: buffers that are never changed (masks, tables of positions)
        are the same on every rank, and are not kept for each."""
        self._before = {name: one.clone() for name, one in self._buffers().items()}

    def of_rank(self) -> dict[str, torch.Tensor]:
        """The buffers that this rank has changed, copied."""
        now = self._buffers()
        self._changed |= {
            name for name, one in now.items() if name not in self._changed and not _same(one, self._before.get(name))
        }
        return {name: one.detach().cpu().clone() for name, one in now.items() if name in self._changed}

    def load_of_rank(self, known: dict[str, torch.Tensor]) -> None:
        """What `of_rank` gave, over what was loaded for all."""
        now = self._buffers()
        with torch.no_grad():
            for name, value in known.items():
                if name in now:
                    now[name].copy_(value)
        self._changed |= set(known)

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Those that belong into a checkpoint."""
        assert self.model is not None
        inner = (
            getattr(self.model, "module", self.model) if isinstance(self.model, DistributedDataParallel) else self.model
        )
        kept = inner.state_dict().keys()
        return {name: one for name, one in inner.named_buffers() if name in kept}

    def _keeps_itself(self) -> Any:
        """The optimizer, where it has more than torch knows to save and says itself how (diamond.optim.KFAC does)."""
        knows = hasattr(self.optimizer, "sharded_state") and hasattr(self.optimizer, "load_sharded")
        return self.optimizer if knows else None

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer] if self.optimizer is not None else []

    def load(self, found: Found, saver: Saver, say: Callable[[str], None]) -> None:
        assert self.model is not None
        small = read_part(found.path / "common.pt")
        order = small.get("buckets")  # checkpoints of earlier versions have none
        if order is not None and self.buckets is not None and not self.buckets.arrange(order):
            say("gradients are exchanged in another order than before: losses may differ in the last bits")
        state = self.tensors()
        saver.load(found, state)
        own = self._keeps_itself()
        if own is not None:
            set_model_state_dict(self.model, state["model"])
            own.load_sharded(state["optimizer"])
        else:
            set_state_dict(
                self.model, self._optimizers(), model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
        for at, average in enumerate(self.averages):
            set_model_state_dict(average, state["averages"][str(at)])
        self.own.clear()
        self.own.update(small["state"])
        for one, known in zip(self.others, small["others"], strict=True):
            one.load_state_dict(known)

    def check_same(self, found: Found, say: Callable[[str], None]) -> None:
        """Whether the checkpoint is of this model, before anything of it is read.

        Raises:
            TrainError: it is not; it says what differs.
        """
        then, now = found.meta["shapes"], self.shapes()
        if then != now:
            names = sorted(name for name in {*then, *now} if then.get(name) != now.get(name))
            shown = [f"{name}: {then.get(name, 'absent')} then, {now.get(name, 'absent')} now" for name in names[:4]]
            more = "; …" if len(names) > 4 else ""
            raise TrainError(
                f"the model is not the one that {found.path} was made with ({'; '.join(shown)}{more})",
                hint="use another `checkpoints` folder for the new model, or resume=False to begin anew",
            )
        small = read_part(found.path / "common.pt")
        if len(self.others) != len(small["others"]) or len(self.averages) != small.get("averages", 0):
            raise TrainError(
                f"prepare() is given other objects than when {found.path} was written",
                hint="give it the same ones, in the same order, or use another `checkpoints` folder",
            )
        if found.meta["code"] != surroundings.code_hash():
            say(f"the script has changed since {found.path} was written")


def _same(one: torch.Tensor, other: torch.Tensor | None) -> bool:
    return other is not None and one.shape == other.shape and torch.equal(one, other)


def _with_copied_buffers(state: dict[str, Any], learnt: set[str], rank: int) -> dict[str, Any]:
    """Buffers change already in the next forward pass; they are small, so they are copied here and now. On ranks other
    than 0 they are left out."""
    return {
        name: value if name in learnt or not isinstance(value, torch.Tensor) else value.clone()
        for name, value in state.items()
        if rank == 0 or name in learnt or not isinstance(value, torch.Tensor)
    }
