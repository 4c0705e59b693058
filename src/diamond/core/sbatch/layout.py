"""How many nodes, tasks, cores, GPUs and how much memory the directives of a batch script ask for, per node. Pure.

Slurm hands out tasks; Diamond hands out nodes. This module turns the one into the other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from diamond.core.resources import parse_accelerators
from diamond.core.sbatch.options import Directive
from diamond.core.sbatch.values import CHANGED, KEPT, LEFT_OUT

_COUNT = re.compile(r"(\d+)([kKmM]?)")
_NODES = re.compile(r"(\d+[kKmM]?)(?:-(\d+[kKmM]?))?(?:[,:].*)?")
_MEMORY = re.compile(r"(\d+)([kKmMgGtT]?)[bB]?")
_GPU = re.compile(r"(?:gres[/:])?gpu(?:[:=]([^:=,]*[^:=,\d][^:=,]*))?(?:[:=](\d+))?")
_TYPED = re.compile(r"(?:([^:=,]*[^:=,\d][^:=,]*)[:=])?(\d+)")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_MIB = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}
MAX_NODES = 100_000
# Who says how many GPUs a node has, the first of them that is there.
_GPU_SOURCES = ("gpus-per-node", "gres", "gpus", "gpus-per-task", "tres-per-task")
_PER = {
    "mem": "",
    "mem-per-cpu": ", times the cores of a node: {cpus}",
    "mem-per-gpu": ", times the GPUs of a node: {gpus}",
}


@dataclass(frozen=True)
class Gpus:
    """GPUs of one kind; `model` is empty when any will do."""

    model: str
    count: int

    @property
    def accelerators(self) -> str | None:
        """As `resources.accelerators` has it; None for names it does not take (MIG slices begin with a digit)."""
        try:
            return parse_accelerators(f"{self.model or 'gpu'}:{self.count}")
        except ValueError:
            return None

    @property
    def gres(self) -> str:
        return f"gpu:{self.model}:{self.count}" if self.model else f"gpu:{self.count}"


def count(text: str | None) -> int | None:
    """A number as Slurm takes it: ``4``, ``2k``. None when it is none."""
    found = _COUNT.fullmatch((text or "").strip())
    if not found or len(found[1]) > 9:
        return None
    return int(found[1]) * {"": 1, "k": 1024, "m": 1024**2}[found[2].lower()]


def node_range(text: str | None) -> tuple[int, int] | None:
    """Least and most nodes of ``2``, ``2-4`` or ``1,2,4``; the same number twice when there is no range."""
    found = _NODES.fullmatch((text or "").strip())
    least = count(found[1]) if found else None
    if not found or not least or least > MAX_NODES:
        return None
    most = count(found[2]) if found[2] else least
    return (least, most) if most and most >= least else None


def mebibytes(text: str | None) -> float | None:
    """Memory as Slurm writes it: MiB without a unit. None when it is none."""
    found = _MEMORY.fullmatch((text or "").strip())
    return int(found[1]) * _MIB[(found[2] or "M").upper()] if found and len(found[1]) <= 15 else None


def show_memory(mib: float) -> int | str:
    """As `resources.memory` takes it: a bare number is GiB."""
    whole = math.ceil(mib)
    return whole // 1024 if whole % 1024 == 0 else f"{whole}MB"


def typed_count(text: str | None) -> list[Gpus]:
    """``4``, ``a100:4`` or ``a100:2,v100:1``, as --gpus and its kin take them. Empty when it is none."""
    found = [_TYPED.fullmatch(part.strip()) for part in (text or "").split(",")]
    if not all(found):
        return []
    return [Gpus(one[1] or "", int(one[2])) for one in found if one and 0 < int(one[2]) < 10_000]


def split_gres(text: str | None) -> tuple[list[Gpus], list[str]]:
    """The GPUs in a --gres list, and everything else in it."""
    gpus: list[Gpus] = []
    others: list[str] = []
    for part in (text or "").split(","):
        found = _GPU.fullmatch(part.strip())
        number = int(found[2] or 1) if found and len(found[2] or "1") <= 4 else 0
        if found and number:
            gpus.append(Gpus(found[1] or "", number))
        elif part.strip() and part.strip().lower() != "none":
            others.append(part.strip())
    return gpus, others


def hosts(text: str | None) -> int:
    """How many nodes a list such as ``c[1-3,7],login1`` names; 0 when that cannot be told."""
    total = 0
    for item in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text or ""):
        number = 1
        for inside in _BRACKET.findall(item):
            span = 0
            for part in inside.split(","):
                low, _, high = part.partition("-")
                if not low.isdecimal() or (high and not high.isdecimal()) or len(low + high) > 18:
                    return 0
                span += int(high or low) - int(low) + 1
            number *= span
        total += number
    return total if 0 < total <= MAX_NODES else 0


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What the directives come to.

    Attributes:
        ntasks: tasks of the whole job; None when the script does not say.
        cpus: cores a node needs; None when the script does not say.
        says_per_node: whether the script itself gives the number of tasks on a node.
        spread: whether the script left the number of nodes to Slurm and one node was assumed.
    """

    num_nodes: int
    ntasks: int | None
    tasks_per_node: int
    cpus_per_task: int | None
    cpus: int | None
    gpus: tuple[Gpus, ...]
    mem_mib: float | None
    says_per_node: bool = False
    spread: bool = False

    @property
    def accelerators(self) -> str | None:
        """As `resources.accelerators` has them; None for none, or for what only `slurm.gres` can say."""
        return self.gpus[0].accelerators if len(self.gpus) == 1 else None

    @property
    def tasks_by_node(self) -> str:
        """As Slurm writes SLURM_TASKS_PER_NODE: ``4(x2)``, ``8,7``."""
        if self.ntasks is None:
            return ""
        each, more = divmod(self.ntasks, self.num_nodes)
        groups = [(each + 1, more), (each, self.num_nodes - more)]
        return ",".join(f"{tasks}(x{nodes})" if nodes > 1 else str(tasks) for tasks, nodes in groups if nodes)


