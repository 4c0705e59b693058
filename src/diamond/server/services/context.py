"""What every service function works with, made once at start."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from diamond.core.home import Home
from diamond.server.identity_providers import IdentityProviders
from diamond.server.services.allowances import Allowances, Caps
from diamond.server.services.ingestion import Ingestion
from diamond.server.services.sealing import FILE_NAME, Keys
from diamond.server.services.throttling import Throttle
from diamond.server.store.blobs import BlobStore
from diamond.server.store.db import Database
from diamond.server.store.measures import MeasureStore
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
    throttle: Throttle = field(default_factory=Throttle)
    identity: IdentityProviders = field(default_factory=IdentityProviders)
    caps: Caps = field(default_factory=Caps)
    allowances: Allowances = field(default_factory=Allowances)
    agent_token_s: float = 30 * 86_400.0  # how long an agent's token works unless it is renewed
    secret_keys: Keys | None = None  # where the operator put them; None: beside the database

    @cached_property
    def measures(self) -> MeasureStore:
        """What trainings measured of themselves."""
        return MeasureStore(self.streams)

    @cached_property
    def ingestion(self) -> Ingestion:
        """How fast agents send, and how full the disk is."""
        return Ingestion(self.caps, self.home.server)

    @cached_property
    def keys(self) -> Keys:
        """What secrets are sealed with."""
        return self.secret_keys or Keys(self.home.server / FILE_NAME)
