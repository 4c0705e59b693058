"""A program as the launcher sees a training: it joins, gives signs of life, goes on where it was. Without torch, whose
imports take longer than all that these tests ask of a launcher. Says every step in a file, as regrouped.py does.

paced.py FOLDER STEPS [hang|hang-never]    both: whoever stands still for three seconds is to be noticed
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from diamond.train import cohort

folder, until = Path(sys.argv[1]), int(sys.argv[2])
mischief = sys.argv[3] if len(sys.argv) > 3 else ""
STEP_S = float(os.environ.get("STEP_S", "0.02"))
HANG_AT, HANG_S = 40, 3.0 if mischief else 0.0

us = cohort.join()
us.look_after(HANG_S)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
generation = os.environ.get("DIAMOND_GENERATION", "0")
(folder / f"here{rank}.{generation}").touch()
while not all((folder / f"here{each}.{generation}").exists() for each in range(world)):
    time.sleep(0.01)  # nobody trains before all are there
place = folder / f"place{rank}"
first = int(place.read_text()) if place.exists() else 0
for step in range(first + 1, until + 1):
    us.pulse.at(cohort.LOOP, step)
    if mischief == "hang" and step >= HANG_AT and step > first + 5 and rank == world - 1:
        time.sleep(1000)
    time.sleep(STEP_S)
    us.pulse.steps += 1
    us.pulse.at(cohort.STEP, step)
    if step % 10 == 0:
        place.with_suffix(".new").write_text(str(step))
        place.with_suffix(".new").replace(place)
        us.saved()
    with (folder / f"rank{rank}").open("a") as file:
        file.write(f"{time.time():.3f} {step} {world} {os.getpid()} {generation} 0 []\n")
