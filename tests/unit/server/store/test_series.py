from __future__ import annotations

import math
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diamond.server.store import series
from diamond.server.store.curves import MAX_GAPS, Curve, CurvePoint
from diamond.server.store.series import Ingested, SeriesInfo
from testing.stores import JOB, Stores, losses

# numpy brings threads of its own; the children here use none of them.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def test_lines_become_points(stores: Stores) -> None:
    assert stores.series.ingest(JOB, "metrics") == Ingested(0, 0, 0)
    assert stores.log(*losses(2), {"step": 2, "t": 1002, "loss": 7, "lr": 1e-3}) == Ingested(3, 4, 0)
    assert stores.series.ingest(JOB, "metrics") == Ingested(0, 0, 0)
    assert stores.series.keys(JOB) == [
        SeriesInfo("loss", "metrics", 3, 2.0, 1002.0, 7.0),
        SeriesInfo("lr", "metrics", 1, 2.0, 1002.0, 1e-3),
    ]
    assert stores.series.curve(JOB, "loss") == Curve(
        "loss", "step", 3, [CurvePoint(0, 0, 0, 0, 0), CurvePoint(1, *[0.125] * 4), CurvePoint(2, 7, 7, 7, 7)]
    )
    assert stores.values("loss", x="time") == [(1000, 0), (1001, 0.125), (1002, 7)]
    assert stores.series.curve(JOB, "never") == Curve("never", "step", 0, [])


def test_a_line_counts_when_its_end_arrives(stores: Stores) -> None:
    stores.write_raw(b'{"step": 1, "t": 5, "lo')
    assert stores.series.ingest(JOB, "metrics") == Ingested(0, 0, 0)
    stores.write_raw(b'ss": 2}\n{"step": 2')
    assert stores.series.ingest(JOB, "metrics") == Ingested(1, 1, 0)
    stores.write_raw(b', "t": 6, "loss": 3}\n')
    assert stores.series.ingest(JOB, "metrics") == Ingested(1, 1, 0)
    assert stores.values("loss") == [(1, 2), (2, 3)]


def test_without_steps_lines_are_numbered(stores: Stores) -> None:
    stores.log({"t": 10.0, "sys/cpu": 93.0}, {"t": 11.0, "sys/cpu": 94.0}, stream="util")
    stores.log("broken", {"t": 12.0, "sys/cpu": 95.0}, stream="util")
    assert stores.values("sys/cpu") == [(0, 93), (1, 94), (2, 95)]


def test_without_a_time_a_point_is_drawn_over_steps_only(stores: Stores) -> None:
    stores.log({"step": 1, "loss": 2}, {"step": 2, "t": 50, "loss": 3})
    assert stores.values("loss") == [(1, 2), (2, 3)]
    assert stores.values("loss", x="time") == [(50, 3)]


def test_a_key_in_both_streams_is_two_series(stores: Stores) -> None:
    stores.log({"step": 1, "t": 1, "gpu": 1})
    stores.log({"t": 2, "gpu": 2}, stream="util")
    assert [(info.key, info.stream) for info in stores.series.keys(JOB)] == [("gpu", "metrics"), ("gpu", "util")]
    assert stores.values("gpu") == [(1, 1)]
    assert stores.values("gpu", stream="util") == [(0, 2)]


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[1, 2]",
        "7",
        '{"step": 1, "t": 1, "loss": 1',
        '{"step": 1, "t": 1, "loss": 1} {"step": 2}',
        '{"step": 1, "t": 1, "loss": 1},{"step": 2, "t": 2, "loss": 2}',
        '{"step": "1", "t": 1, "loss": 1}',
        '{"step": true, "t": 1, "loss": 1}',
        '{"step": NaN, "t": 1, "loss": 1}',
        '{"step": 1, "t": "Infinity", "loss": 1}',
        '{"step": 1%s, "t": 1, "loss": 1}' % ("0" * 400),
        '{"step": 1%s, "t": 1, "loss": 1}' % ("0" * 5000),
        "[" * 100_000,
        '{"step": 1, "t": 1, "loss": "high"}',
        '{"step": 1, "t": 1, "loss": null}',
        '{"step": 1, "t": 1, "loss": true}',
        '{"step": 1, "t": 1, "loss": [1]}',
        '{"step": 1, "t": 1, "loss": 1%s}' % ("0" * 400),
        '{"step": 1, "t": 1, "": 1}',
        '{"step": 1, "t": 1, "a\\u0007b": 1}',
        '{"step": 1, "t": 1, "a\\ud800b": 1}',
        '{"step": 1, "t": 1, "%s": 1}' % ("k" * 201),
    ],
)
def test_what_cannot_be_used_is_counted_and_harms_nothing_else(stores: Stores, line: str) -> None:
    assert stores.log({"step": 0, "t": 0, "loss": 5}, line, "", "  \r", {"step": 9, "t": 9, "loss": 6}).dropped == 1
    assert stores.series.dropped(JOB) == {"metrics": 1}
    assert stores.values("loss") == [(0, 5), (9, 6)]
    assert [info.key for info in stores.series.keys(JOB)] == ["loss"]


