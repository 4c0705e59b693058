"""K-FAC: gradients preconditioned by the curvature of the loss, one Kronecker product a layer."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from diamond.optim import checks, clipping, fallbacks, intact, keeping, rebinding, refreshing, sharded
from diamond.optim.blocks import Block, discover, unwrapped
from diamond.optim.casting import without_autocast
from diamond.optim.compress import Compress
from diamond.optim.crew import Crew
from diamond.optim.curving import Curving, Taken
from diamond.optim.damping import KEPT, adapted, after_steps
from diamond.optim.directions import Direction, Directions
from diamond.optim.errors import OptimError
from diamond.optim.factors import Factors
from diamond.optim.lengths import MOST_MOMENTUM, Lengths, Seen, measure
from diamond.optim.losses import Outcome
from diamond.optim.pieces import LARGEST, chosen
from diamond.optim.planning import Plan
from diamond.optim.precondition import Inverse

_LONGER = 4.0  # how much longer, squared, a step may become before its length is measured again
_SETTLING = 4  # steps from the beginning, by which periods grow by one at least
_SETTLING_UNMEASURED = 10  # likewise, where nothing is measured that might say that they can be longer
_PATIENT = 3  # how often in a row no length may be found, before the fallback takes the steps
_UNCLIPPED = 1.0
_BRAKE_ON, _BRAKE_OFF = 0.6, 1.25  # where a new batch finds the last step too long, and where it does not
_CAREFUL = 0.03  # lr where it can be neither measured nor is given
_LENGTHS_EVERY = 4  # times the period of the factors, once what is measured stays much the same
_STALE = 0.7  # of a length that was measured with another batch
_STEADY = 2.0  # how much the slope may grow from one measurement to the next where all is calm
_ASTRAY = 16.0  # where the slope has grown so much since the last measurement, no step is made before the next


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
        kind: "kfac", the only one.
        solver: "auto", "cholesky", "newton-schulz" or "eigen"; the plan's where left out.
        factor_every, inverse_every: steps between updates of the factors and of their inverses; more often in the
            beginning. The plan's where left out, else 10 and 20.
        decay: of the averages of the factors.
        measured: where lr is a number, how many steps in the beginning are as long as "auto" would make them. What is
            known of the curvature then comes from few batches, and steps of a given length may lead far astray.
        clip: where lr is a number, a bound on lr^2 times the curvature along the step, at the highest lr of the
            schedule, so that the schedule still counts. None for no bound.
        plan: what `diamond.optim.plan` found for this model.
        compress: how gradients and statistics travel between ranks.
        fallback: what takes the parameters that no block covers.
        exclude: names of modules, or their beginnings, that are left to the fallback.
        largest: of layers with more inputs or outputs than that, the factor is kept in blocks on its diagonal.
        inverses: "now", or "aside": computed beside the training, which goes on with the old ones for some steps.
        adapt_damping: with lr="auto", less damping as long as steps bring what they promise, more where they do not.
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
        measured: int = 0,
        clip: float | None = 1e-4,
        plan: Plan | None = None,
        compress: Compress | None = None,
        fallback: Callable[[Sequence[Tensor]], Optimizer] | None = None,
        exclude: Sequence[str] = (),
        largest: int = LARGEST,
        inverses: str = "now",
        adapt_damping: bool = False,
        seed: int = 0,
    ) -> None:
        self._given = {name: one for name, one in locals().items() if name not in ("self", "model", "__class__")}
        checks.kinds(model, plan, compress, fallback, exclude, seed)
        self._measured = math.inf if lr == "auto" else checks.whole("measured", measured)
        self.measures = self._measured > 0
        rate = 1.0 if lr == "auto" else lr
        self.factor_every = factor_every if factor_every is not None else plan.factor_every if plan else 10
        self.inverse_every = inverse_every if inverse_every is not None else plan.inverse_every if plan else 20
        checks.numbers(rate, momentum, damping, weight_decay, decay, clip, self.factor_every, self.inverse_every)
        checks.names(curvature, sharing, loss, kind)
        assert not isinstance(rate, str)
        sharded.check(model)
        self.root = unwrapped(model)
        self._sharded = list(sharded.fsdp_modules(self.root))
        self.blocks = chosen(discover(self.root), exclude, largest, plan.largest if plan else None)
        self.decay, self.clip = decay, clip
        self.damping = self._asked_damping = damping
        self._adapts = adapt_damping
        self.solver = solver or (plan.solver if plan else "auto")
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
        self.wire = rebinding.wire_of(model, compress)
        self.factors = [Factors(block) for block in self.blocks]
        self.kept: dict[int, Inverse] = {}
        self.refreshing = refreshing.made(inverses, self.kept, self.solver, plan)
        self.directions = Directions(self.blocks, self.crew, self.kept)
        self.lengths = Lengths(1.0, 0.0)
        self._batch: list[float] = []  # the fingerprint of the one they were measured with
        self.steps = 0
        self.skipped = 0  # steps that were not made: not finite, or no length of them would have lowered the loss
        self._bad: Tensor | None = None
        self._along: Tensor | None = None  # the slope along the step when its length was measured
        self._calm = 0  # how long what was measured has stayed much the same
        self._stuck = 0  # how many measurements in a row have found no length that lowers the loss
        self._brake: Tensor | None = None  # the part of clipping that steps keep; None before any gradient was clipped
        self._factors_at, self._inverses_at, self._lengths_at = 1, 0, 0
        self._curving = Curving(
            self.root, self.blocks, curvature=curvature, sharing=sharing, loss=loss,
            seed=seed + sharded.data_rank(self.root, self.crew.rank),
        )  # fmt: skip
        self._watch = clipping.Watch(self._curving.parameters)
        # With a static graph DDP takes the first backward pass for the one that it reduces, whichever it is.
        if not getattr(model, "static_graph", False):
            self._curving.arm(again=self.measures)

    # ---- a step ------------------------------------------------------------------------------------------------------

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(self._step)(closure)  # type: ignore[no-untyped-call]
        return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad(), without_autocast(next(self.root.parameters()).device.type):
            sharded.gather_up(self._sharded)
            armed, again = self._curving.armed, self._curving.again
            taken = self._curving.disarm()
            if (ready := self.refreshing.take(self.steps)) is not None:
                self._renew(ready)
            if armed:
                self._check_parameters()
                self._learn(taken)
            self._update(taken, looking=armed and again)
        self.steps += 1
        self.measures = self.measures and self.steps < self._measured
        if self.steps >= self._factors_at:
            self._factors_at = self.steps + self._period(self.factor_every)
            self._curving.arm(again=self.measures)
        return loss

    def rebind(self, model: nn.Module) -> None:
        """Follow the model to where it is trained: wrapped by DDP, sharded in place, by ranks that have met by now.

        For models that are spread after their optimizer was made; diamond.train calls it. All ranks do, before the
        first step and before a state is loaded. What schedulers know of the optimizer stays right.

        Raises:
            OptimError: it is another model, or steps were made before something changed.
        """
        rebinding.rebind(self, model)

    # ---- what is kept ------------------------------------------------------------------------------------------------

    def memory_bytes(self) -> dict[str, int]:
        """Bytes that this rank holds, by what they are for: factors, inverses, last steps, fallback."""
        return keeping.memory_bytes(self)

    def state_dict(self) -> dict[str, Any]:
        """All that this rank needs to go on exactly; for checkpoints of many ranks see diamond.optim.keeping."""
        return {**super().state_dict(), "kfac": keeping.state(self)}

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies, and what is read back from a pickle, belong to the copy of the model that comes with them."""
        return _made_again, (self.root, self._given, self.state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """
        Raises:
            OptimError: it is of another model, kind or rank, incomplete, or not finite; nothing is changed then.
        """
        intact.check_outside(self, state_dict)
        keeping.check(self, state_dict.get("kfac"))
        super().load_state_dict({key: one for key, one in state_dict.items() if key != "kfac"})
        keeping.load(self, state_dict["kfac"])

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if len(getattr(self, "param_groups", ())) > 1:
            raise OptimError(
                "param_group: KFAC finds a model's parameters by itself; to train more of them than required gradients "
                "when it was made, make it again"
            )
        super().add_param_group(param_group)

    def sharded_state(self) -> dict[str, Any]:
        """For torch.distributed.checkpoint with any number of ranks; diamond.train uses it."""
        return keeping.sharded_state(self)

    def load_sharded(self, state: dict[str, Any]) -> None:
        keeping.load_sharded(self, state)

    # ---- the parts of a step -----------------------------------------------------------------------------------------

    def _check_parameters(self) -> None:
        rebinding.check_wire(self)
        known = {id(one) for group in self.param_groups for one in group["params"]}
        for block in self.blocks:
            if any(id(one) not in known for one in block.parameters()):
                raise OptimError(
                    f"model: the parameters of {block.name} were replaced after the optimizer was made; "
                    "make it after fully_shard, parallelize_module and the like, or call rebind then"
                )

    def _learn(self, taken: Taken) -> None:
        means = self.crew.reduce(taken.sums, taken.terms)
        if not self.crew.fresh and self.blocks:
            if taken.empty:
                return
            raise OptimError(taken.why_nothing())
        for one in means:
            self.factors[one.index].update(one.a, one.g, self.decay)
        if self.steps >= self._inverses_at:
            period = self._period(self.inverse_every)
            self._inverses_at = self.steps + period
            self._watch_out()
            known = [factors for factors in self.factors if factors.known and self.crew.owns(factors.block.index)]
            if self.refreshing.aside and self.crew.used <= self.crew.ready:
                self.refreshing.begin(known, self.damping, self.steps, period)
            else:
                self._renew(self.refreshing.now(known, self.damping))

    def _renew(self, found: Mapping[int, Inverse]) -> None:
        """With what this rank computed as an owner. All ranks do so at the same step."""
        self.kept.update(found)
        self.crew.spread(self.kept, self.crew.used)
        self.directions.renew()

    def _period(self, every: int) -> int:
        """Steps until the next update: few in the beginning, and as long as what is measured changes.

        From batch to batch it changes for ever. So it counts for less and less, unless there is only one batch.
        """
        if self.measures:
            settled = self._calm if self.lengths.still else max(self._calm, self.steps // _SETTLING)
        else:
            settled = self.steps // _SETTLING_UNMEASURED
        return max(1, min(every, settled))

    def _watch_out(self) -> None:
        """After steps that were not made, more damping; later, step by step, less again."""
        bad = 0 if self._bad is None else int(self._bad)
        self._bad = None
        self.skipped += bad
        self.damping = after_steps(self.damping, self._asked_damping, bad, self._adapts)

    def _note_bad(self, bad: Tensor) -> None:
        number = bad.to(torch.int32)
        self._bad = number if self._bad is None else self._bad + number

    def _update(self, taken: Taken, looking: bool) -> None:
        group, rest = self.param_groups
        direction = self.directions.find()
        measuring, brake = False, torch.ones_like(direction.along)
        if self.measures and direction.parameters:
            seen = taken.to_follow() if looking else None
            at_hand = self._clipped(taken, seen) if looking else _UNCLIPPED
            clipped = at_hand if looking else self._watch.take()
            if clipped is not None and (at_hand < 1 or self._watch.on):
                direction.unclip(clipped)
            if measuring := looking and self._due(direction.along):
                self._measure(seen, direction, at_hand)
            if clipped is not None and (at_hand < 1 or self._watch.on):
                brake = self._braked(direction.parameters, clipped)
        stuck = self.measures and self._stuck >= _PATIENT
        taken_care_of = [] if stuck else direction.parameters  # what has no curvature yet is the fallback's, too
        fallbacks.step(self._fallback, taken_care_of, rest["lr"])
        if not direction.parameters:
            return
        along = direction.along
        good = along.isfinite()
        self._note_bad(~good)
        if self.measures:
            good = good & self._as_measured(along, _ASTRAY)
            careful = 1.0 if measuring else _STALE
            scale = good * brake * self._within(along) * (self._share() * careful * self.lengths.step)
            momentum = brake * (self.lengths.momentum if measuring else min(self.lengths.momentum, MOST_MOMENTUM))
        else:
            scale = good * self._bounded(along) * (group["lr"] * self._rate)
            momentum = group["momentum"]
        direction.scale(-scale)
        last = self._last_steps(direction.parameters)
        here = [sharded.held(one) for one in last]
        torch._foreach_mul_(here, good * momentum)  # a step that is not finite is none at all
        direction.add_to(last)
        changed = [sharded.held(one) for one in direction.parameters]
        if group["weight_decay"]:
            torch._foreach_mul_(changed, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(changed, here)

    def _due(self, along: Tensor) -> bool:
        """Whether the length is to be measured: when its time has come, or where steps have become so steep that
        none would be made before."""
        return self.steps >= self._lengths_at or not bool(self._as_measured(along, _ASTRAY))

    def _last_steps(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        found = []
        for one in parameters:
            state = self.state[one]
            if "last_step" not in state:
                state["last_step"] = torch.zeros_like(one, requires_grad=False)
            found.append(state["last_step"])
        return found

    def _measure(self, seen: Seen | None, direction: Direction, clipped: float) -> None:
        if not self.crew.all_say(seen is not None and seen.can_be_followed) or seen is None:
            self._give_up_measuring()
            return
        parameters = direction.parameters
        gradients = [one.grad for one in parameters if one.grad is not None]
        last = [self.state[one].get("last_step") for one in parameters]
        before, self._batch = self._batch, seen.fingerprint()
        found = measure(
            self.root, seen, parameters, gradients, [-one for one in direction.tensors()],
            None if any(one is None for one in last) else last,
            rate=self._share(), damping=self.damping, add_up=self.crew.mean, clipped=clipped,
            known=self.lengths if self._along is not None else None, still=self.crew.all_say(self._batch == before),
        )  # fmt: skip
        if found is None:
            return
        if not found.whole and self._along is None:
            self._give_up_measuring()
            return
        self._plan_ahead(found, direction.along)
        self._note_stuck(found, direction)
        self.lengths = found.after(self.lengths)
        if self._adapts and found.ratio is not None:
            self.damping = adapted(self.damping, self._asked_damping, found.ratio)
        self._along = direction.along

    def _plan_ahead(self, found: Lengths, along: Tensor) -> None:
        """When to look at the curvature and to measure again."""
        much_the_same = found.close_to(self.lengths) and bool(self._as_measured(along, _STEADY))
        settled = much_the_same and (found.ratio is None or found.ratio > KEPT)
        self._calm = 0 if found.poor else self._calm + 1 if settled else self._calm // 2
        if found.poor:
            self._inverses_at = min(self._inverses_at, self.steps + 1)
        often = found.still or found.poor or not found.step
        self._lengths_at = self.steps + self._period((1 if often else _LENGTHS_EVERY) * self.factor_every)

    def _note_stuck(self, found: Lengths, direction: Direction) -> None:
        """No length of this step would have lowered the loss. More damping helps where the curvature is wrong; where
        it does not, the fallback takes the steps until a length is found. All samples in every step are another
        matter: nothing is noise then, and there is most often nothing left to gain."""
        if found.step:
            self._stuck = 0
            return
        self._stuck += 1
        if self._stuck < _PATIENT or found.still:
            self._note_bad(torch.ones_like(direction.along, dtype=torch.bool))
            self._factors_at = self._lengths_at = self.steps + 1
        if self._stuck == _PATIENT:
            self._warn_of_being_stuck(found.still)
            if not found.still:
                self.damping, self._bad = self._asked_damping, None
                fallbacks.forget(self._fallback, direction.parameters)

    def _clipped(self, taken: Taken, seen: Seen | None) -> float:
        """What the gradients were multiplied by since the backward pass, if that can be known."""
        self._watch.take()
        outcome = seen.outcomes[0] if seen is not None and seen.outcomes else None
        weight, now = None if outcome is None else outcome.weight, clipping.sizes(self._curving.parameters)
        known = taken.arrived is not None and now is not None and weight is not None
        if not self.crew.all_say(known) or taken.arrived is None or now is None or weight is None or outcome is None:
            return _UNCLIPPED
        before, after = self.crew.total(torch.stack([taken.arrived, now])).tolist()
        scaler = weight / outcome.share
        found = clipping.factor(before, after, scaler)
        if found < 1 and scaler == 1.0:  # a scaler may change from step to step
            self._watch.begin()
        return found

    def _braked(self, parameters: Sequence[Tensor], clipped: Tensor | float) -> Tensor:
        """How much of this step is made: all of it, or as little as clipping leaves.

        Lengths are measured on the batch that the direction comes from. Where batches are small and differ, both fit
        its noise, and clipping, which made steps shorter, was what kept them from harm. Whether that is so shows where
        the next batch slopes along the last step: upwards, if it went too far. Until that is known, clipping counts in
        full; of the same batch over and over there is nothing to learn, and nothing to fear.
        """
        least = torch.as_tensor(clipped, device=parameters[0].device)
        if self._brake is None:
            self._brake = least.clone()
        if self.lengths.still:
            return torch.ones_like(least)
        pairs = [(self.state[one].get("last_step"), one.grad) for one in parameters]
        last, gradients = [one for one, _ in pairs if one is not None], [one for _, one in pairs if one is not None]
        if len(last) < len(pairs) or len(gradients) < len(pairs):
            return torch.maximum(self._brake, least)
        upwards = sharded.dot(last, gradients) > 0
        found = torch.where(upwards, _BRAKE_ON * self._brake, _BRAKE_OFF * self._brake).clamp_max(1.0)
        self._brake = torch.where(least < 1, torch.maximum(found, least), found)
        return torch.maximum(self._brake, least)

    def _share(self) -> float:
        """What a schedule leaves of the lr it began with."""
        lr: float = self.param_groups[0]["lr"]
        return lr / self._reference if self._reference else 0.0

    def _give_up_measuring(self) -> None:
        self.measures = False
        if math.isfinite(self._measured):
            _warn(
                f"measured={self._measured}: only a single loss of the output itself, of one call of the model, can be "
                "followed, and this is none; going on with lr at once: give measured=0"
            )
            return
        self._rate = _CAREFUL
        _warn(
            "lr='auto' follows a single loss of the output itself, of one call of the model, and this is none; going "
            f"on with lr={_CAREFUL:g}, momentum={self.param_groups[0]['momentum']:g}, clip={self.clip}: give KFAC a "
            "number for lr"
        )

    def _warn_of_being_stuck(self, still: bool) -> None:
        name, lr = type(self._fallback).__name__, self.param_groups[1]["lr"]
        instead = f"{name}, the fallback, takes its steps (lr={lr:g}) until one is found"
        _warn(
            f"lr='auto' has found no length of a step that lowers the loss, {_PATIENT} times in a row; "
            f"{'no step is made' if still else instead}. If this lasts: larger batches, another damping, a number for "
            "lr, or a first-order optimizer"
        )

    def _as_measured(self, along: Tensor, most: float) -> Tensor:
        """Whether the slope along the step is at most so many times what it was at the last measurement."""
        return torch.ones_like(along, dtype=torch.bool) if self._along is None else along <= most * self._along

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


def _warn(message: str) -> None:
    """At the line that called for the step, however many of torch's and our own calls are between."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "diamond"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level + 1)


def _finite_slope(along: Tensor) -> Tensor:
    """Of a step that is not made the slope may be anything, and a NaN times nothing would still be one."""
    return torch.nan_to_num(along, 0.0, 0.0, 0.0).clamp_min(1e-30)


def _made_again(model: nn.Module, given: dict[str, Any], state: dict[str, Any]) -> KFAC:
    optimizer = KFAC(model, **given)
    optimizer.load_state_dict(state)
    return optimizer


def _crew(blocks: list[Block], plan: Plan | None, compress: Compress | None) -> Crew:
    factor = (compress.factor if compress else None) or (plan.factor if plan else None)
    return Crew(blocks, plan.owners if plan else None, plan.workers if plan else None, factor)
