"""What goes wrong in the optimizers, said so that a user knows what to do."""

from __future__ import annotations


class OptimError(RuntimeError):
    """Something that the caller can mend; the message names the argument or the layer, and the remedy."""
