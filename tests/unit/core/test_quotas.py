"""Limits as people write them, and days and months as they are counted."""

from __future__ import annotations

import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diamond.core.codec import decode, encode
from diamond.core.errors import InvalidInput
from diamond.core.quotas import Limits, Use, by_day, check_kind, day_of, left_of, month_of, parse_bytes, shown


def utc(*parts: int) -> float:
    return datetime.datetime(*parts, tzinfo=datetime.UTC).timestamp()  # type: ignore[misc,arg-type]


def test_limits_survive_the_wire_and_name_what_is_wrong() -> None:
    limits = decode(Limits, {"tasks": 3, "gpu_hours": 10, "storage_bytes": "1.5 GiB"}, strict=True)
    assert limits == Limits(tasks=3, gpu_hours=10.0, storage_bytes=1_610_612_736)
    assert decode(Limits, encode(limits), strict=True) == limits
    assert limits.given() == {"tasks": 3, "gpu_hours": 10.0, "storage_bytes": 1_610_612_736}
    for field, bad in (
        ("tasks", -1),
        ("tasks", True),
        ("nodes", 2.5),
        ("gpu_hours", "many"),
        ("gpu_hours", float("nan")),
        ("storage_bytes", "12 parsecs"),
        ("storage_bytes", -5),
        ("colour", 1),
    ):
        with pytest.raises(InvalidInput) as caught:
            decode(Limits, {field: bad}, strict=True)
        assert caught.value.field == field


def test_sizes_are_read_and_shown_in_units_of_1024() -> None:
    assert [parse_bytes(text) for text in ("0", "1k", "2 KiB", "3MB", "1T")] == [0, 1024, 2048, 3 * 2**20, 2**40]
    assert [shown("storage_bytes", value) for value in (0, 1023, 1024, 3.25 * 2**30)] == [
        "0 B", "1023 B", "1 KiB", "3.2 GiB",
    ]  # fmt: skip
    assert (shown("gpus", 4), shown("gpu_hours", 2.5), shown("gpu_hours", 100.0)) == ("4", "2.5", "100")


def test_what_is_left_is_never_less_than_nothing() -> None:
    assert left_of(Limits(tasks=2, gpus=8), Use(tasks=5, gpus=3, nodes=7)) == {"tasks": 0, "gpus": 5}


def test_kinds_and_names_go_together() -> None:
    check_kind("every-user", "all")
    check_kind("user", "alice")
    for kind, name in (("group", "x"), ("every-user", "alice"), ("user", ""), ("user", "a\x00b")):
        with pytest.raises(InvalidInput):
            check_kind(kind, name)


def test_months_are_calendar_months_in_utc() -> None:
    assert month_of(utc(2026, 12, 31, 23, 59, 59)) == (utc(2026, 12, 1), utc(2027, 1, 1))
    assert month_of(utc(2028, 2, 1)) == (utc(2028, 2, 1), utc(2028, 3, 1))
    assert day_of(utc(1970, 1, 2)) == 1


@given(st.floats(0, 4e9), st.floats(0, 40 * 86_400))
def test_the_days_of_a_span_add_up_to_it(start: float, length: float) -> None:
    days = by_day(start, start + length)
    assert sum(days.values()) == pytest.approx((start + length) - start, abs=1e-3)
    assert all(0 <= seconds <= 86_400 for seconds in days.values())
    assert sorted(days) == list(range(day_of(start), day_of(start) + len(days)))
