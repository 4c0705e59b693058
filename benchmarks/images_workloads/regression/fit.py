"""Ridge regression on a table, with cross-validation; the job must have a GPU, as the real model's would."""

from __future__ import annotations

import os
import sys

import pandas as pd
from sklearn.linear_model import RidgeCV
from sklearn.model_selection import cross_val_score


def main(source: str) -> None:
    if not os.environ.get("CUDA_VISIBLE_DEVICES"):
        sys.exit("this job has no GPU")
    table = pd.read_csv(source)
    inputs, target = table.drop(columns="y"), table["y"]
    model = RidgeCV(alphas=[0.01, 0.1, 1.0, 10.0])
    score = cross_val_score(model, inputs, target, cv=5).mean()
    print(f"solved: R2 {score:.6f} on GPU {os.environ['CUDA_VISIBLE_DEVICES']}")


if __name__ == "__main__":
    main(sys.argv[1])
