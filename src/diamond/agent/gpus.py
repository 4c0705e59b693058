"""The NVIDIA GPUs of this machine, through NVML: which there are, how busy they are.

NVML is optional. Without the library, the driver or a GPU there simply are none; nothing here raises.
"""

from __future__ import annotations

import os
import re
import threading
from dataclasses import dataclass
from typing import Any

_MODEL = re.compile(
    r"\b(G[BH]\d{3}|[ABHLPTVK]\d{1,4}[A-Z]?|(?:RTX\s+)?(?:PRO\s+)?(?:A\d{4}|\d{4})(?:\s+(?:Ti|SUPER|Ada))*)(?=[\s-]|$)"
)


@dataclass(frozen=True, kw_only=True)
class GpuSlot:
    """One device. `visible` is how CUDA_VISIBLE_DEVICES names it."""

    index: int
    model: str
    mem_bytes: int = 0
    visible: str = ""

    @property
    def cuda_name(self) -> str:
        return self.visible or str(self.index)

    def is_type(self, asked: str | None) -> bool:
        """Whether a user who wrote ``accelerators: asked:1`` means this device."""
        if asked is None:
            return True
        model = self.model.lower().replace("-", "")
        return asked.lower().replace("-", "") in (model, model.removeprefix("rtx"))


def short_model(name: str) -> str:
    """What users call it: ``NVIDIA H100 80GB HBM3`` is an ``H100``, ``NVIDIA GeForce RTX 3090`` an ``RTX-3090``."""
    found = _MODEL.search(name)
    text = found[1] if found else name.removeprefix("NVIDIA").strip()
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-") or "gpu"


class GpuMonitor:
    """A session with NVML. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nvml: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
        except Exception:  # no library, no driver, no permission: no GPUs, whatever it was
            self._nvml = None

    def inventory(self) -> tuple[GpuSlot, ...]:
        """The devices jobs may be given: those that CUDA_VISIBLE_DEVICES leaves to this process."""
        if self._nvml is None:
            return ()
        nvml = self._nvml
        slots: list[GpuSlot] = []
        with self._lock:
            try:
                for index in range(nvml.nvmlDeviceGetCount()):
                    handle = nvml.nvmlDeviceGetHandleByIndex(index)
                    name, uuid = _text(nvml.nvmlDeviceGetName(handle)), _text(nvml.nvmlDeviceGetUUID(handle))
                    if _may_use(index, uuid):
                        slot = GpuSlot(
                            index=index,
                            model=short_model(name),
                            mem_bytes=int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
                            # NVML counts by bus position, CUDA by speed; the UUID is the same to both.
                            visible=uuid,
                        )
                        slots.append(slot)
            except nvml.NVMLError:
                return tuple(slots)
        return tuple(slots)

    def sample(self, index: int) -> tuple[float, int] | None:
        """Percent of time busy and bytes in use of one device; None when NVML does not tell."""
        if self._nvml is None:
            return None
        with self._lock:
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                rates = self._nvml.nvmlDeviceGetUtilizationRates(handle)
                return float(rates.gpu), int(self._nvml.nvmlDeviceGetMemoryInfo(handle).used)
            except self._nvml.NVMLError:
                return None


def _text(raw: Any) -> str:
    return raw.decode(errors="replace") if isinstance(raw, bytes) else str(raw)


def _may_use(index: int, uuid: str) -> bool:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return True
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    return str(index) in names or any(uuid.startswith(name) for name in names if name.startswith("GPU-"))
