"""Connections that send next to nothing, or a request head without end, or take no answer: uvicorn would keep each for
ever, with its file and its buffers.

How slow and how large a body may be is in `limits`; this is about everything before a request is one.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
LEAST_BYTES_PER_S = 1024


class PatientProtocol(HttpToolsProtocol):
    """uvicorn's own, which closes a connection that stays too long without an unanswered request.

    That is: one on which no request head is complete in time, the first or a later one, and one that goes on sending,
    byte by byte, a body that was answered before it was read. And one whose client has stopped reading: an answer that
    fills the buffers has to go out at `LEAST_BYTES_PER_S`, looked at every `drain_within_s`.
    """

    head_within_s: float
    drain_within_s: float
    _stall: asyncio.TimerHandle | None = None
    _unsent_bytes = 0
    _farewell: asyncio.TimerHandle | None = None
    _head_bytes = 0  # received since the last request was complete, of a head that is not
    _in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._arm(self.head_within_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._disarm()
        self._forget_stall()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head:
            # The parser has no limit of its own, and keeps all of it.
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.send_400_response("The request line and headers are too long.")
                return
        if self.cycle is not None and not self.cycle.response_complete:
            self._disarm()

    def on_message_begin(self) -> None:
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        # uvicorn's own timer ends connections that are quiet; this one also those that are not.
        self._arm(self.timeout_keep_alive + self.head_within_s)
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_drain()

    def resume_writing(self) -> None:
        self._forget_stall()
        super().resume_writing()

    def _await_drain(self) -> None:
        self._forget_stall()
        self._unsent_bytes = self.transport.get_write_buffer_size()
        self._stall = self.loop.call_later(self.drain_within_s, self._look_at_drain)

    def _look_at_drain(self) -> None:
        # Nothing is added meanwhile: whoever writes waits until there is room again.
        taken = self._unsent_bytes - self.transport.get_write_buffer_size()
        if taken < self.drain_within_s * LEAST_BYTES_PER_S:
            self._leave()
        else:
            self._await_drain()

    def _forget_stall(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
            self._stall = None

    def _arm(self, within_s: float) -> None:
        self._disarm()
        self._farewell = self.loop.call_later(within_s, self._leave)

    def _disarm(self) -> None:
        if self._farewell is not None:
            self._farewell.cancel()
            self._farewell = None

    def _leave(self) -> None:
        self.transport.abort()


def patient_protocol(head_within_s: float, drain_within_s: float) -> type[PatientProtocol]:
    waits = {"head_within_s": head_within_s, "drain_within_s": drain_within_s}
    return type("PatientProtocol", (PatientProtocol,), waits)
