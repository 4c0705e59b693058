"""A real GPU: handed to the job that asked for it, hidden from the one that did not, and sampled while it works."""

from __future__ import annotations

import json
from typing import Any

import pytest

from diamond.agent.gpus import GpuMonitor
from diamond.agent.sampler import Sampler
from diamond.core.reasons import Reason
from diamond.core.rundir import RunDir

SLOTS = GpuMonitor().inventory()
pytestmark = pytest.mark.skipif(not SLOTS, reason="no NVIDIA GPU on this machine (NVML finds none)")

WORK = """\
python3 - <<'EOF'
import time, torch
print("devices", torch.cuda.device_count(), flush=True)
if torch.cuda.device_count():
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    until = time.time() + 8
    while time.time() < until:
        a = (a @ a).clamp(-1, 1)
    torch.cuda.synchronize()
EOF
"""


def test_a_gpu_is_given_hidden_and_sampled(bench: Any) -> None:
    scheduler = bench.start()
    sampler = Sampler(scheduler, GpuMonitor(), period_s=0.5)
    sampler.start()
    try:
        with_gpu = bench.submit(WORK, gpus=len(SLOTS), gpu_type=SLOTS[0].model)
        without = bench.submit(WORK)
        for job, devices in ((with_gpu, len(SLOTS)), (without, 0)):
            assert bench.result(job).reason is Reason.COMPLETED
            assert bench.log(job) == f"devices {devices}\n"
        lines = RunDir(with_gpu.run_dir).stream("util").read_text().splitlines()
        samples = [json.loads(line) for line in lines]
        print(f"{SLOTS[0].model}: {samples[-1]}")
        assert max(sample["sys/gpu0_percent"] for sample in samples) > 50
        assert max(sample["sys/gpu0_mem_bytes"] for sample in samples) > 128 * 1024**2
    finally:
        sampler.close()
