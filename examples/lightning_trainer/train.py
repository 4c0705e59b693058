"""Tells two spirals apart, with Lightning. Runs alone, under torchrun and under Diamond; killed or out of time, it goes
on where it stopped when it is started again.

Needs lightning and torch. Nothing is downloaded: the data are made here.
"""

import math
import os

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from diamond.train import context
from diamond.train.adapters.lightning import DiamondCallback, last_checkpoint

EPOCHS = int(os.environ.get("EPOCHS", "30"))


def spirals(count: int, seed: int) -> TensorDataset:
    dice = torch.Generator().manual_seed(seed)
    arm = torch.randint(2, (count,), generator=dice)
    turn = 3 * math.pi * torch.rand(count, generator=dice).sqrt()
    angle = turn + math.pi * arm
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], 1) / 10
    return TensorDataset(points + 0.02 * torch.randn(count, 2, generator=dice), arm)


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, 2))

    def training_step(self, batch, batch_idx):
        points, arm = batch
        loss = nn.functional.cross_entropy(self.net(points), arm)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        points, arm = batch
        right = (self.net(points).argmax(1) == arm).float().mean()
        self.log("val/right", right, sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    pl.seed_everything(0)
    place = context()  # what torchrun and Diamond say about this process; one process where nobody says anything
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        num_nodes=place.num_nodes,
        devices=place.world_size // place.num_nodes,
        # Whoever started the ranks said what they are; Slurm's variables, which Lightning looks at first, count tasks.
        plugins=[LightningEnvironment()],
        callbacks=[DiamondCallback("checkpoints")],
        logger=False,
        enable_progress_bar=False,
        log_every_n_steps=10,
    )
    train = DataLoader(spirals(4096, seed=1), batch_size=64, shuffle=True)
    held_back = DataLoader(spirals(1024, seed=2), batch_size=256)
    model = Classifier()
    trainer.fit(model, train, held_back, ckpt_path=last_checkpoint("checkpoints"))
    right = trainer.validate(model, held_back, verbose=False)[0]["val/right"]
    if trainer.is_global_zero:
        torch.save(model.state_dict(), "model.pt")
        print(f"{right:.1%} of the points it has never seen are on the right spiral")


if __name__ == "__main__":
    main()
