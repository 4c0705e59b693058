"""The parts of job scripts that are different inside pilots (ADR 0009). See `diamond.core.scripts`, which uses them."""

from __future__ import annotations

from dataclasses import dataclass

_MIB = 1024**2


@dataclass(frozen=True, kw_only=True)
class SlotShare:
    """What one slot of a pool is: so many cores, a GPU or none, so much memory (0: no limit)."""

    cpus: int = 1
    has_gpus: bool = False
    mem_bytes: int = 0


# A warning means the end in a pilot, be it the pilot's own or to make room. A training that knows when the job ends
# would go by that instead, and what Slurm says is when the pilot does.
NO_END = """\
  unset DIAMOND_ENDS_AT SLURM_JOB_END_TIME
"""

# Begins a loop over the job's nodes; what stands in it goes to the background. Variables of the step that this script
# runs in would change what srun asks for in the other pilots.
EACH_PILOT = """\
for name in "${!SLURM_@}" CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES GPU_DEVICE_ORDINAL ZE_AFFINITY_MASK; do
  case $name in SLURM_CONF|SLURM_CONF_SERVER|SLURM_JWT) ;; *) unset "$name" ;; esac
done
# Each node is held by a pilot, a job of its own, and has a step of this job's in it.
steps=() DIAMOND_NODE=0
while read -r DIAMOND_PILOT DIAMOND_HOST DIAMOND_SLOTS <&4; do
"""

EACH_PILOT_END = """\
steps+=($!) DIAMOND_NODE=$((DIAMOND_NODE + 1))
done 4< pilots
"""

_STEP = (
    'exec 4<&-; exec "$DIAMOND_SRUN" --jobid="$DIAMOND_PILOT" --exact --nodes=1 --ntasks=1 --nodelist="$DIAMOND_HOST" '
    '\\\n   --cpus-per-task="$((DIAMOND_SLOTS * {cpus}))"{gres}{mem} --kill-on-bad-exit=0 --export=ALL --input=none '
    "\\\n   env -u SLURM_JOB_END_TIME "
)


def pilot_step(slot: SlotShare) -> str:
    """The srun that starts a program on a node of that loop."""
    return _STEP.format(
        cpus=slot.cpus,
        gres=' --gres=gpu:"$DIAMOND_SLOTS"' if slot.has_gpus else "",
        mem=f' --mem="$((DIAMOND_SLOTS * {-(-slot.mem_bytes // _MIB)}))M"' if slot.mem_bytes else "",
    )
