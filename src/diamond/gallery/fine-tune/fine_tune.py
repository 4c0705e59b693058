"""Fine-tunes pretrained weights for another task: the head alone first, then everything at a tenth of the rate."""

import json
import os

import torch
from network import Network, accuracy, waves
from torch import nn

from diamond.train import log

torch.manual_seed(1)
torch.set_num_threads(1)
known = torch.load("pretrained.pt", weights_only=True)
model = Network(classes=2)
model.load_state_dict({name: value for name, value in known.items() if name.startswith("body.")}, strict=False)
test_x, test_y = waves(512, "pitch", seed=10_000)
before = accuracy(model, test_x, test_y)
step = 0


def train(parameters, rate, steps):
    global step
    optimiser = torch.optim.Adam(parameters, lr=rate)
    for _ in range(steps):
        x, y = waves(64, "pitch", seed=20_000 + step)
        loss = nn.functional.cross_entropy(model(x), y)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        step += 1
        log(step=step, loss=loss.item())
        if step % 20 == 0:
            right = accuracy(model, test_x, test_y)
            log(step=step, accuracy=right)
            print(f"step {step}: loss {loss.item():.3f}, accuracy {right:.1%}", flush=True)


for weight in model.body.parameters():
    weight.requires_grad_(False)
train(model.head.parameters(), 1e-2, int(os.environ.get("HEAD_STEPS", "80")))
for weight in model.body.parameters():
    weight.requires_grad_(True)
train(model.parameters(), 1e-3, int(os.environ.get("ALL_STEPS", "80")))

after = accuracy(model, test_x, test_y)
torch.save(model.state_dict(), "tuned.pt")
with open("result.json", "w") as file:
    json.dump({"accuracy_before": before, "accuracy_after": after}, file)
print(f"accuracy {before:.1%} -> {after:.1%}")
