"""Pages with 10,000 tasks behind them: weight, speed, and what open pages cost the server; MLflow's beside them.

    [DIAMOND_BENCH_PEERS=DIR] .venv/bin/python -m benchmarks.web [--quick] [--check]

A real server and agent, and a real browser on the same machine. A cold load is a browser that never was there; its
time ends when the first row can be seen. Open pages are 50 clients that do what static/live.js does: one stream each,
and the page again when told; meanwhile one of the people runs a task every five seconds. The log is a real task that
prints 500 lines a second, each with the moment it was printed; the lag is until a browser shows it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import httpx
import sqlalchemy as sa

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import web_peers
from benchmarks.harness import Bench, median, options, percentile, rss_mib
from benchmarks.web_pages import Loaded, Page, click_to_change, middle, visit
from diamond.core.home import ClientConfig
from diamond.core.ids import new_id
from diamond.core.states import TaskState
from diamond.server.services import projects, tokens
from diamond.server.store.db import Database
from diamond.server.store.models import JobRow, TaskRow, UserRow
from testing.browser import running_chromium
from testing.service import Service

_T = TypeVar("_T")
TASKS, OPEN_PAGES = 10_000, 50
_METRICS = """python3 - <<'END'
import json, os
with open(os.environ["DIAMOND_METRICS_FILE"], "a") as file:
    for step in range(2000):
        file.write(json.dumps({"step": step, "loss": 1 / (step + 1)}) + "\\n")
END
"""
_LINES = """python3 -u - <<'END'
import time
began = time.time()
for number in range(500 * SECONDS):
    late = began + number / 500 - time.time()
    if late > 0: time.sleep(late)
    print(f"line {number} at {time.time():.3f}", flush=True)
END
"""


def fill(service: Service, number: int) -> str:
    """As many finished tasks as that, copies of one that really ran; the id of that one."""
    with service.client() as client:
        task = client.tasks.create({"name": "train", "run": _METRICS})
        done = client.tasks.wait(task.id, timeout_s=120)
        assert done.state is TaskState.SUCCEEDED, done.detail
    db = Database(f"sqlite:///{service.home.server / 'diamond.db'}")
    ends = [state.value for state in (TaskState.SUCCEEDED, TaskState.FAILED, TaskState.CANCELLED)]
    with db.write() as session:
        row = dict(session.execute(sa.select(TaskRow.__table__).where(TaskRow.id == task.id)).mappings().one())
        job = dict(session.execute(sa.select(JobRow.__table__).where(JobRow.task_id == task.id)).mappings().one())
        for first in range(0, number, 1000):
            ids = [new_id("tsk") for _ in range(min(1000, number - first))]
            tasks = [
                {**row, "id": key, "name": f"task-{first + at}", "state": ends[at % 10 % 3]}
                for at, key in enumerate(ids)
            ]
            session.execute(sa.insert(TaskRow.__table__), tasks)
            session.execute(sa.insert(JobRow.__table__), [{**job, "id": new_id("job"), "task_id": key} for key in ids])
    db.close()
    return task.id


def report_pages(bench: Bench, ours: dict[str, tuple[list[Loaded], list[Loaded]]], theirs: dict[str, Any]) -> None:
    for name, (cold, warm) in ours.items():
        for label, found in (("cold", cold), ("warm", warm)):
            own, peer = middle(found), None
            if name in theirs:
                peer = middle(theirs[name][label == "warm"])
            aims = {"KiB": 60.0, "ms": 700.0} if label == "cold" else {}
            for unit, what in (("KiB", "bytes"), ("requests", "requests"), ("ms", "ms")):
                scale = 1024 if unit == "KiB" else 1
                bench.add(
                    f"{name}, {label}: {'time to the first row' if unit == 'ms' else unit}",
                    getattr(own, what) / scale,
                    unit if unit != "requests" else "",
                    "lower",
                    aim=aims.get(unit),
                    runs=[round(getattr(one, what) / scale, 2) for one in found],
                    peer={"MLflow": round(getattr(peer, what) / scale, 2)} if peer else {},
                )


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def more_people(service: Service, number: int) -> list[str]:
    """Tokens of so many people beside the one who is there."""
    db = Database(f"sqlite:///{service.home.server / 'diamond.db'}")
    found, now = [], time.time()
    with db.write() as session:
        for each in range(number):
            user = UserRow(id=new_id("usr"), name=f"reader{each}", created_at=now, is_admin=False)
            session.add(user)
            session.flush()
            projects.personal(session, user, now)
            found.append(tokens.issue(session, now=now, user_id=user.id, name="pages"))
    db.close()
    return found


async def live_pages(service: Service, people: list[str], number: int, seconds: float) -> tuple[float, int]:
    """Cores the server took with so many pages open, dealt to these people; and how often pages looked again. The
    first of them runs a task every five seconds."""
    assert service.server is not None
    async with httpx.AsyncClient(base_url=service.url, timeout=3600, trust_env=False) as client:
        looks = 0

        async def page(token: str) -> None:
            nonlocal looks
            headers = {"Authorization": f"Bearer {token}", "Diamond-Part": "1", "Accept-Encoding": "gzip"}
            made = (await client.get("/tasks", headers=headers)).headers["Diamond-Made"]
            async with client.stream("GET", f"/live?topic=events&made={made}", headers=headers) as stream:
                async for line in stream.aiter_lines():
                    if line.startswith("event: change"):
                        looks += 1
                        answer = await client.get("/tasks", headers=headers)
                        assert answer.status_code == 200, answer.text[:300]

        async def change() -> None:
            while True:
                await asyncio.to_thread(_launch_one, service)
                await asyncio.sleep(5)

        pages = [asyncio.create_task(page(people[each % len(people)])) for each in range(number)]
        running = [*pages, asyncio.create_task(change())]
        await asyncio.sleep(5)
        before, began = cpu_s(service.server.pid), time.monotonic()
        looks = 0
        await asyncio.sleep(seconds)
        used = (cpu_s(service.server.pid) - before) / (time.monotonic() - began)
        for task in running:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return used, looks


def apart(work: Callable[..., Coroutine[Any, Any, _T]], *given: Any) -> _T:
    """In a thread of its own: the browser's driver has the loop of this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(work(*given))).result()


