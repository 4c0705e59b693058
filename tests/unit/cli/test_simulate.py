"""`diamond simulate`: a log of Slurm's through policies, in a table, as JSON, and as pictures."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from diamond.cli import main
from diamond.planner.pools.simulation.outcomes import Placed
from diamond.planner.pools.simulation.pictures import Bar, bars_of, busy_of, completion, gantt, utilisation

HEAD = "JobID|Submit|Start|End|Timelimit|NNodes"


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as caught:
        main.main([str(one) for one in arguments])
    return int(caught.value.code or 0)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A long task of both nodes, one of one node behind it, and a short one that fits beside neither."""
    day = "2026-03-01T"
    lines = [
        f"1|{day}10:00:00|{day}10:00:00|{day}12:00:00|180|2",
        f"2|{day}10:10:00|{day}12:00:00|{day}13:00:00|90|1",
        f"3|{day}10:20:00|{day}12:00:00|{day}12:05:00|10|1",
        f"3.batch|{day}10:20:00|{day}12:00:00|{day}12:05:00|10|1",
    ]
    path = tmp_path / "jobs.txt"
    path.write_text("\n".join([HEAD, *lines]) + "\n")
    return path


def test_a_log_is_replayed_and_compared(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "with blanks $(and more)"
    assert call("simulate", log, "-p", "fifo", "-p", "srtf", "--nodes", "2x4", "--restart", "0s", "-o", out) == 0
    table = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in table[:3]] == ["POLICY", "fifo", "srtf"]
    assert {path.name for path in out.iterdir()} == {
        "completion.svg", "gpus.svg", "gantt-fifo.svg", "gantt-srtf.svg", "fifo.json", "srtf.json",
    }  # fmt: skip
    for path in out.glob("*.svg"):
        assert ElementTree.parse(path).getroot().tag.endswith("svg")
    fifo = {task["name"]: task for task in json.loads((out / "fifo.json").read_text())["tasks"]}
    assert [round(fifo[name]["completion_s"] / 60) for name in ("1", "2", "3")] == [120, 170, 105]


