"""The run itself, in one process: what it says when something is wrong, what it keeps, and when it ends."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.optim.lr_scheduler import ReduceLROnPlateau  # noqa: E402
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler  # noqa: E402

import diamond.train as dt  # noqa: E402
from diamond.train.errors import Continued  # noqa: E402
from diamond.train.loop import beside  # noqa: E402


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "DIAMOND_CONTINUE_FILE", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DIAMOND_TRAIN_QUIET", "1")


def things(width: int = 4, batch_size: int = 4, **loader: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    data = TensorDataset(torch.arange(10), torch.randn(10, 3))
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    return model, torch.optim.Adam(model.parameters()), DataLoader(data, batch_size=batch_size, **loader)


def turns(run: Any, model: Any, loader: Any, until: int) -> Iterator[tuple[list[int], float]]:
    for index, values in run.steps(loader, until=until):
        loss = model(values).square().mean()
        run.backward(loss)
        run.step()
        yield index.tolist(), loss.item()


def trained(folder: Path, until: int, *, width: int = 4, **given: Any) -> list[tuple[list[int], float]]:
    with dt.run(checkpoints=folder, **given) as run:
        model, _, loader = run.prepare(*things(width=width))
        return list(turns(run, model, loader, until))


def test_it_goes_on_where_it_ended(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    whole = trained(tmp_path / "whole", 9)
    first, second = trained(tmp_path / "parts", 4), trained(tmp_path / "parts", 9)
    assert first + second == whole
    assert [len(samples) for samples, _ in whole] == [4, 4, 2] * 3
    assert "going on from" in capfd.readouterr().err
    assert trained(tmp_path / "parts", 9) == [], "there is nothing left to do"
    assert trained(tmp_path / "parts", 2, resume=False) == whole[:2]


def test_the_order_is_the_loaders(tmp_path: Path) -> None:
    with dt.run(checkpoints=tmp_path / "sequential") as run:
        model, _, loader = run.prepare(*things())
        assert [samples for samples, _ in turns(run, model, loader, 3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    with dt.run(checkpoints=tmp_path / "dropped") as run:
        model, _, loader = run.prepare(*things(drop_last=True))
        assert [samples for samples, _ in turns(run, model, loader, 3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    drawn = []
    for _ in range(2):
        with dt.run(checkpoints=tmp_path / "weighted", resume=False, seed=5) as run:
            sampler = WeightedRandomSampler([0.0] * 5 + [1.0] * 5, 12)
            model, _, loader = run.prepare(*things(sampler=sampler))
            drawn.append([sample for samples, _ in turns(run, model, loader, 3) for sample in samples])
    assert drawn[0] == drawn[1] and len(drawn[0]) == 12 and min(drawn[0]) >= 5


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for number in range(10):
            yield torch.tensor(number), torch.full((3,), float(number))


def test_a_stream_is_read_once(tmp_path: Path) -> None:
    seen = []
    for until in (2, 5):
        model, optimizer, _ = things()
        with dt.run(checkpoints=tmp_path) as run:
            model, _, loader = run.prepare(model, optimizer, DataLoader(Stream(), batch_size=4))
            seen += [samples for samples, _ in turns(run, model, loader, until)]
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_else_is_kept(tmp_path: Path) -> None:
    for until in (3, 6):
        model, optimizer, loader = things()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        with dt.run(checkpoints=tmp_path) as run:
            model, optimizer, loader, scheduler = run.prepare(model, optimizer, loader, scheduler)
            for _ in turns(run, model, loader, until):
                run.state["best"] = torch.tensor(float(run.step_number))
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-3 * 0.5**6)
    assert float(run.state["best"]) == 6.0


def test_what_follows_a_save_is_in_the_last_checkpoint(tmp_path: Path) -> None:
    for until in (2, 3):
        with dt.run(checkpoints=tmp_path) as run:
            model, _, loader = run.prepare(*things())
            assert run.state.get("turns", 0) == {2: 0, 3: 2}[until], "what came after the save, too"
            for _ in turns(run, model, loader, until):
                run.save()
                run.state["turns"] = run.step_number
    assert run.state["turns"] == 3
    with dt.run(checkpoints=tmp_path) as run:
        model, _, loader = run.prepare(*things())
        assert (run.state["turns"], run.samples) == (3, 10)
        for _ in turns(run, model, loader, 6):
            if run.step_number == 4:
                break
    with dt.run(checkpoints=tmp_path) as run:
        model, _, loader = run.prepare(*things())
        assert next(turns(run, model, loader, 6))[0] == [4, 5, 6, 7], "a loop that was left replays nothing either"


def test_a_damaged_one_is_not_taken(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    trained(tmp_path, 3)
    trained(tmp_path, 5)
    newest, before = sorted(tmp_path.iterdir(), reverse=True)[:2]
    part = max((newest / "state").glob("*.distcp"), key=lambda path: path.stat().st_size)
    data = bytearray(part.read_bytes())
    data[len(data) // 2] ^= 1
    part.write_bytes(data)
    assert len(trained(tmp_path, 6)) == 3, "from step 3"
    said = capfd.readouterr().err
    assert f"{newest} is damaged" in said and part.name in said and f"going on from {before}" in said
    for folder in tmp_path.iterdir():
        (folder / "manifest.json").write_text("{")
    with pytest.raises(dt.TrainError, match=r"none of the \d checkpoints .* is whole.*begin anew"):
        trained(tmp_path, 7)


def test_only_some_are_kept(tmp_path: Path) -> None:
    trained(tmp_path, 6, save_every_s=0.0, keep=2)
    assert len(list(tmp_path.iterdir())) == 2
    (tmp_path / "step-000000099.unfinished").mkdir()
    trained(tmp_path, 7)
    assert not list(tmp_path.glob("*.unfinished"))


@pytest.mark.parametrize(
    ("skip", "words"),
    [("step", r"run\.step\(\) was not called.*after"), ("backward", r"run\.backward\(loss\) was not")],
)
def test_forgotten_calls(tmp_path: Path, skip: str, words: str) -> None:
    def forgetful() -> None:
        with dt.run(checkpoints=tmp_path) as run:
            model, _, loader = run.prepare(*things())
            for _, values in run.steps(loader, until=3):
                loss = model(values).mean()
                if skip != "backward":
                    run.backward(loss)
                if skip != "step":
                    run.step()

    with pytest.raises(dt.TrainError, match=words):
        forgetful()


def test_a_loss_that_is_no_number(tmp_path: Path) -> None:
    def hopeless() -> None:
        with dt.run(checkpoints=tmp_path) as run:
            model, _, loader = run.prepare(*things())
            for _, values in run.steps(loader, until=5):
                run.backward(model(values).mean() * float("nan"))
                run.step()

    with pytest.raises(dt.TrainError, match=r"not a number.*learning rate"):
        hopeless()
    assert not list(tmp_path.glob("step-*")), "nothing to go on from was made of it"


def test_another_model(tmp_path: Path) -> None:
    trained(tmp_path, 2)
    with pytest.raises(dt.TrainError, match=r"0\.weight: \[4, 3\] then, \[5, 3\] now.*resume=False"):
        trained(tmp_path, 4, width=5)


def test_other_objects(tmp_path: Path) -> None:
    trained(tmp_path, 2)
    model, optimizer, loader = things()
    with pytest.raises(dt.TrainError, match="the same order"), dt.run(checkpoints=tmp_path) as run:
        run.prepare(model, optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 1))


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    def stuffed() -> None:
        with dt.run(checkpoints=tmp_path, save_every_s=0.0) as run:
            model, _, loader = run.prepare(*things())
            run.state["file"] = lambda: None
            list(turns(run, model, loader, 3))

    with pytest.raises(dt.TrainError, match=r"run\.state .* cannot be saved.*no open files"):
        stuffed()


@pytest.mark.parametrize(
    ("given", "words"),
    [({"parallel": "magic"}, "magic"), ({"precision": "fp7"}, "fp7"), ({"keep": 0}, "at least 1")],
)
def test_bad_arguments(given: dict[str, Any], words: str) -> None:
    with pytest.raises(dt.TrainError, match=words):
        dt.run(**given)


def test_misuse_of_prepare(tmp_path: Path) -> None:
    model, optimizer, loader = things()
    with dt.run(checkpoints=tmp_path) as run:
        with pytest.raises(dt.TrainError, match="given 0 models"):
            run.prepare(optimizer, loader)
        with pytest.raises(dt.TrainError, match="cannot use a str"):
            run.prepare(model, optimizer, "loader")
        with pytest.raises(dt.TrainError, match="outside of the loop"):
            run.step()
    with dt.run(checkpoints=tmp_path) as run, pytest.raises(dt.TrainError, match="makes no batches"):
        run.prepare(model, optimizer, DataLoader(loader.dataset, batch_size=None))


def test_only_the_first_loader_is_trained_on(tmp_path: Path) -> None:
    model, optimizer, loader = things()
    held_out = DataLoader(Augmented(), batch_size=4, shuffle=True)
    with dt.run(checkpoints=tmp_path) as run:
        model, optimizer, loader, held_out = run.prepare(model, optimizer, loader, held_out)
        with pytest.raises(dt.TrainError, match=r"run\.steps\(\) alone.*further DataLoader"):
            iter(loader)
        with pytest.raises(dt.TrainError, match="another loader than the first"):
            next(run.steps(held_out, until=3))
        before = torch.get_rng_state()
        passes = [[batch.tolist() for batch in held_out] for _ in range(2)]
        assert passes[0] == passes[1] and len(passes[0]) == len(held_out) == 3
        assert sorted(int(one) for batch in passes[0] for one in batch) == list(range(10))
        assert torch.equal(torch.get_rng_state(), before)


class Augmented(Dataset[Any]):
    def __init__(self) -> None:
        self._dice = torch.Generator().manual_seed(1)

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Any:
        return index + 0.5 * torch.rand((), generator=self._dice)


def test_a_plateau_is_the_ranks_together(tmp_path: Path) -> None:
    def seen(mean: Callable[[float], float]) -> tuple[float, dict[str, Any]]:
        _, optimizer, _ = things()
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        beside.look_together(plateau, mean)
        for metric in (1.0, torch.tensor(2.0)):
            plateau.step(metric)
        torch.save(plateau.state_dict(), tmp_path / "state")
        assert isinstance(plateau, ReduceLROnPlateau)
        return optimizer.param_groups[0]["lr"], plateau.state_dict()

    assert seen(lambda metric: metric)[0] == pytest.approx(5e-4), "it became worse"
    together = iter((1.0, 0.5))
    rate, state = seen(lambda metric: next(together))
    assert rate == pytest.approx(1e-3) and state["best"] == 0.5, "on all ranks together it became better"


def test_a_checkpoint_of_an_earlier_version_is_gone_on_from(tmp_path: Path) -> None:
    """It has no order of buckets, no buffers of ranks, nothing of the data but numbers."""
    whole = trained(tmp_path / "whole", 7)
    first = trained(tmp_path / "run", 4)
    (checkpoint,) = (tmp_path / "run").iterdir()
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    for name, new in {"common.pt": {"buckets", "data", "averages"}, "rank-0.pt": {"buffers"}}.items():
        part = torch.load(checkpoint / name, weights_only=False)
        assert new <= part.keys()
        torch.save({key: value for key, value in part.items() if key not in new}, checkpoint / name)
        data = (checkpoint / name).read_bytes()
        manifest["files"][name] = [len(data), zlib.crc32(data)]
    assert sorted(torch.load(checkpoint / "common.pt", weights_only=False)) == ["others", "state"]
    assert manifest["meta"]["data"].pop("samples") == 10
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert first + trained(tmp_path / "run", 7) == whole


def test_a_warning_ends_it_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIAMOND_CONTINUE_FILE", str(tmp_path / "continue"))
    handler = signal.getsignal(signal.SIGUSR1)

    def warned() -> None:
        with dt.run(checkpoints=tmp_path / "c") as run:
            model, _, loader = run.prepare(*things())
            for _ in turns(run, model, loader, 100):
                if run.step_number == 5:
                    os.kill(os.getpid(), signal.SIGUSR1)

    with pytest.raises(Continued) as left:
        warned()
    assert left.value.code == 85
    assert (tmp_path / "continue").exists()
    assert signal.getsignal(signal.SIGUSR1) == handler
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["step-000000005"]


def test_it_knows_when_the_job_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = int(time.time()) + 9
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(ends))

    def timed() -> None:
        with dt.run(checkpoints=tmp_path, save_every_s=0.2) as run:
            model, _, loader = run.prepare(*things())
            for _ in turns(run, model, loader, 10**6):
                time.sleep(0.05)

    with pytest.raises(Continued) as left:
        timed()
    assert left.value.code == 128 + signal.SIGUSR1
    assert time.time() < ends, "before the scheduler ends it"
    assert list(tmp_path.glob("step-*"))


FULL = """
import resource, signal, sys
import torch
from tests.train.test_running import things, turns
import diamond.train as dt
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
with dt.run(checkpoints=sys.argv[1], save_every_s=0.0) as run:
    model, _, loader = run.prepare(*things())
    for _ in turns(run, model, loader, 40):
        if run.step_number == 5:
            run.save()
            run._checkpoints.saver.wait()
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
        if run.step_number in (10, 15):
            run.save()
        if run.step_number == 30:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""


