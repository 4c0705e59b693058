"""How careful to be: damping after steps that failed, and by what a step brought against what was promised."""

from __future__ import annotations

BACK_OFF = 10.0  # what damping is multiplied by after a step that was not finite, or would not have lowered the loss
RELAX = 0.7  # and at every later update of the inverses, until it is what was asked for
MORE, LESS = 1.5, 1 / 1.5  # after a measurement whose promise was broken, or kept
BROKEN, KEPT = 0.25, 0.75  # parts of the promised reduction of the loss
FARTHEST = 1e6  # times what was asked for, after steps that were not made
LOWEST, HIGHEST = 1e-2, 1e3  # times what was asked for


def after_steps(damping: float, asked: float, bad: int, adapts: bool) -> float:
    """After some steps, so many of which were not made."""
    if bad:
        return max(damping, min(damping * BACK_OFF, FARTHEST * asked))
    return damping if adapts and damping <= HIGHEST * asked else max(asked, damping * RELAX)


def adapted(damping: float, asked: float, ratio: float) -> float:
    """By how much the loss really falls along the step, over what the parabola promised (Levenberg and Marquardt)."""
    if ratio > KEPT:
        damping *= LESS
    elif not ratio >= BROKEN:
        damping *= MORE
    return min(max(damping, LOWEST * asked), HIGHEST * asked)
