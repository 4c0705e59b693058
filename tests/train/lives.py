"""Trains a small model with the Trainer of another library over and over again, each life ending as it is told. A
program of its own: ranks are forked from a process that has the library loaded already, so that a life takes a second.

    python -m tests.train.lives huggingface|lightning FOLDER:WORLD:MODE:UNTIL=END,END,... ...

prints the exit statuses of every life by folder. A MODE is `often` (a checkpoint whenever it may be), `plain` (the
callback as it comes), `own` (the Trainer is told when to save), `workers` (often, with processes that load), `stream`
(often, of a dataset without a length), `pair` (often, of two loaders), `validated` (often, with a validation every four
batches) or `apart` (the Trainer is not told what makes it join the ranks). An END is `done` (to the end), `kill@N`
(SIGKILL once step N is done), `usr1@N` (SIGUSR1 to the last rank then), `warn@N` (SIGUSR1 in the midst of step N),
`torn@N` (SIGKILL when half of a file of the first checkpoint from step N on is written), `late` (the job is about to
end), and `cut`, which is no life: half of the newest weights is gone.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from diamond.train.launch import free_port
from tests.train.forked import has_ended, wait_for

SAMPLES, BATCH, WORDS = 44, 4, 8
DELAY_S = 0.004


class Known(Dataset[Any]):
    """Sentences of which each is what its number says."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        words = torch.randint(32, (WORDS,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": words, "labels": words}


class Drawn(Dataset[Any]):
    """What a sample is depends on the dice, too."""

    def __init__(self, noise: float = 0.1) -> None:
        self._noise = noise

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        values = torch.randn(8, generator=torch.Generator().manual_seed(index))
        noise = self._noise * torch.rand(8) if torch.utils.data.get_worker_info() is None else 0.0
        return index, values + noise, values.sum()


class Stream(IterableDataset[Any]):
    """Without a length. One batch is read ahead, so what is drawn for a sample is not what is drawn again."""

    def __iter__(self) -> Any:
        return (Drawn(noise=0.0)[index] for index in torch.randperm(SAMPLES).tolist())


class Diary:
    """Each step of each rank is a line: step, loss to the last bit, samples."""

    def __init__(self, folder: Path) -> None:
        self._file = (folder / f"rank-{os.environ['RANK']}").open("a")
        self._warn_at = int(os.environ.get("WARN_AT", "0"))

    def note(self, step: int, loss: float, *more: Any) -> None:
        self._file.write(json.dumps([step, float(loss).hex(), *more]) + "\n")
        self._file.flush()
        if step == self._warn_at:
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(DELAY_S)


def weights(model: nn.Module) -> list[str]:
    return [float(value).hex() for one in model.parameters() for value in one.detach().flatten()[:50]]


# ---- the two libraries -----------------------------------------------------------------------------------------------


