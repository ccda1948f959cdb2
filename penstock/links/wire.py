"""A socket between two processes that carries short messages, and file descriptors."""

from __future__ import annotations

import os
import select
import socket
import struct
import time
import weakref
from typing import NamedTuple

from penstock.links.local import Aborted

_HEADER = struct.Struct("<qqqqqq")
_AT_ONCE = 1 << 20  # bytes that are read at once; a buffer of that size is made each time
_FD = struct.Struct("i")
_FD_SPACE = socket.CMSG_SPACE(_FD.size)
_SPIN = 50e-6  # seconds of looking again and again before a thread is put to sleep


class Gone(Aborted):
    """The process at the other end is gone."""


class Message(NamedTuple):
    """What is sent at once.

    Attributes:
        round: of jobs, to which it belongs.
        kind: what the receiver makes of it.
        slot: the segment that it speaks of.
        layout: how the segment is laid out.
        payload: more bytes, of any number.
        fd: of a segment that the receiver does not know yet, or -1.
        size: of that segment.
    """

    round: int
    kind: int = 0
    slot: int = 0
    layout: int = 0
    payload: bytes = b""
    fd: int = -1
    size: int = 0


class Wire:
    """One end of a stream socket.

    Attributes:
        busy: whether it is in the midst of a message. If it is interrupted then, nobody knows
            where the next message begins.
        close: closes this end; the other one notices.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._incoming = select.poll()
        self._incoming.register(sock, select.POLLIN)
        self._outgoing = select.poll()
        self._outgoing.register(sock, select.POLLOUT)
        self.busy = False
        self.close = weakref.finalize(self, sock.close)
        self.close.atexit = False

    def fileno(self) -> int:
        """Of the socket."""
        return self._socket.fileno()

    def send(self, message: Message, timeout: float = 60.0) -> None:
        """Send a message; waits only if the other end has not read many.

        Raises:
            Gone: the other end is closed.
            TimeoutError: it did not read for so many seconds.
        """
        numbers = (message.round, message.kind, message.slot, message.layout, message.size)
        data = _HEADER.pack(*numbers, len(message.payload)) + message.payload
        fds = [] if message.fd < 0 else [message.fd]
        self.busy = True
        sent = self._send(data, fds, timeout)
        while sent < len(data):
            sent += self._send(memoryview(data)[sent:], [], timeout)
        self.busy = False

    def _send(self, data: bytes | memoryview, fds: list[int], timeout: float) -> int:
        while True:
            try:
                if fds:
                    return socket.send_fds(self._socket, [data], fds)
                return self._socket.send(data)
            except BlockingIOError:
                if not self._outgoing.poll(timeout * 1000):
                    raise TimeoutError(f"nothing was read for {timeout:.0f} s") from None
            except OSError as error:
                raise Gone from error

    def receive(self, timeout: float | None = None) -> Message:
        """The next message; waits for it.

        Raises:
            Gone: the other end is closed.
            TimeoutError: none came for so many seconds.
        """
        data, fd = self._begin(timeout)
        if len(data) < _HEADER.size:
            header = bytearray(_HEADER.size)
            header[: len(data)] = data
            self._fill(memoryview(header)[len(data) :])
            data = bytes(header)
        round, kind, slot, layout, size, length = _HEADER.unpack(data)
        payload = bytearray(length)
        if length:
            self._fill(memoryview(payload))
        self.busy = False
        return Message(round, kind, slot, layout, bytes(payload), fd, size)

    def _begin(self, timeout: float | None) -> tuple[bytes, int]:
        """The beginning of the next message, and the file descriptor that came along, or -1."""
        while True:
            self.busy = True  # before anything is read: an interruption may come right after
            try:
                return self._read(_HEADER.size)
            except BlockingIOError:
                self.busy = False
                self._await_incoming(timeout)

    def _read(self, count: int) -> tuple[bytes, int]:
        """Up to so many bytes that are there, and a file descriptor that came along, or -1."""
        try:
            data, ancillary, _, _ = self._socket.recvmsg(count, _FD_SPACE)
        except BlockingIOError:
            raise
        except OSError as error:
            raise Gone from error
        if not data:
            raise Gone
        return data, _FD.unpack(ancillary[0][2])[0] if ancillary else -1

    def ready(self) -> bool:
        """Whether `receive` would not wait."""
        return bool(self._incoming.poll(0))

    def _await_incoming(self, timeout: float | None) -> None:
        if not self._incoming.poll(None if timeout is None else timeout * 1000):
            raise TimeoutError(f"no message came for {timeout:.0f} s")

    def _fill(self, view: memoryview) -> None:
        """Read so many bytes more."""
        while view:
            try:
                data, _ = self._read(min(len(view), _AT_ONCE))
            except BlockingIOError:
                self._incoming.poll(60_000)
                continue
            view[: len(data)] = data
            view = view[len(data) :]


def spin(poller: select.poll, timeout: float | None) -> list[tuple[int, int]]:
    """What is ready, looked for without sleep at first; nothing after `timeout` seconds."""
    stop = time.perf_counter() + _SPIN
    while time.perf_counter() < stop:
        if ready := poller.poll(0):
            return ready
        os.sched_yield()
    return poller.poll(None if timeout is None else timeout * 1000)