def lay_out(last: Mapping[str, Directive]) -> Layout:
    """The layout from the directives that count, by name. What cannot be read counts as not said."""

    def value(name: str) -> str | None:
        return last[name].value if name in last else None

    per_task = tres_per_task(value("tres-per-task"))
    nodes = node_range(value("nodes"))
    ntasks, per_node = count(value("ntasks")), count(value("ntasks-per-node"))
    named = hosts(value("nodelist")) if "/" not in (value("nodelist") or "/") else 0
    spread = False
    if nodes:
        num_nodes = min(nodes[0], ntasks) if ntasks else nodes[0]
    elif ntasks and per_node:
        num_nodes = math.ceil(ntasks / per_node)
    elif named:
        num_nodes = named
    else:
        num_nodes, spread = 1, (ntasks or 1) > 1
    per_gpu = count(value("ntasks-per-gpu"))
    whole = typed_count(value("gpus"))
    spread = spread or (num_nodes == 1 and not nodes and not named and sum(one.count for one in whole) > 1)
    on_node = typed_count(value("gpus-per-node")) or split_gres(value("gres"))[0]
    if not on_node and whole:
        on_node = [Gpus(one.model, math.ceil(one.count / num_nodes)) for one in whole]
    if ntasks is None and per_node:
        ntasks = per_node * num_nodes
    elif ntasks is None and per_gpu and on_node:
        ntasks = per_gpu * sum(one.count for one in on_node) * num_nodes
    tasks_per_node = math.ceil((ntasks or num_nodes) / num_nodes)
    of_task = typed_count(value("gpus-per-task")) or per_task.gpus
    if not on_node and of_task:
        on_node = [Gpus(one.model, one.count * tasks_per_node) for one in of_task]
    cpus_per_task = count(value("cpus-per-task")) or per_task.cpus
    per_gpu_cpus = count(value("cpus-per-gpu"))
    cpus = tasks_per_node * (cpus_per_task or 1) if ntasks or cpus_per_task else None
    if per_gpu_cpus and on_node and not cpus_per_task:
        cpus = max(cpus or 1, per_gpu_cpus * sum(one.count for one in on_node))
    return Layout(
        num_nodes=num_nodes,
        ntasks=ntasks,
        tasks_per_node=tasks_per_node,
        cpus_per_task=cpus_per_task,
        cpus=cpus,
        gpus=tuple(on_node),
        mem_mib=_memory(value, cpus or 1, sum(one.count for one in on_node)),
        says_per_node=bool(per_node),
        spread=spread,
    )


def _memory(value: Callable[[str], str | None], cpus: int, gpus: int) -> float | None:
    for name, times in (("mem", 1), ("mem-per-cpu", cpus), ("mem-per-gpu", gpus)):
        amount = mebibytes(value(name))
        if amount and times:
            return amount * times
    return None


@dataclass(frozen=True)
class PerTask:
    """What --tres-per-task says; `others` is what neither cores nor GPUs are."""

    cpus: int | None
    gpus: list[Gpus]
    others: list[str]


