"""Agents and servers of different versions: no stream is sent to a server that does not take it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from diamond.core.codec import encode
from diamond.core.errors import DiamondError, ProtocolError
from diamond.core.rundir import RunDir
from diamond.core.wire import FIRST_STREAMS, STREAMS, Welcome
from tests.unit.agent.test_reporter import Bench


class Versioned(Bench):
    """A server of any age. One that is old says nothing of streams, and refuses those it does not know."""

    takes: tuple[str, ...] = STREAMS

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.refuse = self._unknown
        self.hellos = 0

    def _unknown(self, raw: dict[str, Any]) -> DiamondError | None:
        wrong = [chunk["stream"] for chunk in raw["streams"] if chunk["stream"] not in self.takes]
        return ProtocolError(f"no stream {wrong[0]!r}") if wrong else None

    def call(self, method: str, path: str, body: Any = None, **how: Any) -> Any:
        if path != "/agent/hello":
            return super().call(method, path, body, **how)
        self.hellos = getattr(self, "hellos", 0) + 1
        answer = encode(Welcome(endpoint_id="e", endpoint_name="e", epoch="1", streams=self.takes))
        if self.takes == FIRST_STREAMS:
            del answer["streams"]
        return answer

    def told(self) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for report in self.sent:
            for chunk in report.streams:
                found[chunk.stream] = found.get(chunk.stream, b"") + chunk.raw()
        return found


class Old(Versioned):
    takes = FIRST_STREAMS


def trains(bench: Bench, **result: Any) -> Any:
    job = bench.job(log=b"begun\n", **result)
    RunDir(job.run_dir).stream("train").write_bytes(b'{"step": 1}\n')
    RunDir(job.run_dir).stream("metrics").write_bytes(b'{"step": 1, "loss": 1}\n')
    return job


def test_what_a_training_measures_is_told(tmp_path: Path) -> None:
    bench = Versioned(tmp_path)
    job = trains(bench, exit_code=0)
    bench.settle()
    assert bench.told()["train"] == b'{"step": 1}\n' and bench.delivered == [job] and bench.refused == 0


def test_an_older_server_gets_what_it_takes(tmp_path: Path) -> None:
    bench = Old(tmp_path)
    job = trains(bench, exit_code=0)
    bench.settle()
    assert set(bench.told()) == {"log", "metrics"} and bench.delivered == [job]
    assert bench.refused == 0 and "refused" not in bench.sent[-1].jobs[0].detail


@pytest.mark.parametrize("result", [{}, {"exit_code": 0}], ids=["running", "over"])
def test_a_server_that_becomes_an_older_one_is_asked_what_it_takes(tmp_path: Path, result: dict[str, Any]) -> None:
    bench = Versioned(tmp_path)
    bench.takes = FIRST_STREAMS
    job = trains(bench, **result)
    bench.settle()
    assert (bench.refused, bench.hellos) == (1, 1)
    assert set(bench.told()) == {"log", "metrics"}
    assert bench.delivered == ([job] if result else [])
    if result:
        assert "refused" not in bench.sent[-1].jobs[0].detail
