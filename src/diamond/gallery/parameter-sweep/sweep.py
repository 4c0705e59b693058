"""Tries every combination of parameters and keeps a table. Needs nothing beyond Python's standard library."""

import csv
import itertools
import json
import math
import multiprocessing
import os
import random

from diamond.train import log


def score(rate, width, steps=400):
    """Trains a network of one hidden layer on a sine and returns its error: your own training goes here."""
    rng = random.Random(0)  # noqa: S311 - numbers to train with, the same every time
    a = [rng.uniform(-2, 2) for _ in range(width)]
    b = [rng.uniform(-2, 2) for _ in range(width)]
    c = [0.0] * width
    points = [(x / 10, math.sin(x / 10)) for x in range(-30, 31)]
    for _ in range(steps):
        x, y = rng.choice(points)
        hidden = [math.tanh(a[i] * x + b[i]) for i in range(width)]
        error = sum(c[i] * hidden[i] for i in range(width)) - y
        for i in range(width):
            slope = error * c[i] * (1 - hidden[i] ** 2)
            c[i] -= rate * error * hidden[i]
            a[i] -= rate * slope * x
            b[i] -= rate * slope
    guesses = ((sum(c[i] * math.tanh(a[i] * x + b[i]) for i in range(width)) - y) ** 2 for x, y in points)
    return sum(guesses) / len(points)


def attempt(pair):
    rate, width = pair
    return {"rate": rate, "width": width, "error": round(score(rate, width), 6)}


def main():
    rates = [float(text) for text in os.environ.get("RATES", "0.03,0.1").split(",")]
    widths = [int(text) for text in os.environ.get("WIDTHS", "4,8").split(",")]
    pairs = list(itertools.product(rates, widths))
    results = []
    with multiprocessing.Pool(min(len(pairs), len(os.sched_getaffinity(0)))) as pool:
        for number, result in enumerate(pool.imap_unordered(attempt, pairs), 1):
            results.append(result)
            best = min(results, key=lambda one: one["error"])
            log(step=number, error=result["error"], best=best["error"])
            print(f"{number}/{len(pairs)}  {result}", flush=True)
    results.sort(key=lambda one: one["error"])
    with open("results.csv", "w", newline="") as file:
        table = csv.DictWriter(file, ["rate", "width", "error"])
        table.writeheader()
        table.writerows(results)
    with open("best.json", "w") as file:
        json.dump(results[0], file)
    print("best:", results[0])


if __name__ == "__main__":
    main()
