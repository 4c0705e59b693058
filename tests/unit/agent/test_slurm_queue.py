"""What squeue says, recorded from Slurm 22.05 and 24.11, and what it means."""

from __future__ import annotations

from pathlib import Path

import pytest

from diamond.agent.schedulers.slurm.hostlist import MAX_HOSTS, compress, expand
from diamond.agent.schedulers.slurm.pending import REASONS, explain
from diamond.agent.schedulers.slurm.queue import (
    DIVIDER,
    Status,
    ordinal,
    parse_exit_code,
    parse_places,
    parse_rows,
    parse_sacct,
    parse_statuses,
    parse_time,
)
from diamond.agent.schedulers.slurm.states import STATES, Stage, meaning
from diamond.core.reasons import Reason

GOLDEN = Path(__file__).parent / "golden"
VERSIONS = ("slurm-22.05", "slurm-24.11")


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_rows(version: str) -> None:
    rows = {row.name: row for row in parse_rows((GOLDEN / version / "squeue.txt").read_text())}
    assert len(rows) == 15
    running = rows["running"]
    assert (running.job_id, running.state, running.cpus, running.partition, running.nodes) == (
        "1",
        "RUNNING",
        1,
        "debug",
        "c1",
    )
    assert running.start_at and running.end_at == running.start_at + 120
    assert rows['odd | "name" ünï'].state == "RUNNING"
    assert rows["two"].job_id == "6", "the rest of a name with a line end is no row"
    assert rows["held"].reason == "JobHeldUser" and rows["held"].start_at is None
    assert rows["begin"].start_at == 1893456000
    assert rows["both"].partition == "gpu,long"
    assert expand(rows["wide"].nodes) == ("c2", "c4")
    assert (rows["suspended"].state, rows["cancelled"].state) == ("SUSPENDED", "CANCELLED")
    assert rows["never"].reason == "DependencyNeverSatisfied"


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_exit_codes(version: str) -> None:
    found = parse_statuses((GOLDEN / version / "status.txt").read_text())
    assert found == {"2": Status(exit_code=3), "3": Status(signal=9)}


@pytest.mark.parametrize("version", VERSIONS)
def test_recorded_places(version: str) -> None:
    places = parse_places((GOLDEN / version / "places.txt").read_text())
    assert places["10", "debug"] == (1, 3)
    assert ("9", "debug") not in places and ("14", "gpu") not in places, "who is held stands in nobody's way"


def test_places_by_priority_then_age() -> None:
    lines = [("7", "50", "a"), ("5", "100", "a,b"), ("6", "100", "a"), ("8_[1-9]", "1", "a")]
    places = parse_places("\n".join(DIVIDER.join(line) for line in lines))
    assert places["5", "a"] == (1, 3) and places["6", "a"] == (2, 3) and places["7", "a"] == (3, 3)
    assert places["5", "b"] == (1, 1)


@pytest.mark.parametrize("text", ["", "\n\n", "CLUSTER: alpha", "1\x1fRUNNING", "x" + "\x1f" * 9, "\x00\xff garbage"])
def test_lines_that_are_no_rows(text: str) -> None:
    assert parse_rows(text) == []
    assert parse_statuses(text) == {} and parse_places(text) == {} and parse_sacct(text) == {}


def test_a_name_may_hold_the_divider() -> None:
    line = DIVIDER.join(["7", "PENDING", "None", "N/A", "N/A", "1", "x", "p", "", "a\x1fb"])
    (row,) = parse_rows(line)
    assert (row.name, row.cpus) == ("a\x1fb", 0)


def test_accounting() -> None:
    text = (
        "12|CANCELLED by 1001|0:0|1794728052|1794728060\n13|OUT_OF_ME+|0:125|Unknown|Unknown\n13.batch|FAILED|1:0||\n"
    )
    found = parse_sacct(text)
    row, status = found["12"]
    assert (row.state, row.reason, row.end_at) == ("CANCELLED", "by uid 1001", 1794728060)
    assert found["13"][1].signal == 125 and set(found) == {"12", "13"}
    assert status.exit_code == 0


def test_small_parts() -> None:
    assert [parse_exit_code(text) for text in ("3:0", "0:9", "768", "9", "4021", "x", "1:x")] == [
        (3, 0),
        (0, 9),
        (3, 0),
        (0, 9),
        (15, 53),
        None,
        None,
    ]
    assert [parse_time(text) for text in ("N/A", "Unknown", "", "0", "1794728052")] == [None] * 4 + [1794728052.0]
    assert parse_time("2026-11-15T06:55:50") is not None
    assert [ordinal(number) for number in (1, 2, 3, 4, 11, 12, 13, 21, 102, 111)] == [
        "1st",
        "2nd",
        "3rd",
        "4th",
        "11th",
        "12th",
        "13th",
        "21st",
        "102nd",
        "111th",
    ]


@pytest.mark.parametrize(
    ("short", "names"),
    [
        ("c1", ("c1",)),
        ("c[1-3,7],login1", ("c1", "c2", "c3", "c7", "login1")),
        ("n[008-011]", ("n008", "n009", "n010", "n011")),
        ("r[1-2]n[1-2]", ("r1n1", "r1n2", "r2n1", "r2n2")),
        ("", ()),
        ("(null)", ()),
        ("None assigned", ()),
        ("odd[", ("odd[",)),
    ],
)
def test_host_lists(short: str, names: tuple[str, ...]) -> None:
    assert expand(short) == names


