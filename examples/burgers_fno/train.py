"""Train a Fourier neural operator to jump from u(x, 0) to u(x, T) of Burgers' equation in a single evaluation.

    python train.py                               # alone, all cores
    torchrun --nproc-per-node 2 train.py          # two ranks
    diamond launch task.yaml                      # the same two ranks, on a cluster

Settings come from the environment: EPOCHS, TRAIN_SAMPLES, TEST_SAMPLES.
"""

import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import burgers
from diamond import train
from figure import draw

EPOCHS = int(os.environ.get("EPOCHS", "30"))
TRAIN_SAMPLES = int(os.environ.get("TRAIN_SAMPLES", "2048"))
TEST_SAMPLES = int(os.environ.get("TEST_SAMPLES", "256"))
GLOBAL_BATCH = 32
LEARNING_RATE = 4e-3
MODEL = {"width": 32, "modes": 24, "layers": 4}


class SpectralConv(nn.Module):
    """A convolution over the whole interval: one small matrix for each of the lowest Fourier modes."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.modes = modes
        # Real and imaginary part side by side: optimisers and all-reduce need no complex numbers then.
        self.weight = nn.Parameter(torch.randn(modes, width, width, 2) / width)

    def forward(self, x: Tensor) -> Tensor:
        low = torch.fft.rfft(x)[..., : self.modes].permute(2, 0, 1)
        mixed = (low @ torch.view_as_complex(self.weight)).permute(1, 2, 0)
        return torch.fft.irfft(mixed, n=x.shape[-1])


class FNO(nn.Module):
    """Fourier neural operator. It is not told x: the equation is the same everywhere, and so is the network."""

    def __init__(self, width: int, modes: int, layers: int) -> None:
        super().__init__()
        self.lift = nn.Conv1d(1, width, 1)
        self.spectral = nn.ModuleList(SpectralConv(width, modes) for _ in range(layers))
        self.local = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(layers))
        self.project = nn.Sequential(nn.Conv1d(width, 4 * width, 1), nn.GELU(), nn.Conv1d(4 * width, 1, 1))

    def forward(self, u0: Tensor) -> Tensor:
        x = self.lift(u0.unsqueeze(1))
        for spectral, local in zip(self.spectral, self.local, strict=True):
            x = x + nn.functional.gelu(spectral(x) + local(x))
        return self.project(x).squeeze(1)


def relative_l2(prediction: Tensor, truth: Tensor) -> Tensor:
    """The error of each sample, as a share of the norm of its true solution."""
    return (prediction - truth).norm(dim=-1) / truth.norm(dim=-1)


@torch.no_grad()
def mean_error(net: FNO, u0: Tensor, truth: Tensor) -> float:
    """Mean relative L2 error over a set of samples."""
    return relative_l2(net(u0), truth).mean().item()


def save(path: Path, checkpoint: dict[str, object]) -> None:
    """Write then rename, so that nobody ever sees half a checkpoint."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def main() -> None:
    started = time.perf_counter()
    here = train.context()
    use_gpu = torch.cuda.is_available()
    device = torch.device("cuda", here.local_rank) if use_gpu else torch.device("cpu")
    if here.world_size > 1:
        dist.init_process_group("nccl" if use_gpu else "gloo")

    def share(count: int, seed: int, rank: int = 0, world_size: int = 1) -> list[Tensor]:
        return [part.to(device) for part in burgers.dataset(count, seed, rank, world_size)]

    u0, truth = share(TRAIN_SAMPLES, 0, here.rank, here.world_size)
    val = share(TEST_SAMPLES // 2, seed=1)
    if here.rank == 0:
        seconds = time.perf_counter() - started
        print(f"{TRAIN_SAMPLES} solutions on {here.world_size} rank(s) after {seconds:.1f} s", flush=True)

    torch.manual_seed(0)
    net = FNO(**MODEL).to(device)
    model = nn.parallel.DistributedDataParallel(net) if here.world_size > 1 else net
    batch = max(1, GLOBAL_BATCH // here.world_size)
    # Every rank must take the same number of steps, so a share that is one sample larger leaves it out.
    steps_per_epoch = max(1, TRAIN_SAMPLES // here.world_size // batch)
    optimizer = torch.optim.Adam(net.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=LEARNING_RATE, total_steps=EPOCHS * steps_per_epoch, pct_start=0.2
    )
    step = 0
    for epoch in range(1, EPOCHS + 1):
        epoch_started = time.perf_counter()
        epoch_loss = 0.0
        for rows in torch.randperm(len(u0), device=device).split(batch)[:steps_per_epoch]:
            loss = relative_l2(model(u0[rows]), truth[rows]).mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                train.log(step=step, loss=loss, lr=schedule.get_last_lr()[0])
            schedule.step()
            epoch_loss += loss.item() / steps_per_epoch
            step += 1
        error = mean_error(net, *val)  # quick, so every rank does it; only rank 0 tells
        seconds = time.perf_counter() - epoch_started
        train.log({"val/rel_l2": error, "epoch": epoch}, step=step)
        if here.rank == 0:
            progress = f"epoch {epoch:3}/{EPOCHS}  loss {epoch_loss:.4f}  val {error:.4f}  {seconds:.2f} s/epoch"
            print(progress, flush=True)

    # Every rank measures here too. A process that ends right after a collective can abort in Gloo (torch 2.13): its
    # threads want the interpreter once more to let go of the last gradients.
    u0, truth = share(TEST_SAMPLES, seed=2)
    error = mean_error(net, u0, truth)
    train.log({"test/rel_l2": error}, step=step)
    if here.rank == 0:
        result = {
            "test_rel_l2": error,
            "parameters": sum(parameter.numel() for parameter in net.parameters()),
            "ranks": here.world_size,
            "epochs": EPOCHS,
            "seconds": round(time.perf_counter() - started, 2),
        }
        save(here.output_dir / "model.pt", {"model": MODEL, "state": net.state_dict(), "test_rel_l2": error})
        draw_samples(here.output_dir / "prediction.svg", net, u0[:3], truth[:3])
        (here.output_dir / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"test error {100 * error:.2f} % after {result['seconds']:.1f} s", flush=True)
    if here.world_size > 1:
        dist.destroy_process_group()


@torch.no_grad()
def draw_samples(path: Path, net: FNO, u0: Tensor, truth: Tensor) -> None:
    """Draw what the network makes of a few initial conditions."""
    prediction = net(u0)
    errors = relative_l2(prediction, truth).tolist()
    curves = zip(u0.tolist(), truth.tolist(), prediction.tolist(), strict=True)
    title = f"Burgers' equation, viscosity {burgers.NU:g}, T = {burgers.T:g}: truth and prediction"
    captions = [f"sample {number}: error {100 * error:.2f} %" for number, error in enumerate(errors, start=1)]
    draw(path, title, list(zip(captions, curves, strict=True)))


if __name__ == "__main__":
    main()
