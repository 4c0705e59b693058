"""Which endpoint a task goes to, and why. Pure: the same snapshot always gives the same answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from diamond.core.endpoints import EndpointFacts, EndpointUsage
from diamond.core.tasks import TaskSpec
from diamond.planner.partitions import Choice, Obstacle, choose, gpus_of

_GIB = 1024**3
MOST_LOOKED_AT = 100_000  # partitions, groups of nodes, GPUs and features of all endpoints together


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """An endpoint as the planner sees it. `facts` is None until its agent has spoken once.

    Attributes:
        rank: how far away what the task needs is (its image): the smaller, the better.
        note: a reason for or against it that follows from that, for people.
        obstacle: what makes the task impossible there beyond what the facts say.
        doubt: how little the facts are borne out, for whoever asks: the smaller, the better. It comes before all that
            an endpoint says of itself.
    """

    name: str
    online: bool
    facts: EndpointFacts | None
    usage: EndpointUsage | None = None
    rank: int = 0
    note: str = ""
    obstacle: Obstacle | None = None
    doubt: int = 0


@dataclass(frozen=True, kw_only=True)
class Placement:
    """`endpoint` is None when nothing fits (then every candidate has an obstacle) or nothing is known yet."""

    endpoint: str | None
    why: tuple[str, ...] = ()
    obstacles: dict[str, Obstacle] = field(default_factory=dict)  # by endpoint name
    undecided: tuple[str, ...] = ()  # endpoints whose agent has never connected
    choice: Choice = field(default_factory=Choice)  # where at the endpoint


def place(spec: TaskSpec, candidates: Sequence[Candidate]) -> Placement:
    """Choose among the endpoints that can run the task: online first, then the least doubtful, then those that have
    what it needs, then free now, then the shortest queue.

    How much is looked at is bounded (`MOST_LOOKED_AT`): by amount and not by time, so that the same is always answered.
    """
    obstacles: dict[str, Obstacle] = {}
    undecided: list[str] = []
    fitting: list[Candidate] = []
    too_much = _too_much(spec, candidates)
    for candidate in candidates:
        if spec.resources.infra is not None and candidate.name != spec.resources.infra:
            obstacles[candidate.name] = Obstacle(field="resources.infra", text="the task names another endpoint")
        elif candidate.name in too_much:
            text = "all endpoints together list too many partitions to look through: name it with resources.infra"
            obstacles[candidate.name] = Obstacle(field="resources.infra", text=text)
        elif obstacle := (_found(spec, candidate.facts) if candidate.facts else None) or candidate.obstacle:
            obstacles[candidate.name] = obstacle
        elif candidate.facts is None:
            undecided.append(candidate.name)
        else:
            fitting.append(candidate)
    if not fitting:
        return Placement(endpoint=None, obstacles=obstacles, undecided=tuple(undecided))
    best = min(fitting, key=lambda c: _rank(spec, c))
    assert best.facts is not None
    choice = choose(spec, best.facts)
    assert isinstance(choice, Choice), "find_obstacle has looked"
    return Placement(
        endpoint=best.name,
        why=_explain(spec, best, fitting, choice),
        choice=choice,
        obstacles=obstacles,
        undecided=tuple(undecided),
    )


# Looking through a cluster's partitions takes long, and of tasks that are launched together most ask for the same.
_FOUND: dict[tuple[object, ...], tuple[EndpointFacts, Obstacle | None]] = {}
_MOST_FOUND = 2000


def _found(spec: TaskSpec, facts: EndpointFacts) -> Obstacle | None:
    """`find_obstacle`, remembered: of what the task asks for and these very facts."""
    key = (id(facts), spec.num_nodes, spec.resources, spec.slurm, spec.max_duration, bool(spec.secrets))
    known = _FOUND.get(key)
    if known is not None and known[0] is facts:
        return known[1]
    obstacle = find_obstacle(spec, facts)
    if len(_FOUND) >= _MOST_FOUND:
        _FOUND.clear()
    _FOUND[key] = (facts, obstacle)  # which keeps the facts, so that no others get their id
    return obstacle


def find_obstacle(spec: TaskSpec, facts: EndpointFacts) -> Obstacle | None:
    """The first thing that makes the task impossible there, whatever else is running."""
    need = spec.resources
    if spec.num_nodes > facts.nodes:
        return Obstacle(
            field="num_nodes", text=f"it has {_plural(facts.nodes, 'node')}, the task asks for {spec.num_nodes}"
        )
    if need.cpus_min > facts.cpus_per_node:
        return Obstacle(
            field="resources.cpus", text=f"its nodes have {facts.cpus_per_node} cores, the task asks for {need.cpus}"
        )
    if facts.mem_bytes_per_node and need.mem_bytes_min > facts.mem_bytes_per_node:
        have = facts.mem_bytes_per_node / _GIB
        return Obstacle(
            field="resources.memory", text=f"its nodes have {have:.1f} GiB of memory, the task asks for {need.memory}"
        )
    if not facts.partitions and need.gpus > gpus_of(facts.gpus_per_node, need.gpu_type):
        return Obstacle(field="resources.accelerators", text=_gpu_shortage(facts, need.accelerators or ""))
    if spec.secrets and not facts.takes_secrets:
        text = "its policy file allows no task with secrets (allow_secrets), or its agent is too old for them"
        return Obstacle(field="secrets", text=text)
    choice = choose(spec, facts)
    return choice if isinstance(choice, Obstacle) else None


def _too_much(spec: TaskSpec, candidates: Sequence[Candidate]) -> set[str]:
    """Those that are not looked at. Small ones come first: what lists no end of things may have made them up."""
    sizes = [(_size(c.facts), c.name) for c in candidates if spec.resources.infra in (None, c.name)]
    left, found = MOST_LOOKED_AT, set()
    for size, name in sorted(sizes):
        left -= size
        if left < 0:
            found.add(name)
    return found


def _size(facts: EndpointFacts | None) -> int:
    """How much there is to look at."""
    if facts is None:
        return 0
    return 1 + sum(
        1 + len(part.allow_accounts) + sum(1 + len(group.gpus) + len(group.features) for group in part.groups)
        for part in facts.partitions
    )


def _gpu_shortage(facts: EndpointFacts, asked: str) -> str:
    have = ", ".join(f"{gpu.model}:{gpu.count}" for gpu in facts.gpus_per_node) or "no GPUs"
    return f"its nodes have {have}, the task asks for {asked}"


def _rank(spec: TaskSpec, candidate: Candidate) -> tuple[bool, int, int, bool, int, str]:
    queued = candidate.usage.jobs_queued if candidate.usage else 0
    return (
        not candidate.online,
        candidate.doubt,
        candidate.rank,
        not _free_now(spec, candidate),
        queued,
        candidate.name,
    )


def _free_now(spec: TaskSpec, candidate: Candidate) -> bool:
    facts, usage = candidate.facts, candidate.usage
    if facts is None or usage is None:
        return facts is not None
    free_cpus = facts.nodes * facts.cpus_per_node - usage.cpus_used
    total_gpus = sum(gpu.count for gpu in facts.gpus_per_node) * facts.nodes
    free_gpus = total_gpus - sum(usage.gpus_used.values())
    return free_cpus >= spec.resources.cpus_min * spec.num_nodes and free_gpus >= spec.resources.gpus * spec.num_nodes


def _explain(spec: TaskSpec, best: Candidate, fitting: Sequence[Candidate], choice: Choice) -> tuple[str, ...]:
    why = []
    if spec.resources.infra is not None:
        why.append(f"the task asks for {best.name} (resources.infra)")
    elif len(fitting) == 1:
        why.append(f"no endpoint but {best.name} can run it")
    else:
        why.append(f"of {len(fitting)} endpoints that can run it, {best.name} is the best")
    if choice.why:
        why.append(choice.why)
    if best.note:
        why.append(best.note)
    why.append("its agent is online" if best.online else "its agent is offline now: the task waits until it returns")
    if best.online:
        why.append("enough is free right now" if _free_now(spec, best) else _queue_text(best))
    return tuple(why)


def _queue_text(candidate: Candidate) -> str:
    queued = candidate.usage.jobs_queued if candidate.usage else 0
    return f"it is busy: {_plural(queued, 'job')} in its queue"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
