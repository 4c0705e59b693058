"""K-FAC: gradients preconditioned by the curvature of the loss, one Kronecker product a layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from diamond.optim import checks, keeping, losses, sharded, stacks
from diamond.optim.blocks import Block, discover, unwrapped
from diamond.optim.compress import Compress, attach
from diamond.optim.crew import Crew
from diamond.optim.curving import Curving, Taken
from diamond.optim.errors import OptimError
from diamond.optim.factors import Factors
from diamond.optim.lengths import Lengths, Seen, measure
from diamond.optim.losses import Outcome
from diamond.optim.planning import Plan
from diamond.optim.precondition import Eigen, Inverse, eigenbases_of, inverses_of

_BACK_OFF = 10.0  # what damping is multiplied by after a step that was not finite
_LONGER = 4.0  # how much longer, squared, a step may become before its length is measured again
_CAREFUL = 0.03  # lr where it can be neither measured nor is given
_LENGTHS_EVERY = 4  # times the period of the factors, once what is measured stays much the same
_STALE = 0.7  # of a length that was measured with another batch
_RELAX = 0.7  # and at every later update of the inverses, until it is what was asked for


class AdamW:
    """Which optimizer takes what K-FAC does not: `fallback=AdamW(lr=1e-3)`."""

    def __init__(self, lr: float = 1e-3, **options: Any) -> None:
        self.lr, self.options = lr, options

    def __call__(self, parameters: Sequence[Tensor]) -> Optimizer:
        return torch.optim.AdamW(parameters, lr=self.lr, **self.options)


class KFAC(Optimizer):
    """Second-order optimizer for a whole model.

    Args:
        model: as it is trained: plain, under DDP or FSDP2, parallelised by tensors, compiled.
        lr: of the preconditioned step; "auto" measures how far to go and how much of the last step to keep, and a
            schedule then multiplies what was found. Schedulers of torch work.
        momentum: of the preconditioned steps, where lr is a number.
        damping: added to the curvature; larger is more careful.
        weight_decay: decoupled, of the blocks' weights; times lr, whatever lengths are found.
        curvature: "ggn-mc" (one sampled backward pass), "ggn-exact", or "empirical" (no further pass).
        sharing: "expand" or "reduce", for weights that are used at many positions of a sample.
        loss: "auto" recognises torch's loss functions and means of squares; else a name of `losses.NAMES`, or a
            function that takes the model's output and gives an Outcome.
        kind: "kfac" or "ekfac".
        solver: "auto", "cholesky", "newton-schulz" or "eigen"; the plan's where left out.
        factor_every, inverse_every: steps between updates of the factors and of their inverses; more often in the
            beginning. The plan's where left out, else 10 and 20.
        decay: of the averages of the factors.
        clip: where lr is a number, a bound on lr^2 times the curvature along the step, at the highest lr of the
            schedule, so that the schedule still counts. None for no bound.
        plan: what `diamond.optim.plan` found for this model.
        compress: how gradients and statistics travel between ranks.
        fallback: what takes the parameters that no block covers.
        exclude: names of modules, or their beginnings, that are left to the fallback.
        largest: layers with more inputs or outputs than that are left to the fallback: their factors would be huge.
        seed: of the Monte-Carlo draws.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float | str = "auto",
        *,
        momentum: float = 0.9,
        damping: float = 1e-4,
        weight_decay: float = 0.0,
        curvature: str = "ggn-mc",
        sharing: str = "expand",
        loss: str | Callable[[Any], Outcome] = "auto",
        kind: str = "kfac",
        solver: str | None = None,
        factor_every: int | None = None,
        inverse_every: int | None = None,
        decay: float = 0.9,
        clip: float | None = 1e-2,
        plan: Plan | None = None,
        compress: Compress | None = None,
        fallback: Callable[[Sequence[Tensor]], Optimizer] | None = None,
        exclude: Sequence[str] = (),
        largest: int = 8192,
        seed: int = 0,
    ) -> None:
        self.measures = lr == "auto"
        rate = 1.0 if self.measures else lr
        self.factor_every = factor_every or (plan.factor_every if plan else 10)
        self.inverse_every = inverse_every or (plan.inverse_every if plan else 20)
        checks.numbers(rate, momentum, damping, weight_decay, decay, clip, self.factor_every, self.inverse_every)
        checks.names(curvature, sharing, loss, kind)
        assert not isinstance(rate, str)
        sharded.check(model)
        self.root = unwrapped(model)
        self._sharded = list(sharded.fsdp_modules(self.root))
        self.blocks = chosen(discover(self.root), exclude, largest)
        self.kind, self.decay, self.clip = kind, decay, clip
        self.damping = self._least_damping = damping
        self.solver = solver or (plan.solver if plan else "auto")
        self._newton_schulz_up_to = plan.newton_schulz_up_to if plan else 0
        covered = {id(one): one for block in self.blocks for one in block.parameters()}
        rest = [one for one in self.root.parameters() if one.requires_grad and id(one) not in covered]
        if not covered and not rest:
            raise OptimError("model: none of its parameters requires a gradient")
        self._make_fallback = fallback or AdamW()
        self._fallback = self._make_fallback(sharded.grouped([*rest, *covered.values()]))
        groups = [
            {"params": list(covered.values()), "lr": rate, "momentum": momentum, "weight_decay": weight_decay},
            {"params": rest, "lr": self._fallback.param_groups[0]["lr"], "momentum": 0.0, "weight_decay": 0.0},
        ]
        super().__init__(groups, {"lr": rate})
        self._reference, self._rate = rate, 1.0
        self.crew = _crew(self.blocks, plan, compress)
        if kind == "ekfac" and any(number != self.crew.world for number in self.crew.workers):
            raise OptimError("kind='ekfac' keeps eigenbases on every rank; plan with workers=world, or use kind='kfac'")
        self.wire = attach(model, compress) if compress is not None and compress.grad != "none" else None
        self.factors = [Factors(block) for block in self.blocks]
        self.kept: dict[int, Inverse | Eigen] = {}
        self._stacks: list[stacks.Stack] | None = None
        self.lengths = Lengths(1.0, 0.0)
        self.steps = 0
        self.skipped = 0  # steps that were not finite
        self._bad: Tensor | None = None
        self._along: Tensor | None = None  # the slope along the step when its length was measured
        self._calm = 0  # how long what was measured has stayed much the same
        self._factors_at, self._inverses_at, self._lengths_at = 1, 0, 0
        self._curving = Curving(
            self.root, self.blocks, self.kept, curvature=curvature, sharing=sharing, loss=loss,
            seed=seed + sharded.data_rank(self.root, self.crew.rank),
        )  # fmt: skip
        # With a static graph DDP takes the first backward pass for the one that it reduces, whichever it is.
        if not getattr(model, "static_graph", False):
            self._curving.arm(again=self.measures)

    # ---- a step ------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            sharded.gather_up(self._sharded)
            armed, again = self._curving.armed, self._curving.again
            taken = self._curving.disarm()
            if armed:
                self._check_parameters()
                self._learn(taken)
            self._update(taken.seen, measuring=armed and again)
        self.steps += 1
        if self.steps >= self._factors_at:
            self._factors_at = self.steps + self._period(self.factor_every)
            self._curving.arm(again=self.measures and self.steps >= self._lengths_at)
        return loss

    # ---- what is kept ------------------------------------------------------------------------------------------------

    def memory_bytes(self) -> dict[str, int]:
        """Bytes that this rank holds, by what they are for: factors, inverses, last steps, fallback."""
        return keeping.memory_bytes(self)

    def state_dict(self) -> dict[str, Any]:
        """All that this rank needs to go on exactly; for checkpoints of many ranks see diamond.optim.keeping."""
        return {**super().state_dict(), "kfac": keeping.state(self)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Raises:
            OptimError: it is of another model, kind or rank, incomplete, or not finite; nothing is changed then.
        """
        keeping.check(self, state_dict.get("kfac"))
        super().load_state_dict({key: one for key, one in state_dict.items() if key != "kfac"})
        keeping.load(self, state_dict["kfac"])

    def sharded_state(self) -> dict[str, Any]:
        """For torch.distributed.checkpoint with any number of ranks; diamond.train uses it."""
        return keeping.sharded_state(self)

    def load_sharded(self, state: dict[str, Any]) -> None:
        keeping.load_sharded(self, state)

    # ---- the parts of a step -----------------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        known = {id(one) for group in self.param_groups for one in group["params"]}
        for block in self.blocks:
            if any(id(one) not in known for one in block.parameters()):
                raise OptimError(
                    f"model: the parameters of {block.name} were replaced after the optimizer was made; "
                    "make it after fully_shard, parallelize_module and the like"
                )

    def _learn(self, taken: Taken) -> None:
        means = self.crew.reduce(taken.sums, taken.terms)
        if not self.crew.fresh and self.blocks:
            raise OptimError(
                "loss='auto' recognised no loss since the last step; say which it is, e.g. "
                f"KFAC(model, loss='mse'), one of {', '.join(losses.NAMES)}"
            )
        for one in means:
            self.factors[one.index].update(one.a, one.g, self.decay)
        if not self.measures:
            self._calm = self.steps // 10
        if self.kind == "ekfac":
            self._learn_moments(taken)
        if self.steps >= self._inverses_at:
            self._inverses_at = self.steps + self._period(self.inverse_every)
            self._watch_out()
            known = [factors for factors in self.factors if factors.known and self.crew.owns(factors.block.index)]
            if self.kind == "ekfac":
                self.kept.update(eigenbases_of(known, self.damping))
            else:
                self.kept.update(inverses_of(known, self.damping, self.solver, self.kept, self._newton_schulz_up_to))
            self.crew.spread(self.kept, self.crew.used)
            self._stacks = None

    def _learn_moments(self, taken: Taken) -> None:
        """The curvature in the eigenbases, which stay for longer."""
        for index, kept in sorted(self.kept.items()):
            if isinstance(kept, Eigen) and index in self.crew.fresh:
                squares = taken.squares.get(index)
                mean = self.crew.total(torch.zeros_like(kept.moments) if squares is None else squares) / self.crew.terms
                if bool(torch.isfinite(mean.sum())):
                    kept.moments.mul_(self.decay).add_(mean, alpha=1 - self.decay)

    def _period(self, every: int) -> int:
        """Steps until the next update: few as long as what is measured changes, as in the beginning."""
        return max(1, min(every, self._calm))

    def _watch_out(self) -> None:
        """After steps that were not finite, more damping; later, step by step, less again."""
        bad = 0 if self._bad is None else int(self._bad)
        self._bad = None
        self.skipped += bad
        if bad:
            self.damping = self.damping * _BACK_OFF
        else:
            self.damping = max(self._least_damping, self.damping * _RELAX)

    def _update(self, seen: Seen | None, measuring: bool) -> None:
        group, rest = self.param_groups
        updates, along = self._preconditioned()
        self._step_fallback(updates, rest["lr"])
        if not updates:
            return
        parameters: list[Tensor] = [one for one, _ in updates.values()]
        steps = [step for _, step in updates.values()]
        good = along.isfinite()
        bad = (~good).to(torch.int32)
        self._bad = bad if self._bad is None else self._bad + bad
        if measuring:
            self._measure(seen, parameters, steps, along)
        if self.measures:
            careful = 1.0 if measuring else _STALE
            scale = good * self._within(along) * (group["lr"] * careful * self.lengths.step)
            momentum = self.lengths.momentum
        else:
            scale = good * self._bounded(along) * (group["lr"] * self._rate)
            momentum = group["momentum"]
        here = [sharded.held(step) for step in steps]
        torch._foreach_mul_(here, -scale)
        states = [self.state[one] for one in parameters]
        if momentum:
            moving = [(part, one["last_step"]) for part, one in zip(here, states, strict=True) if "last_step" in one]
            if moving:
                torch._foreach_add_(
                    [part for part, _ in moving], [sharded.held(one) for _, one in moving], alpha=momentum
                )
        for one, step in zip(states, steps, strict=True):
            one["last_step"] = step
        changed = [sharded.held(one) for one in parameters]
        if group["weight_decay"]:
            torch._foreach_mul_(changed, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(changed, here)

    def _preconditioned(self) -> tuple[dict[int, tuple[nn.Parameter, Tensor]], Tensor]:
        """What the curvature makes of the gradients, by parameter, and the gradient's slope along it."""
        due = [self.blocks[index] for index in sorted(self.crew.ready)]
        due = [block for block in due if all(one.grad is not None for one in block.parameters())]
        found, others, along = self._applied(due)
        self.crew.hand_on(found, [block.index for block in due])
        slopes = [(found[index] * gradient).sum() for index, gradient in others.items()]
        for index in others:
            found[index] = stacks.finite(found[index])
        total = torch.stack([*along, *slopes] or [torch.zeros(())]).sum()
        updates: dict[int, tuple[nn.Parameter, Tensor]] = {}
        into: list[Tensor] = []
        out_of: list[Tensor] = []
        for block in due:
            for one in block.parameters():
                updates.setdefault(id(one), (one, sharded.room_for(one)))
            bias = None if block.bias is None else updates[id(block.bias)][1]
            for part, values in block.places(found[block.index], updates[id(block.weight)][1], bias):
                into.append(part)
                out_of.append(values)
        stacks.copy((into, out_of))
        return {key: (one, sharded.like(one, whole)) for key, (one, whole) in updates.items()}, total

    def _applied(self, due: list[Block]) -> tuple[dict[int, Tensor], dict[int, Tensor], list[Tensor]]:
        """What becomes of the gradients of these blocks, as far as this rank works on them; the gradients of those
        that are not stacked, and the slopes along those that are."""
        if self._stacks is None:
            mine = [self.blocks[index] for index in sorted(self.crew.ready) if self.crew.works_on(index)]
            self._stacks = stacks.stacked(mine, self.kept)
        wanted = {block.index: block for block in due}
        into: list[Tensor] = []
        out_of: list[Tensor] = []
        for stack in self._stacks:
            for block in stack.blocks:
                room = stack.room(block)
                if wanted.pop(block.index, None) is None:
                    room.zero_()
                    continue
                for columns, part in block.pieces(*_whole_gradients(block)):
                    into.append(room[:, :, columns])
                    out_of.append(part)
        stacks.copy((into, out_of))
        found: dict[int, Tensor] = {}
        along = []
        for stack in self._stacks:
            parts, slope = stack.apply()
            found.update(parts)
            along.append(slope)
        others = {index: block.matrix(*_whole_gradients(block)).float() for index, block in wanted.items()}
        for index, gradient in others.items():
            if self.crew.works_on(index):
                found[index] = self.kept[index].apply(gradient)
        return found, others, along

    def _measure(self, seen: Seen | None, parameters: list[Tensor], steps: list[Tensor], along: Tensor) -> None:
        if not self.crew.all_say(seen is not None and seen.can_be_followed) or seen is None:
            self._give_up_measuring()
            return
        gradients = [one.grad for one in parameters if one.grad is not None]
        last = [self.state[one].get("last_step") for one in parameters]
        found = measure(
            self.root, seen, parameters, gradients, [-one for one in steps],
            None if any(one is None for one in last) else last,
            rate=self.param_groups[0]["lr"], damping=self.damping, add_up=self.crew.mean,
        )  # fmt: skip
        if found is not None:
            settled = found.close_to(self.lengths)
            self._calm = self._calm + 1 if settled else self._calm // 2
            self.lengths = found.after(self.lengths)
            self._along = along
            self._lengths_at = self.steps + self._period(_LENGTHS_EVERY * self.factor_every)

    def _give_up_measuring(self) -> None:
        self.measures, self._rate = False, _CAREFUL
        warnings.warn(
            "lr='auto' follows a single loss of the model's output itself, and this is none; going on with lr="
            f"{_CAREFUL:g}, momentum={self.param_groups[0]['momentum']:g}, clip={self.clip}: give KFAC a number for lr",
            stacklevel=2,
        )

    def _within(self, along: Tensor) -> Tensor:
        """Between measurements a step may become longer, by the curvature it knows, but not much."""
        if self._along is None:
            return torch.ones_like(along)
        return (_LONGER * self._along / _finite_slope(along)).sqrt().clamp_max(1.0)

    def _bounded(self, along: Tensor) -> Tensor:
        """Scales the step so that the highest lr of the schedule would keep it within the bound."""
        if self.clip is None:
            return torch.ones_like(along)
        return (self.clip / (_finite_slope(along) * (self._reference * self._rate) ** 2)).sqrt().clamp_max(1.0)

    def _step_fallback(self, updates: dict[int, Any], lr: float) -> None:
        """What has no curvature yet is the fallback's, too."""
        hidden = [(one, one.grad) for one, _ in updates.values()]
        for one, _ in hidden:
            one.grad = None
        for group in self._fallback.param_groups:
            group["lr"] = lr
        self._fallback.step()
        for one, gradient in hidden:
            one.grad = gradient


def _finite_slope(along: Tensor) -> Tensor:
    """Of a step that is not made the slope may be anything, and a NaN times nothing would still be one."""
    return torch.nan_to_num(along, 0.0, 0.0, 0.0).clamp_min(1e-30)


def _whole_gradients(block: Block) -> tuple[Tensor, Tensor | None]:
    bias = block.bias
    return sharded.whole(block.weight.grad), None if bias is None else sharded.whole(bias.grad)


def _crew(blocks: list[Block], plan: Plan | None, compress: Compress | None) -> Crew:
    factor = compress.factor if compress is not None else (plan.factor if plan else "tri")
    return Crew(blocks, plan.owners if plan else None, plan.workers if plan else None, factor)


def chosen(blocks: list[Block], exclude: Sequence[str], largest: int) -> list[Block]:
    """The blocks that K-FAC takes, numbered anew."""
    kept = [
        one
        for one in blocks
        if not any(one.name == name or one.name.startswith(name + ".") for name in exclude)
        and max(one.g, 0 if one.a_diagonal else one.a) <= largest
    ]
    for place, block in enumerate(kept):
        block.index = place
    return kept
