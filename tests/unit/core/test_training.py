"""What a training says of itself: read from anything a job may write, and what follows from it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diamond.core import training_words
from diamond.core.codec import decode, encode
from diamond.core.training import (
    MAX_LINE_BYTES,
    MAX_SIZES,
    Measure,
    Saves,
    Training,
    by_size,
    jobs_expected,
    merge,
    note,
    ordered,
    parse_line,
)

LINE: dict[str, Any] = {
    "t": 1700000000.0, "job": "job_1", "step": 1200, "until": 10000, "steps": 40, "world": 4, "nodes": 2,
    "device": "NVIDIA H200", "parallel": "ddp", "precision": "bf16", "global_batch": 256, "per_rank": 64,
    "accumulate": 1, "step_s": 0.21, "compute_s": 0.15, "comm_s": 0.03, "data_s": 0.01, "save_s": 0.002,
    "other_s": 0.018, "sync_s": None, "samples_per_s": 1219.0, "noise_scale": 812.0, "noise_by_group": [1.0, 2.0],
    "grad_sqr": 1.0, "grad_var": 2.0, "memory_peak_bytes": 123456789, "lr_scale": 1.0, "generation": 0, "restarts": 0,
    "saves": {"count": 3, "blocked_s": 0.03, "took_s": 1.2, "interval_s": 72.0}, "ends_at": 1700003600.0,
    "slowest": {"rank": 3, "host": "node2", "ratio": 1.8}, "of_a_later_version": {"deep": [1]}, "grows": True,
    "first_batch": 64, "max_batch": 512, "samples": 153600, "until_samples": 2560000, "parallel_why": "fits",
}  # fmt: skip

anything = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
measures = st.builds(
    Measure,
    t=st.floats(0, 1e9),
    step=st.integers(0, 100),
    nodes=st.integers(1, 3),
    world=st.integers(1, 3),
    global_batch=st.sampled_from([None, 32, 64]),
    samples_per_s=st.none() | st.floats(0, 1e6),
)


def test_a_line_of_the_library_is_read_whole() -> None:
    found = parse_line(json.dumps(LINE).encode())
    assert found is not None
    known = {key: value for key, value in encode(found).items() if key in LINE}
    assert known == {key: LINE[key] for key in known} and len(known) == len(LINE) - 4
    assert sum(found.parts.values()) == pytest.approx(0.21)
    assert found.remaining_s == pytest.approx(8800 * 0.21)
    assert decode(Training, encode(Training(latest=found, by_size=tuple(by_size([found]))))).latest == found


def test_samples_are_counted_by_steps_where_nothing_else_is_said() -> None:
    said = parse_line(json.dumps(LINE))
    old = parse_line(json.dumps({**LINE, "samples": None, "until_samples": -1, "grows": 1}))
    least = parse_line(json.dumps({"t": 1.0, "step": 12, "until": 20}))
    assert said is not None and (said.samples_done, said.samples_in_all) == (153600, 2560000)
    assert old is not None and (old.samples_done, old.samples_in_all, old.grows) == (1200 * 256, 10000 * 256, None)
    assert least is not None and (least.samples_done, least.samples_in_all) == (None, None)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "ddp, a copy of the model on each rank (fits)"),
        ({"parallel": "fsdp", "parallel_why": None}, "fsdp, the model in shards over all ranks"),
        ({"parallel": "theirs"}, "theirs (fits)"),
        ({"parallel": ""}, ""),
    ],
)
def test_the_technique_in_words(fields: dict[str, Any], words: str) -> None:
    found = parse_line(json.dumps({**LINE, **fields}))
    assert found is not None and training_words.technique(found) == words


def test_a_batch_says_that_it_is_of_all_ranks_together() -> None:
    told = Measure(t=1.0, step=1, global_batch=32, per_rank=16, world=2, noise_scale=100.0)
    assert training_words.batch(told) == "32 = 16 × 2 ranks"
    assert training_words.batch(replace(told, per_rank=8, accumulate=2)) == "32 = 8 × 2 × 2 ranks"
    assert training_words.batch(replace(told, per_rank=None)) == "32 = 16 × 2 ranks"
    assert training_words.batch(replace(told, world=1)) == "32"
    assert training_words.shared(1000, 3) == "1,000 over 3 ranks"
    assert training_words.noise(told).endswith("The batch is 32 = 16 × 2 ranks.")


@given(st.dictionaries(st.sampled_from(sorted(LINE)), anything))
def test_whatever_a_field_holds(changed: dict[str, Any]) -> None:
    found = parse_line(json.dumps({**LINE, **changed}))
    if found is None:
        return
    for value in (*vars(found).values(), *vars(found.saves or Saves()).values()):
        if isinstance(value, float | int):
            assert math.isfinite(value) and value >= 0
        if isinstance(value, str):
            assert len(value) <= 80 and value.isprintable()
    json.dumps(encode(found), allow_nan=False)
    stands = Training(latest=found, by_size=tuple(by_size([found])), remaining_s=found.remaining_s)
    assert all(isinstance(each, str) for each in training_words.outlook(stands))
    training_words.parts(found), training_words.batch(found), training_words.where(found)
    training_words.checkpoints(found)


@given(st.binary(max_size=200) | anything.map(lambda each: json.dumps(each).encode()))
def test_whatever_a_line_holds(raw: bytes) -> None:
    parse_line(raw)


@pytest.mark.parametrize(
    "raw",
    [
        b"[" * 5000, b'{"t": ' + b"9" * 7000 + b', "step": 1}', b'{"t": NaN, "step": 1.0}', b'{"t": 1.0, "step": true}',
        b'{"t": 1e999, "step": 1}', b'{"t": 1.0, "step": 1.5}', b'{"t": 1, "step": -1}   ',
        json.dumps({**LINE, "more": "x" * MAX_LINE_BYTES}).encode(), b'{"t": "1", "step": 1}\xff',
    ],
)  # fmt: skip
def test_what_is_no_measure(raw: bytes) -> None:
    assert parse_line(raw) is None


def test_text_cannot_turn_the_rest_of_a_page_around() -> None:
    found = parse_line(json.dumps({**LINE, "device": "a\u202eb\x1b[31m\nc" + "d" * 500, "precision": 5}))
    assert found is not None and found.device == "ab[31mc" + "d" * 70 and found.precision == ""


def at(step: int, until: int | None = 1000, step_s: float | None = 10.0, took_s: float = 0.0) -> Measure:
    return Measure(t=0.0, step=step, until=until, step_s=step_s, saves=Saves(count=1, took_s=took_s))


@pytest.mark.parametrize(
    ("measure", "asked", "expected"),
    [
        (at(0), {"walltime_s": 3600}, 3),  # 10,000 s
        (at(0), {"walltime_s": 3600, "startup_s": 1600}, 5),
        (at(0, took_s=100.0), {"walltime_s": 3600, "startup_s": 1000}, 4),
        (at(0), {"walltime_s": 3600, "left_s": 3600}, 2),
        (at(640), {"walltime_s": 3600, "left_s": 3600}, 0),
        (at(640, took_s=1.0), {"walltime_s": 3600, "left_s": 3600}, 1),
        (at(1000), {"walltime_s": 3600}, 0),
        (at(2000), {"walltime_s": 3600}, 0),
        (at(0), {"walltime_s": None, "left_s": math.inf}, 0),
        (at(0), {"walltime_s": None}, 1),
        (at(0, until=None), {"walltime_s": 3600}, None),
        (at(0, step_s=None), {"walltime_s": 3600}, None),
        (at(0), {"walltime_s": 60, "startup_s": 60}, None),
        (at(0), {"walltime_s": 60, "startup_s": 55}, None),
    ],
)
def test_jobs_expected(measure: Measure, asked: dict[str, Any], expected: int | None) -> None:
    assert jobs_expected(measure, **asked) == expected


@given(
    step=st.integers(0, 1000),
    step_s=st.floats(0.001, 100),
    walltime_s=st.floats(1, 1e5),
    startup_s=st.floats(0, 1e4),
    left_s=st.floats(0, 1e5),
)
def test_the_jobs_expected_are_enough_and_not_one_too_many(
    step: int, step_s: float, walltime_s: float, startup_s: float, left_s: float
) -> None:
    measure = at(step, step_s=step_s, took_s=1.0)
    jobs = jobs_expected(measure, walltime_s=walltime_s, startup_s=startup_s, left_s=left_s)
    usable, now = walltime_s - startup_s - 1.0, max(0.0, left_s - 1.0)
    remaining = (1000 - step) * step_s
    if jobs is None:
        assert usable < step_s
        return
    slack = 1e-6 * (remaining + abs(usable))
    assert now + jobs * usable >= remaining - slack
    if jobs:
        assert now + (jobs - 1) * usable < remaining + slack
    more = jobs_expected(measure, walltime_s=walltime_s, startup_s=startup_s, left_s=left_s + walltime_s)
    assert more is not None and more <= jobs, "time that is left never asks for more jobs"


@given(st.lists(measures, max_size=30))
def test_sizes(found: list[Measure]) -> None:
    rows = by_size(found)
    told = [each for each in found if each.samples_per_s is not None]
    sizes = {(each.nodes, each.world, each.global_batch, each.device) for each in told}
    assert {(row.nodes, row.world, row.global_batch, row.device) for row in rows} == sizes and len(rows) == len(sizes)
    assert sum(row.windows for row in rows) == len(told)
    for row in rows:
        own = [
            each
            for each in told
            if (each.nodes, each.world, each.global_batch) == (row.nodes, row.world, row.global_batch)
        ]
        assert row.best_samples_per_s == max(each.samples_per_s or 0 for each in own)
        assert row.at == max(each.t for each in own)
        assert row.samples_per_s in [each.samples_per_s for each in own if each.t == row.at]
    assert [row.at for row in rows] == sorted((row.at for row in rows), reverse=True)


@given(st.lists(measures, max_size=20), st.integers(0, 20))
def test_sizes_of_several_jobs_are_those_of_all_their_lines(found: list[Measure], cut: int) -> None:
    whole = by_size(found)
    table: dict[Any, Any] = {}
    for half in (found[:cut], found[cut:]):
        for row in by_size(half):
            merge(table, row)
    assert ordered(table) == whole


def test_the_sizes_of_a_hostile_job_are_bounded() -> None:
    table: dict[Any, Any] = {}
    for number in range(10_000):
        note(table, Measure(t=float(number), step=1, world=number + 1, samples_per_s=1.0))
    assert len(table) == MAX_SIZES and ordered(table)[0].world == 10_000


@pytest.mark.parametrize(
    ("stands", "words"),
    [
        (Training(remaining_s=9000.0, jobs_expected=3, walltime_s=3600.0, chained=True),
         "About 2h 30m of training left at this pace. About 3 more jobs of 1h expected."),
        (Training(remaining_s=300.0, jobs_expected=1, walltime_s=5400.0, chained=True),
         "About 5m of training left at this pace. About 1 more job of 1h 30m expected."),
        (Training(remaining_s=300.0, jobs_expected=0, walltime_s=5400.0),
         "About 5m of training left at this pace. It should be done within this job."),
        (Training(remaining_s=7200.0, jobs_expected=1, walltime_s=3600.0),
         "About 2h of training left at this pace. That is longer than its job may run (1h), and none follows it."),
        (Training(remaining_s=10.0, jobs_expected=None, walltime_s=5.0, chained=True),
         "About 10s of training left at this pace. A job of 5s is too short to get further."),
        (Training(remaining_s=9000.0, jobs_expected=3, walltime_s=3600.0, chained=True, stage="waiting"),
         "About 2h 30m of training left at the pace of its last job. About 3 more jobs of 1h expected."),
        (Training(remaining_s=7200.0, jobs_expected=3, walltime_s=3600.0, stage="waiting"),
         "About 2h of training left at the pace of its last job. "
         "That is longer than the next job may run (1h), and none follows that one."),
        (Training(remaining_s=300.0, jobs_expected=1, walltime_s=3600.0, stage="waiting"),
         "About 5m of training left at the pace of its last job. "
         "The next job should finish it, if it goes on from a checkpoint."),
        (Training(remaining_s=7200.0, jobs_expected=3, walltime_s=3600.0, over_s=5400.0, stage="waiting"),
         "About 2h of training left at the pace of its last job. "
         "That is 1h 30m more than max_duration leaves it: run it again with a larger one."),
        (Training(remaining_s=300.0, jobs_expected=1, stage="waiting"),
         "About 5m of training left at the pace of its last job."),
        (Training(remaining_s=7200.0, jobs_expected=3, walltime_s=3600.0, stage="ending"),
         "About 2h of training left at the pace of its last job."),
        (Training(remaining_s=7200.0, jobs_expected=3, walltime_s=3600.0, chained=True, stage="ending"),
         "About 2h of training left at the pace of its last job. About 3 more jobs of 1h expected."),
        (Training(remaining_s=7200.0, jobs_expected=3, walltime_s=3600.0, stage="over"), ""),
        (Training(remaining_s=0.0), "All steps are done."),
        (Training(remaining_s=0.4), "About 1s of training left at this pace."),
        (Training(), ""),
    ],
)  # fmt: skip
def test_the_outlook_in_words(stands: Training, words: str) -> None:
    assert " ".join(training_words.outlook(stands)) == words
