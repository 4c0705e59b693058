"""What every benchmark shares: figures with aims and raw runs, the table, the result file, the exit code."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import sys
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


@dataclass(kw_only=True)
class Figure:
    """One measured number. `runs` keeps every raw repetition (`peer_runs` the others'); `peer` what others gave in
    the same run."""

    name: str
    value: float
    unit: str
    better: str  # "lower" or "higher"
    aim: float | None = None
    peer: dict[str, float] = field(default_factory=dict)
    runs: list[float] = field(default_factory=list)
    peer_runs: dict[str, list[float]] = field(default_factory=dict)
    note: str = ""

    @property
    def holds(self) -> bool | None:
        if self.aim is None:
            return None
        return self.value <= self.aim if self.better == "lower" else self.value >= self.aim

    def to_json(self) -> dict[str, Any]:
        return {**self.__dict__, "holds": self.holds}


@dataclass
class Bench:
    """`packages` are looked up in this interpreter; `versions` come on top, of what runs elsewhere. `absent` says who
    was not measured, and why."""

    name: str
    figures: list[Figure] = field(default_factory=list)
    packages: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, value: float, unit: str, better: str, **rest: Any) -> Figure:
        figure = Figure(name=name, value=round(value, 4), unit=unit, better=better, **rest)
        self.figures.append(figure)
        print(f"  {figure.name}: {figure.value:g} {figure.unit}{_verdict(figure)}", flush=True)
        return figure

    def finish(self, options: argparse.Namespace) -> int:
        self._print_table()
        for name, why in self.absent.items():
            print(f"not measured: {name}: {why}")
        if not options.quick or options.keep:
            target = self.write()
            print(f"\nwritten to {target.relative_to(Path.cwd()) if target.is_relative_to(Path.cwd()) else target}")
        missed = [figure.name for figure in self.figures if figure.holds is False]
        if missed:
            print(f"missed aims: {', '.join(missed)}")
        return 1 if missed and options.check else 0

    def write(self) -> Path:
        """Keeps what was measured so far; of a long benchmark, before it is done."""
        RESULTS.mkdir(exist_ok=True)
        target = RESULTS / f"{self.name}.json"
        target.write_text(_by_lines(self._document()) + "\n")
        return target

    def _document(self) -> dict[str, Any]:
        return {
            "benchmark": self.name,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "machine": machine(),
            "versions": versions(self.packages) | self.versions,
            "absent": self.absent,
            "figures": [figure.to_json() for figure in self.figures],
        }

    def _print_table(self) -> None:
        width = max(len(figure.name) for figure in self.figures)
        print(f"\n{'figure':<{width}}  {'value':>12}  {'aim':>10}  peers")
        for figure in self.figures:
            aim = "" if figure.aim is None else f"{'<' if figure.better == 'lower' else '>'} {figure.aim:g}"
            peers = ", ".join(f"{name} {value:g}" for name, value in figure.peer.items())
            print(f"{figure.name:<{width}}  {figure.value:>12g}  {aim:>10}  {peers}  [{figure.unit}]{_verdict(figure)}")


def _by_lines(document: dict[str, Any]) -> str:
    """JSON with one line for each list of plain values, which runs and curves are made of.

    A line break in the text is never part of a string, where it would be escaped.
    """
    text = json.dumps(document, indent=1)
    return re.sub(r"\[\n *([^\[\]{}]*?)\n *\]", lambda found: "[" + re.sub(r"\n *", " ", found[1]) + "]", text)


def _verdict(figure: Figure) -> str:
    return {None: "", True: "  ok", False: "  MISSED"}[figure.holds]


def options(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="the same in under a minute, with fewer repetitions")
    parser.add_argument("--check", action="store_true", help="exit 1 when an aim does not hold")
    parser.add_argument("--keep", action="store_true", help="write the result file even with --quick")
    return parser.parse_args()


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: list[float]) -> float:
    return statistics.median(values)


def machine() -> dict[str, Any]:
    cpu = ""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    except OSError:
        pass
    return {
        "cores": len(os.sched_getaffinity(0)),
        "cpu": cpu,
        "mem_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1024**3, 1),
        "kernel": platform.release(),
    }


def versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {pid} has no VmRSS")
