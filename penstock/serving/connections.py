"""Connections of clients, which are closed if they have waited too long for a request."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

_PATIENCE = 30.0  # seconds for the head of a request to come, and for more of a response to be read


class Connection(H11Protocol):
    """HTTP of one client.

    uvicorn's own time for a request begins after a response only, and ends with its first byte.
    """

    _waiting: asyncio.TimerHandle | None = None
    _unread = 0  # bytes of the last response, when it was last looked at

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for a request."""
        super().connection_made(transport)
        self._wait()

    def on_response_complete(self) -> None:
        """Wait for the next one."""
        super().on_response_complete()
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        super().connection_lost(exc)
        if self._waiting is not None:
            self._waiting.cancel()

    def _wait(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
        self._waiting = self.loop.call_later(_PATIENCE, self._give_up)

    def _give_up(self) -> None:
        """Close the connection, unless a response is not complete, or still being read."""
        if self.cycle is not None and not self.cycle.response_complete:
            return
        before, self._unread = self._unread, self.transport.get_write_buffer_size()
        if self._unread not in (0, before):
            self._wait()
            return
        self.transport.abort()  # close() would wait until all is read
