"""Decisions in words: what every task gets, against what it has now, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from diamond.planner.pools.policies.ledger import Ledger, rate, smallest
from diamond.planner.pools.snapshot import Decision, Demand, Placement, Shape

CENTURY_S = 100 * 365.25 * 86_400


def decide(ledger: Ledger, why: Mapping[str, str], others: str, *, exact: bool = True, hold: bool = False) -> Decision:
    """Places for what the ledger promised, with a reason for every task.

    Args:
        why: what the policy says about single tasks.
        others: whom it preferred, of those it says nothing about.
    """
    placed = ledger.places(hold=hold)
    free = {kind: ledger.total[kind] for kind in ledger.types}
    for name in placed:
        free[ledger.wanted[name].gpu_type] -= ledger.wanted[name].gpus
    reasons = {
        demand.id: _served(ledger, demand, placed[demand.id], why.get(demand.id, ""))
        if demand.id in placed
        else _unserved(ledger, demand, why.get(demand.id, ""), others, free)
        for demand in ledger.snapshot.demands
    }
    return Decision(placed=placed, reasons=reasons, exact=exact)


def gpus(number: int, kind: str = "") -> str:
    return (f"{number} GPU" if number == 1 else f"{number} GPUs") + (f" of {kind}" if kind else "")


def minutes(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < CENTURY_S:
        return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
    return "more than a hundred years"


def _served(ledger: Ledger, demand: Demand, placement: Placement, why: str) -> str:
    new = Shape(ledger.wanted[demand.id].gpu_type, len(placement), ledger.wanted[demand.id].gpus)
    old = ledger.shapes.get(demand.id)
    tail = f"; {why}" if why else ""
    if old is None:
        return f"starts on {gpus(new.gpus, new.gpu_type)}{tail}"
    if placement == ledger.standing[demand.id]:
        bound = "" if demand.movable else ", as it cannot be moved"
        return f"keeps {gpus(new.gpus)}{bound}{tail}"
    return f"{_change(old, new)}{_gain(demand, old, new)}{tail}"


def _change(old: Shape, new: Shape) -> str:
    if old.gpu_type != new.gpu_type:
        return f"moves from {gpus(old.gpus, old.gpu_type)} to {gpus(new.gpus, new.gpu_type)}"
    if old.gpus == new.gpus:
        return f"moves with its {gpus(new.gpus)} to other nodes"
    return f"{'grows' if new.gpus > old.gpus else 'shrinks'} from {old.gpus} to {gpus(new.gpus)}"


def _gain(demand: Demand, old: Shape, new: Shape) -> str:
    before, after = rate(demand, old), rate(demand, new)
    return f": {after / before:.2g} times its goodput" if before and after else ""


def _unserved(ledger: Ledger, demand: Demand, why: str, others: str, free: Mapping[str, int]) -> str:
    old = ledger.shapes.get(demand.id)
    head = "waits" if old is None else f"stops, and gives back {gpus(old.gpus)}"
    return f"{head}: {why or obstacle(ledger, demand) or _outdone(ledger, demand, others, free)}"


def obstacle(ledger: Ledger, demand: Demand) -> str:
    """Why it could not get anything here even if it were alone; empty where it could."""
    kinds = ledger.kinds(demand)
    if not ledger.types:
        return "the pool has no nodes"
    if not kinds:
        return f"it runs on {_listed(demand.gpu_types or ())} alone, and there is {_listed(ledger.types)}"
    least = smallest(demand)
    if least == 0:
        return f"no number of GPUs is both among its sizes and from {demand.min_gpus} to {demand.max_gpus}"
    allowed = ledger.snapshot.quotas.get(demand.owner)
    if allowed is not None and least > allowed:
        return f"it needs {gpus(least)}, and its owner may hold {allowed}"
    top = max(ledger.total[kind] for kind in kinds)
    if least > top:
        return f"it needs {gpus(least)} of one kind, and there are {top}"
    return ""


def _outdone(ledger: Ledger, demand: Demand, others: str, free: Mapping[str, int]) -> str:
    least = smallest(demand)
    if ledger.quota(demand) < least:
        return f"what its owner may hold at once ({ledger.snapshot.quotas.get(demand.owner)} GPUs) is in use"
    room = max(free[kind] for kind in ledger.kinds(demand))
    return f"{others}; it needs {gpus(least)} or more, {room} free"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"
