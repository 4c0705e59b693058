"""Batches that stay, grow and end unevenly, on real ranks: each sample once, the same training whoever computes it."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import diamond.train as dt
from diamond.train.scaling import lr_scale
from tests.train.served import Served

pytest.importorskip("torch", reason="PyTorch is not installed")
Told = list[dict[str, Any]]


class Trainer(Served):
    """Runs jobs, one after the other."""

    def __call__(self, folder: Path, world: int = 1, **given: Any) -> tuple[Told, str]:
        told, said = self.tried(folder, world, **given)
        assert told, said[-3000:]
        return told, said

    def tried(self, folder: Path, world: int = 1, **given: Any) -> tuple[Told, str]:
        answer = self.ask(folder=str(folder), world=world, **given)
        return answer["told"], answer["said"]


@pytest.fixture(scope="module")
def train() -> Iterator[Trainer]:
    one = Trainer("grown")
    yield one
    one.close()


def sizes(told: Told) -> list[int]:
    """Samples of each step, over all ranks."""
    counted: Counter[int] = Counter()
    for rank in told:
        at = rank["pieces"][0][0] + (0 if rank["pieces"][0][5] else 1) if rank["pieces"] else 0
        for _, _, samples, _, _, is_last, _ in rank["pieces"]:
            counted[at] += len(samples)
            at += is_last
    return [counted[step] for step in sorted(counted)]


def seen(*jobs: Told) -> Counter[tuple[int, int]]:
    return Counter(
        (epoch, one) for told in jobs for rank in told for _, epoch, samples, *_ in rank["pieces"] for one in samples
    )


def each_once(found: Counter[tuple[int, int]], samples: int) -> int:
    """How many whole epochs there were."""
    assert set(found.values()) == {1}
    last = max(epoch for epoch, _ in found)
    for epoch in range(last):
        assert sorted(one for at, one in found if at == epoch) == list(range(samples)), epoch
    return last


def close(one: Told, other: Told) -> None:
    for name, values in one[0]["weights"].items():
        flat = [_flat(values), _flat(other[0]["weights"][name])]
        assert flat[0] == pytest.approx(flat[1], rel=2e-4, abs=2e-5), name


def _flat(values: Any) -> list[float]:
    return [each for value in values for each in _flat(value)] if isinstance(values, list) else [values]


# ---- batches that end unevenly ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("samples", "batch", "drop_last", "steps"),
    [
        (22, 7, False, [7, 7, 7, 1]),  # the last step has a sample for one rank alone
        (23, 7, False, [7, 7, 7, 2]),
        (22, 7, True, [7, 7, 7]),
        (5, 16, False, [5]),  # a dataset smaller than a batch
        (2, 16, False, [2]),  # and smaller than the ranks
    ],
)
def test_ranks_train_as_one_does(
    train: Trainer, tmp_path: Path, samples: int, batch: int, drop_last: bool, steps: list[int]
) -> None:
    given = {"samples": samples, "run": {"batch": batch}, "loader": {"drop_last": drop_last, "shuffle": True}}
    until = 3 * len(steps)
    alone, _ = train(tmp_path / "1", 1, until=until, **given)
    assert sizes(alone) == steps * 3
    for world in (2, 3):
        told, _ = train(tmp_path / str(world), world, until=until, **given)
        assert sizes(told) == steps * 3
        assert seen(told) == seen(alone)
        close(told, alone)
        assert all(rank["weights"] == told[0]["weights"] for rank in told)


def test_a_dataset_that_drop_last_empties(train: Trainer, tmp_path: Path) -> None:
    told, said = train.tried(tmp_path, 1, until=3, samples=5, run={"batch": 16}, loader={"drop_last": True})
    assert not told and "holds 5 samples, less than one batch of 16. Lower batch_size" in said


# ---- batches that stay -----------------------------------------------------------------------------------------------


def test_a_number_is_the_batch_whatever_the_ranks(train: Trainer, tmp_path: Path) -> None:
    """Also one below what the ranks could take at once, and above it."""
    for batch in (3, 21):
        alone, _ = train(tmp_path / f"{batch}-1", 1, until=12, run={"batch": batch})
        three, _ = train(tmp_path / f"{batch}-3", 3, until=12, run={"batch": batch})
        assert sizes(alone)[:4] == sizes(three)[:4] == [batch] * 4
        close(three, alone)
    first, _ = train(tmp_path / "parts", 2, until=5, run={"batch": 21})
    second, _ = train(tmp_path / "parts", 1, until=12, run={"batch": 21})
    close(second, alone)
    assert seen(first, second) == seen(alone)
    assert {line[3] for line in second[0]["pieces"] if line[5]} == {0.02}, "the learning rate is the user's"


def test_accumulating_is_a_larger_batch(train: Trainer, tmp_path: Path) -> None:
    pieces, _ = train(tmp_path / "pieces", 2, until=12, run={"accumulate": 3}, loader={"batch_size": 4})
    whole, _ = train(tmp_path / "whole", 1, until=12, loader={"batch_size": 24})
    assert sizes(pieces) == sizes(whole) == [24, 24, 24, 24, 7] * 2 + [24, 24]
    assert len(pieces[0]["pieces"]) == 3 * 10 + 2 * 1, "the last one of an epoch fits at once"
    close(pieces, whole)
    more, _ = train(tmp_path / "pieces", 3, until=14, run={"accumulate": 3}, loader={"batch_size": 4})
    assert sizes(more) == [24, 24], "it stays when there are more ranks"


# ---- batches that grow -----------------------------------------------------------------------------------------------


def test_samples_come_once_while_the_batch_follows_the_ranks(train: Trainer, tmp_path: Path) -> None:
    given = {"samples": 103, "run": {"batch": "grow", "lr_warmup": 0}, "loader": {"shuffle": True}, "scheduler": True}
    jobs, until = [], 0
    for world in (1, 2, 4, 2, 1):
        until += 9  # steps; no epoch ends there
        told, said = train(tmp_path, world, until=until, **given)
        jobs.append(told)
        assert told[0]["batch"] == 4 * world
        if len(jobs) > 1:
            assert f"a step takes {4 * world} samples from here on" in said
            assert "the run began with 4" in said
        assert world > 1 or {line[4] for line in told[0]["pieces"]} == {1.0}
        told_rates = {rank["pieces"][-1][3] for rank in told}
        assert len(told_rates) == 1, "the same on every rank"
        # The scheduler's own rate: halved every ten steps, whatever the batch.
        assert told[0]["lr"] == pytest.approx(0.02 * 0.5 ** (until // 10))
        assert told[0]["pieces"][-1][3] == pytest.approx(told[0]["pieces"][-1][4] * 0.02 * 0.5 ** ((until - 1) // 10))
    assert [sizes(told)[0] for told in jobs] == [4, 8, 16, 8, 4]
    assert each_once(seen(*jobs), 103) >= 3
    assert jobs[-1][0]["samples"] == sum(map(sum, map(sizes, jobs)))


@pytest.mark.parametrize(("rule", "factor"), [("linear", 3.0), ("sqrt", 3.0**0.5), ("none", 1.0)])
def test_the_rate_of_a_larger_batch(train: Trainer, tmp_path: Path, rule: str, factor: float) -> None:
    given = {"run": {"batch": "grow", "lr_rule": rule, "lr_warmup": 2}}
    train(tmp_path, 1, until=3, **given)
    told, _ = train(tmp_path, 3, until=5, **given)
    rates = [line[3] for line in told[0]["pieces"]]
    again, _ = train(tmp_path, 3, until=8, **given)
    rates += [line[3] for line in again[0]["pieces"]]
    way = [1 + (factor - 1) * part for part in (1 / 3, 2 / 3, 1, 1, 1)]
    assert rates == pytest.approx([0.02 * each for each in way]), "it warms up, over the end of a job"
    assert again[0]["lr"] == 0.02
    smaller, _ = train(tmp_path, 1, until=9, **given)
    assert [line[3] for line in smaller[0]["pieces"]] == [0.02], "back to where it began, at once"


def test_the_planner_says_how_far(train: Trainer, tmp_path: Path) -> None:
    given = {"samples": 300, "run": {"batch": "grow", "max_batch": 40}}
    wish = "DIAMOND_GLOBAL_BATCH"
    first, _ = train(tmp_path, 2, until=2, env={wish: "10"}, **given)
    second, _ = train(tmp_path, 2, until=4, env={wish: "30"}, **given)
    third, _ = train(tmp_path, 1, until=6, env={wish: "999"}, **given)
    fourth, said = train(tmp_path, 2, until=8, env={wish: "lots"}, **given)
    assert [sizes(told) for told in (first, second, third, fourth)] == [[10] * 2, [30] * 2, [40] * 2, [8] * 2]
    assert "DIAMOND_GLOBAL_BATCH='lots'" in said and "ignored" in said
    assert set(seen(first, second, third, fourth).values()) == {1}
    kept, _ = train(tmp_path / "kept", 1, until=2, env={wish: "30"})
    assert sizes(kept) == [4, 4], "nobody allowed it"


def test_a_grown_batch_never_drops_everything(train: Trainer, tmp_path: Path) -> None:
    given = {"samples": 10, "run": {"batch": "grow"}, "loader": {"drop_last": True, "batch_size": 4}}
    train(tmp_path, 1, until=2, **given)
    told, _ = train(tmp_path, 3, until=4, **given)
    assert sizes(told) == [10, 10]


def test_the_rate_follows_the_noise_that_was_measured(train: Trainer, tmp_path: Path) -> None:
    given = {"samples": 500, "run": {"batch": "grow"}, "loader": {"shuffle": True}}
    train(tmp_path, 1, until=40, **given)
    told, _ = train(tmp_path, 2, until=41, **given)
    newest = max(tmp_path.glob("step-*"))
    data = json.loads((newest / "manifest.json").read_text())["meta"]["data"]
    assert (data["base"], data["global_batch"], newest.name) == (4, 8, "step-000000041")
    gain = lr_scale("adascale", 2.0, data["noise"], batch=4)
    assert 1.0 <= gain <= 2.0
    assert [rank["pieces"][-1][4] for rank in told] == [gain, gain], "at once, and the same on both ranks"
    assert told[0]["pieces"][-1][3] == pytest.approx(0.02 * gain)


@pytest.mark.parametrize("rule", [None, "linear"])
def test_a_job_between_changes_nothing(train: Trainer, tmp_path: Path, rule: str | None) -> None:
    """The same losses and rates to the last bit, in the middle of a warm-up and of measuring."""
    given = {"samples": 500, "run": {"batch": "grow", "lr_rule": rule, "lr_warmup": 9}, "loader": {"shuffle": True}}
    train(tmp_path / "calm", 1, until=5, **given)
    shutil.copytree(tmp_path / "calm", tmp_path / "stopped")
    calm, _ = train(tmp_path / "calm", 2, until=40, **given)
    parts = [train(tmp_path / "stopped", 2, until=until, **given)[0] for until in (9, 33, 40)]
    for rank in range(2):
        assert [line for told in parts for line in told[rank]["pieces"]] == calm[rank]["pieces"]
    assert len({line[4] for line in calm[0]["pieces"]}) >= 9, "the rate changed meanwhile"


# ---- an end counted in samples ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_so_many_samples_and_no_more(train: Trainer, tmp_path: Path, stream: bool) -> None:
    given = {"samples": 50, "run": {"batch": "grow"}, "stream": stream}
    jobs = []
    for world, until_samples in ((1, 30), (2, 77), (1, 131)):
        told, said = train(tmp_path, world, until_samples=until_samples, **given)
        assert told[0]["samples"] == until_samples
        assert f"of {until_samples}, " in said
        jobs.append(told)
    assert [sum(sizes(told)) for told in jobs] == [30, 47, 54]
    assert each_once(seen(*jobs), 50) == 2
    done, _ = train(tmp_path, 1, until_samples=131, **given)
    assert done[0]["pieces"] == []


def test_dropped_ones_do_not_count(train: Trainer, tmp_path: Path) -> None:
    told, _ = train(tmp_path, 1, until_samples=19, samples=10, loader={"drop_last": True, "batch_size": 4})
    assert sizes(told) == [4, 4, 4, 4, 3]
    assert [line[1] for line in told[0]["pieces"]] == [0, 0, 1, 1, 2]


# ---- torch.compile ---------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler")
@pytest.mark.parametrize(("world", "kind"), [(1, "auto"), (2, "ddp"), (2, "fsdp")])
def test_a_compiled_model_is_the_same_model(train: Trainer, tmp_path: Path, world: int, kind: str) -> None:
    """Its checkpoints are those of one that is not: it goes on from them, and they from it."""
    plain = {"parallel": kind, "batch": 10}
    compiled = {**plain, "compile": True}
    whole, _ = train(tmp_path / "plain", world, until=9, samples=22, run=plain)
    first, said = train(tmp_path / "mixed", world, until=4, samples=22, run=compiled)
    second, _ = train(tmp_path / "mixed", world, until=6, samples=22, run=plain)
    third, _ = train(tmp_path / "mixed", world, until=9, samples=22, run=compiled)
    assert [told[0]["compiled"] for told in (whole, first, second, third)] == [False, True, False, True]
    assert "without torch.compile" not in said
    assert sizes(third) == [10, 10, 2]
    close(third, whole)


def test_without_a_compiler_it_trains_all_the_same(train: Trainer, tmp_path: Path) -> None:
    run = {"compile": "max-autotune", "batch": 10}
    plain, _ = train(tmp_path / "plain", 2, until=4, samples=22, run={"batch": 10})
    told, said = train(tmp_path / "none", 2, until=4, samples=22, run=run, env={"PATH": str(tmp_path)})
    assert said.count("training goes on without torch.compile: there is no C++ compiler") == 1
    assert "set CXX" in said
    assert not any(rank["compiled"] for rank in told)
    assert [rank["weights"] for rank in told] == [rank["weights"] for rank in plain]


def test_a_compiler_that_fails(tmp_path: Path) -> None:
    env = {"CXX": "/bin/false", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    train = Trainer("grown")  # its own: which compiler is used is settled when torch.compile is imported
    told, said = train(tmp_path / "run", 1, until=2, run={"compile": True}, env=env)
    train.close()
    assert "training goes on without torch.compile: a trial failed" in said
    assert not told[0]["compiled"]


def test_a_mode_that_is_unknown() -> None:
    with pytest.raises(dt.TrainError, match=r"compile='fast'.*max-autotune"):
        dt.run(compile="fast")
