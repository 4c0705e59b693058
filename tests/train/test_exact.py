"""What makes going on hard: a run that was killed is to the last bit the one that never was, and the one without
Diamond."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

from tests.train.exact import Known, Shuffled
from tests.train.served import Served

WORLDS = [1, 2, 3]


class Trainer(Served):
    """Runs trainings one after the other; the lives of each end as they are meant to."""

    def __call__(self, folder: Path, world: int, until: int, **given: Any) -> str:
        told = self.tried(folder, world, until, **given)
        wanted = [[0 if life is None else -signal.SIGKILL] * world for life in given.get("lives", [None])]
        assert told["ends"] == wanted + [[0] * world] * bool(given.get("plain")), told["said"][-3000:]
        said: str = told["said"]
        return said

    def tried(self, folder: Path, world: int, until: int, **given: Any) -> dict[str, Any]:
        return self.ask(folder=str(folder), world=world, until=until, **given)


@pytest.fixture(scope="module")
def train() -> Iterator[Trainer]:
    program = Trainer("exact")
    yield program
    program.close()


def steps(folder: Path, rank: int, name: str = "rank") -> dict[int, list[Any]]:
    """The last life in which each step was done."""
    return {step: rest for step, *rest in map(json.loads, (folder / f"{name}-{rank}").read_text().splitlines())}


def check_exact(
    train: Trainer, folder: Path, world: int, until: int, lives: list[int | None], *, calmly: bool = True, **given: Any
) -> Path:
    """Killed, not killed (`calmly`) and without Diamond: the same. Returns the folder of the run that was killed."""
    train(folder / "wild", world, until, lives=lives, plain=True, **given)
    if calmly:
        train(folder / "calm", world, until, **given)
    for rank in range(world):
        wild = steps(folder / "wild", rank)
        assert len(wild) == until
        assert wild == steps(folder / "wild", rank, "plain"), "what a loop without Diamond comes to, to the last bit"
        if calmly:
            assert wild == steps(folder / "calm", rank), "the same losses, evaluations, samples"
            weights = [(folder / name / f"weights-{rank}").read_text() for name in ("wild", "calm")]
            assert weights[0] == weights[1]
    return folder / "wild"


@pytest.mark.parametrize("world", WORLDS)
def test_killed_it_is_the_run_that_never_was(train: Trainer, world: int, tmp_path: Path) -> None:
    """With saves in the body of the loop, of which none replays a batch; with running statistics, which are each
    rank's own; and past probes (steps 8 and 16), where three ranks must round their gradients alike."""
    saves = {"5": "after step", "9": "before backward", "14": "after step"}
    lives = [6, 10, 15, None]
    wild = check_exact(train, tmp_path, world, 18, lives, norm=True, saves=saves)
    begun = [json.loads(line)[0] for line in (wild / "rank-0").read_text().splitlines()]
    assert begun == [*range(1, 7), *range(6, 11), *range(10, 16), *range(15, 19)]


def test_running_statistics_are_rank_0s_for_another_number_of_ranks(train: Trainer, tmp_path: Path) -> None:
    train(tmp_path, 3, 4, norm=True)
    was = steps(tmp_path, 0)[4][1]
    assert len({steps(tmp_path, rank)[4][1] for rank in range(3)}) == 3, "each has its own"
    train(tmp_path, 2, 4, norm=True)
    for rank in range(2):
        assert (tmp_path / f"judged-{rank}").read_text() == was


@pytest.mark.parametrize("world", WORLDS)
def test_weights_that_are_no_numbers_are_not_sealed(train: Trainer, world: int, tmp_path: Path) -> None:
    """The loss was one still when they were to be saved. From what is there, the run goes on."""
    saves = {"3": "after step", "6": "after step"}
    told = train.tried(tmp_path / "run", world, 8, saves=saves, poison=6)
    assert told["ends"] == [[1] * world]
    assert "the weights are not numbers any more, after step 6" in told["said"]
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoints.glob("step-*")] == ["step-000000003"]
    assert "step-000000003 (step 3)" in train(tmp_path / "run", world, 8)
    train(tmp_path / "calm", world, 8, plain=True)
    for rank in range(world):
        assert (
            steps(tmp_path / "run", rank) == steps(tmp_path / "calm", rank) == steps(tmp_path / "calm", rank, "plain")
        )