def test_bytes_that_are_not_text_spoil_only_what_they_are_in(stores: Stores) -> None:
    stores.write_raw(
        b'{"step": 1, "loss": 1, "\xff": 2}\n\xfe\xff\n{"step": 2, "loss": "\xff"}\n{"step": 3, "loss": 3}\n'
    )
    assert stores.series.ingest(JOB, "metrics") == Ingested(3, 2, 3)
    assert stores.values("loss") == [(1, 1), (3, 3)]


def test_spaces_and_windows_line_ends_are_fine(stores: Stores) -> None:
    stores.write_raw(b'  {"step": 1, "loss": 1}\r\n\t{"step": 2, "loss": 2} \n')
    assert stores.series.ingest(JOB, "metrics") == Ingested(2, 2, 0)


def test_keys_may_be_any_printable_text(stores: Stores) -> None:
    keys = ["train/loss", "../../etc/passwd", "Gewinn α→β 🎉", "a b", "k" * 200, "/", "."]
    stores.log({"step": 1, "t": 1, **{key: number for number, key in enumerate(keys)}})
    assert [info.key for info in stores.series.keys(JOB)] == sorted(keys)
    for number, key in enumerate(keys):
        assert stores.values(key) == [(1, number)]
    assert {path.parent for path in stores.root.rglob("*.f64")} == {stores.folder()}


def test_a_job_has_at_most_512_keys(stores: Stores) -> None:
    stores.log({"t": 1, **{f"sys/{number}": 1 for number in range(12)}}, stream="util")
    first = stores.log({"step": 1, **{f"key{number}": number for number in range(600)}})
    assert first == Ingested(1, 500, 100)
    second = stores.log({"step": 2, "key3": 33, "key599": 1, "new": 1})
    assert second == Ingested(1, 1, 2)
    assert len(stores.series.keys(JOB)) == 512
    assert stores.values("key3") == [(1, 3), (2, 33)]
    assert stores.series.dropped(JOB) == {"util": 0, "metrics": 102}


def test_values_that_are_not_finite_are_counted_apart(stores: Stores) -> None:
    stores.log(
        {"step": 1, "loss": 1.0},
        {"step": 2, "loss": "Infinity"},
        '{"step": 3, "loss": NaN}',
        {"step": 4, "loss": "-Infinity"},
        {"step": 5, "loss": 5.0},
        {"step": 6, "loss": "NaN"},
    )
    curve = stores.series.curve(JOB, "loss")
    assert [point.x for point in curve.points] == [1, 5]
    assert (curve.count, curve.non_finite, curve.first_non_finite_x) == (6, 4, 2.0)
    assert stores.series.curve(JOB, "loss", x_min=5, x_max=5).non_finite == 0
    (info,) = stores.series.keys(JOB)
    assert math.isnan(info.last_value)
    stores.log(*({"step": step, "nan": "NaN"} for step in range(5)))
    assert stores.series.curve(JOB, "nan", max_points=2).points == []


def test_gaps_say_where_values_were_no_numbers(stores: Stores) -> None:
    stores.log(*({"step": step, "loss": "NaN" if step in (3, 4, 7) else 1.0} for step in (*range(6), 9, 8, 7, 6)))
    curve = stores.series.curve(JOB, "loss")
    assert curve.gaps == ((3.0, 4.0), (7.0, 7.0)), "in order of x, whatever the order they came in"
    assert stores.series.curve(JOB, "loss", x_min=4, x_max=6).gaps == ((4.0, 4.0),)
    stores.log(*({"step": step, "odd": "Infinity" if step % 2 else 1.0} for step in range(4 * MAX_GAPS)))
    assert len(stores.series.curve(JOB, "odd").gaps) == MAX_GAPS


