"""A U-Net of two levels that marks discs in noisy pictures."""

import json
import os

import torch
from torch import nn

from diamond.train import log

SIZE = 32


def pictures(count, seed):
    """Pictures and their masks; replace this by reading your own from $DATASET."""
    generator = torch.Generator().manual_seed(seed)
    axis = torch.arange(SIZE)
    mask = torch.zeros(count, SIZE, SIZE)
    for _ in range(3):
        centre = torch.rand(count, 2, 1, 1, generator=generator) * SIZE
        radius = 3 + 4 * torch.rand(count, 1, 1, generator=generator)
        away = (axis[:, None] - centre[:, 0]) ** 2 + (axis[None, :] - centre[:, 1]) ** 2
        mask = torch.maximum(mask, (away < radius**2).float())
    return (mask + 0.6 * torch.randn(count, SIZE, SIZE, generator=generator))[:, None], mask[:, None]


def double(inside, outside):
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU(), nn.Conv2d(outside, outside, 3, padding=1), nn.ReLU()
    )


class UNet(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.down, self.bottom, self.up = double(1, width), double(width, 2 * width), double(3 * width, width)
        self.out = nn.Conv2d(width, 1, 1)

    def forward(self, x):
        fine = self.down(x)
        coarse = self.bottom(nn.functional.max_pool2d(fine, 2))
        return self.out(self.up(torch.cat([fine, nn.functional.interpolate(coarse, scale_factor=2)], 1)))


def overlap(model, x, mask):
    """Intersection over union: 1 is perfect."""
    with torch.no_grad():
        found = model(x) > 0
    wanted = mask > 0.5
    return ((found & wanted).sum() / (found | wanted).sum()).item()


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = UNet()
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3)
    steps = int(os.environ.get("STEPS", "120"))
    test_x, test_mask = pictures(64, seed=10_000)
    for step in range(1, steps + 1):
        x, mask = pictures(24, seed=step)
        loss = nn.functional.binary_cross_entropy_with_logits(model(x), mask)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        log(step=step, loss=loss.item())
        if step % 30 == 0 or step == steps:
            found = overlap(model, test_x, test_mask)
            log(step=step, overlap=found)
            print(f"step {step}: loss {loss.item():.3f}, overlap {found:.3f}", flush=True)
    torch.save(model.state_dict(), "unet.pt")
    with open("result.json", "w") as file:
        json.dump({"overlap": overlap(model, test_x, test_mask)}, file)
    with torch.no_grad():
        answer = torch.sigmoid(model(test_x[:1]))[0, 0]
    both = torch.cat([test_x[0, 0].clamp(0, 1), test_mask[0, 0], answer], 1)
    with open("example.pgm", "wb") as file:  # the picture, what is wanted, what was found
        file.write(f"P5 {3 * SIZE} {SIZE} 255\n".encode() + (both * 255).byte().numpy().tobytes())


if __name__ == "__main__":
    main()