@pytest.mark.parametrize("world", WORLDS)
def test_a_start_that_fails_at_once_is_followed_by_one_from_further_back(
    train: Trainer, world: int, tmp_path: Path
) -> None:
    """Also where weights that are no numbers were saved, by an earlier version or on purpose."""
    run, checkpoints = tmp_path / "run", tmp_path / "run" / "checkpoints"
    saves = {"3": "after step", "6": "after step"}
    train(run, world, 6, saves=saves, lives=[6])
    assert train.tried(run, world, 9, fails=8)["ends"] == [[1] * world]
    said = train.tried(run, world, 9, fails=5)["said"]
    assert "step-000000006 failed before it saved anything; going back to the one before it" in said
    assert f"going on from {checkpoints / 'step-000000003'} (step 3)" in said
    again = train.tried(run, world, 9, fails=8)["said"]
    assert "failed at once; going on from the newest again" in again and "step-000000006 (step 6)" in again

    poisoned = {"4": "after step", "5": "after step"}
    given = {"saves": poisoned, "poison": 5, "everywhere": True, "run": {"check_loss": False}}
    train(tmp_path / "nan", world, 5, lives=[5], **given)
    said = train(tmp_path / "nan", world, 7)
    assert "step-000000005 are not numbers; going back" in said and "step-000000004 (step 4)" in said
    names = sorted(path.name for path in (tmp_path / "nan" / "checkpoints").iterdir())
    assert names == ["step-000000004", "step-000000007"], "and the bad one is gone"


@pytest.mark.parametrize("world", WORLDS)
def test_a_generator_is_read_on(train: Trainer, world: int, tmp_path: Path) -> None:
    """Its body shuffles and augments while it is read. With workers, too, which nobody knows the parts of."""
    given = {"data": "generated", "samples": 24, "run": {"save_every_s": 0.0}}
    wild = check_exact(train, tmp_path, world, 12, [4, 9, None], workers=2 if world == 2 else 0, **given)
    seen: dict[int, list[int]] = {}
    values: dict[tuple[int, int], list[float]] = {}
    for rank in range(world):
        for _, _, epoch, samples, given_values in steps(wild, rank).values():
            seen.setdefault(epoch, []).extend(samples)
            values |= {(epoch, index): one for index, one in zip(samples, given_values, strict=True)}
    assert len(seen) == 2 * world, "whole epochs"
    assert all(sorted(samples) == list(range(24)) for samples in seen.values()), "each sample once an epoch"
    orders = {tuple(samples) for samples in seen.values()}
    assert len(orders) == 2 * world, "in another order each time"
    known = {index: Known(24)[index][1].tolist() for index in range(24)}
    noise = {
        tuple(round(a - b, 5) for a, b in zip(one, known[index], strict=True)) for (_, index), one in values.items()
    }
    assert len(noise) == len(values), "augmented in another way each time"


def orders(folder: Path, world: int) -> list[list[int]]:
    """The samples of each epoch, as all ranks together took them."""
    ranks = [steps(folder, rank) for rank in range(world)]
    found: dict[int, list[int]] = {}
    for step in sorted(ranks[0]):
        for rank in ranks:
            found.setdefault(rank[step][2], []).extend(rank[step][3])
    return list(found.values())


@pytest.mark.parametrize("world", WORLDS)
def test_a_sampler_and_a_data_set_with_dice_of_their_own(train: Trainer, world: int, tmp_path: Path) -> None:
    """Which are told of each epoch, too; also in worker processes."""
    given = {"data": "augmented", "sampler": "shuffled", "samples": 24, "workers": 2 if world == 1 else 0}
    wild = check_exact(train, tmp_path, world, 12, [5, 9, None], run={"save_every_s": 0.0}, **given)
    sampler, wanted = Shuffled(24), []
    for epoch in range(2 * world):
        sampler.set_epoch(epoch)
        wanted.append(list(sampler))
    assert orders(wild, world) == wanted, "as without Diamond"
    lines = steps(wild, 0).values()
    assert all(values[0] == epoch / 64 for _, _, epoch, _, batch in lines for values in batch)
    noise = [values[1] - Known(24)[index][1][1].item() for _, _, _, batch, given in lines
             for index, values in zip(batch, given, strict=True)]  # fmt: skip
    assert len({round(one, 5) for one in noise}) > len(noise) - 3, "augmented in another way each time"


