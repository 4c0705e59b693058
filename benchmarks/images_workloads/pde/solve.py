"""Heat conduction in a plate: implicit Euler on the temperatures of a CSV file."""

from __future__ import annotations

import sys

import numpy as np
import scipy.sparse as sparse
from scipy.sparse.linalg import splu


def main(source: str, steps: int = 50) -> None:
    field = np.loadtxt(source, delimiter=",")
    size = field.shape[0]
    line = sparse.diags([1.0, -2.0, 1.0], [-1, 0, 1], shape=(size, size))
    eye = sparse.identity(size)
    laplace = sparse.kron(line, eye) + sparse.kron(eye, line)
    step = splu((sparse.identity(size * size) - 0.1 * laplace).tocsc())
    heat = field.ravel()
    for _ in range(steps):
        heat = step.solve(heat)
    np.savetxt("heat.csv", heat.reshape(field.shape), delimiter=",")
    print(f"solved: mean temperature {heat.mean():.6f}")


if __name__ == "__main__":
    main(sys.argv[1])
