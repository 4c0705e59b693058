"""A real kill by the kernel for want of memory, in a memory cgroup made for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diamond.core.reasons import Reason

LIMIT_BYTES = 64 * 1024 * 1024
EAT = 'exec python3 -c "b = bytearray(400 << 20)"'


@pytest.fixture
def tight_memory() -> Iterator[Path]:
    """A memory cgroup of 64 MiB without swap; yields the file that takes processes in."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    root, limit, entry = (v1, "memory.limit_in_bytes", "tasks") if v1.is_dir() else (v2, "memory.max", "cgroup.procs")
    folder = root / f"diamond-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / limit).write_text(str(LIMIT_BYTES))
    except OSError as error:
        if folder.is_dir():
            folder.rmdir()
        pytest.skip(f"a memory cgroup cannot be made here ({error}); needs root and the memory controller")
    yield folder / entry
    folder.rmdir()


@pytest.mark.root
def test_a_kill_by_the_kernel_is_told_from_any_other(bench: Any, tight_memory: Path) -> None:
    eaten = bench.result(bench.submit(f"echo $$ > {tight_memory}\n{EAT}"))
    assert (eaten.reason, eaten.signal) == (Reason.OUT_OF_MEMORY, 9)
    assert "memory" in eaten.detail
    shot = bench.result(bench.submit("kill -KILL $$"))
    assert (shot.reason, shot.signal) == (Reason.SIGNALLED, 9)
