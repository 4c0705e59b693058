"""What a person did on the way to a first successful run, step by step, and what it adds up to.

Typing is counted in characters, Enter included, and never measured: `typing_s` is what those characters take at a
stated speed, and every figure that contains it says so. Nothing else is simulated: seconds of a step are those the
program really took, less what its jobs waited in Slurm's queue.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# 40 words a minute, a word being five characters. Nobody stops to think, to read a page or an error message.
WORDS_A_MINUTE = 40
CHARACTERS_A_SECOND = WORDS_A_MINUTE * 5 / 60


class WayLost(RuntimeError):
    """A step did not end as the script of the journey says: nothing of the journey can be counted."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One line typed at a prompt, or what was typed into an editor.

    Attributes:
        seconds: wall time of what it started, queue wait taken off.
        queue_s: the wait that was taken off.
        mistake: it would not have been there had nothing been forgotten or wrong.
    """

    who: str
    typed: str
    is_command: bool = True
    seconds: float = 0.0
    queue_s: float = 0.0
    mistake: bool = False

    @property
    def num_characters(self) -> int:
        return len(self.typed) + 1

    def to_json(self) -> dict[str, Any]:
        rounded = {"seconds": round(self.seconds, 3), "queue_s": round(self.queue_s, 3)}
        return {**self.__dict__, **rounded, "characters": self.num_characters}


@dataclass
class Diary:
    """The steps of one journey, by whoever took part in it."""

    steps: list[Step] = field(default_factory=list)

    def add(self, step: Step) -> None:
        self.steps.append(step)
        told = step.typed if step.is_command else f"({step.num_characters} characters into the file)"
        mark = "!" if step.mistake else " "
        print(f"    {mark} {step.who:<12} {told:<64} {step.seconds:7.2f} s", flush=True)

    def without_mistakes(self) -> Diary:
        """The same journey by somebody who forgot nothing and knew everything."""
        return Diary([step for step in self.steps if not step.mistake])

    @property
    def commands(self) -> int:
        return sum(step.is_command for step in self.steps)

    @property
    def characters(self) -> int:
        return sum(step.num_characters for step in self.steps)

    @property
    def wall_s(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def typing_s(self) -> float:
        return self.characters / CHARACTERS_A_SECOND

    @property
    def total_s(self) -> float:
        return self.wall_s + self.typing_s
