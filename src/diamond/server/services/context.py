"""What every service function works with, made once at start."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from diamond.core.home import Home
from diamond.server.store.blobs import BlobStore
from diamond.server.store.db import Database
from diamond.server.store.series import SeriesStore
from diamond.server.store.streams import StreamStore


class Notifier(Protocol):
    """The part of the hub that services use: tell whoever waits on these topics to look again."""

    def notify(self, *topics: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Context:
    home: Home
    db: Database
    streams: StreamStore
    series: SeriesStore
    blobs: BlobStore
    hub: Notifier
    epoch: str
    clock: Callable[[], float] = field(default=time.time)
