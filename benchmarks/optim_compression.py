"""What compressed gradients save on a slow line, and what they cost in accuracy.

    .venv/bin/python -m benchmarks.optim_compression [--quick] [--check]       (as root: it makes network namespaces)

Two ranks, each in a network namespace of its own, joined by a veth that `tc` limits to 100 Mbit/s or 1 Gbit/s, train
networks to take Burgers' initial states to their solutions. Step times are of DDP uncompressed, of torch's own PowerSGD
hook, and of Diamond's ways, with 2.4 million parameters on the same line one after the other. Accuracy, the relative L2
error on solutions never seen, is measured with 0.66 million parameters on the unlimited line, over several seeds; bytes
are what the kernel counts on that line.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Bench, median, options

RATES = {"100 Mbit/s": "100mbit", "1 Gbit/s": "1gbit"}
ADDRESSES = ("10.214.0.1", "10.214.0.2")  # in namespaces that nothing else can reach
PORT = "29533"
INSIDE = Path(__file__).with_name("optim_compression_inside.py")
PLAIN = "uncompressed"
TORCH = ("torch powersgd:4", "torch powersgd:16")
SMALL, LARGE = 512, 1024  # width of the network
WAYS: dict[str, dict[str, Any]] = {
    "powersgd:4": {"grad": "powersgd:4"},
    "powersgd:16:int8": {"grad": "powersgd:16:int8"},
    "powersgd:32:int8": {"grad": "powersgd:32:int8"},
    "topk:0.05:int8": {"grad": "topk:0.05:int8"},
    "int1 remembered": {"grad": "int1", "error_feedback": True},
}
SAME = {"powersgd:4": "torch powersgd:4", "powersgd:16:int8": "torch powersgd:16"}
FEWER_BYTES, WORSE_PERCENT = 20.0, 0.5
AIMED = ("powersgd:16:int8", "powersgd:32:int8")  # the others are shown for comparison


# ---- the line --------------------------------------------------------------------------------------------------------


class Line:
    """Two namespaces, each held by a process that ends with this one."""

    def __init__(self) -> None:
        self._holders = [
            subprocess.Popen(["unshare", "--net", "--", "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            for _ in ADDRESSES
        ]
        for holder in self._holders:
            # An echo comes from inside: the namespace is there.
            assert holder.stdin is not None and holder.stdout is not None
            holder.stdin.write(b"\n")
            holder.stdin.flush()
            holder.stdout.readline()
        first, second = (holder.pid for holder in self._holders)
        self._inside(0, "ip", "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", str(second))
        assert first != second
        for side, address in enumerate(ADDRESSES):
            self._inside(side, "ip", "link", "set", "lo", "up")
            self._inside(side, "ip", "address", "add", f"{address}/30", "dev", "eth0")
            self._inside(side, "ip", "link", "set", "eth0", "up")
        self._limited = False

    def limit(self, rate: str | None) -> None:
        """Both directions; None: as fast as it goes."""
        for side in range(len(ADDRESSES)):
            if rate is not None:
                # A small burst, or a short message would pass as if there were no limit.
                shape = ("rate", rate, "burst", "64kb", "latency", "100ms")
                self._inside(side, "tc", "qdisc", "replace", "dev", "eth0", "root", "tbf", *shape)
            elif self._limited:
                self._inside(side, "tc", "qdisc", "delete", "dev", "eth0", "root")
        self._limited = rate is not None

    def enter(self, side: int) -> list[str]:
        return ["nsenter", f"--target={self._holders[side].pid}", "--net", "--"]

    def close(self) -> None:
        for holder in self._holders:
            holder.communicate()

    def _inside(self, side: int, *argv: str) -> None:
        done = subprocess.run([*self.enter(side), *argv], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(argv)}: {done.stderr.strip()}")


class Ranks:
    """Two processes that do one job after the other."""

    def __init__(self, line: Line, data: Path) -> None:
        known = {**os.environ, "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT, "GLOO_SOCKET_IFNAME": "eth0"}
        known |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(INSIDE.parent.parent / "src")}
        self._ranks = [
            subprocess.Popen(
                [*line.enter(rank), sys.executable, str(INSIDE), str(data)],
                env=known | {"RANK": str(rank)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank in range(len(ADDRESSES))
        ]  # fmt: skip

    def work(self, way: str, *, seed: int, steps: int, width: int) -> dict[str, Any]:
        job = {"method": WAYS.get(way, way), "seed": seed, "steps": steps, "width": width}
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps(job) + "\n")
            rank.stdin.flush()
        assert self._ranks[0].stdout is not None
        answer = self._ranks[0].stdout.readline()
        if not answer:
            raise RuntimeError(f"the ranks ended during {way}")
        told: dict[str, Any] = json.loads(answer)
        return told

    def close(self) -> None:
        for rank in self._ranks:
            rank.communicate(timeout=60)


@contextmanager
def ranks_on_a_line(data: Path) -> Iterator[tuple[Line, Ranks]]:
    with ExitStack() as open_:
        line = Line()
        open_.callback(line.close)
        ranks = Ranks(line, data)
        open_.callback(ranks.close)
        yield line, ranks


# ---- the task --------------------------------------------------------------------------------------------------------


def burgers(samples: int, *, points: int = 128, viscosity: float = 0.01, steps: int = 500) -> tuple[Any, Any]:
    """Random smooth periodic initial states and the solution of u_t + u u_x = ν u_xx at time 1.

    In Fourier space the viscous part is solved exactly (integrating factor), the rest by Runge-Kutta of fourth order;
    the upper third of the frequencies is cut, because products alias there.
    """
    dice = torch.Generator().manual_seed(0)
    waves = torch.arange(points // 2 + 1, dtype=torch.float64)
    kept = (waves < points / 3).double()
    size = torch.where((waves > 0) & (waves < 8), 1 / (1 + waves**2), 0.0) * points
    phases = torch.randn(samples, waves.numel(), 2, generator=dice, dtype=torch.float64)
    state = torch.view_as_complex(phases) * size
    begin = torch.fft.irfft(state, n=points)
    dt = 1.0 / steps
    half = torch.exp(-viscosity * (2 * math.pi * waves) ** 2 * dt / 2)

    def slope(spectrum: Any) -> Any:
        values = torch.fft.irfft(spectrum, n=points)
        return -1j * math.pi * waves * kept * torch.fft.rfft(values * values)

    for _ in range(steps):
        first = slope(state)
        second = slope(half * (state + dt / 2 * first))
        third = slope(half * state + dt / 2 * second)
        fourth = slope(half * half * state + dt * half * third)
        state = half * half * (state + dt / 6 * first) + dt / 3 * half * (second + third) + dt / 6 * fourth
    return begin.float(), torch.fft.irfft(state, n=points).float()


def prepare(target: Path, train: int, test: int) -> None:
    inputs, wanted = burgers(train + test)
    if not bool(torch.isfinite(wanted).all()):
        raise RuntimeError("the solutions of Burgers' equation are not finite")
    torch.save(
        {
            "inputs": inputs[:train].clone(),
            "wanted": wanted[:train].clone(),
            "test_inputs": inputs[train:].clone(),
            "test_wanted": wanted[train:].clone(),
        },
        target,
    )


# ---- the figures -----------------------------------------------------------------------------------------------------


def accuracy(bench: Bench, line: Line, ranks: Ranks, *, seeds: int, steps: int) -> None:
    """Each seed is one network and one order of the data, the same for all ways: changes are taken seed by seed."""
    line.limit(None)
    told: dict[str, list[dict[str, Any]]] = {way: [] for way in (PLAIN, *TORCH, *WAYS)}
    for seed in range(seeds):
        for way, runs in told.items():
            runs.append(ranks.work(way, seed=seed, steps=steps, width=SMALL))
    plain = [one["error"] for one in told[PLAIN]]
    plain_bytes = median([one["bytes_a_step"] for one in told[PLAIN]])
    for way in (*TORCH, *WAYS):
        errors = [one["error"] for one in told[way]]
        changes = [100 * (error / without - 1) for error, without in zip(errors, plain, strict=True)]
        name = way if way in TORCH else f"Diamond {way}"
        sent = [one["bytes_a_step"] for one in told[way]]
        bench.add(
            f"fewer bytes: {name}", plain_bytes / median(sent), "times", "higher",
            aim=FEWER_BYTES if way in AIMED else None, runs=sent, peer_runs={PLAIN: [plain_bytes]},
            note=f"bytes that leave a rank in a step by the kernel, mean of all {steps} steps",
        )  # fmt: skip
        bench.add(
            f"held-out error: {name}", statistics.fmean(changes), "% against uncompressed", "lower",
            aim=WORSE_PERCENT if way in AIMED else None, peer={PLAIN: round(statistics.fmean(plain), 6)},
            runs=changes, peer_runs={PLAIN: plain, way: errors},
            note=f"relative L2 error after {steps} steps; mean of {seeds} paired seeds, {_standard_error(changes)}",
        )  # fmt: skip


def _standard_error(values: list[float]) -> str:
    if len(values) < 2:
        return "standard error unknown"
    return f"standard error {statistics.stdev(values) / math.sqrt(len(values)):.3f}"


def times(bench: Bench, line: Line, ranks: Ranks, *, steps: int) -> None:
    for rate, limit in RATES.items():
        line.limit(limit)
        told = {
            way: [1000 * one for one in ranks.work(way, seed=0, steps=steps + 4, width=LARGE)["step_s"][4:]]
            for way in (PLAIN, *TORCH, *WAYS)
        }
        peers = {way: round(median(told[way]), 2) for way in (PLAIN, *TORCH)}
        for way in WAYS:
            # Only the same method can be asked to be as fast as torch's.
            bench.add(
                f"step over {rate}: Diamond {way}", median(told[way]), "ms", "lower",
                aim=peers[SAME[way]] if way in SAME else None, peer=peers, runs=told[way],
                peer_runs={way_: told[way_] for way_ in peers},
            )  # fmt: skip


def main() -> int:
    chosen = options(__doc__ or "")
    if os.geteuid():
        raise SystemExit("this benchmark makes network namespaces: run it as root")
    bench = Bench("optim_compression", packages=("torch",))
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "burgers.pt"
        prepare(data, 256 if chosen.quick else 1000, 64 if chosen.quick else 500)
        with ranks_on_a_line(data) as (line, ranks):
            times(bench, line, ranks, steps=3 if chosen.quick else 20)
            accuracy(bench, line, ranks, seeds=1 if chosen.quick else 5, steps=20 if chosen.quick else 800)
    return bench.finish(chosen)


if __name__ == "__main__":
    sys.exit(main())
