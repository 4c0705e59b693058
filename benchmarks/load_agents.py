"""Agents that speak the real protocol about jobs that are not there: what a server feels of a cluster, without one."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import random
from typing import Any

from benchmarks.load_http import Connection

REPORT_EVERY_S = 2.0
_LOGGING, _MEASURING = 20, 10  # of its jobs, in each report
_NODES, _CPUS = 1, 4096


class SimulatedAgent:
    """One endpoint's agent. `delivered` counts orders, `errors` answers that were none."""

    def __init__(self, host: str, port: int, token: str, number: int) -> None:
        self._poll, self._reports = Connection(host, port), Connection(host, port)
        self._token = token
        self._headers = {"Diamond-Agent": f"load-{number}"}
        self._random = random.Random(number)
        self._offsets: dict[str, dict[str, int]] = {}
        self._news: list[dict[str, Any]] = []
        self._epoch, self._revision = "", 0
        self.running: set[str] = set()
        self.errors: list[str] = []
        self.reports = 0

    async def run(self) -> None:
        facts = {
            "scheduler": "local", "hostname": "load", "nodes": _NODES, "cpus_per_node": _CPUS,
            "mem_bytes_per_node": 2**45, "builds": "off", "allows_others": True,
        }  # fmt: skip
        welcome = await self._ask(self._reports, "POST", "/api/v1/agent/hello", {"facts": facts, "protocol": 1})
        self._epoch = welcome["epoch"]
        await asyncio.gather(self._keep_polling(), self._keep_reporting())

    async def _ask(self, connection: Connection, method: str, path: str, body: Any = None) -> Any:
        answer = await connection.ask(method, path, self._token, body, self._headers)
        if answer.status != 200:
            self.errors.append(f"{path}: {answer.status} {answer.body[:200]!r}")
            raise ConnectionError(self.errors[-1])
        return answer.json()

    async def _keep_polling(self) -> None:
        while True:
            path = f"/api/v1/agent/desired?epoch={self._epoch}&since={self._revision}&wait_s=25"
            state = await self._ask(self._poll, "GET", path)
            self._epoch, self._revision = state["epoch"], state["revision"]
            for order in state["orders"]:
                self._obey(order["job_id"], order["desired"])

    def _obey(self, job_id: str, desired: str) -> None:
        if desired == "cancel":
            self.running.discard(job_id)
            self._news.append({"job_id": job_id, "state": "CANCELLED", "reason": "CANCELLED"})
        elif job_id not in self.running:
            self.running.add(job_id)
            self._news.append({"job_id": job_id, "state": "RUNNING", "scheduler_id": job_id[-6:], "hosts": ["n1"]})

    async def _keep_reporting(self) -> None:
        for number in itertools.count():
            await asyncio.sleep(REPORT_EVERY_S * self._random.uniform(0.9, 1.1))
            jobs, self._news = self._news, []
            live = sorted(self.running)
            streams = [
                self._chunk(job, "log", f"step {number} of many, loss {1 / (number + 1):.6f}\n".encode() * 3)
                for job in self._random.sample(live, min(_LOGGING, len(live)))
            ]
            streams += [
                self._chunk(job, "metrics", json.dumps({"step": number, "time": 0, "loss": 0.5}).encode() + b"\n")
                for job in self._random.sample(live, min(_MEASURING, len(live)))
            ]
            usage = {"jobs_running": len(live), "cpus_used": len(live)}
            body = {"epoch": self._epoch, "jobs": jobs, "streams": streams, "usage": usage}
            answer = await self._ask(self._reports, "POST", "/api/v1/agent/reports", body)
            self.reports += 1
            for job, sizes in answer["received"].items():
                self._offsets.setdefault(job, {}).update(sizes)

    def _chunk(self, job: str, stream: str, data: bytes) -> dict[str, Any]:
        offset = self._offsets.get(job, {}).get(stream, 0)
        return {"job_id": job, "stream": stream, "offset": offset, "data": base64.b64encode(data).decode()}
