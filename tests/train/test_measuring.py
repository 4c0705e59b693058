"""What a run measures of itself: parts of a step, probes that change nothing, lines for the planner, failures."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import diamond.train as dt  # noqa: E402
from diamond.train import measures  # noqa: E402
from diamond.train.loop import measuring, parallel  # noqa: E402
from diamond.train.loop.buckets import together  # noqa: E402
from diamond.train.loop.measuring import PARTS, Told, slowest, split  # noqa: E402
from diamond.train.loop.probing import is_probe  # noqa: E402
from tests.train.served import Measured  # noqa: E402
from tests.train.test_running import things, turns  # noqa: E402


def test_probes_are_chosen_by_number() -> None:
    assert [step for step in range(400) if is_probe(step)] == [8, 16, 32, 64, 128, 256, 384]


def test_parts_are_the_whole() -> None:
    cpu = split(1.0, save_s=0.1, data_s=0.2, compute_s=0.4, sync_s=0.2, hides_data=False)
    assert cpu == pytest.approx(
        {"step_s": 1.0, "compute_s": 0.4, "comm_s": 0.2, "data_s": 0.2, "save_s": 0.1, "other_s": 0.1}
    )
    late = split(1.0, save_s=0.0, data_s=0.5, compute_s=0.9, sync_s=0.2, hides_data=True)
    assert late["compute_s"] == pytest.approx(0.9) and late["data_s"] == pytest.approx(0.1), "the GPU did not wait"
    for given in ((9.0, 9.0, 9.0, 9.0), (0.0, 0.0, 0.0, 0.0), (-1.0, 0.3, 0.3, 0.9)):
        save_s, data_s, compute_s, sync_s = given
        parts = split(1.0, save_s=save_s, data_s=data_s, compute_s=compute_s, sync_s=sync_s, hides_data=False)
        assert sum(parts[name] for name in PARTS) == pytest.approx(1.0) and min(parts.values()) >= 0


def told(*compute: float) -> list[Told]:
    return [Told(each, 0.0, 0, f"node{at}") for at, each in enumerate(compute)]


def test_who_is_slow() -> None:
    assert slowest(told(1.0, 1.1, 1.0, 1.5)) == {"rank": 3, "host": "node3", "ratio": pytest.approx(1.429)}
    assert slowest(told(1.0, 1.1, 1.0)) is None
    assert slowest(told(1.4, 1.0)) is None, "of two, either may be the usual one"
    assert slowest(told(1.6, 1.0)) == {"rank": 0, "host": "node0", "ratio": 1.6}
    assert slowest(told(1.6)) is None and slowest(told(1.6, 0.0)) is None


def test_buckets_are_of_a_kind() -> None:
    mib = 2**20
    large = torch.empty(mib)
    grads = [torch.empty(3), torch.empty(2, dtype=torch.float64), large, torch.empty(5), torch.empty(1)]
    sizes = [[one.numel() for one in bucket] for bucket in together(grads, 2 * mib)]
    assert sorted(sizes) == sorted([[3, large.numel()], [5, 1], [2]])


# ---- real runs -------------------------------------------------------------------------------------------------------


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DIAMOND_TRAIN_FILE", str(tmp_path / "train.jsonl"))
    monkeypatch.setenv("DIAMOND_JOB_ID", "job_1")
    monkeypatch.setenv("DIAMOND_ENDS_AT", str(time.time() + 3600))
    monkeypatch.setenv("DIAMOND_TRAIN_QUIET", "1")
    monkeypatch.setattr(measuring, "FIRST_LINE_S", 0.3)
    monkeypatch.setattr(measuring, "EVERY_S", 0.5)

    class Slow(torch.utils.data.Dataset):  # type: ignore[misc,name-defined]
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            time.sleep(0.002)
            return torch.randn(3)

    model, optimizer, _ = things()
    with dt.run(checkpoints=tmp_path / "c", save_every_s=0.2) as run:
        loader = torch.utils.data.DataLoader(Slow(), batch_size=4)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        assert run.measures == {}
        for values in run.steps(loader, until=90):
            time.sleep(0.006)
            run.backward(model(values).square().mean())
            run.step()
            time.sleep(0.004)
    found = lines(tmp_path / "train.jsonl")
    assert len(found) >= 3 and found[-1]["step"] == 90 and run.measures["step"] == 90
    whole = max(found, key=lambda line: int(line["steps"]))
    assert sum(line["steps"] for line in found) == 88, "all but the first two, each once"
    # Each at least as long as it slept; as they are the whole together, none can be much of another.
    assert whole["data_s"] >= 0.008, "four samples of 2 ms"
    assert whole["compute_s"] >= 0.006, "before the step"
    assert whole["other_s"] >= 0.004, "and after it"
    assert whole["comm_s"] == 0 and whole["sync_s"] is None
    for line in found:
        assert sum(line[name] for name in PARTS) == pytest.approx(line["step_s"], rel=1e-4)
        assert line["samples_per_s"] == pytest.approx(4 / line["step_s"], rel=1e-3)
        assert len(json.dumps(line)) < measures.MOST_BYTES
        assert {**line, "global_batch": 4, "per_rank": 4, "accumulate": 1, "until": 90, "job": "job_1"} == line
        assert {**line, "world": 1, "nodes": 1, "device": "cpu", "parallel": "none", "precision": "fp32"} == line
        assert {**line, "slowest": None, "lr_scale": 1.0, "generation": 0, "restarts": 0} == line
        assert {**line, "grows": False, "first_batch": 4, "max_batch": None, "until_samples": None} == line
        assert line["samples"] == 4 * line["step"] and line["parallel_why"] == "one rank holds all of it"
        assert line["ends_at"] > time.time() + 3000 and line["memory_peak_bytes"] > 10**7
    saves = found[-1]["saves"]
    assert saves["count"] >= 3 and saves["interval_s"] == 0.2 and 0 <= saves["blocked_s"] <= saves["took_s"]
    assert any(line["save_s"] > 0 for line in found)
    said = capfd.readouterr().err
    assert "samples/s" in said and "% computing" in said and "% waiting for data" in said


def test_what_a_planner_needs_to_choose_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_JOB_END_TIME", "DIAMOND_GLOBAL_BATCH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DIAMOND_TRAIN_FILE", str(tmp_path / "train.jsonl"))
    monkeypatch.setenv("DIAMOND_TRAIN_QUIET", "1")

    def train(until_samples: int, **more: Any) -> dict[str, Any]:
        model, optimizer, _ = things()
        given = {"checkpoints": tmp_path / "c", "batch": "grow", "max_batch": 50, **more}
        with dt.run(**given) as run:
            loader = torch.utils.data.DataLoader(torch.randn(200, 3), batch_size=4)
            model, optimizer, loader = run.prepare(model, optimizer, loader)
            for values in run.steps(loader, until_samples=until_samples):
                run.backward(model(values).square().mean())
                run.step()
        return lines(tmp_path / "train.jsonl")[-1]

    first = train(40, parallel="none")
    batch = first["global_batch"]
    known = {"grows": True, "first_batch": batch, "max_batch": 50}
    assert {**first, **known, "samples": 40, "until_samples": 40, "until": first["step"]} == first
    assert first["parallel_why"] == "set in the script"
    monkeypatch.setenv("DIAMOND_GLOBAL_BATCH", "10")
    second = train(100)
    assert {**second, **known, "samples": 100, "until_samples": 100, "global_batch": 10} == second
    assert second["until"] == second["step"] == first["step"] + 6, "sixty samples more, not ten steps in all"


@pytest.mark.parametrize(
    ("train", "device", "world", "nodes", "expected"),
    [
        (2**40, 2**20, 1, 1, ("none", "one rank holds all of it")),
        (2**30, 80 * 2**30, 4, 1, ("ddp", "fits on each rank: 1 GiB for training, 80 GiB a rank")),
        (90 * 2**30, 80 * 2**30, 8, 2, ("hybrid", "fits in a node, not on a rank: 90 GiB for training, 80 GiB a rank")),
        (2**42, 80 * 2**30, 8, 2, ("fsdp", "too large for a rank: 4,096 GiB for training, 80 GiB a rank")),
        (3 * 2**20, 2**20, 2, 1, ("fsdp", "too large for a rank: 3 MiB for training, 1 MiB a rank")),
    ],
)
def test_a_technique_says_why(train: int, device: int, world: int, nodes: int, expected: tuple[str, str]) -> None:
    found = parallel.chosen(parallel.Sizes(train_bytes=train, device_bytes=device, world=world, num_nodes=nodes))
    assert found == expected and len(found[1]) <= 80


def test_ranks_are_heard(measured: Measured, tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    given = {"batch_size": 8, "slow_rank": 1, "slow_s": 0.02}
    last = measured(tmp_path, 2, 200, given, DIAMOND_TRAIN_FILE=str(file), DIAMOND_GENERATION="2", DIAMOND_RESTARTS="1")
    found = lines(file)
    assert len(found) >= 2, "after two seconds, and at the end"
    assert found[-1]["step"] == 200 and sum(line["steps"] for line in found) == 198
    assert last["world"] == 2 and last["parallel"] == "ddp" and last["global_batch"] == 16
    assert last["generation"] == 2 and last["restarts"] == 1
    assert last["slowest"]["rank"] == 1 and last["slowest"]["ratio"] > 1.5 and last["slowest"]["host"]
    assert last["sync_s"] < 0.02, "exchanging 1 kB, without waiting for the slow one"
    assert last["comm_s"] > 0.25 * last["step_s"], "rank 0 waits for the other most of the time"
    assert last["compute_s"] < 0.5 * last["step_s"]
    assert last["memory_peak_bytes"] > 10**7


def test_a_probe_exchanges_what_ddp_would(measured: Measured, tmp_path: Path) -> None:
    """Gradients of all steps, probes among them, are the same on both ranks, and the mean of what each computed."""
    measured(tmp_path, 2, 40, {"batch_size": 8, "grads": True, "lr": 0.1, "run": {"seed": 5}})
    one, two = (torch.load(tmp_path / f"grads-{rank}.pt") for rank in range(2))
    assert len(one) == 40
    for mine, theirs in zip(one, two, strict=True):
        assert torch.equal(mine, theirs)
    single = tmp_path / "single"
    measured(single, 1, 40, {"batch_size": 16, "lr": 0.1, "run": {"seed": 5}})
    state = [dt_state(folder) for folder in (tmp_path, single)]
    assert torch.allclose(state[0], state[1], atol=1e-5), "as one process with the whole batch"


def dt_state(folder: Path) -> Any:
    import torch.distributed.checkpoint as dcp

    held = {"model": {"noisy": torch.zeros(256)}}
    newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
    dcp.load(held, checkpoint_id=newest / "state", no_dist=True)
    return held["model"]["noisy"]


# ---- the file --------------------------------------------------------------------------------------------------------


def test_a_line_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DIAMOND_TRAIN_FILE", raising=False)
    assert not measures.write({"step": 1})
    file = tmp_path / "train.jsonl"
    file.write_text('{"step": 1')
    monkeypatch.setenv("DIAMOND_TRAIN_FILE", str(file))
    assert measures.write({"step": 2, "t": 1700000000.123, "x": float("inf"), "y": [float("nan"), 0.123456789]})
    assert measures.write({"step": 3})
    torn, *rest = file.read_text().splitlines()
    assert torn == '{"step": 1'
    assert [json.loads(line) for line in rest] == [
        {"step": 2, "t": 1700000000.123, "x": None, "y": [None, 0.123457]}, {"step": 3},
    ]  # fmt: skip


def test_a_line_is_never_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIAMOND_TRAIN_FILE", str(tmp_path / "train.jsonl"))
    assert measures.write({"step": 2, "noise_by_group": [0.5] * 5000})
    assert lines(tmp_path / "train.jsonl") == [{"step": 2}]
    assert not measures.write({"job": "x" * 9000})


def test_a_file_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measures, "_warned", False)
    monkeypatch.setenv("DIAMOND_TRAIN_FILE", str(tmp_path / "absent" / "train.jsonl"))
    assert not measures.write({"step": 1}) and not measures.write({"step": object()})
    said = capfd.readouterr().err
    assert said.count("cannot write measurements") == 1 and "training goes on" in said


# ---- failures --------------------------------------------------------------------------------------------------------


def test_failures_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_JOB_END_TIME", "DIAMOND_ENDS_AT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DIAMOND_TRAIN_QUIET", "1")

    def life(until: int, *, fails: bool) -> tuple[int, float, float]:
        with dt.run(checkpoints=tmp_path) as run:
            model, _, loader = run.prepare(*things())
            kept = run._checkpoints
            for _ in turns(run, model, loader, until):
                if run.step_number in (until - 1, until):
                    run.save()
                    kept.saver.wait()
                    if fails and run.step_number == until - 1:
                        raise KeyError("a mishap")
            kept.saver.blocked_s[:] = [5.0]
            return kept.failures, kept.ran_s, kept.interval_s()

    assert life(4, fails=False)[0] == 0
    calm = life(8, fails=False)
    assert calm[0] == 0 and calm[1] > 0, "a run that ended is no failure, though its last checkpoint came in the loop"
    for until in (12, 16, 20):
        with pytest.raises(KeyError, match="mishap"):
            life(until, fails=True)
    failed, ran_s, interval_s = life(24, fails=False)
    assert failed == 3 and ran_s > calm[1]
    assert interval_s == pytest.approx(calm[2] / 2, rel=0.05), "four times the failures: half the interval"
    assert life(28, fails=False)[0] == 3
