"""How soon a training goes on after one of its workers is killed: Diamond's launcher against torchrun.

    PYTHONPATH=src python -m benchmarks.train_recovery [--quick]

The same script runs under both, two gloo ranks, with `diamond.train.run` for its state; only who starts the ranks
differs. A worker is killed with SIGKILL at a random moment, in turn the first and the second. Counted is the time until
both ranks have done a step in new processes, and whether they ever do: after half a minute without, the kill counts as
not recovered, and the training is begun anew. The two take turns of ten kills, until torchrun's have taken PEER_S.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import Bench, median, options, percentile

ROOT = Path(__file__).parents[1]
LAUNCH = ROOT / "src" / "diamond" / "train" / "launch.py"
LOST_S = 30.0
PEER_S = float(os.environ.get("DIAMOND_BENCH_PEER_S", "600"))  # most of it waits for those that never come back
KILLS_IN_TURN = 10

SCRIPT = """
import os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import diamond.train as dt

folder = sys.argv[1]
torch.manual_seed(0)
inputs = torch.randn(4096, 64)
with dt.run(checkpoints=folder + "/checkpoints", save_every_s=1.0) as run:
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    data = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=32, shuffle=True)
    model, optimizer, loader = run.prepare(model, optimizer, data)
    for given, wanted in run.steps(loader, until=10**9):
        loss = (model(given) - wanted).square().mean()
        run.backward(loss)
        run.step()
        time.sleep(0.02)
        with open(folder + f"/rank{run.rank}", "w") as file:
            file.write(f"{os.getpid()} {run.step_number} {time.time()} .")
"""


class Training:
    """One that runs under `which`."""

    def __init__(self, which: str) -> None:
        self.which = which
        self._folder = tempfile.TemporaryDirectory(prefix="diamond-recovery-")
        self.path = Path(self._folder.name)
        (self.path / "train.py").write_text(SCRIPT)
        script = [str(self.path / "train.py"), str(self.path)]
        argv = {
            "diamond": [sys.executable, str(LAUNCH), "--ranks", "2", "--", sys.executable, *script],
            "torchrun": [
                sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                "--max-restarts", "100000", "--monitor-interval", "0.1", *script,
            ],
        }[which]  # fmt: skip
        env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
        self._log = (self.path / "log").open("wb")
        self._proc = subprocess.Popen(
            argv, env=env, stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True, cwd=self.path
        )
        self.wait_for_step({})

    def places(self) -> dict[int, int]:
        """Process ids by rank, of ranks that have done a step."""
        found = {}
        for rank in range(2):
            with contextlib.suppress(OSError, ValueError, IndexError):
                words = (self.path / f"rank{rank}").read_text().split(" ")
                if words[-1] == ".":
                    found[rank] = int(words[0])
        return found

    def wait_for_step(self, before: dict[int, int]) -> float | None:
        """Until both ranks have done a step in processes that were not there before; when rank 0's was seen."""
        deadline = time.monotonic() + LOST_S
        while time.monotonic() < deadline and self._proc.poll() is None:
            now = self.places()
            if len(now) == 2 and not set(now.values()) & set(before.values()):
                return time.monotonic()
            time.sleep(0.005)
        return None

    def kill(self, rank: int) -> float | None:
        """Seconds until it trains again; None if it does not."""
        while len(before := self.places()) < 2:  # a file is being written
            time.sleep(0.005)
        began = time.monotonic()
        os.kill(before[rank], signal.SIGKILL)
        seen = self.wait_for_step(before)
        return None if seen is None else seen - began

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._proc.pid, signal.SIGTERM)
        try:
            self._proc.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._proc.pid, signal.SIGKILL)
            self._proc.wait()
        for pid in self.places().values():  # torchrun's ranks have sessions of their own
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self._log.close()
        self._folder.cleanup()


def main() -> int:
    chosen = options(__doc__ or "")
    kills = 6 if chosen.quick else 50
    bench = Bench("train_recovery", packages=("torch",))
    dice = random.Random(0)
    taken: dict[str, list[float]] = {"diamond": [], "torchrun": []}
    lost = {"diamond": 0, "torchrun": 0}
    spent = 0.0
    for begin in range(0, kills, KILLS_IN_TURN):
        for which in taken:
            if which == "torchrun" and spent > PEER_S:
                continue
            began = time.monotonic()
            training = Training(which)
            for number in range(begin, min(begin + KILLS_IN_TURN, kills)):
                if which == "torchrun" and spent + time.monotonic() - began > PEER_S:
                    break
                time.sleep(dice.uniform(0.5, 5.0))
                found = training.kill(number % 2)
                print(f"{which} {number}: {found}", flush=True)
                if found is None:
                    lost[which] += 1
                    training.close()
                    training = Training(which)
                else:
                    taken[which].append(round(found, 3))
            training.close()
            spent += time.monotonic() - began if which == "torchrun" else 0.0
    tried = len(taken["torchrun"]) + lost["torchrun"]
    for part, name, aim in ((0.5, "p50", None), (0.95, "p95", 5.0)):
        ours, theirs = (percentile(taken[which], part) if taken[which] else 0.0 for which in ("diamond", "torchrun"))
        bench.add(f"recovery after SIGKILL of a worker, {name}", ours, "s", "lower", aim=aim,
                  peer={"torchrun": theirs}, runs=taken["diamond"], peer_runs={"torchrun": taken["torchrun"]},
                  note=f"median {median(taken['diamond']):.2f} s; of those that recovered")  # fmt: skip
    bench.add("kills recovered", 100 * (1 - lost["diamond"] / kills), "%", "higher", aim=100.0,
              peer={"torchrun": round(100 * len(taken["torchrun"]) / max(tried, 1), 1)},
              note=f"{kills - lost['diamond']} of {kills}; torchrun {len(taken['torchrun'])} of {tried}")  # fmt: skip
    return bench.finish(chosen)


if __name__ == "__main__":
    raise SystemExit(main())
