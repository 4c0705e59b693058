"""Curves of jobs that log more than is kept of them: thinned, never cut, and right in every figure read off them."""

from __future__ import annotations

import errno
import itertools
import json
import math
import os
import random
from pathlib import Path

import numpy as np
import pytest

from diamond.core.errors import StorageFull
from diamond.server.store import records, series
from diamond.server.store.points import MAX_KEYS
from diamond.server.store.series import SeriesStore
from diamond.server.store.streams import MIB
from testing.dying import in_child, killed_at
from testing.stores import JOB, Stores

# numpy brings threads of its own; the children here use none of them.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
ROOM = 40_000  # bytes of points
WINDOW = 20_000  # bytes of lines of each stream


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stores:
    return small_stores(tmp_path, monkeypatch)


def small_stores(root: Path, monkeypatch: pytest.MonkeyPatch) -> Stores:
    monkeypatch.setattr(series, "MIN_WINDOW_BYTES", 4000)
    monkeypatch.setattr(series, "_BATCH_BYTES", 5000)
    stores = Stores(root, segment_bytes=1000, cap_bytes=10_000)
    stores.series = SeriesStore(root / "series", stores.streams, cap_bytes=2 * ROOM)
    return stores


def noisy(count: int, seed: int = 1) -> list[float]:
    rng = random.Random(seed)
    values = [rng.gauss(0.0, 1.0) for _ in range(count)]
    values[count // 7] = 1e6  # a spike in what will be thinned out most
    values[count // 9] = -1e6
    return values


def log_all(stores: Stores, values: list[float], at_once: int = 500) -> None:
    for first in range(0, len(values), at_once):
        stores.log(
            *({"step": first + n, "t": first + n, "loss": v} for n, v in enumerate(values[first : first + at_once]))
        )


def test_a_curve_over_its_room_is_thinned_and_its_figures_stay(small: Stores) -> None:
    values = noisy(20_000)
    log_all(small, values)
    (info,) = small.series.keys(JOB)
    assert (info.count, info.last_step, info.last_value, info.thinned) == (20_000, 19_999, values[-1], True)
    curve = small.series.curve(JOB, "loss", max_points=100_000)
    assert curve.thinned and curve.exact
    assert curve.count * records.RECORD_BYTES <= ROOM
    assert curve.count > 800
    kept = {int(point.x): point.last for point in curve.points}
    assert all(values[step] == value for step, value in kept.items()), "nothing is made up"
    assert {0, 20_000 // 7, 20_000 // 9, 19_999} <= kept.keys(), "first, largest, smallest, last"
    assert kept.keys() >= set(range(19_900, 20_000)), "what is newest is complete"
    quarters = [sum(1 for step in kept if low <= step < low + 5000) for low in range(0, 20_000, 5000)]
    assert quarters == sorted(quarters), "the further back, the sparser"
    assert quarters[0] > 50


def test_what_is_on_disk_is_bounded(small: Stores) -> None:
    most = 0
    for seed in range(10):
        log_all(small, noisy(4000, seed))
        most = max(most, small.series.held_bytes(JOB) + small.streams.held_bytes(JOB))
    lines = 10 * 4000 * 40
    assert most < ROOM + WINDOW + 10_000 < lines / 10
    assert small.streams.size(JOB, "metrics") > lines, "offsets count every byte there was"


def test_an_agent_that_repeats_itself_is_told_how_far_it_was(small: Stores) -> None:
    raw = b"".join(b'{"step": %d, "loss": %d}\n' % (step, step) for step in range(5000))
    for start in range(0, len(raw), 3000):
        again = max(0, start - 2500)
        size = small.streams.append(JOB, "metrics", again, raw[again : start + 3000])
        assert size == min(len(raw), start + 3000)
        small.series.gather(JOB, "metrics", again, size)
    assert small.streams.append(JOB, "metrics", 0, raw[:100]) == len(raw)
    (info,) = small.series.keys(JOB)
    assert (info.count, info.last_value) == (5000, 4999)


def test_a_key_with_few_points_keeps_them_all(small: Stores) -> None:
    small.log(*({"step": step, "val/acc": step / 100} for step in range(100)))
    log_all(small, noisy(20_000))
    assert small.values("val/acc") == [(step, step / 100) for step in range(100)]
    assert {info.key: info.thinned for info in small.series.keys(JOB)} == {"val/acc": False, "loss": True}


def test_where_a_loss_was_first_no_number_is_remembered(small: Stores) -> None:
    small.log({"step": 0, "loss": 1.0}, {"step": 1, "loss": 2.0}, '{"step": 2, "loss": "NaN"}', {"step": 3, "loss": 3})
    log_all(small, noisy(20_000))
    curve = small.series.curve(JOB, "loss", max_points=10)
    assert curve.first_non_finite_x == 2


def test_a_new_key_on_every_line_is_bounded_and_said(small: Stores) -> None:
    small.log(*({"step": step, f"key{step}": step, "loss": step} for step in range(3000)))
    assert len(small.series.keys(JOB)) == MAX_KEYS
    (told,) = small.series.unusable(JOB).values()
    assert told.dropped == told.crowded_out == 3001 - MAX_KEYS
    names = os.listdir(small.folder())
    assert len(names) <= MAX_KEYS + 4


def test_lines_without_an_end_do_not_pile_up(small: Stores) -> None:
    for _ in range(200):
        small.write_raw(b"x" * 1000)
        small.series.ingest(JOB, "metrics")
    small.log("", {"step": 1, "loss": 5})
    assert small.streams.held_bytes(JOB) < WINDOW + 10_000
    assert small.values("loss") == [(1, 5)]


def test_squeezing_leaves_less_and_says_so(small: Stores) -> None:
    values = noisy(3000)
    log_all(small, values)
    before = small.series.held_bytes(JOB)
    assert not small.series.unusable(JOB)["metrics"].squeezed
    small.series.squeeze(JOB, ROOM // 4)
    assert small.series.held_bytes(JOB) < before / 3
    assert small.series.unusable(JOB)["metrics"].squeezed
    curve = small.series.curve(JOB, "loss")
    assert curve.thinned
    assert (min(p.min for p in curve.points), max(p.max for p in curve.points)) == (min(values), max(values))
    assert small.series.keys(JOB)[0].count == 3000
    log_all(small, noisy(100))
    assert small.series.keys(JOB)[0].count == 3100


def test_squeezing_a_job_without_curves_makes_none(small: Stores) -> None:
    small.series.squeeze(JOB, 1000)
    assert not small.folder().exists()


@pytest.mark.parametrize("damage", ["short records", "no records", "torn state", "old state", "nothing but records"])
def test_a_power_failure_after_thinning_costs_only_what_was_not_safe(small: Stores, damage: str) -> None:
    log_all(small, noisy(10_000))
    state = small.folder() / "state.json"
    old = state.read_bytes()
    log_all(small, [5.0] * 100)
    held = {info.key: info.count for info in small.series.keys(JOB)}
    assert held == {"loss": 10_100}
    largest = max(small.folder().glob("*.f64"), key=lambda path: path.stat().st_size)
    match damage:
        case "short records":
            os.truncate(largest, largest.stat().st_size - 24 * 50)
        case "no records":
            largest.unlink()
        case "torn state":
            os.truncate(state, 30)
        case "old state":
            state.write_bytes(old)
        case "nothing but records":
            state.unlink()
            (small.folder() / "kept.json").unlink()
    small.log({"step": 1, "loss": 7.0})
    (info,) = small.series.keys(JOB)
    curve = small.series.curve(JOB, "loss", max_points=100_000)
    assert info.last_value == curve.points[-1].last or curve.points[-1].x >= 0
    if damage in ("torn state", "old state"):
        assert info.count == 10_101, "what was not counted is taken in from the stream again"
        assert curve.count > 500
    elif damage == "nothing but records":
        assert 0 < info.count < 10_101, "the lines that are left are all that is known"
    assert small.series.curve(JOB, "loss").points


def test_killed_at_every_call_thinning_has_happened_or_has_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = noisy(900)
    for nth in itertools.count(1):
        root = tmp_path / str(nth)
        stores = small_stores(root, monkeypatch)
        stores.series = SeriesStore(root / "series", stores.streams, cap_bytes=10**6)
        stores.log(*({"step": step, "t": step, "loss": value, "lr": step} for step, value in enumerate(values)))
        stores.write({"step": 900, "loss": 0.5})
        stores.series = SeriesStore(root / "series", stores.streams, cap_bytes=24_000)
        killed = killed_at(nth, lambda stores=stores: stores.series.ingest(JOB, "metrics"))
        seen = stores.series.curve(JOB, "loss", max_points=2000)
        assert all(point.last == (values[int(point.x)] if point.x < 900 else 0.5) for point in seen.points)
        stores.series.ingest(JOB, "metrics")
        after = stores.series.curve(JOB, "loss", max_points=2000)
        steps = [point.x for point in after.points]
        assert steps == sorted(set(steps)), "no point twice"
        assert {0, 900 // 7, 900 // 9, 899, 900} <= set(steps)
        assert {info.key: (info.count, info.last_value) for info in stores.series.keys(JOB)} == {
            "loss": (901, 0.5),
            "lr": (900, 899),
        }
        stores.series.ingest(JOB, "metrics")
        stores.write({"step": 901, "loss": 0.25})
        stores.series.ingest(JOB, "metrics")
        assert stores.series.keys(JOB)[0].last_value == 0.25
        if not killed:
            break
    assert nth > 20


def test_a_reader_beside_a_writer_never_sees_garbage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = small_stores(tmp_path, monkeypatch)
    log_all(stores, [float(step) for step in range(1000)])

    def write() -> None:
        for first in range(1000, 15_000, 200):
            stores.log(*({"step": step, "t": step, "loss": float(step)} for step in range(first, first + 200)))

    child = in_child(write)
    last = 0.0
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        curve = stores.series.curve(JOB, "loss", max_points=100_000)
        steps = [point.x for point in curve.points]
        assert steps == sorted(set(steps))
        assert steps[0] == 0
        assert all(point.last == point.x for point in curve.points)
        assert steps[-1] >= last
        last = steps[-1]
    assert stores.series.keys(JOB)[0].count == 15_000


def test_a_disk_that_fills_while_points_are_thinned_changes_nothing(
    small: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_all(small, noisy(1500))
    before = small.series.curve(JOB, "loss", max_points=10_000)
    real = os.fsync

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageFull):
            small.series.squeeze(JOB, 4000)
        assert small.series.curve(JOB, "loss", max_points=10_000).points == before.points
    assert os.fsync is real
    small.series.squeeze(JOB, 4000)
    assert small.series.curve(JOB, "loss", max_points=10_000).count < len(before.points)


def test_curves_from_before_they_were_thinned_are_read(small: Stores) -> None:
    small.log({"step": 1, "t": 1, "loss": 2.0})
    path = small.folder() / "state.json"
    state = json.loads(path.read_text())
    old = {name: state["metrics"][name] for name in ("consumed", "lines", "dropped", "torn")}
    path.write_text(json.dumps({"metrics": {**old, "keys": {"loss": [1, 1.0, 1.0, 2.0]}}}))
    small.log({"step": 2, "t": 2, "loss": 3.0})
    assert small.values("loss") == [(1, 2), (2, 3)]
    assert small.series.keys(JOB)[0].count == 2


def test_sparser_keeps_what_must_be_kept_whatever_the_values() -> None:
    rng = random.Random(7)
    for count in (65, 100, 1001, 20_000):
        values = np.array([rng.choice([math.nan, math.inf, -math.inf, rng.random()]) for _ in range(count)])
        rows = np.stack([np.arange(count, dtype=float), np.zeros(count), values], axis=1)
        for most in (records.LEAST_LEFT, 99, 500):
            left, spans = records.sparser(rows, [], most)
            assert sum(logged for _, logged in spans) <= count
            assert len(left) <= most
            steps = left[:, 0]
            assert (np.diff(steps) > 0).all()
            assert (steps[0], steps[-1]) == (0, count - 1)
            finite = values[np.isfinite(values)]
            kept = left[:, 2][np.isfinite(left[:, 2])]
            assert (kept.min(), kept.max()) == (finite.min(), finite.max())


def test_a_cap_too_small_to_hold_curves_is_refused(tmp_path: Path) -> None:
    stores = Stores(tmp_path)
    with pytest.raises(ValueError, match="holds no curves"):
        SeriesStore(tmp_path / "series", stores.streams, cap_bytes=MIB)
