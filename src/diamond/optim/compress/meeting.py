"""The ranks that send each other something: whether they have met."""

from __future__ import annotations

import torch.distributed as dist

from diamond.optim.errors import OptimError


def together(what: str) -> dist.ProcessGroup:
    """All ranks.

    Raises:
        OptimError: they have not met.
    """
    if not dist.is_available() or not dist.is_initialized():
        raise OptimError(
            f"{what}: this process has not met any others; call torch.distributed.init_process_group before, in a "
            "script that torchrun or Diamond starts, or leave compression out on a single process"
        )
    everyone = dist.group.WORLD
    assert everyone is not None
    return everyone