@pytest.mark.parametrize("world", WORLDS)
def test_torchs_own_sampler_for_ranks_leaves_no_sample_out(train: Trainer, world: int, tmp_path: Path) -> None:
    train(tmp_path, world, 12, sampler="distributed", samples=24)
    assert [sorted(order) for order in orders(tmp_path, world)] == [list(range(24))] * 2 * world


@pytest.mark.parametrize("world", WORLDS)
def test_a_sampler_that_cannot_be_brought_back_is_refused(train: Trainer, world: int, tmp_path: Path) -> None:
    given = {"sampler": "counting", "samples": 24, "saves": {"8": "after step"}}
    train(tmp_path / "run", world, 8, lives=[8], **given)
    told = train.tried(tmp_path / "run", world, 12, **given)
    assert told["ends"] == [[1] * world]
    assert f"the sampler (Counting) gives another order of epoch {(32 * world - 1) // 24} than before" in told["said"]
    assert "give it set_epoch" in told["said"] and "run(new_data=True)" in told["said"]
    said = train(tmp_path / "run", world, 12, run={"new_data": True}, **given)
    assert f"epoch {(32 * world - 1) // 24 + 1} begins with them" in said
    if world > 1:
        told = train.tried(tmp_path / "parted", world, 12, sampler="parted", samples=24)
        assert told["ends"] == [[1] * world]
        assert "the sampler (Parted) gives other samples on other ranks" in told["said"]


@pytest.mark.parametrize("world", WORLDS)
def test_other_data_are_refused_unless_they_are_meant(train: Trainer, world: int, tmp_path: Path) -> None:
    saves = {"2": "after step"}
    train(tmp_path / "run", world, 2, samples=331, saves=saves, lives=[2])
    told = train.tried(tmp_path / "run", world, 6, samples=200)
    assert told["ends"] == [[1] * world]
    assert "the data set holds 200 samples, and held 331 when the checkpoint was written" in told["said"]
    assert "run(new_data=True)" in told["said"]
    assert "epoch 1 begins with them" in train(tmp_path / "run", world, 6, samples=200, run={"new_data": True})
    assert [rest[2] for rest in steps(tmp_path / "run", 0).values()] == [0, 0, 1, 1, 1, 1]

    stream = {"data": "generated", "saves": saves}
    train(tmp_path / "stream", world, 2, samples=30, lives=[2], **stream)
    said = train.tried(tmp_path / "stream", world, 6, samples=5, **stream)["said"]
    assert f"the stream (Generated) ended after 5 samples, and {8 * world} of it were trained on" in said
    assert train(tmp_path / "stream", world, 6, samples=5, run={"new_data": True}, **stream)


@pytest.mark.parametrize("world", WORLDS)
def test_what_stands_beside_the_training_comes_back(train: Trainer, world: int, tmp_path: Path) -> None:
    """A validation, a learning rate that follows it, an average of the weights."""
    given: dict[str, Any] = {"beside": True, "run": {"save_every_s": 0.0}}
    wild = check_exact(train, tmp_path, world, 12, [5, 9, None], calmly=False, **given)
    rates = {float.fromhex(rest[6]) for rest in steps(wild, 0).values()}
    assert len(rates) > 1, "it was lowered"
    if world == 2:
        shards = {"beside": True, "run": {"save_every_s": 0.0, "parallel": "fsdp"}}
        train(tmp_path / "shards", world, 8, lives=[5, None], **shards)
        train(tmp_path / "calm-shards", world, 8, **shards)
        assert steps(tmp_path / "shards", 1) == steps(tmp_path / "calm-shards", 1)
