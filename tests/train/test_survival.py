"""Killed at any moment and started again, a run is the run that was never killed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.train.killed import SAMPLES
from tests.train.served import Served

pytest.importorskip("torch", reason="PyTorch is not installed")
Train = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def train() -> Iterator[Train]:
    program = Served("killed")

    def run(
        folder: Path, world: int, until: int, kills: int = 0, seed: int = 0, parallel: str = "auto"
    ) -> dict[str, Any]:
        told = program.ask(folder=str(folder), world=world, until=until, kills=kills, seed=seed, parallel=parallel)
        assert told["finished"], told
        return told

    yield run
    program.close()


def lives(folder: Path, rank: int) -> dict[int, list[Any]]:
    """The last life in which each step was done, on a rank."""
    return {step: rest for step, *rest in map(json.loads, (folder / f"rank-{rank}").read_text().splitlines())}


@pytest.mark.parametrize("world", [1, 2])
def test_twenty_five_kills_change_nothing(train: Train, world: int, tmp_path: Path) -> None:
    kills, until = 25, 400
    train(tmp_path / "calm", world, until)
    told = train(tmp_path / "wild", world, until, kills, seed=world)
    assert told["killed"] == kills, "so often it was killed while it trained"
    for rank in range(world):
        calm, wild = lives(tmp_path / "calm", rank), lives(tmp_path / "wild", rank)
        assert len(calm) == until
        assert wild == calm, "the same losses to the last bit, the same samples, the same state"


def test_samples_come_once_while_the_number_of_ranks_changes(train: Train, tmp_path: Path) -> None:
    until = 0
    for world in (1, 2, 4, 2, 1):
        until += 13
        train(tmp_path / "run", world, until)
    seen: Counter[tuple[int, int]] = Counter()
    for file in sorted((tmp_path / "run").glob("rank-*")):
        for line in file.read_text().splitlines():
            _, _, epoch, samples, _ = json.loads(line)
            seen.update((epoch, sample) for sample in samples)
    whole = max(epoch for epoch, _ in seen)
    assert whole >= 4
    for epoch in range(whole):
        assert sorted(sample for at, sample in seen if at == epoch) == list(range(SAMPLES)), epoch
    assert set(seen.values()) == {1}
    fixed = tmp_path / "fixed"
    train(fixed, 1, until)
    losses = [float.fromhex(line[0]) for line in lives(fixed, 0).values()]
    changed = [float.fromhex(line[0]) for line in lives(tmp_path / "run", 0).values()]
    # Dropout draws differently on another number of ranks; how well it learns does not depend on that.
    assert sum(changed[-10:]) / 10 == pytest.approx(sum(losses[-10:]) / 10, rel=0.5)


def test_shards_go_on_whole_and_as_other_shards(train: Train, tmp_path: Path) -> None:
    """FSDP on two ranks, killed; then its checkpoint on one process, and as copies on four."""
    train(tmp_path / "calm", 2, 60, parallel="fsdp")
    assert train(tmp_path / "wild", 2, 60, kills=4, seed=9, parallel="fsdp")["killed"] == 4
    for rank in range(2):
        assert lives(tmp_path / "wild", rank) == lives(tmp_path / "calm", rank)
    train(tmp_path / "wild", 1, 70)
    train(tmp_path / "wild", 4, 80, parallel="ddp")
    assert set(lives(tmp_path / "wild", 3)) == set(range(71, 81))
