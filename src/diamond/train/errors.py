"""What goes wrong in a training script, in words that say what to do."""

from __future__ import annotations


class TrainError(RuntimeError):
    """A mistake or a mishap that the user can mend; the text ends with how."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(f"{message.rstrip('. ')}. {hint[:1].upper()}{hint[1:]}.")
        self.hint = hint


class Continued(SystemExit):
    """The state is saved and this process ends, to be started again: nothing after the training loop may run."""
