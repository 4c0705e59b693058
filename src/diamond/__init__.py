"""Diamond: train any model, with any dataset, on any machine.

Importing this package costs nothing: training scripts do it on every rank, so the client
(and the HTTP library behind it) is loaded only when it is first named.
"""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Client", "__version__"]

if TYPE_CHECKING:
    from diamond.sdk.client import Client


def __getattr__(name: str) -> Any:
    if name == "Client":
        from diamond.sdk.client import Client

        return Client
    raise AttributeError(f"module 'diamond' has no attribute {name!r}")
