"""The callback for the Hugging Face Trainer: real training, killed and warned, is the training that was left alone."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from diamond.core.training import measures_in
from tests.train.trained import assert_same, example, launched, lines, live

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
KILLED, CONTINUED, DONE = -9, 85, 0


class Told:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ends, self.said = live(
            "huggingface",
            f"{folder}/calm-1:1:plain:14=done",
            f"{folder}/wild-1:1:often:14=kill@3,torn@5,torn@5,warn@7,late,cut,done",
            f"{folder}/own:1:own:14=warn@4,done",
            f"{folder}/calm-2:2:plain:12=done",
            f"{folder}/wild-2:2:often:12=kill@3,torn@5,usr1@7,done",
            f"{folder}/apart:2:apart:4=done",
        )


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    return Told(tmp_path_factory.mktemp("huggingface"))


def test_kills_and_warnings_change_nothing(told: Told) -> None:
    assert told.ends["calm-1"] == [[DONE]]
    assert told.ends["wild-1"] == [[KILLED], [KILLED], [KILLED], [CONTINUED], [CONTINUED], [DONE]]
    assert_same(told.folder / "wild-1", told.folder / "calm-1", 1)


def test_two_ranks_stop_together_when_one_is_warned(told: Told) -> None:
    assert told.ends["calm-2"] == [[DONE, DONE]]
    assert told.ends["wild-2"] == [[KILLED, KILLED], [KILLED, KILLED], [CONTINUED, CONTINUED], [DONE, DONE]]
    assert (told.folder / "wild-2" / "continue").exists()
    assert_same(told.folder / "wild-2", told.folder / "calm-2", 2)


def test_half_written_and_damaged_checkpoints_are_passed_over(told: Told) -> None:
    assert "is not whole (trainer_state.json is missing)" in told.said
    assert "is not whole (model.safetensors is not what was written)" in told.said
    assert "is removed" in told.said


def test_two_checkpoints_stay_and_the_users_own_rhythm_is_kept(told: Told) -> None:
    def kept(name: str) -> set[str]:
        return {path.name for path in (told.folder / name / "out").iterdir()}

    assert kept("calm-1") == {"checkpoint-14"}, "a short run is worth a single one, at its end"
    assert len(kept("wild-1")) == 2
    assert told.ends["own"] == [[CONTINUED], [DONE]]
    assert kept("own") == {"checkpoint-7", "checkpoint-14"}
    assert (told.folder / "own" / "out" / "checkpoint-7" / "diamond.json").exists()


def test_the_trainers_logs_are_metrics_of_the_task(told: Told) -> None:
    logged = lines(told.folder / "calm-2" / "metrics.jsonl")
    assert [line["step"] for line in logged if "loss" in line] == list(range(1, 13)), "rank 0 alone, every step once"
    assert {"grad_norm", "learning_rate", "epoch"} <= set(logged[0])


def test_what_was_measured_is_written_for_the_planner(told: Told) -> None:
    *_, last = measures_in((told.folder / "calm-2" / "train.jsonl").read_bytes())
    assert (last.step, last.until, last.world, last.parallel, last.device) == (12, 12, 2, "ddp", "cpu")
    assert (last.per_rank, last.accumulate, last.global_batch) == (4, 2, 16)
    assert last.step_s is not None
    assert sum(last.parts.values()) == pytest.approx(last.step_s, rel=1e-3)
    assert last.samples_per_s == pytest.approx(16 / last.step_s, rel=1e-3)
    assert (last.memory_peak_bytes or 0) > 10**7


def test_ranks_that_do_not_know_of_each_other_are_told_how(told: Told) -> None:
    assert told.ends["apart"] == [[1, 1]]
    assert "2 ranks were started, but the Trainer trains with 1. " in told.said
    assert "use_cpu=True" in told.said
    assert not list((told.folder / "apart" / "out").glob("*"))


def test_the_example_trains_on_two_ranks(tmp_path: Path) -> None:
    folder = example("huggingface_trainer", tmp_path)
    done = launched(folder, STEPS="6")
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    assert done.stdout.count("of the sums it has never seen are right") == 1, "of rank 0 alone"
    assert (folder / "model/model.safetensors").exists()
