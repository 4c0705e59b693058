"""A training script that knows nothing of Diamond: it fits a line to noisy points, and prints how that goes."""

import random

random.seed(0)
points = [(x / 100, 3 * x / 100 - 1 + random.gauss(0, 0.1)) for x in range(-100, 100)]
held_out, points = points[::5], [point for place, point in enumerate(points) if place % 5]
slope, offset, rate = 0.0, 0.0, 0.05


def error(data):
    return sum((slope * x + offset - y) ** 2 for x, y in data) / len(data)


for epoch in range(1, 31):
    random.shuffle(points)
    for x, y in points:
        wrong = slope * x + offset - y
        slope -= rate * wrong * x
        offset -= rate * wrong
    rate *= 0.95
    print(
        f"Epoch {epoch:2d}/30 | loss: {error(points):.5f} | val loss: {error(held_out):.5f} | lr {rate:.4f}", flush=True
    )
    print(f"   the line is {slope:.4f} x {offset:+.4f}", flush=True)
