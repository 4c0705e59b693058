"""A network that solves Burgers' equation, u(x, 0) -> u(x, T), trained by a second-order optimizer or a usual one."""

import json
import math
import os
import sys
import time

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

import diamond.optim as do
import diamond.train as dt
from burgers import POINTS, samples

STEPS = int(os.environ.get("STEPS", "300"))
RATES = {"adamw": 1e-2, "soap": 1e-2, "muon": 3e-2}  # what LR=auto means for these; K-FAC measures how far to go


def optimizer_for(model):
    name, rate = os.environ.get("OPTIMIZER", "kfac"), os.environ.get("LR", "auto")
    if name == "kfac":
        damping = float(os.environ.get("DAMPING", "1e-4"))
        return do.KFAC(model, rate if rate == "auto" else float(rate), damping=damping)
    if name not in RATES:
        sys.exit(f"OPTIMIZER={name}: use kfac, {', '.join(RATES)}")
    return do.make(name, model, lr=RATES[name] if rate == "auto" else float(rate))


def main():
    torch.set_num_threads(1)
    with dt.run(seed=0) as run:  # goes on from ./checkpoints, if there are any
        model = network = nn.Sequential(
            nn.Linear(POINTS, 192), nn.GELU(), nn.Linear(192, 192), nn.GELU(), nn.Linear(192, POINTS)
        )
        optimizer = optimizer_for(model)
        schedule = LambdaLR(optimizer, lambda step: 0.5 + 0.5 * math.cos(math.pi * min(1, step / STEPS)))
        data = TensorDataset(*samples(int(os.environ.get("SAMPLES", "2000")), seed=0))
        loader = DataLoader(data, batch_size=100, shuffle=True)
        model, optimizer, schedule, loader = run.prepare(model, optimizer, schedule, loader)
        test_u0, test_u = (one.to(run.device) for one in samples(256, seed=1))

        def error():
            with torch.no_grad():
                return ((network(test_u0) - test_u).norm(dim=1) / test_u.norm(dim=1)).mean().item()

        seconds, since = run.state.get("seconds", 0.0), time.perf_counter()
        for u0, u in run.steps(loader, until=STEPS):
            loss = nn.functional.mse_loss(model(u0), u)
            run.backward(loss)
            run.step()
            run.log(loss=loss.item())
            seconds += time.perf_counter() - since
            run.state.update(seconds=seconds, loss=loss.item())
            if run.step_number % 25 == 0 or run.step_number == STEPS:
                found = error()
                run.log(relative_error=found, seconds=seconds)
                line = f"step {run.step_number}: loss {loss.item():.2e}, relative error {found:.2%}, {seconds:.1f} s"
                print(line, flush=True)
            since = time.perf_counter()
        if run.is_main:
            torch.save(network.state_dict(), "surrogate.pt")
            result = {"optimizer": os.environ.get("OPTIMIZER", "kfac"), "steps": run.step_number}
            result |= {"loss": run.state["loss"], "relative_error": error(), "training_seconds": round(seconds, 2)}
            with open("result.json", "w") as file:
                json.dump(result, file)


if __name__ == "__main__":
    main()
