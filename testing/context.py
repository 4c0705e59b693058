"""A server's insides without the server: what service functions work with, over any database."""

from __future__ import annotations

from pathlib import Path

from diamond.core.home import Home
from diamond.server.services.context import Context
from diamond.server.store.blobs import BlobStore
from diamond.server.store.db import Database
from diamond.server.store.series import SeriesStore
from diamond.server.store.streams import StreamStore


class Recorder:
    """A hub that remembers which topics were woken."""

    def __init__(self) -> None:
        self.topics: list[str] = []

    def notify(self, *topics: str) -> None:
        self.topics.extend(topics)


class Clock:
    """Time that moves only when told to."""

    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


def make_context(url: str, folder: Path, clock: Clock | None = None, *, has_schema: bool = False) -> Context:
    db = Database(url, sqlite_synchronous="OFF")  # processes are killed here, machines are not
    if not has_schema:
        db.migrate()
    home = Home(folder / "home")
    home.make()
    streams = StreamStore(home.server / "streams")
    return Context(
        home=home,
        db=db,
        streams=streams,
        series=SeriesStore(home.server / "series", streams),
        blobs=BlobStore(home.server / "blobs"),
        hub=Recorder(),
        epoch=db.epoch(),
        **({"clock": clock} if clock else {}),
    )
