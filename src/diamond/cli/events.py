"""`diamond events`: what happened, as lines."""

from __future__ import annotations

from collections import deque
from typing import Any

from diamond.cli import render
from diamond.cli.session import connect, emit
from diamond.core.events import Event


def events(*, follow: bool, since: int | None, limit: int, as_json: bool) -> None:
    with connect() as client:
        if follow:
            try:
                for event in client.events(since, follow=True):
                    emit(event, line=True) if as_json else print(line_of(event), flush=True)
            except KeyboardInterrupt:
                pass
            return
        found: deque[Event] = deque(client.events(since), maxlen=limit)
        if as_json:
            emit({"events": list(found), "cursor": found[-1].seq if found else since or 0})
            return
        for event in found:
            print(line_of(event))


def line_of(event: Event) -> str:
    subject = event.task_id or event.endpoint_id or ""
    head = f"{event.seq:>6}  {render.clock(event.at)}  {render.clean(event.kind):<22} {subject}"
    return f"{head}  {_data(event.data)}".rstrip()


def _data(data: dict[str, Any]) -> str:
    return " ".join(
        f"{render.clean(key)}={render.clean(value)}" for key, value in data.items() if value not in (None, "")
    )