def test_one_spike_in_a_million_survives_and_is_fast(stores: Stores) -> None:
    count, spike = 1_000_000, 777_777
    lines = [b'{"step":%d,"t":%d,"loss":0.5}\n' % (step, step) for step in range(count)]
    lines[spike] = b'{"step":%d,"t":%d,"loss":1e9}\n' % (spike, spike)
    lines[spike + 1] = b'{"step":%d,"t":%d,"loss":-1e9}\n' % (spike + 1, spike + 1)
    stores.write_raw(b"".join(lines))
    assert stores.series.ingest(JOB, "metrics") == Ingested(count, count, 0)
    took_s = []
    for _ in range(5):
        begun = time.perf_counter()
        curve = stores.series.curve(JOB, "loss")
        took_s.append(time.perf_counter() - begun)
    assert min(took_s) < 0.2
    assert curve.count == count
    assert not curve.exact
    assert len(curve.points) == 2000
    assert max(point.max for point in curve.points) == 1e9
    assert min(point.min for point in curve.points) == -1e9
    assert curve.points[-1].x == count - 1
    assert all(point.min <= point.mean <= point.max for point in curve.points)
    zoomed = stores.series.curve(JOB, "loss", x_min=spike - 2, x_max=spike + 2)
    assert zoomed.exact
    assert [point.last for point in zoomed.points] == [0.5, 0.5, 1e9, -1e9, 0.5]


@pytest.mark.parametrize(("count", "max_points"), [(1, 1), (7, 1), (10, 10), (11, 10), (19, 10), (1000, 7)])
def test_every_sample_is_in_one_bucket(stores: Stores, count: int, max_points: int) -> None:
    chance = random.Random(count)
    samples = [chance.uniform(-5, 5) for _ in range(count)]
    stores.log(*({"step": step, "loss": value} for step, value in enumerate(samples)))
    curve = stores.series.curve(JOB, "loss", max_points=max_points)
    assert len(curve.points) == min(count, max_points)
    assert curve.exact is (count <= max_points)
    begin = 0
    for point in curve.points:
        bucket = samples[begin : int(point.x) + 1]
        assert (point.min, point.max, point.last) == (min(bucket), max(bucket), bucket[-1])
        assert point.mean == pytest.approx(sum(bucket) / len(bucket))
        begin += len(bucket)
    assert begin == count


def test_a_resumed_run_goes_back_and_range_queries_still_find_everything(stores: Stores) -> None:
    stores.log(*({"step": step, "t": step, "loss": 1.0} for step in range(100)))
    stores.log(*({"step": step, "t": 50 + step, "loss": 2.0} for step in range(60, 160)))
    curve = stores.series.curve(JOB, "loss")
    xs = [point.x for point in curve.points]
    assert xs == sorted(xs)
    assert len(xs) == 200
    assert stores.values("loss", x_min=98, x_max=101) == [(98, 1), (98, 2), (99, 1), (99, 2), (100, 2), (101, 2)]
    assert len(stores.values("loss", x_max=59)) == 60
    assert stores.values("loss", x_min=159) == [(159, 2)]
    assert stores.values("loss", x_min=500) == []
    few = stores.series.curve(JOB, "loss", max_points=10)
    assert [point.x for point in few.points] == sorted(point.x for point in few.points)
    assert {(point.min, point.max) for point in few.points if 65 <= point.x <= 95} == {(1.0, 2.0)}


def test_huge_values_have_a_mean(stores: Stores) -> None:
    stores.log(*({"step": step, "loss": value} for step, value in enumerate([1.7e308] * 3 + [-1.7e308] * 3)))
    points = stores.series.curve(JOB, "loss", max_points=2).points
    assert [point.mean for point in points] == [1.7e308, -1.7e308]


