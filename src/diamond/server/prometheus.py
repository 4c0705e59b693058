"""The /metrics text: request counts and latencies, tasks by state, endpoints online, bytes taken in, memory.

Owns its own registry, so that nothing a library registers globally appears. Labels come from route templates, never
from paths: ids in labels would grow without bound. Must not ask the database more than once in `_CACHE_S` seconds.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for every first one, which nothing here reads
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_CACHE_S = 5.0
WORKERS_ENV = "PROMETHEUS_MULTIPROC_DIR"  # where several workers keep their counts together
_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0)


class ServerMetrics:
    """Everything this process counts. Thread-safe."""

    def __init__(self, counts: Callable[[], tuple[dict[str, int], dict[str, int]]]) -> None:
        """`counts` gives tasks by state and endpoints by "online"/"offline"."""
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "diamond_http_requests", "Requests answered.", ("route", "method", "status"), registry=self.registry
        )
        self.latency = Histogram(
            "diamond_http_request_seconds",
            "Seconds until the answer was complete; waiting (long polls, streams) is not counted here.",
            ("route", "method"),
            buckets=_BUCKETS,
            registry=self.registry,
        )
        self.waiting = Gauge(
            "diamond_http_waiting",
            "Long polls and live streams in flight.",
            ("route",),
            registry=self.registry,
            multiprocess_mode="livesum",
        )
        self.stream_bytes = Counter(
            "diamond_stream_received_bytes", "Request bytes of agents' reports.", registry=self.registry
        )
        self.blob_bytes = Counter(
            "diamond_blob_received_bytes", "Bytes of uploaded files taken in.", registry=self.registry
        )
        self._standing = _Standing(counts)
        self.registry.register(self._standing)

    def text(self) -> bytes:
        if not os.environ.get(WORKERS_ENV):
            return generate_latest(self.registry)
        # Of all workers together, whichever of them was asked.
        together = CollectorRegistry()
        MultiProcessCollector(together)  # type: ignore[no-untyped-call]
        together.register(self._standing)
        return generate_latest(together)


class _Standing(Collector):
    """What is asked when somebody scrapes, rather than counted as it happens."""

    def __init__(self, counts: Callable[[], tuple[dict[str, int], dict[str, int]]]) -> None:
        self._counts = counts
        self._lock = threading.Lock()
        self._cached: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self._until = 0.0

    def describe(self) -> Iterable[GaugeMetricFamily]:
        return []  # registering must not ask the database

    def collect(self) -> Iterable[GaugeMetricFamily]:
        tasks, endpoints = self._standing()
        by_state = GaugeMetricFamily("diamond_tasks", "Tasks by state.", labels=["state"])
        for state, number in sorted(tasks.items()):
            by_state.add_metric([state], number)
        yield by_state
        by_presence = GaugeMetricFamily("diamond_endpoints", "Endpoints by whether they are online.", labels=["state"])
        for state, number in sorted(endpoints.items()):
            by_presence.add_metric([state], number)
        yield by_presence
        yield GaugeMetricFamily("diamond_process_resident_memory_bytes", "Memory of this process.", value=rss_bytes())

    def _standing(self) -> tuple[dict[str, int], dict[str, int]]:
        with self._lock:
            if time.monotonic() >= self._until:
                try:
                    self._cached = self._counts()
                except Exception:
                    # A scrape must still show request counts while the database is away; gaps show as absent series.
                    self._cached = ({}, {})
                self._until = time.monotonic() + _CACHE_S
            return self._cached


def rss_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


class RequestMetrics:
    """Counts requests and their latency by route template."""

    def __init__(self, app: ASGIApp, *, metrics: ServerMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        status = 500
        started = time.perf_counter()

        async def sender(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, sender)
        finally:
            route = getattr(scope.get("route"), "path", "") or "unknown"
            method = scope["method"] if scope["method"] in _METHODS else "other"
            self._metrics.requests.labels(route, method, str(status)).inc()
            if not scope.get("diamond.waits"):
                self._metrics.latency.labels(route, method).observe(time.perf_counter() - started)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
