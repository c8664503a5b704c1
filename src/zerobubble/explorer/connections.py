"""uvicorn's HTTP connections, with a time limit for requests to arrive."""

from __future__ import annotations

import json
from asyncio import TimerHandle, Transport

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

ARRIVAL_S = 60.0
"""Seconds in which a request has to arrive whole, from the connection's start or the end of the answer before it."""


class TimedConnection(H11Protocol):
    """A connection that is closed if its request does not arrive within `ARRIVAL_S`: uvicorn has no such limit."""

    _arrival: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop()

    def _watch(self) -> None:
        """Start the limit of a request. Further bytes do not restart it, since a slow client may send one a minute."""
        if self.conn.their_state not in (h11.IDLE, h11.SEND_BODY) or self.transport.is_closing():
            self._stop()
        elif self._arrival is None:
            self._arrival = self.loop.call_later(ARRIVAL_S, self._close)

    def _stop(self) -> None:
        if self._arrival is not None:
            self._arrival.cancel()
            self._arrival = None

    def _close(self) -> None:
        has_begun = self.conn.their_state is h11.SEND_BODY or bool(self.conn.trailing_data[0])
        if has_begun and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            self._refuse(f"the request did not arrive within {ARRIVAL_S:g} s")
        self.transport.close()

    def _refuse(self, sentence: str) -> None:
        """Answer in place of the application, which sees a disconnected client."""
        body = json.dumps({"error": sentence, "field": ""}).encode()
        headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
        for event in (h11.Response(status_code=408, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
