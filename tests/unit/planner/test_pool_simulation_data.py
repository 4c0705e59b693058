"""What simulations are made of: tables of applications, workloads, accounting logs, and the figures that come out."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import numpy as np
import pytest

from diamond.core.errors import InvalidInput
from diamond.planner.pools.batches import Batch
from diamond.planner.pools.simulation import Application, Arrival, Outcome, TaskOutcome, in_bursts, read_arrivals
from diamond.planner.pools.simulation.fairness import alone_s
from diamond.planner.pools.simulation.outcomes import Contention
from diamond.planner.pools.simulation.running import counts_of
from tests.unit.planner.pool_worlds import EPOCH_STEPS, REFERENCE, nodes, step_s, toy, write_application

WORKLOAD = "name,time,application,num_replicas,batch_size\nb,20.5,toy,2,32\na,10,toy,1,16\n"
COLUMNS = """2
       JobID    JobName    UID               Start              Submit                 End   Priority TimelimitR ExitCode   NNodes
------------ ---------- ------ ------------------- ------------------- ------------------- ---------- ---------- -------- --------
11\tx y\t00000\t2022-11-01T10:00:00\t2022-11-01T09:00:00\t2022-11-01T10:30:00\t1\t120\t0:0\t2
12\tz\t00000\tUnknown\t2022-11-01T09:00:00\tUnknown\t1\t120\t0:0\t2
"""  # noqa: E501 - as Slurm writes it
PIPES = """JobID|User|Submit|Start|End|Timelimit|NNodes|AllocTRES
7|ada|2026-01-01T00:00:00|2026-01-01T00:00:10|2026-01-01T01:00:10|1-02:00:00|2|billing=8,gres/gpu=6,node=2
7.batch|ada|2026-01-01T00:00:00|2026-01-01T00:00:10|2026-01-01T01:00:10|1-02:00:00|1|
8|bob|2026-01-01T00:01:00|2026-01-01T00:02:00|2026-01-01T00:02:00|UNLIMITED|1|
9|bob|2026-01-01T00:02:00|2026-01-01T00:02:30|2026-01-01T00:03:00|UNLIMITED|3|
"""


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Application:
    return toy(tmp_path_factory.mktemp("tables"))["toy"]


def test_times_are_those_of_the_tables_and_in_between(application: Application) -> None:
    for counts in ((1,), (2,), (1, 2), (4, 4)):
        for per_gpu in (4, 6, 16):
            whole, sync = step_s(len(counts), sum(counts), per_gpu)
            assert application.step("any", counts, per_gpu) == pytest.approx((whole, whole - sync))
    whole, sync = step_s(3, 6, 8)  # no such placement was measured
    assert application.step("any", (2, 2, 2), 8) == pytest.approx((whole, whole - sync), rel=0.05)
    assert application.step("any", (2, 1), 8) == application.step("any", (1, 2), 8)


def test_more_than_was_ever_measured_has_the_nearest_times(application: Application) -> None:
    step, compute = application.step("any", (4,) * 20, 16)
    assert step_s(4, 16, 16)[0] == pytest.approx(step)
    assert 0 < compute <= step


def test_work_goes_as_gain_by_time(application: Application) -> None:
    batch = Batch(per_gpu=16, accumulation=1)
    total = 2 * 2 * 16
    step, compute = application.step("any", (2,), 16)
    variance = np.array([4.0, 5.0, 6.0])
    gain = (variance + 1) / (variance * REFERENCE / total + 1)
    assert application.rates("any", (2,), batch) == pytest.approx(gain * REFERENCE / (step + compute))
    assert application.ends == pytest.approx([EPOCH_STEPS * REFERENCE * epoch for epoch in (1, 2, 3)])


def test_the_best_batch_is_no_worse_than_any_other(application: Application) -> None:
    for counts in ((1,), (2,), (4, 4)):
        rates, batches = application.best("any", counts)
        for total in range(16, 65, 8):
            split = application.split("any", counts, total)
            if split.per_gpu >= 4:
                assert (application.rates("any", counts, split) <= rates * 1.02).all()
        for epoch, batch in enumerate(batches):
            assert application.rates("any", counts, batch)[epoch] == pytest.approx(rates[epoch])
    assert application.most_gpus("any") == 16
    assert (application.best("any", (4,) * 5)[0] == 0).all()  # 20 GPUs would have less than four samples each


def test_a_batch_is_split_over_gpus_and_passes(application: Application) -> None:
    assert application.split("any", (1,), 16) == Batch(16, 0)
    assert application.split("any", (1,), 20) == Batch(10, 1)  # a second pass, to see the noise
    assert application.split("any", (2,), 64) == Batch(16, 1)
    assert application.split("any", (4,), 64) == Batch(16, 0)
    assert application.fitted("any", (4,), Batch(40, 0)) == Batch(16, 0)


def test_a_kind_that_was_not_measured_is_refused(tmp_path: Path) -> None:
    application = toy(tmp_path, kinds=("fast",))["toy"]
    assert not application.runs_on("slow")
    with pytest.raises(InvalidInput, match="toy was not measured on 'slow' GPUs"):
        application.limits("slow")


def test_ncf_runs_on_one_gpu_at_one_batch(tmp_path: Path) -> None:
    write_application(tmp_path, "ncf")
    ncf = Application.read(tmp_path, "ncf")
    assert (ncf.fixed_batch, ncf.most_gpus("any")) == (64, 1)
    assert ncf.best("any", (1,))[1][0].total(1) == 64


def test_tables_that_are_wrong_say_where(tmp_path: Path) -> None:
    home = write_application(tmp_path) / "toy"
    table = home / "placements.csv"
    good = table.read_text()
    table.write_text(good + "22,8,fast,0.1\n")
    with pytest.raises(InvalidInput, match=r"placements\.csv, line 26, column step_time: 'fast' is not a number"):
        Application.read(tmp_path, "toy")
    table.write_text(good.replace("sync_time", "sync", 1))
    with pytest.raises(InvalidInput, match=r"placements\.csv, line 1: no column sync_time"):
        Application.read(tmp_path, "toy")
    table.unlink()
    with pytest.raises(InvalidInput, match=r"placements\.csv: cannot be read"):
        Application.read(tmp_path, "toy")
    with pytest.raises(InvalidInput, match=r"no validation-BATCH\.csv"):
        Application.read(tmp_path, "other")
    with pytest.raises(InvalidInput, match=r"'\.\./toy' is no folder's name"):
        Application.read(tmp_path / "other", "../toy")


@pytest.mark.parametrize(
    ("table", "line", "message"),
    [
        ("placements.csv", "2.5,8,1,0.1", "column placement: '2.5' is not a digit"),
        ("placements.csv", "20,8,1,0.1", "column placement: '20' is not a digit"),
        ("placements.csv", "22,8,0,0", "column step_time: a step takes time"),
        ("placements.csv", "22,8,nan,0", "column step_time: nan is out of range"),
        ("placements.csv", "22,0,1,0", "column local_bsz: 0 is out of range"),
        ("validation-16.csv", "1,3,0,1,4", "column progress: 1 is not above"),
        ("validation-16.csv", "1e6,3,0,0,0", "column grad_var: there is no gradient"),
        ("validation-16.csv", "1e6,3,0,-1,4", "column grad_sqr: -1 is out of range"),
    ],
)
def test_measurements_that_cannot_be_are_refused(tmp_path: Path, table: str, line: str, message: str) -> None:
    path = write_application(tmp_path) / "toy" / table
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(InvalidInput, match=message):
        Application.read(tmp_path, "toy")


def test_workloads_come_in_order(tmp_path: Path) -> None:
    path = tmp_path / "workload.csv"
    path.write_text(WORKLOAD)
    assert read_arrivals(path) == (Arrival("a", 10.0, "toy", 1, 16), Arrival("b", 20.5, "toy", 2, 32))
    assert [one.at for one in in_bursts(read_arrivals(path), 20.0)] == [0.0, 20.0]


def test_accounting_in_columns(tmp_path: Path) -> None:
    path = tmp_path / "slurm.log"
    path.write_text(COLUMNS)
    (one,) = read_arrivals(path, gpus_per_node=3)
    assert (one.name, one.at, one.gpus, one.duration_s, one.limit_s) == ("11", 0.0, 6, 1800.0, 7200.0)


def test_accounting_as_sacct_prints_it(tmp_path: Path) -> None:
    path = tmp_path / "slurm.txt"
    path.write_text(PIPES)
    first, second = read_arrivals(path)
    assert (first.name, first.owner, first.gpus, first.duration_s) == ("7", "ada", 6, 3600.0)
    assert first.limit_s == 26 * 3600.0
    assert (second.name, second.at, second.gpus, second.limit_s) == ("9", 120.0, 3, None)


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("30", 1800.0),
        ("30:15", 1815.0),
        ("02:00:00", 7200.0),
        ("1-12", 36 * 3600.0),
        ("1-12:30", 36.5 * 3600),
        ("1-00:00:01", 86_401.0),
        ("Partition_Limit", None),
        ("infinite", None),
        ("", None),
    ],
)
def test_time_limits_are_read_as_slurm_writes_them(tmp_path: Path, said: str, seconds: float | None) -> None:
    path = tmp_path / "slurm.txt"
    path.write_text(PIPES.replace("1-02:00:00|2", f"{said}|2"))
    assert read_arrivals(path)[0].limit_s == seconds


@pytest.mark.parametrize(
    "text",
    [
        "\ufeff" + PIPES,
        PIPES.replace("\n", "\r\n"),
        PIPES.replace("\n", "|\n"),
        PIPES.replace("User", "JobName").replace("ada", '"a').replace("bob", "b\\|c"),
        PIPES.replace("T00:02:30", "T01:02:30+01:00"),
    ],
    ids=["byte order mark", "carriage returns", "sacct -p", "quotes and bars", "time zones"],
)
def test_accounting_as_other_tools_leave_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "slurm.txt"
    path.write_bytes(text.encode())
    found = read_arrivals(path)
    assert [(one.name, one.at, one.gpus, one.duration_s) for one in found] == [
        ("7", 0.0, 6, 3600.0),
        ("9", 120.0, 3, 30.0),
    ]


def test_accounting_may_come_through_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=(PIPES,))
    writer.start()
    assert len(read_arrivals(pipe)) == 2
    writer.join()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "line 1: these are neither a workload's columns nor"),
        (PIPES.encode("utf-16"), "line 1: not UTF-8"),
        (PIPES.replace("ada", "\xe9").encode("latin-1"), "line 2: not UTF-8"),
        (PIPES.replace("ada", "a\0").encode(), "line 2: holds a NUL"),
        (PIPES.encode() + b"x" * 200_000, "line 6: longer than 100000 bytes"),
    ],
    ids=["empty", "utf-16", "latin-1", "nul", "endless line"],
)
def test_what_is_no_table_says_so(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(InvalidInput, match=message):
        read_arrivals(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (WORKLOAD.replace("10,", "soon,"), "line 3, column time: 'soon' is not a number"),
        (WORKLOAD.replace("toy,1", "toy,1.5"), "line 3, column num_replicas: 1.5 is not a whole number"),
        (WORKLOAD.replace("toy,1", "toy,0"), "line 3, column num_replicas: 0 is out of range"),
        (WORKLOAD.replace("b,20", "a,20"), "a is there twice"),
        (WORKLOAD.split("\n")[0], "no task in it"),
        (PIPES.replace("2026-01-01T01:00:10", "noon"), "line 2, column End: 'noon' is not a time"),
        (PIPES.replace("1-02:00:00", "1:x"), "line 2, column Timelimit: '1:x' is not a time"),
        (PIPES.replace("|NNodes", "|Nodes"), "line 1: no column NNodes"),
        (PIPES.replace("|Timelimit", "|Limit"), "line 1: no column Timelimit"),
        (COLUMNS.replace("\t2\n", "\n", 1), "line 4, column NNodes: is missing"),
        (WORKLOAD.replace("10,", "1e300,"), "line 3, column time: 1e300 is out of range"),
        (WORKLOAD.replace(",16", ",1e30"), "line 3, column batch_size: 1e30 is out of range"),
        (WORKLOAD.replace(",16", ",16,7"), "line 3: more values than the 5 columns"),
        (WORKLOAD.replace("a,10", '"' + "a\n" * 80_000), "line .*field larger than field limit"),
        (PIPES.replace("|ada|", "|a|da|", 1), "line 2: more values than the 8 columns"),
        (PIPES.replace("|User|", "|JobID|"), "line 1: column JobID is there twice"),
        (PIPES.replace("T01:00:10", "T00:00:09"), "line 2, column End: is before Start"),
        (PIPES.replace("gpu=6", "gpu=" + "6" * 5000), "line 2, column AllocTRES: 6+ GPUs are too many"),
        (PIPES.replace("1-02:00:00", "9" * 400 + "-0:00"), "line 2, column Timelimit: '9+' is not a time"),
        (PIPES.replace("9|bob", "7|bob"), "line 5, column JobID: 7 is there twice, first in line 2"),
    ],
)
def test_workloads_that_are_wrong_say_where(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "workload.txt"
    path.write_text(text)
    with pytest.raises(InvalidInput, match=message):
        read_arrivals(path)


def test_contention_is_a_mean_over_a_life() -> None:
    found = Contention([(0.0, 10.0), (5.0, 10.0), (5.0, 20.0)])
    assert found.mean(0.0, 10.0) == pytest.approx(2.0)  # alone, then three
    assert found.mean(5.0, 20.0) == pytest.approx((3 * 5 + 10) / 15)


def test_a_fair_share_alone(application: Application) -> None:
    pool = nodes(2, gpus=4)
    spans = np.diff(application.ends, prepend=0.0)
    one = application.best("any", (1,))[0]
    half = application.best("any", (4,))[0]
    assert alone_s(application, pool, 16.0, 64) == pytest.approx((spans / one).sum() * 2)  # half a GPU
    assert alone_s(application, pool, 2.0, 64) <= (spans / half).sum() * (1 + 1e-9)
    assert alone_s(application, pool, 1.0, 64) < alone_s(application, pool, 2.0, 64)


def test_shapes_become_placements() -> None:
    assert counts_of(3, 10, 4) == (4, 4, 2)
    assert counts_of(2, 3, 4) == (2, 1)
    assert counts_of(1, 3, 4) == (3,)


def test_figures_of_an_outcome() -> None:
    tasks = tuple(
        TaskOutcome(
            name=str(index),
            application="toy",
            submitted_at=0.0,
            started_at=10.0 * index,
            ended_at=100.0 * (index + 1),
            gpu_s=3600.0,
            restarts=index,
            lost_s=60.0,
            lost_gpu_s=360.0,
            alone_s=150.0,
        )
        for index in range(2)
    )
    found = Outcome(policy="p", tasks=tasks, decisions_s=(0.1, 0.3), total_gpus=72).summary()
    assert found["completion_mean_s"] == 150.0
    assert found["makespan_s"] == 200.0
    assert found["gpu_hours"] == 2.0
    assert found["utilisation"] == pytest.approx(0.5)
    assert found["rho_worst"] == pytest.approx(4 / 3)
    assert found["rho_over_1_share"] == 0.5
    assert found["restarts_mean"] == 0.5
    assert found["lost_gpu_hours"] == pytest.approx(0.2)
    assert found["wait_mean_s"] == 5.0
    assert (found["decision_mean_s"], found["decision_max_s"]) == pytest.approx((0.2, 0.3))
