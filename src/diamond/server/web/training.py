"""What templates/training.html needs: how the training of a task stands, and where the time of a step goes."""

from __future__ import annotations

from dataclasses import dataclass

from diamond.core import training_words
from diamond.core.training import Training
from diamond.server.services import training
from diamond.server.services.context import Context

_WIDTH = 1000.0
_GAP = 3.0


@dataclass(frozen=True, kw_only=True)
class Slice:
    """One part of a step: its place in the bar, and how people read it."""

    key: str
    name: str
    x: float
    width: float
    takes: str
    share: str


@dataclass(frozen=True, kw_only=True)
class Panel:
    training: Training
    slices: tuple[Slice, ...]
    outlook: tuple[str, ...]


def panel(ctx: Context, user_id: str, task_id: str) -> Panel | None:
    """None where nothing was measured: most tasks train nothing, and need no panel."""
    found = training.of_task(ctx, user_id, task_id)
    if found.latest is None:
        return None
    slices, x = [], 0.0
    for part in training_words.parts(found.latest):
        width = part.share * _WIDTH
        slices.append(
            Slice(
                key=part.key,
                name=part.name,
                x=round(x, 2),
                width=round(max(0.0, width - min(_GAP, width / 4)), 2),
                takes=training_words.moment(part.seconds),
                share=f"{part.share:.0%}" if part.share >= 0.0095 or part.share == 0 else f"{part.share:.1%}",
            )
        )
        x += width
    return Panel(training=found, slices=tuple(slices), outlook=tuple(training_words.outlook(found)))
