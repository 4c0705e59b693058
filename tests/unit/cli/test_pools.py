"""`diamond pool`: how a pool looks in a terminal, and mistakes that are seen before any server is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from diamond.cli import launch, main, pool_page
from diamond.core.errors import InvalidInput
from diamond.core.pools import Pilot, Pool, PoolDecision, PoolSpec, PoolTask
from diamond.core.slurm import SlurmOptions

NOW = 1_800_000_000.0
SPEC = PoolSpec(
    name="gpus", endpoint="hpc", nodes="2..8", accelerators="A100:4", slurm=SlurmOptions(partition="gpu"), memory="16"
)
PILOTS = (
    Pilot(task_id="tsk_000000001", job_id="job_1", state="RUNNING", host="n1", slots=4, used=3, started_at=NOW - 3600,
          ends_at=NOW + 10_800),
    Pilot(task_id="tsk_000000002", job_id="job_2", state="QUEUED", slots=4, pending_reason="Resources"),
)  # fmt: skip
TASKS = (
    PoolTask(task_id="tsk_000000003", name="train", owner="ana", state="RUNNING", slots=2, nodes=1, hosts=("n1",),
             least=1, most=8, resizable=True, reason="twice the GPUs would bring 1.2x", goodput=800.0, alone=400.0,
             step=30, until=100, restarts=1, predicted_end_at=NOW + 600),
    PoolTask(task_id="tsk_000000004", name="fixed", owner="ana", state="RUNNING", slots=1, least=1, most=1),
    PoolTask(task_id="", name="task 6 of another user", owner="ben", state="RUNNING", least=1, most=4, slots=2,
             moving=True),
    PoolTask(task_id="tsk_000000005", name="done", owner="ana", state="SUCCEEDED", submitted_at=NOW - 90,
             ended_at=NOW - 30),
)  # fmt: skip
DECISIONS = (
    PoolDecision(at=NOW - 60, task_id="tsk_000000003", task_name="train", slots=2, before=1, reason="a node came"),
    PoolDecision(at=NOW - 70, task_id="tsk_000000004", task_name="fixed", slots=1, before=0, reason="it fits"),
    PoolDecision(at=NOW - 80, task_id="tsk_000000003", task_name="train", slots=1, before=1, reason="its node died"),
    PoolDecision(at=NOW - 90, task_id="tsk_000000003", task_name="train", slots=0, before=1, reason="one is urgent"),
)
POOL = Pool(
    id="pol_1", name="gpus", spec=SPEC, endpoint="hpc", owner="ana", project="pde", nodes=1, wanted_nodes=2, slots=4,
    used=3, running=2, waiting=1, goodput=1.35, note="1 more node is asked for: Resources", pilots=PILOTS, tasks=TASKS,
    decisions=DECISIONS,
)  # fmt: skip


def page(pool: Pool, capsys: pytest.CaptureFixture[str]) -> list[str]:
    pool_page.print_page(pool, NOW)
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_the_page_says_who_has_what_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    lines = page(POOL, capsys)
    assert lines[:10] == [
        "gpus open pol_1",
        "endpoint hpc, partition gpu",
        "project pde",
        "nodes 1 held of 2..8, 2 wanted",
        "each node A100:4; a slot has 1 core, 16 GiB",
        "slots ████████░░ 3 of 4",
        "tasks 2 running, 1 waiting",
        "gain 1.4x the work of fixed equal shares (estimated)",
        "walltime 4h; let go after 10m idle",
        "note 1 more node is asked for: Resources",
    ]
    assert "n1 RUNNING ████████░░ 3 of 4 1h 00m in 3h 00m tsk_000000001" in lines
    waiting = lines.index("- QUEUED tsk_000000002")
    assert lines[waiting + 1] == "↳ Resources"
    train = lines.index("train tsk_000000003 ana RUNNING 2 of 1..8 n1 800 (2x) 30/100 in 10m 00s 1")
    assert lines[train + 1] == "↳ twice the GPUs would bring 1.2x"
    assert "fixed tsk_000000004 ana RUNNING 1 of 1" in lines
    assert "task 6 of another user ben saving to move 2 of 1..4, not measured yet" in lines
    assert any(line.startswith("done tsk_000000005 ana SUCCEEDED 1m 00s") for line in lines)
    newest = lines.index("1m ago train 1 → 2 slots")
    assert lines[newest + 1 :] == [
        "↳ a node came", "1m ago fixed begins with 1 slot", "↳ it fits", "1m ago train goes on with 1 slot",
        "↳ its node died", "1m ago train makes room: 1 slot freed", "↳ one is urgent",
    ]  # fmt: skip


def test_a_pool_that_holds_nothing_has_no_bars(capsys: pytest.CaptureFixture[str]) -> None:
    bare = PoolSpec(name="cores", endpoint="hpc", slots=8, cpus="2")
    lines = page(Pool(id="pol_2", name="cores", spec=bare, endpoint="hpc", closed_at=1.0, note="it is closed"), capsys)
    assert lines == [
        "cores closed pol_2", "endpoint hpc", "nodes 0 held of 1", "each node 8 slots; a slot has 2 cores",
        "slots 0 of 0", "tasks 0 running, 0 waiting", "walltime 4h; let go after 10m idle", "note it is closed",
    ]  # fmt: skip


def test_long_lists_are_cut_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    many = Pool(id="pol_1", name="gpus", spec=SPEC, tasks=TASKS[3:] * 7, decisions=DECISIONS[:1] * 40)
    lines = page(many, capsys)
    assert [line for line in lines if line.startswith("and ")] == [
        "and 2 more (--json has them)",
        "and 30 more (--json has them)",
    ]


def test_what_others_wrote_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    bad = "x\x1b[2J\x1b]0;title\x07\r\nforged\u202e"
    task = PoolTask(task_id=bad, name=bad, owner=bad, state=bad, hosts=(bad,), reason=bad, slots=1)
    decision = PoolDecision(at=NOW, task_id=bad, task_name=bad, slots=1, before=0, reason=bad)
    pilot = Pilot(task_id=bad, job_id=bad, state=bad, host=bad, pending_reason=bad)
    spec = PoolSpec(name=bad, endpoint=bad, accelerators=f"{bad}:1", cpus=bad, memory=bad)
    pool = Pool(id=bad, name=bad, spec=spec, owner=bad, project=bad, endpoint=bad, note=bad, is_mine=False,
                pilots=(pilot,), tasks=(task,), decisions=(decision,))  # fmt: skip
    pool_page.print_page(pool, NOW)
    out = capsys.readouterr().out
    assert not set("\x1b\x07\r\u202e") & set(out)
    assert not [line for line in out.splitlines() if line.startswith("forged")]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpus", "4", "--nodes", "8..2"), "--nodes: '8..2' is not a number of nodes"),
        (("--gpus", "4", "--nodes", "0..0"), "--nodes: '0..0' is not a number of nodes"),
        (("--gpus", "4", "--nodes", "1000000000"), "--nodes: '1000000000' is not a number of nodes"),
        (("--gpus", "4", "--walltime", "0"), "--walltime: must be"),
        (("--gpus", "4", "--idle", "-1"), "--idle: '-1' is not a length of time"),
        (("--gpus", "A100:1..4"), "--gpus: 'A100:1..4' is no one number"),
        (("--gpus", "4", "--slots", "2"), "--slots: GPUs are slots already"),
        (("--slots", "0"), "--slots: must be a whole number"),
        ((), "--slots: it is not said what its nodes are cut into"),
        (("--slots", "2", "--cpus", "x"), "--cpus: "),
        (("--slots", "2", "--memory", "x"), "--memory: "),
        (("--gpus", "4", "--project", "The Lab"), "--project: "),
        (("--gpus", "4", "--partition", "two words"), "--partition: 'two words' is not a name Slurm knows"),
        (("--gpus", "4", "--name", "two\nlines"), "--name: must be one line"),
    ],
)
def test_mistakes_name_the_option(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], said: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["pool", "create", "hpc", *words])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_launch_names_a_pool_instead_of_the_file() -> None:
    changes = launch.Changes(pool="gpus")
    assert changes.applied({"run": "x", "pool": "other"})["pool"] == "gpus"
    assert changes.option_for("pool") == "--pool"
    assert launch.Changes().option_for("pool") == ""
    assert launch.Changes().applied({"run": "x", "pool": "other"})["pool"] == "other"


def test_a_range_of_gpus_is_for_pools(tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text("run: python train.py\n")
    spec = launch.read(str(file), [], launch.Changes(gpus="A100:1..8", pool="gpus"))
    assert (spec.pool, spec.resources.range) == ("gpus", (1, 8))
    assert launch.Changes(gpus="1..8").applied({})["resources"] == {"accelerators": "gpu:1..8"}
    assert launch.Changes(slots="1..4").applied({})["resources"] == {"slots": "1..4"}
    with pytest.raises(InvalidInput, match="leaves the number to a pool") as caught:
        launch.read(str(file), [], launch.Changes(gpus="A100:1..8"))
    assert caught.value.field == "--gpus"
