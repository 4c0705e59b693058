"""A stream store and a series store over one folder, with the few calls tests make of them."""

from __future__ import annotations

import json
from pathlib import Path

from diamond.server.store.series import Ingested, SeriesStore
from diamond.server.store.streams import StreamStore

JOB = "job_01kbx3v9qz8m2c4d6"


class Stores:
    """A SeriesStore on its streams, fed with lines."""

    def __init__(self, root: Path, **options: int) -> None:
        self.root = root
        self.streams = StreamStore(root / "streams", **options)
        self.series = SeriesStore(root / "series", self.streams)

    def write(self, *records: object, stream: str = "metrics") -> None:
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in records)
        self.write_raw(text.encode(), stream=stream)

    def write_raw(self, raw: bytes, *, stream: str = "metrics") -> None:
        self.streams.append(JOB, stream, self.streams.size(JOB, stream), raw)

    def log(self, *records: object, stream: str = "metrics") -> Ingested:
        self.write(*records, stream=stream)
        return self.series.ingest(JOB, stream)

    def values(self, key: str, **options: object) -> list[tuple[float, float]]:
        curve = self.series.curve(JOB, key, **options)  # type: ignore[arg-type]
        assert curve.exact
        return [(point.x, point.last) for point in curve.points]

    def folder(self) -> Path:
        return self.root / "series" / JOB[-2:] / JOB


def losses(count: int, start: int = 0) -> list[dict[str, float]]:
    return [{"step": step, "t": 1000.0 + step, "loss": step / 8} for step in range(start, start + count)]
