"""The callback for Lightning: real training, killed and warned, is the training that was left alone."""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from diamond.core.training import measures_in
from tests.train.trained import assert_same, example, launched, lines, live, steps_of

pytestmark = pytest.mark.skipif(find_spec("lightning") is None, reason="Lightning is not installed")
KILLED, CONTINUED, DONE = -9, 85, 0
EPOCH = 11  # batches on one rank


class Told:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ends, self.said = live(
            "lightning",
            f"{folder}/calm-1:1:plain:44=done",
            f"{folder}/wild-1:1:often:44=kill@4,torn@8,warn@12,warn@{2 * EPOCH},late,cut,kill@36,done",
            f"{folder}/calm-2:2:plain:24=done",
            f"{folder}/wild-2:2:often:24=kill@4,torn@8,usr1@13,kill@18,done",
            f"{folder}/calm-workers:1:workers:22=done",
            f"{folder}/wild-workers:1:workers:22=kill@6,warn@18,done",
            f"{folder}/calm-stream:1:stream:22=done",
            f"{folder}/wild-stream:1:stream:22=kill@7,warn@16,done",
            f"{folder}/calm-pair:1:pair:22=done",
            f"{folder}/wild-pair:1:pair:22=kill@7,warn@16,done",
            f"{folder}/calm-validated:1:validated:22=done",
            f"{folder}/wild-validated:1:validated:22=kill@7,kill@16,warn@20,done",
            f"{folder}/apart:2:apart:4=done",
        )


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return Told(tmp_path_factory.mktemp("lightning"))


def test_kills_and_warnings_change_nothing(told: Told) -> None:
    assert told.ends["calm-1"] == [[DONE]]
    assert told.ends["wild-1"] == [[KILLED], [KILLED], [CONTINUED], [CONTINUED], [CONTINUED], [KILLED], [DONE]]
    assert_same(told.folder / "wild-1", told.folder / "calm-1", 1)


def test_two_ranks_stop_together_when_one_is_warned(told: Told) -> None:
    assert told.ends["calm-2"] == [[DONE, DONE]]
    assert told.ends["wild-2"] == [[KILLED, KILLED], [KILLED, KILLED], [CONTINUED] * 2, [KILLED, KILLED], [DONE, DONE]]
    assert (told.folder / "wild-2" / "continue").exists()
    assert_same(told.folder / "wild-2", told.folder / "calm-2", 2)


@pytest.mark.parametrize("kind", ["workers", "stream", "pair"])
def test_other_loaders_go_on_at_the_same_sample(kind: str, told: Told) -> None:
    assert told.ends[f"wild-{kind}"] == [[KILLED], [CONTINUED], [DONE]]
    assert_same(told.folder / f"wild-{kind}", told.folder / f"calm-{kind}", 1)


def test_validation_in_between_changes_nothing(told: Told) -> None:
    assert told.ends["wild-validated"] == [[KILLED], [KILLED], [CONTINUED], [DONE]]
    assert_same(told.folder / "wild-validated", told.folder / "calm-validated", 1)


def test_every_sample_comes_once_an_epoch(told: Told) -> None:
    batches = steps_of(told.folder / "wild-1", 0)
    assert sorted(batches) == list(range(1, 4 * EPOCH + 1))
    for epoch in range(4):
        numbers = range(epoch * EPOCH + 1, (epoch + 1) * EPOCH + 1)
        seen = Counter(sample for number in numbers for sample in batches[number][1])
        assert seen == Counter(range(44)), epoch


def test_a_torn_checkpoint_is_passed_over_and_two_stay(told: Told) -> None:
    assert "step-" in told.said
    assert "is not whole (ends early or is damaged)" in told.said
    assert len(list((told.folder / "wild-1" / "out").iterdir())) == 2
    # A short run is worth a single one, at its end; the Trainer adds none of its own.
    assert [path.name for path in (told.folder / "calm-2" / "out").iterdir()] == ["step-000000024.ckpt"]


def test_what_the_trainer_logs_are_metrics_of_the_task(told: Told) -> None:
    logged = lines(told.folder / "calm-2" / "metrics.jsonl")
    assert [line["step"] for line in logged if "loss" in line] == list(range(1, 25)), "rank 0 alone, every step once"


def test_what_was_measured_is_written_for_the_planner(told: Told) -> None:
    *_, last = measures_in((told.folder / "calm-2" / "train.jsonl").read_bytes())
    assert (last.step, last.until, last.world, last.parallel, last.precision) == (24, 24, 2, "ddp", "fp32")
    assert (last.per_rank, last.accumulate, last.global_batch) == (4, 1, 8)
    assert last.step_s is not None
    assert last.samples_per_s == pytest.approx(8 / last.step_s, rel=1e-3)


def test_ranks_that_do_not_know_of_each_other_are_told_how(told: Told) -> None:
    assert told.ends["apart"] == [[1, 1]]
    assert "2 ranks were started, but the Trainer trains with 1. " in told.said
    assert "LightningEnvironment" in told.said
    assert not list((told.folder / "apart" / "out").glob("*"))


def test_the_example_trains_on_two_ranks(tmp_path: Path) -> None:
    folder = example("lightning_trainer", tmp_path)
    # In a job of Slurm, whose one task on this node is the launcher.
    done = launched(folder, EPOCHS="2", SLURM_NTASKS="1", SLURM_JOB_NAME="a", SLURM_PROCID="0")
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    assert done.stdout.count("of the points it has never seen are on the right spiral") == 1, "of rank 0 alone"
    assert (folder / "model.pt").exists()
