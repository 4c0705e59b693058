"""The thread that asks the server what should be: hello, then one long poll after the other, for ever.

Hands every answer to the loop and does nothing about it itself.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from diamond.agent.link import Link
from diamond.agent.session import Patience, Session
from diamond.core.codec import decode
from diamond.core.errors import DiamondError, InvalidInput, ProtocolError
from diamond.core.ids import ID_PATTERN
from diamond.core.shells import ShellOrder
from diamond.core.wire import JobOrder

log = logging.getLogger(__name__)

WAIT_S = 25.0
_SPARE_S = 20.0


class TakesShells(Protocol):
    """Who starts programs by hand in running jobs (see `diamond.agent.shells`)."""

    runner: str
    """Names this process, so that the server sees when another has taken its place."""

    def known(self) -> Iterable[str]:
        """Shells that need not be named again."""
        ...

    def take(self, orders: list[ShellOrder]) -> None:
        """Start these. Must return at once."""
        ...


class Poller:
    def __init__(
        self,
        *,
        link: Link,
        session: Session,
        stop: threading.Event,
        on_orders: Callable[[list[JobOrder], bool], None],
        on_misfit: Callable[[str, str], None],
        shells: TakesShells | None = None,
        on_rotate: Callable[[], None] | None = None,
    ) -> None:
        """`on_orders` takes the orders of an answer and whether they are all there are; `on_misfit` the id of a job
        whose order this version cannot read, and why. Without `shells`, none are asked for. `on_rotate` takes a new
        token when the server wants that."""
        self._link = link
        self._session = session
        self._stop = stop
        self._on_orders = on_orders
        self._on_misfit = on_misfit
        self._shells = shells
        self._on_rotate = on_rotate
        self._since = 0
        self._epoch = ""  # the one `since` is of
        self._thread = threading.Thread(target=self._run, name="poller", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        patience = Patience("asking for orders", self._stop)
        while not self._stop.is_set():
            try:
                self._session.greet()
                self._poll()
                patience.worked()
            except DiamondError as error:
                patience.failed(error)
            except Exception as error:  # an answer from a server gone wrong must not end the agent
                log.exception("asking for orders: unexpected error")
                patience.failed(ProtocolError(str(error)))

    def _poll(self) -> None:
        epoch = self._session.epoch
        if epoch != self._epoch:
            self._epoch, self._since = epoch, 0
        # Until the first full answer is in, do not wait for news: there may be none, and reports wait for the offsets.
        wait_s = WAIT_S if self._session.synced.is_set() else 0.0
        query: dict[str, str | int | float] = {"epoch": epoch, "since": self._since, "wait_s": wait_s}
        if self._shells is not None:
            query |= {"runner": self._shells.runner, "shells": ",".join(self._shells.known())}
        if self._on_rotate is not None:
            query["rotates"] = 1
        answer = self._link.call("GET", "/agent/desired", query=query, timeout_s=WAIT_S + _SPARE_S)
        if not isinstance(answer, dict):
            raise ProtocolError("the server's orders make no sense")
        if answer.get("epoch") != epoch:
            self._session.greet_again()
            return
        orders = self._read_orders(answer.get("orders") or [])
        full = bool(answer.get("full"))
        if orders or full:
            self._on_orders(orders, full)
            self._session.synced.wait(5)
        if self._shells is not None and (wanted := _read_shells(answer.get("shells") or [])):
            self._shells.take(wanted)
        self._since = int(answer.get("revision", 0))
        if self._on_rotate is not None and answer.get("rotate") is True:
            self._on_rotate()

    def _read_orders(self, raw_orders: list[Any]) -> list[JobOrder]:
        orders = []
        for raw in raw_orders:
            try:
                order = decode(JobOrder, raw)
                if not ID_PATTERN.fullmatch(order.job_id):  # it becomes the name of a directory
                    log.error("an order names its job %r, which is no id; ignored", order.job_id[:80])
                    continue
                orders.append(order)
            except InvalidInput as error:
                # One order from a newer server must not keep all others from being heard.
                job_id = raw.get("job_id") if isinstance(raw, dict) else None
                log.error("order for job %s cannot be read: %s", job_id, error)
                if isinstance(job_id, str) and ID_PATTERN.fullmatch(job_id):
                    self._on_misfit(job_id, str(error))
        return orders


def _read_shells(raw_orders: list[Any]) -> list[ShellOrder]:
    orders = []
    for raw in raw_orders:
        try:
            order = decode(ShellOrder, raw)
        except InvalidInput as error:
            log.error("an order for a shell cannot be read: %s", error)
            continue
        if ID_PATTERN.fullmatch(order.shell_id) and order.argv:
            orders.append(order)
    return orders
