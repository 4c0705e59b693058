"""What is run in the images of the benchmark: three small programs of three kinds, and what each of them needs.

The data lie at the centre already (`/scratch/data`), as they would; the programs are on the user's own machine.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
DATA_INSIDE = "/scratch/data"
SOLVED = "solved:"  # how the line of a successful run begins


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A program and its needs.

    Attributes:
        forgotten: the package of `system` or `pip` that is left out at first, whoever writes the list.
        symptom: what the program then says.
        num_nodes: one rank on each.
        gpu: the kind of one GPU for each node; empty for none.
    """

    name: str
    program: str
    pip: tuple[str, ...]
    system: tuple[str, ...] = ()
    forgotten: str
    symptom: str
    num_nodes: int = 1
    gpu: str = ""

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def command(self) -> str:
        return f"python3 {self.program} {DATA_INSIDE}/{self.name}.csv"

    def first_try(self, packages: tuple[str, ...]) -> list[str]:
        return [package for package in packages if package != self.forgotten]


WORKLOADS = (
    Workload(
        name="pde", program="solve.py", pip=("numpy", "scipy"),
        forgotten="scipy", symptom="No module named 'scipy'",
    ),
    Workload(
        name="regression", program="fit.py", pip=("scikit-learn", "pandas"),
        forgotten="pandas", symptom="No module named 'pandas'", gpu="a100",
    ),
    Workload(
        name="climate", program="means.py", system=("hdf5-tools",), pip=("numpy", "h5py"),
        forgotten="hdf5-tools", symptom="No such file or directory: 'h5repack'", num_nodes=2,
    ),
)  # fmt: skip


def data() -> dict[str, str]:
    """The data set of each workload as the text of a CSV file; the same every time."""
    chance = random.Random(11)
    plate = [[math.sin(row / 9) * math.cos(column / 7) for column in range(48)] for row in range(48)]
    days = [[15 + 8 * math.sin(day / 58) + chance.gauss(0, 1) for _ in range(100)] for day in range(360)]
    rows = []
    for _ in range(2000):
        inputs = [chance.gauss(0, 1) for _ in range(8)]
        rows.append([*inputs, sum(inputs[:4]) + chance.gauss(0, 0.2)])
    names = [*(f"x{number}" for number in range(8)), "y"]
    return {
        "pde": _csv(plate),
        "regression": ",".join(names) + "\n" + _csv(rows),
        "climate": _csv(days),
    }


def _csv(rows: list[list[float]]) -> str:
    return "".join(",".join(f"{value:.6f}" for value in row) + "\n" for row in rows)
