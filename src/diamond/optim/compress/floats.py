"""Numbers in 16 bits, summed on the wire."""

from __future__ import annotations

import torch

from diamond.optim.compress.codec import Dice, Layout


class Half:
    """bfloat16 or float16. A value too large for float16 becomes infinite, as a GradScaler expects."""

    summable = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def encode(self, flat: torch.Tensor, layout: Layout, dice: Dice) -> torch.Tensor:
        return flat.to(self.dtype)

    def decode(self, sent: torch.Tensor, layout: Layout, dice: Dice) -> torch.Tensor:
        return sent.float()
