"""Masking secrets in logs: how much text a second, beside `bytes.replace` of the same text in the same run.

Ordinary text with a few ordinary secrets, secrets that repeat themselves in logs that do as well, and thousands of
lines to look for. For the repetitive ones the growth is measured too: the time for eight times the text.

    .venv/bin/python benchmarks/masking.py [--quick] [--check]
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable

from harness import Bench, median, options

from diamond.agent.masking import Mask

MIB = 1024 * 1024
GROWTH = 8


def ordinary_text(size: int) -> bytes:
    rng = random.Random(1)
    lines = []
    held = 0
    for step in range(size):
        line = f"epoch {step // 100} step {step} loss {rng.random():.5f} lr 3.0e-4 12.{step % 10} it/s /data/run\n"
        lines.append(line)
        held += len(line)
        if held >= size:
            break
    return "".join(lines).encode()[:size]


def tokens(count: int) -> list[str]:
    rng = random.Random(2)
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
    return ["hf_" + "".join(rng.choices(letters, k=37)) for _ in range(count)]


def lines(count: int) -> str:
    rng = random.Random(3)
    return "\n".join("".join(rng.choices("abcdefghij", k=12)) for _ in range(count))


CASES: dict[str, tuple[list[str], Callable[[int], bytes], float | None]] = {
    # What the secrets are, what the log is, and how many MB/s are aimed at.
    "ordinary text, 1 token": (tokens(1), ordinary_text, 100),
    "ordinary text, 4 tokens": (tokens(4), ordinary_text, 100),
    "ordinary text, 32 tokens": (tokens(32), ordinary_text, None),
    "ordinary text, 5,000 lines": ([lines(5000)], ordinary_text, None),
    "one letter 30,000 times": (["a" * 30_000], lambda size: b"a" * size, 10),
    "the same, but for its middle": (["a" * 15_000 + "b" + "a" * 15_000], lambda size: b"a" * size, 10),
    "pairs": (["ab" * 15_000], lambda size: b"ab" * (size // 2), 10),
    "lines within lines": (["\n".join("a" * k for k in range(8, 300))], lambda size: b"a" * size, None),
}


def seconds(work: Callable[[], object], repeats: int) -> list[float]:
    runs = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        runs.append(time.perf_counter() - began)
    return runs


def measure(bench: Bench, name: str, size: int, repeats: int) -> None:
    values, text_of, aim = CASES[name]
    mask = Mask(values)
    small, large = text_of(size), text_of(size * GROWTH)
    plain = values[0].encode()
    mask.cut(small, len(small), more=True)
    runs = [size / MIB / took for took in seconds(lambda: mask.cut(small, len(small), more=True), repeats)]
    peer = [size / MIB / took for took in seconds(lambda: small.replace(plain, b"*" * len(plain)), repeats)]
    best = max(runs)
    bench.add(
        name, best, "MB/s", "higher", aim=aim, runs=runs, peer={"bytes.replace": round(max(peer), 1)},
        peer_runs={"bytes.replace": peer}, note="best of the runs; replace looks for one form of one secret",
    )  # fmt: skip
    times = seconds(lambda: mask.cut(large, len(large), more=True), repeats)
    ratio = min(times) / (size / MIB / best)
    bench.add(
        f"{name}: time for {GROWTH} times the text", ratio, "times", "lower",
        aim=2.5 * GROWTH, runs=times, note=f"linear is {GROWTH}, quadratic {GROWTH**2}; runs are seconds",
    )  # fmt: skip


def main() -> int:
    chosen = options(__doc__ or "")
    size, repeats = (MIB // 2, 3) if chosen.quick else (2 * MIB, 7)
    bench = Bench("masking")
    for name in CASES:
        measure(bench, name, size, repeats)
    print(f"median of all throughputs: {median([f.value for f in bench.figures if f.unit == 'MB/s']):.0f} MB/s")
    return bench.finish(chosen)


if __name__ == "__main__":
    sys.exit(main())