def test_host_lists_back() -> None:
    for short in ("c1", "c[1-3,7]", "n[008-011]", "c[9-11]", "gpu-a[1-2],gpu-b1", "login"):
        assert compress(expand(short)) == short
    assert compress(["c2", "c1", "c1", "x"]) == "c[1-2],x"
    assert len(expand("c[1-99999999999]")) == MAX_HOSTS


# States: the whole table, so that a change of it is seen

GOLDEN_STATES = {
    "PENDING": ("waiting", None),
    "RUNNING": ("running", None),
    "SUSPENDED": ("running", None),
    "COMPLETED": ("over", None),
    "FAILED": ("over", None),
    "CANCELLED": ("over", "CANCELLED"),
    "TIMEOUT": ("over", "TIME_LIMIT"),
    "DEADLINE": ("over", "TIME_LIMIT"),
    "NODE_FAIL": ("over", "NODE_FAIL"),
    "BOOT_FAIL": ("over", "NODE_FAIL"),
    "PREEMPTED": ("over", "PREEMPTED"),
    "OUT_OF_MEMORY": ("over", "OUT_OF_MEMORY"),
    "COMPLETING": ("running", None),
    "CONFIGURING": ("waiting", None),
    "POWER_UP_NODE": ("waiting", None),
    "RESIZING": ("running", None),
    "SIGNALING": ("running", None),
    "STAGE_OUT": ("running", None),
    "STOPPED": ("running", None),
    "EXPEDITING": ("waiting", None),
    "REQUEUED": ("waiting", None),
    "REQUEUE_FED": ("waiting", None),
    "REQUEUE_HOLD": ("waiting", None),
    "SPECIAL_EXIT": ("waiting", None),
    "RESV_DEL_HOLD": ("waiting", None),
    "REVOKED": ("over", "LOST"),
    "LAUNCH_FAILED": ("over", "LAUNCH_FAILED"),
    "RECONFIG_FAIL": ("over", "NODE_FAIL"),
    "UPDATE_DB": ("unknown", None),
    "OOM": ("over", "OUT_OF_MEMORY"),
}


def test_every_state_of_slurm() -> None:
    assert {name: (one.stage.value, one.reason) for name, one in STATES.items()} == GOLDEN_STATES
    for name, one in STATES.items():
        assert one.text or one.reason is None, f"{name} ends a job without a word"


def test_states_in_combination_and_unknown_ones() -> None:
    assert meaning("FAILED,LAUNCH_FAILED").reason is Reason.LAUNCH_FAILED
    assert meaning("CANCELLED+COMPLETING").stage is Stage.RUNNING
    assert meaning("running").stage is Stage.RUNNING
    assert (meaning("HOVERING").stage, meaning("HOVERING").text) == (Stage.UNKNOWN, "Slurm calls its state HOVERING")


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("Priority", "higher priority"),
        ("Resources", "busy"),
        ("JobHeldUser", "scontrol release 4711 (Slurm: JobHeldUser)"),
        ("JobHeldAdmin", "site's support"),
        ("DependencyNeverSatisfied", "launch it again"),
        ("PartitionTimeLimit", "slurm.time"),
        ("PartitionNodeLimit", "num_nodes"),
        ("PartitionConfig", "more than the partition has"),
        ("ReqNodeNotAvail, UnavailableNodes:c[1-2]", "down, drained or reserved"),
        ("ReqNodeNotAvail, May be reserved for other job", "comes first"),
        ("(ReqNodeNotAvail, Reserved for maintenance)", "maintenance"),
        ("Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority partitions", "kept for"),
        ("QOSMaxJobsPerUserLimit", "as many jobs running as you may"),
        ("QOSMaxCpuPerUserLimit", "as much as your QoS or account allows"),
        ("QOSMaxGRESPerUser", "as much as your QoS or account allows"),
        ("QOSMaxWallDurationPerJobLimit", "slurm.time"),
        ("QOSMaxNodePerJobLimit", "more than one job may have"),
        ("QOSGrpCpuLimit", "group uses as much"),
        ("AssocGrpCPUMinutesLimit", "budget"),
        ("AssocGrpBillingMinutes", "budget"),
        ("AssocGrpCPURunMinutesLimit", "may still take"),
        ("AssocMaxJobsLimit", "as many jobs running as you may"),
        ("AssocGrpNodeLimit", "group uses as much"),
        ("AssocMaxSubmitJobLimit", "in the queue as you may"),
        ("QOSMinGRES", "limit of your QoS"),
        ("launch failed requeued held", "scontrol release 4711"),
        ("uid 1000 not in group permitted to use this partition (x). groups allowed: y", "may not use this partition"),
        ("BeginTime", "--begin"),
        ("Licenses", "licences"),
        ("Reservation", "reservation has not begun"),
        ("BadConstraints", "slurm.constraint"),
        ("InvalidAccount", "slurm.account"),
    ],
)
def test_reasons_to_wait(reason: str, words: str) -> None:
    text = explain(reason, "4711")
    assert words in text and reason.strip("()") in text


def test_reasons_without_a_sentence() -> None:
    assert explain("SomethingNew2031") == "SomethingNew2031"
    assert explain("None") == explain("") == REASONS["None"]