def test_a_full_disk_stops_nothing(tmp_path: Path) -> None:
    """Files that cannot grow beyond 2 kB stand for a full disk: a write fails in the middle."""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[1] == resource.RLIM_INFINITY
    root = Path(__file__).parents[2]
    argv = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(argv, cwd=root, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "could not be written" in done.stderr
    assert "step-000000040" in {path.name for path in tmp_path.iterdir()}


QUIET = """
import sys
seen = []
talk = ("socket.connect", "socket.getaddrinfo", "socket.sendto")
sys.addaudithook(lambda event, args: seen.append(event) if event in talk else None)
import diamond.train as dt
from tests.train.test_running import things, turns
with dt.run(checkpoints=sys.argv[1]) as run:
    model, _, loader = run.prepare(*things())
    for _ in turns(run, model, loader, 20):
        pass
assert run.step_number == 20 and not seen, seen
"""


def test_alone_it_talks_to_nobody(tmp_path: Path) -> None:
    """No name is looked up and nothing connected to, from the first import to the end."""
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    argv = [sys.executable, "-c", QUIET, str(tmp_path / "checkpoints")]
    done = subprocess.run(
        argv, cwd=Path(__file__).parents[2], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"checkpoints": ""}, "checkpoints=''"),
        ({"checkpoints": 5}, "checkpoints=5"),
        ({"seed": "a"}, "seed='a'"),
        ({"keep": "x"}, "keep='x'"),
        ({"save_every_s": -1}, "save_every_s=-1"),
        ({"save_every_s": "x"}, "save_every_s='x'"),
        ({"hang_after_s": "x"}, "hang_after_s='x'"),
        ({"hang_after_s": float("nan")}, "hang_after_s=nan"),
    ],
)
def test_arguments_are_looked_at_before_anything_begins(given: dict[str, Any], named: str) -> None:
    with pytest.raises(dt.TrainError) as told:
        dt.run(**given)
    assert str(told.value).startswith(named)


@pytest.mark.parametrize("until", ["30", 0, -5, 1.5, True])
def test_an_end_is_a_number_of_steps(tmp_path: Path, until: Any) -> None:
    with dt.run(checkpoints=tmp_path) as run:
        _, _, loader = run.prepare(*things())
        with pytest.raises(dt.TrainError, match="until="):
            next(run.steps(loader, until=until))


def test_a_folder_that_cannot_be_written_is_told_of_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(dt.TrainError, match="checkpoints cannot be written to"):
        dt.run(checkpoints=tmp_path / "file" / "checkpoints").__enter__()
