"""Communication compression for any optimizer: gradients under DDP and FSDP2, factors of K-FAC, bytes counted.

wire = attach(DistributedDataParallel(model), Compress(grad="powersgd:16:int8"))
...                                  # train as always
print(wire.ratio, wire.relative_error)
"""

from diamond.optim.compress.counting import Count, RelativeError
from diamond.optim.compress.factors import average_factors
from diamond.optim.compress.hooks import attach
from diamond.optim.compress.spec import FACTORS, GRADS, Compress
from diamond.optim.compress.triangle import Packed, pack, unpack
from diamond.optim.compress.wire import Wire

__all__ = [
    "FACTORS",
    "GRADS",
    "Compress",
    "Count",
    "Packed",
    "RelativeError",
    "Wire",
    "attach",
    "average_factors",
    "pack",
    "unpack",
]
