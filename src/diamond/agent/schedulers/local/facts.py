"""What the local scheduler may hand out and what it has handed out, in the words of `diamond.core.endpoints`. Pure."""

from __future__ import annotations

import time
from pathlib import Path

from diamond.agent.gpus import GpuSlot
from diamond.agent.schedulers.local.queue import Slots
from diamond.core.endpoints import EndpointFacts, EndpointUsage, Gpu


def facts_of(slots: Slots, *, host: str, jobs_dir: Path) -> EndpointFacts:
    models: dict[str, list[GpuSlot]] = {}
    for slot in slots.gpus.values():
        models.setdefault(slot.model, []).append(slot)
    return EndpointFacts(
        scheduler="local",
        scheduler_version="1",
        hostname=host,
        cpus_per_node=slots.cpus,
        mem_bytes_per_node=slots.mem_bytes,
        gpus_per_node=tuple(
            Gpu(model=model, count=len(same), mem_bytes=min(slot.mem_bytes for slot in same))
            for model, same in models.items()
        ),
        run_root=str(jobs_dir),
    )


def usage_of(slots: Slots, *, running: int, queued: int) -> EndpointUsage:
    used: dict[str, int] = {}
    for index in set(slots.gpus) - slots.free_gpus:
        used[slots.gpus[index].model] = used.get(slots.gpus[index].model, 0) + 1
    return EndpointUsage(
        at=time.time(),
        cpus_used=slots.cpus - slots.free_cpus,
        mem_bytes_reserved=slots.mem_bytes - slots.free_mem_bytes,
        gpus_used=used,
        jobs_running=running,
        jobs_queued=queued,
    )
