"""Several things at the same moment."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from diamond.core.errors import DiamondError


def at_once(*calls: Callable[[], Any]) -> list[Any]:
    """What each gave or raised, all begun at the same moment."""
    barrier = threading.Barrier(len(calls))
    results: list[Any] = [None] * len(calls)

    def work(number: int) -> None:
        barrier.wait()
        try:
            results[number] = calls[number]()
        except DiamondError as error:
            results[number] = error

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results