def test_wrong_arguments_are_refused(stores: Stores) -> None:
    for job_id in ("..", "job_01kbx3v9qz\n", "job_0123456/../x"):
        for call in (stores.series.keys, stores.series.delete, stores.series.dropped):
            with pytest.raises(ValueError, match="not a job id"):
                call(job_id)
        with pytest.raises(ValueError, match="not a job id"):
            stores.series.ingest(job_id, "metrics")
        with pytest.raises(ValueError, match="not a job id"):
            stores.series.curve(job_id, "loss")
    with pytest.raises(ValueError, match="no curves"):
        stores.series.ingest(JOB, "log")
    with pytest.raises(ValueError, match="no curves"):
        stores.series.curve(JOB, "loss", stream="log")
    with pytest.raises(ValueError, match="not a stream"):
        stores.series.ingest(JOB, "other")
    with pytest.raises(ValueError, match="cannot draw"):
        stores.series.curve(JOB, "loss", max_points=0)
    with pytest.raises(ValueError, match="cannot draw"):
        stores.series.curve(JOB, "loss", x="epoch")  # type: ignore[arg-type]


def test_delete(stores: Stores) -> None:
    stores.log(*losses(3))
    stores.series.delete(JOB)
    stores.series.delete(JOB)
    assert not stores.folder().exists()
    assert len(stores.values("loss")) == 3, "the streams still have it"


def test_numpy_is_loaded_by_curves_alone() -> None:
    code = "import sys, diamond.server.store.series; sys.exit('numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_line_too_long_is_skipped_to_its_end(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "_BATCH_BYTES", 100)
    stores.log({"step": 1, "loss": 1})
    stores.write_raw(b"x" * 250)
    assert stores.series.ingest(JOB, "metrics") == Ingested(0, 0, 1)
    stores.write_raw(b"x" * 130)
    assert stores.series.ingest(JOB, "metrics") == Ingested(0, 0, 0)
    stores.write_raw(b'"loss": 9}\n{"step": 2, "loss": 2}\n')
    assert stores.series.ingest(JOB, "metrics") == Ingested(1, 1, 0)
    assert stores.values("loss") == [(1, 1), (2, 2)]


@pytest.mark.parametrize("tail", [b"", b'{"step": 99'])
@pytest.mark.parametrize("segment_bytes", [100, 110])
def test_a_hole_in_the_stream_costs_the_lines_in_it(tmp_path: Path, segment_bytes: int, tail: bytes) -> None:
    stores = Stores(tmp_path, segment_bytes=segment_bytes)
    lines = b"".join(b'{"step": %d, "loss": %d}\n' % (step, step) for step in range(10, 40))
    stores.write_raw(lines + tail)
    begin, end = 2 * segment_bytes, 3 * segment_bytes
    (tmp_path / "streams" / JOB[-2:] / JOB / "metrics" / f"{begin:016d}.seg").unlink()
    # Behind a hole nothing tells a whole line from the rest of one, so the first is always given up.
    steps = [step for step in range(10, 40) if (step - 9) * 25 <= begin or (step - 10) * 25 > end]
    assert stores.series.ingest(JOB, "metrics").dropped == 1
    assert stores.values("loss") == [(step, step) for step in steps]


def test_whoever_looks_sees_what_has_gathered(stores: Stores) -> None:
    stores.write(*losses(3))
    stores.write({"t": 1.0, "sys/cpu": 5.0}, stream="util")
    stores.series.gather(JOB, "metrics", 0, stores.streams.size(JOB, "metrics"))
    assert not stores.folder().exists(), "little has gathered: nothing was done for it"
    assert [(info.key, info.count) for info in stores.series.keys(JOB)] == [("loss", 3), ("sys/cpu", 1)]
    stores.write(*losses(2, start=3))
    assert len(stores.values("loss")) == 5
    stores.write("broken")
    assert stores.series.dropped(JOB) == {"metrics": 1, "util": 0}


def test_much_that_gathers_is_taken_in_by_whoever_brings_it(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(series, "_GATHERED_BYTES", 500)
    taken = []
    real = stores.series.ingest
    monkeypatch.setattr(stores.series, "ingest", lambda *which: taken.append(real(*which)))
    for step in range(100):
        begin = stores.streams.size(JOB, "metrics")
        stores.write(*losses(1, start=step))
        stores.series.gather(JOB, "metrics", begin, stores.streams.size(JOB, "metrics"))
    assert len(taken) == stores.streams.size(JOB, "metrics") // 500
    assert sum(one.points for one in taken) > 80
    assert len(stores.values("loss")) == 100
