"""Data-parallel training with DistributedDataParallel: the same program in every process."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from diamond.train import log


def data():
    """A curve with noise; replace it by your own data set."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(4096, 8, generator=generator) * 2 - 1
    y = torch.sin(3 * x[:, :1]) + x[:, 1:2] ** 2 + 0.05 * torch.randn(4096, 1, generator=generator)
    return TensorDataset(x, y)


def main():
    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, local_rank = dist.get_rank(), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if on_gpu else torch.device("cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    model = DistributedDataParallel(net, device_ids=[local_rank] if on_gpu else None)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    sampler = DistributedSampler(rows := data(), seed=0)
    loader = DataLoader(rows, batch_size=128, sampler=sampler)
    step, steps = 0, int(os.environ.get("STEPS", "60"))
    while step < steps:
        sampler.set_epoch(step)
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            optimiser.zero_grad()
            loss.backward()  # gradients are averaged over all processes here
            optimiser.step()
            step += 1
            if rank == 0:
                log(step=step, loss=loss.item())
                if step % 20 == 0:
                    print(f"step {step}: loss {loss.item():.4f} on {dist.get_world_size()} processes", flush=True)
            if step >= steps:
                break
    if rank == 0:
        torch.save(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