def tres_per_task(text: str | None) -> PerTask:
    cpus: int | None = None
    rest: list[str] = []
    for part in (text or "").split(","):
        if (found := re.fullmatch(r"\s*cpu[:=](\d{1,6})\s*", part)) and int(found[1]):
            cpus = int(found[1])
        elif part.strip():
            rest.append(part.strip())
    gpus, others = split_gres(",".join(rest))
    return PerTask(cpus, gpus, others)


NUMBERS = (
    *_GPU_SOURCES,
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "ntasks-per-gpu",
    "cpus-per-task",
    "cpus-per-gpu",
    *_PER,
)


def explain(directive: Directive, layout: Layout, last: Mapping[str, Directive]) -> tuple[str, str]:
    """What becomes of one of `NUMBERS`, and where it is to be found."""
    name, value = directive.name, directive.value
    if name == "nodes":
        return _explain_nodes(value, layout)
    if name in _GPU_SOURCES:
        return _explain_gpus(name, value, layout, last)
    if name in _PER:
        if mebibytes(value) is None:
            return LEFT_OUT, "it is not an amount of memory"
        if not layout.mem_mib:
            why = "there are no GPUs" if name == "mem-per-gpu" else "all memory of a node has no name here"
            return LEFT_OUT, f"{why}; give the amount in resources.memory"
        gpus = sum(one.count for one in layout.gpus)
        where = f"resources.memory{_PER[name].format(cpus=layout.cpus or 1, gpus=gpus)}"
        if name == "mem-per-cpu" and "exclusive" in last:
            return CHANGED, f"{where}; nodes of one's own have more cores, so raise it if need be"
        return KEPT, where
    if not count(value):
        return LEFT_OUT, "it is not a number"
    if name.endswith("per-gpu") and not layout.gpus:
        return LEFT_OUT, "the script asks for no GPUs"
    if name == "cpus-per-gpu":
        return (LEFT_OUT, "--cpus-per-task says it") if layout.cpus_per_task else (KEPT, "resources.cpus")
    variable = "SLURM_CPUS_PER_TASK" if name == "cpus-per-task" else "SLURM_NTASKS"
    return KEPT, f"resources.cpus, for all tasks of a node together; `run` sets {variable} for srun"


def _explain_nodes(value: str | None, layout: Layout) -> tuple[str, str]:
    found = node_range(value)
    if not found:
        return LEFT_OUT, "it is not a number of nodes"
    if layout.num_nodes < found[0]:
        return CHANGED, f"num_nodes: {layout.num_nodes}, as sbatch would have it: there are no more tasks"
    if found[1] > found[0] or not re.fullmatch(r"\w+", (value or "").strip()):
        return CHANGED, f"num_nodes: {layout.num_nodes}, the least of {value}; a task's number of nodes is fixed"
    return KEPT, "num_nodes"


def _explain_gpus(name: str, value: str | None, layout: Layout, last: Mapping[str, Directive]) -> tuple[str, str]:
    gpus, others = split_gres(value) if name == "gres" else (typed_count(value), [])
    cpus = None
    if name == "tres-per-task":
        found = tres_per_task(value)
        gpus, others, cpus = found.gpus, found.others, found.cpus
        if others:
            return CHANGED, f"resources has its cores and GPUs; {', '.join(others)[:200]} has no place and is left out"
    if not gpus and not others and not cpus:
        return LEFT_OUT, "it asks for none" if re.search(r"\b(0|none)$", value or "") else "it is not a number of GPUs"
    where = ["resources.cpus"] if cpus else []
    source = next((one for one in _GPU_SOURCES if one in last and _has_gpus(last[one])), "")
    if gpus and name in (source, "gpus-per-task", "gpus") and layout.gpus:
        where.append("resources.accelerators" if layout.accelerators else "slurm.gres")
    if name in ("gpus-per-task", "gpus", "gpus-per-node"):
        where.append(f"SLURM_{name.upper().replace('-', '_')} in `run`")
    if others:
        where.append("slurm.gres")
    if gpus and name in ("gres", "tres-per-task") and name != source:
        where.append(f"but the number of GPUs is that of --{source}")
        return CHANGED, ", ".join(where)
    if name == source == "gpus" and any(one.count % layout.num_nodes for one in gpus):
        return CHANGED, ", ".join([*where, "rounded up: every node has the same number"])
    return KEPT, ", ".join(dict.fromkeys(where))


def _has_gpus(directive: Directive) -> bool:
    if directive.name == "gres":
        return bool(split_gres(directive.value)[0])
    if directive.name == "tres-per-task":
        return bool(tres_per_task(directive.value).gpus)
    return bool(typed_count(directive.value))