def test_json_holds_every_figure(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("simulate", log, "-p", "fifo", "--nodes", "2x4", "--restart", "0s", "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)["outcomes"]
    assert found["policy"] == "fifo"
    assert found["tasks"] == 3
    assert found["makespan_s"] == pytest.approx(3 * 3600, abs=120)
    assert found["gpu_hours"] == pytest.approx(2 * 8 + 1 * 4 + 5 / 60 * 4, rel=0.02)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nodes", "16"), "16x4"),
        (("--nodes", "0x4"), "16x4"),
        (("-p", "nice"), "policies: diamond, fifo"),
        (("--knowledge", "all"), "estimated, warm, oracle"),
        (("--interval", "soon"), "error: --interval: 'soon'"),
        (("--interval", "0s"), "error: --interval: 0 s"),
        (("--nodes", "99999x999"), "error: --nodes: more than 100,000 GPUs"),
        (("--nodes", "\u0663x4"), "error: --nodes:"),
        (("--noise", "nan"), "error: --noise: nan is out of range"),
        (("--noise", "-1"), "error: --noise: -1 is out of range"),
        (("--seed", "-1"), "error: --seed: -1 is too small"),
        (("--policy", "nice"), "error: --policy: there is no policy 'nice'"),
    ],
)
def test_wrong_words_are_named(
    arguments: tuple[str, ...], said: str, log: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("simulate", log, "--nodes", "2x4", *arguments) == 2
    assert said in capsys.readouterr().err


def test_a_task_larger_than_the_pool_is_named(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.write_text(log.read_text().replace("|180|2", "|180|3"))
    assert call("simulate", log, "--nodes", "2x4") == 2
    assert "error: --nodes: task 1 asks for 12 GPUs of a kind, and there are 8" in capsys.readouterr().err


def test_where_nothing_can_be_written_nothing_is(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / "taken"
    (taken / "gpus.svg").mkdir(parents=True)
    for out, said in ((log, "is no folder"), (log / "deeper", "is no folder"), (taken, "gpus.svg is a folder")):
        assert call("simulate", log, "-p", "fifo", "--nodes", "2x4", "-o", out) == 2
        said_now = capsys.readouterr()
        assert "error: --out: " in said_now.err
        assert said in said_now.err
        assert said_now.out == ""
    assert [path.name for path in taken.iterdir()] == ["gpus.svg"]


def test_results_replace_a_link_and_not_what_it_leads_to(log: Path, tmp_path: Path) -> None:
    other, out = tmp_path / "other", tmp_path / "out"
    other.write_text("mine")
    out.mkdir()
    (out / "fifo.json").symlink_to(other)
    assert call("simulate", log, "-p", "fifo", "--nodes", "2x4", "-o", out) == 0
    assert other.read_text() == "mine"
    assert json.loads((out / "fifo.json").read_text())["policy"] == "fifo"
    assert not [path for path in out.iterdir() if path.name.startswith(".")]


def test_a_pool_too_large_to_draw_is_not_drawn(log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("simulate", log, "-p", "fifo", "--nodes", "1300x4", "-o", tmp_path / "out") == 0
    assert not (tmp_path / "out" / "gantt-fifo.svg").exists()
    assert "too much for a picture" in capsys.readouterr().err


def test_applications_need_to_be_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "w.csv"
    trace.write_text("name,time,application,num_replicas,batch_size\na-0,5,bert,2,24\n")
    assert call("simulate", trace) in (1, 2)
    assert "--traces FOLDER" in capsys.readouterr().err
    assert call("simulate", tmp_path / "nothing.csv") in (1, 2)
    assert "nothing.csv" in capsys.readouterr().err


def test_bars_never_share_a_gpu() -> None:
    timeline = [
        Placed(0.0, "a", (("n1", 2),)),
        Placed(0.0, "b", (("n1", 2), ("n2", 4))),
        Placed(10.0, "a", (("n2", 2),)),
        Placed(10.0, "b", (("n1", 4),)),
        Placed(30.0, "a", ()),
        Placed(40.0, "b", ()),
    ]
    bars = bars_of(timeline, {"n1": 4, "n2": 4})
    assert sorted(bars) == [
        Bar("n1", 0, 2, 0.0, 10.0, "a"),
        Bar("n1", 0, 4, 10.0, 40.0, "b"),
        Bar("n1", 2, 2, 0.0, 10.0, "b"),
        Bar("n2", 0, 2, 10.0, 30.0, "a"),
        Bar("n2", 0, 4, 0.0, 10.0, "b"),
    ]
    assert busy_of(timeline)[-3:] == [(10.0, 6), (30.0, 4), (40.0, 0)]


def test_pictures_of_nothing_and_of_hostile_names() -> None:
    for picture in (
        completion({}),
        completion({"<b>&": [3600.0]}),
        utilisation({}, 0),
        gantt("<script>", [Bar("n", 0, 1, 0.0, 5.0, '"><x')], {"n": 1}),
        gantt("unseen", [Bar("n", 0, 1, 0.0, 5.0, "\x00\x1b[31m\x07\x0b\uffff\ud800]]>")], {"n": 1}),
        gantt("empty", [], {}),
    ):
        assert ElementTree.fromstring(picture).tag.endswith("svg")


def test_a_picture_of_many_changes_stays_small_and_shows_the_peaks() -> None:
    many = [(float(second), 3 * (second % 2)) for second in range(50_000)]
    many[25_000] = (25_000.0, 8)
    drawn = utilisation({"p": many}, 8)
    assert len(drawn) < 600_000
    (line,) = (one for one in ElementTree.fromstring(drawn) if one.tag.endswith("polyline"))
    heights = {point.split(",")[1] for point in line.attrib["points"].split()}
    assert len(heights) == 3
