"""An event: one line of what happened, in the order it happened. `seq` is the cursor everything live follows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Event:
    seq: int
    at: float
    kind: str  # "task.state", "task.cancel_requested", "endpoint.online", "image.ready", …
    task_id: str | None = None
    job_id: str | None = None
    endpoint_id: str | None = None
    data: dict[str, Any] = field(default_factory=dict)
