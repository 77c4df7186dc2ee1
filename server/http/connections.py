"""Connections that cannot hold the server: bounds on their number, on headers, and on the time a request takes to come.

They apply before a key is checked: whoever reaches the port can open connections.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_BYTES = 32 << 10
"""Longest request line and headers."""

HEADER_SECONDS = 10.0
"""Time limit for the headers of a request, from its first byte or the start of its connection."""

BODY_SECONDS = 60.0
"""Time limit for the body of a request, from the end of its headers."""

CONNECTIONS = 2048
"""Connections open at once; more are closed as they come."""

CONNECTIONS_OF_AN_ADDRESS = 1024
"""Connections open at once from the same address; those that come through a proxy are all from one."""


class BoundedProtocol(H11Protocol):
    """HTTP/1.1 of uvicorn, with deadlines for headers and bodies, and a bound on the number of connections."""

    _deadline: asyncio.TimerHandle | None = None
    _waits_for: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for headers; close the connection if there are too many."""
        super().connection_made(transport)
        if len(self.connections) > CONNECTIONS or self._same_address() > CONNECTIONS_OF_AN_ADDRESS:
            transport.abort()
            return
        self._watch()

    def _same_address(self) -> int:
        """Connections from the address of this one; 0 while there are few connections at all."""
        if self.client is None or len(self.connections) <= CONNECTIONS_OF_AN_ADDRESS:
            return 0
        others = (other.client for other in self.connections if isinstance(other, BoundedProtocol))
        return sum(client is not None and client[0] == self.client[0] for client in others)

    def data_received(self, data: bytes) -> None:
        """Take bytes, and begin to wait for the next part of the request."""
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop waiting."""
        self._stop_watching()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Set the deadline of the part of a request that is awaited, unless it is set: more bytes do not move it."""
        state = self.conn.their_state
        if state is self._waits_for:
            return
        self._stop_watching()
        seconds = {h11.IDLE: HEADER_SECONDS, h11.SEND_BODY: BODY_SECONDS}.get(state)
        if seconds is not None:
            self._waits_for = state
            self._deadline = self.loop.call_later(seconds, self._too_slow)

    def _stop_watching(self) -> None:
        self._waits_for = None
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self.flow.read_paused:  # it is the server that lets the rest of a body wait
            self._stop_watching()
            self._watch()
            return
        if not self.transport.is_closing():
            self.transport.close()
