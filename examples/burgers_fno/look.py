"""Load a trained model and try it on initial conditions it has never seen.

    python look.py model.pt [SEED]

Prints the error of each sample and writes look.svg beside the model.
"""

import sys
from pathlib import Path

import torch

import burgers
from train import FNO, draw_samples, relative_l2


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "model.pt")
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1234
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    net = FNO(**checkpoint["model"])
    net.load_state_dict(checkpoint["state"])
    net.eval()
    u0, truth = burgers.dataset(8, seed)
    with torch.no_grad():
        errors = relative_l2(net(u0), truth).tolist()
    for number, error in enumerate(errors):
        print(f"sample {number}: relative L2 error {100 * error:.2f} %")
    picture = path.with_name("look.svg")
    draw_samples(picture, net, u0[:3], truth[:3])
    print(f"picture: {picture}")


if __name__ == "__main__":
    main()