def huggingface(folder: Path, until: int, mode: str) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    from diamond.train.adapters.huggingface import DiamondCallback, last_checkpoint

    diary = Diary(folder)

    class Noting(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "loss" in logs:
                diary.note(state.global_step, logs["loss"])

    sizes = {"vocab_size": 32, "n_positions": WORDS, "n_embd": 16, "n_layer": 1, "n_head": 2}
    torch.manual_seed(1)
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    args = TrainingArguments(
        output_dir=str(folder / "out"), max_steps=until, per_device_train_batch_size=BATCH, logging_steps=1, seed=3,
        learning_rate=1e-2, use_cpu=mode != "apart", report_to="none", disable_tqdm=True, gradient_accumulation_steps=2,
        dataloader_pin_memory=False, **({"save_steps": 7} if mode == "own" else {}),
    )  # fmt: skip
    callbacks = [DiamondCallback(save_every_s=0.0 if mode == "often" else None), Noting()]
    trainer = Trainer(model=model, args=args, train_dataset=Known(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir))
    (folder / f"weights-{os.environ['RANK']}").write_text(json.dumps(weights(model)))


def lightning(folder: Path, until: int, mode: str) -> None:
    import lightning.pytorch as pl

    from diamond.train.adapters.lightning import DiamondCallback, last_checkpoint

    diary = Diary(folder)

    class Model(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            index, values, target = batch if mode != "pair" else map(torch.cat, zip(*batch.values(), strict=True))
            loss = ((self.net(values).squeeze(1) - target) ** 2).mean()
            self.log("loss", loss)
            diary.note(self.trainer.fit_loop.total_batch_idx + 1, loss.item(), index.tolist())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val/noise", batch[1].mean())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.9), "interval": "step"}]

    pl.seed_everything(1, verbose=False)
    world, epochs = int(os.environ["WORLD_SIZE"]), {"max_epochs": until // (SAMPLES // BATCH)}
    saved = folder / "out"
    devices = 1 if mode == "apart" else world
    trainer = pl.Trainer(
        accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto", logger=False,
        enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2 if world == 1 else 1,
        callbacks=[DiamondCallback(saved, save_every_s=None if mode == "plain" else 0.0)], log_every_n_steps=1,
        **(epochs if world == 1 else {"max_steps": until}), val_check_interval=4 if mode == "validated" else None,
    )  # fmt: skip
    loader: Any = DataLoader(Drawn(), batch_size=BATCH, shuffle=True, num_workers=2 if mode == "workers" else 0)
    if mode == "stream":
        loader = DataLoader(Stream(), batch_size=BATCH)
    if mode == "pair":
        loader = {"one": loader, "other": DataLoader(Drawn(), batch_size=BATCH, shuffle=True)}
    model = Model()
    held_back: Any = DataLoader(Drawn(), batch_size=SAMPLES) if mode == "validated" else None
    trainer.fit(model, loader, held_back, ckpt_path=last_checkpoint(saved))
    (folder / f"weights-{os.environ['RANK']}").write_text(json.dumps(weights(model)))


# ---- lives -----------------------------------------------------------------------------------------------------------


def tear(library: str, folder: Path, after: int) -> None:
    """From step `after` on, this process is gone when half of a checkpoint's file is written."""

    def torn(value: Any, path: Any, save: Any = torch.save) -> None:
        if steps(folder) < after:
            return save(value, path)
        whole = io.BytesIO()
        save(value, whole)
        with open(path, "wb") as file:
            file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
            file.flush()
        os.kill(os.getpid(), signal.SIGKILL)

    if library == "huggingface":
        torch.save = torn
    else:
        from lightning.fabric.plugins.io import torch_io

        torch_io._atomic_save = torn


def size(folder: Path) -> int:
    path = folder / "rank-0"
    return path.stat().st_size if path.exists() else 0


def steps(folder: Path) -> int:
    """How many have been done."""
    path = folder / "rank-0"
    lines = path.read_text().splitlines() if path.exists() else []
    return int(json.loads(lines[-1])[0]) if lines else 0


def cut(folder: Path) -> None:
    number = max(int(re.sub(r"\D", "", path.name)) for path in (folder / "out").iterdir())
    (newest,) = (path for path in (folder / "out").iterdir() if int(re.sub(r"\D", "", path.name)) == number)
    file = newest / "model.safetensors" if newest.is_dir() else newest
    os.truncate(file, file.stat().st_size // 2)


def rank_life(library: str, run: Run, kind: str, at: int) -> int:
    torch.set_num_threads(1)
    try:
        if kind == "torn" and os.environ["RANK"] == "0":
            tear(library, run.folder, at)
        {"huggingface": huggingface, "lightning": lightning}[library](run.folder, run.until, run.mode)
    except SystemExit as left:
        return int(left.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def one_life(library: str, run: Run, kind: str, at: int) -> list[int]:
    before, ranks, port = size(run.folder), [], str(free_port())
    for rank in range(run.world):
        pid = os.fork()
        if pid == 0:
            os.environ.update(
                RANK=str(rank), WORLD_SIZE=str(run.world), MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                DIAMOND_METRICS_FILE=str(run.folder / "metrics.jsonl"), WARN_AT=str(at if kind == "warn" else 0),
                DIAMOND_TRAIN_FILE=str(run.folder / "train.jsonl"), OMP_NUM_THREADS="1",
                DIAMOND_CONTINUE_FILE=str(run.folder / "continue"),
            )  # fmt: skip
            if run.world > 1:
                os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(run.world))
            if kind == "late":
                os.environ["DIAMOND_ENDS_AT"] = str(time.time() + 4.0)
            code = 1
            try:
                code = rank_life(library, run, kind, at)
            finally:
                sys.stderr.flush()
                os._exit(code)
        ranks.append(pid)
    if kind in ("kill", "usr1"):
        deadline = time.monotonic() + 60
        # A step of this life: before its first nobody listens for signals.
        while (size(run.folder) == before or steps(run.folder) < at) and time.monotonic() < deadline:
            time.sleep(0.002)
        for pid in ranks if kind == "kill" else ranks[-1:]:
            os.kill(pid, signal.SIGKILL if kind == "kill" else signal.SIGUSR1)
    if kind == "torn":  # a node that loses power takes all its ranks
        while not has_ended(ranks[0]):
            time.sleep(0.002)
        for pid in ranks[1:]:
            os.kill(pid, signal.SIGKILL)
    return wait_for(ranks)


class Run(NamedTuple):
    folder: Path
    world: int
    mode: str
    until: int


def main() -> None:
    library = sys.argv[1]
    if library == "huggingface":
        from transformers import GPT2LMHeadModel, Trainer  # noqa: F401
    else:
        import lightning.pytorch  # noqa: F401
    told: dict[str, list[list[int]]] = {}
    for word in sys.argv[2:]:
        what, _, ends = word.partition("=")
        folder, world, mode, until = what.split(":")
        run = Run(Path(folder), int(world), mode, int(until))
        run.folder.mkdir(parents=True)
        told[run.folder.name] = []
        for end in ends.split(","):
            kind, _, at = end.partition("@")
            if kind == "cut":
                cut(run.folder)
            else:
                told[run.folder.name].append(one_life(library, run, kind, int(at or 0)))
    print(json.dumps(told))


if __name__ == "__main__":
    main()
