"""A training in the lines of a terminal. Everything given back has been cleaned."""

from __future__ import annotations

from diamond.cli import render
from diamond.core import training_words as words
from diamond.core.training import Training


def training_lines(training: Training) -> list[str]:
    """How it stands: where it is, how long it takes, and where its time goes; the sizes it had, if several."""
    at = training.latest
    if at is None:
        return []
    lines = [words.progress(at), *words.outlook(training)]
    if at.slowest:
        lines.append(render.clean(words.slowest(at.slowest)))
    split = ", ".join(f"{part.name.lower()} {part.share:.0%}" for part in words.parts(at) if part.share >= 0.005)
    rows = [
        ("step", (words.moment(at.step_s) if at.step_s is not None else "") + (f": {split}" if split else "")),
        ("samples/s", words.rate(at.samples_per_s) if at.samples_per_s is not None else ""),
        ("batch", words.batch(at)),
        ("runs on", words.where(at)),
        ("memory", f"{render.size(at.memory_peak_bytes)} at most" if at.memory_peak_bytes is not None else ""),
        ("checkpoints", words.checkpoints(at)),
        ("noise scale", f"{words.rate(at.noise_scale)}. {words.noise(at)}" if at.noise_scale is not None else ""),
    ]
    lines += [f"{name:<11}  {render.clean(value)}" for name, value in rows if value]
    if len(training.by_size) > 1:
        lines.append("at each size it had:")
        for row in training.by_size:
            size = f"{render.count(row.nodes, 'node')}, {render.count(row.world, 'rank')}"
            size += f", batch {words.shared(row.global_batch, row.world)}" if row.global_batch is not None else ""
            size += f", {row.device}" if row.device else ""
            best = f" (at best {words.rate(row.best_samples_per_s)})"
            lines.append(f"  {render.clean(size)}: {words.rate(row.samples_per_s)} samples/s{best}")
    return lines