def _launch_one(service: Service) -> None:
    with service.client() as client:
        client.tasks.create({"name": "live", "run": "true"})


def log_lag(chromium: Any, service: Service, seconds: int) -> tuple[list[float], float]:
    """How old the newest line in view is, looked at ten times a second, and the server's cores meanwhile."""
    assert service.server is not None
    with service.client() as client:
        task = client.tasks.create({"name": "chatty", "run": _LINES.replace("SECONDS", str(seconds + 15))})
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    context.request.get(f"{service.url}/dashboard")
    tab = context.new_page()
    tab.goto(f"{service.url}/tasks/{task.id}")
    tab.locator("#log-lines .line").first.wait_for(timeout=60_000)
    tab.wait_for_timeout(3000)
    lags, before, began = [], cpu_s(service.server.pid), time.monotonic()
    while time.monotonic() - began < seconds:
        text = tab.locator("#log-lines").inner_text()
        moments = [float(found) for found in re.findall(r"line \d+ at ([\d.]+)", text)]
        if moments:
            lags.append(time.time() - max(moments))
        tab.wait_for_timeout(100)
    used = (cpu_s(service.server.pid) - before) / (time.monotonic() - began)
    context.close()
    with service.client() as client:
        client.tasks.cancel(task.id)
    return lags, used


@contextlib.contextmanager
def filled_service(folder: Path, number: int) -> Iterator[tuple[Service, str]]:
    with Service(folder / "home") as service:
        yield service, fill(service, number)


def main() -> int:
    chosen = options(__doc__ or "")
    bench = Bench("web", packages=("fastapi", "uvicorn", "jinja2", "playwright"))
    times, seconds = (2, 10) if chosen.quick else (5, 40)
    theirs: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="diamond-web-") as name, running_chromium() as chromium:
        folder = Path(name)
        bench.versions["chromium"] = chromium.version
        if peers := web_peers.folder():
            with web_peers.mlflow(peers, folder, TASKS // 10 if chosen.quick else TASKS) as (_, pages):
                theirs = {page.name: visit(chromium, page, times) for page in pages}
        else:
            bench.absent["MLflow"] = "DIAMOND_BENCH_PEERS names no environment that holds it"
        with filled_service(folder, TASKS) as (service, task):
            assert service.server is not None
            pages = [
                Page(name="dashboard", url=f"{service.url}/dashboard", row="main h1"),
                Page(name="tasks", url=f"{service.url}/tasks", row="main tbody tr"),
                Page(name="task", url=f"{service.url}/tasks/{task}", row="main h1"),
            ]
            report_pages(bench, {page.name: visit(chromium, page, times) for page in pages}, theirs)
            clicks = click_to_change(chromium, f"{service.url}/tasks", "main a:has-text('task-')", "main #log", times)
            bench.add("click on a task until its log is there", median(clicks), "ms", "lower", runs=clicks)
            config = ClientConfig.load(service.home)
            assert config is not None
            people = [config.token, *more_people(service, 9)]
            idle, _ = apart(live_pages, service, people, 0, seconds)
            for who, name in ((people, "of ten people"), (people[:1], "all of the one whose tasks run")):
                used, looks = apart(live_pages, service, who, OPEN_PAGES, seconds)
                told = f"{looks} looks in {seconds} s, a task every 5 s; without pages {100 * idle:.1f} %"
                aim = 5.0 if who is people else None
                label = f"{OPEN_PAGES} live pages {name}: server"
                bench.add(label, 100 * used, "% of a core", "lower", aim=aim, note=told)
            bench.add("memory of the server with them", rss_mib(service.server.pid), "MiB", "lower")
            lags, cores = log_lag(chromium, service, seconds)
            bench.add("log at 500 lines/s: lag until it is shown, p50", median(lags), "s", "lower")
            bench.add("log at 500 lines/s: lag until it is shown, p99", percentile(lags, 0.99), "s", "lower",
                      note=f"server {100 * cores:.0f} % of a core")  # fmt: skip
    return bench.finish(chosen)


if __name__ == "__main__":
    raise SystemExit(main())
