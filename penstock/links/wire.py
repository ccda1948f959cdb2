"""A socket between two processes that carries frames: bytes, and file descriptors.

What the bytes mean is a matter of the protocol: each has types of its own for what is said in it.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import time
import weakref
from collections.abc import Callable
from typing import NamedTuple

from penstock.links.local import Aborted

_LENGTH = struct.Struct("<q")
_SHORT = 48  # bytes, with the length: every frame has as many, so a short one is read at once
_AT_ONCE = 1 << 20  # bytes that are read at once; a buffer of that size is made each time
_SLICE = 1.0  # seconds that are waited at once
_FD = struct.Struct("i")
_FD_SPACE = socket.CMSG_SPACE(_FD.size)
SPIN = 50e-6
"""Seconds of looking again and again before a thread is put to sleep."""


class Gone(Aborted):
    """The process at the other end is gone."""


class Frame(NamedTuple):
    """What is sent at once.

    Attributes:
        data: any number of bytes.
        fd: a file descriptor, or -1. It belongs to whoever has received it.
    """

    data: bytes
    fd: int = -1


class Wire:
    """One end of a stream socket.

    Args:
        sock: the socket.
        check: called every second that it waits; raises `TimeoutError` if it waits in vain.

    Attributes:
        busy: whether it is in the midst of a frame. If it is interrupted then, nobody knows where
            the next one begins.
        begun: how many frames it has begun to send.
        close: closes this end; the other one notices.
    """

    def __init__(self, sock: socket.socket, check: Callable[[], None] = lambda: None) -> None:
        sock.setblocking(False)
        self._check = check
        self._socket = sock
        self._incoming = polling(sock.fileno())
        self._outgoing = polling(out=sock.fileno())
        self.busy = False
        self.begun = 0
        self.close = weakref.finalize(self, sock.close)
        self.close.atexit = False

    def fileno(self) -> int:
        """The socket's file descriptor, so that a wire can be polled."""
        return self._socket.fileno()

    def send(self, data: bytes, fd: int = -1, timeout: float | None = None) -> None:
        """Send a frame; waits only if the other end has not read many.

        Raises:
            Gone: the other end is closed, or a frame was interrupted in the midst.
            TimeoutError: it did not read for so many seconds.
        """
        if self.busy:  # this one would be taken for the rest of the other
            raise Gone("a message was interrupted")
        data = (_LENGTH.pack(len(data)) + data).ljust(_SHORT, b"\0")
        self.begun += 1
        self.busy = True
        try:
            sent = self._send(data, [] if fd < 0 else [fd], timeout)
        except (Gone, TimeoutError):  # with nothing of it sent; what has come can still be read
            self.busy = False
            raise
        while sent < len(data):
            sent += self._send(memoryview(data)[sent:], [], timeout)
        self.busy = False

    def _send(self, data: bytes | memoryview, fds: list[int], timeout: float | None) -> int:
        while True:
            try:
                if fds:
                    return socket.send_fds(self._socket, [data], fds)
                return self._socket.send(data)
            except BlockingIOError:
                self._await(self._outgoing, timeout, "nothing was read")
            except OSError as error:
                raise Gone from error

    def receive(self, timeout: float | None = None) -> Frame:
        """The next frame; waits for it.

        Raises:
            Gone: the other end is closed, or a frame was interrupted in the midst.
            TimeoutError: nothing came for so many seconds.
        """
        if self.busy:
            raise Gone("a message was interrupted")
        data, fd = self._begin(timeout)
        try:
            if len(data) < _SHORT:
                data = self._rest(data, _SHORT, timeout)
            (length,) = _LENGTH.unpack_from(data)
            data = data[_LENGTH.size : _LENGTH.size + length]
            if len(data) < length:
                data = self._rest(data, length, timeout)
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        self.busy = False
        return Frame(data, fd)

    def _begin(self, timeout: float | None) -> tuple[bytes, int]:
        """The beginning of the next frame, and the file descriptor that came along, or -1."""
        while True:
            self.busy = True  # before anything is read: an interruption may come right after
            try:
                return self._read(_SHORT)
            except Gone:
                self.busy = False
                raise
            except BlockingIOError:
                self.busy = False
                self._await(self._incoming, timeout, "no message came")

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
        if not ancillary:
            return data, -1
        (fd,) = _FD.unpack(ancillary[0][2])
        os.set_inheritable(fd, False)  # what a worker starts must not have it
        return data, fd

    def ready(self) -> bool:
        """Whether `receive` would not wait."""
        return bool(self._incoming.poll(0))

    def has_room(self) -> bool:
        """Whether sending a short frame would not wait."""
        return bool(self._outgoing.poll(0))

    def _await(self, poller: select.poll, timeout: float | None, what: str) -> None:
        left = float("inf") if timeout is None else timeout
        while not poller.poll(1000 * min(left, _SLICE)):
            left -= _SLICE
            if left <= 0:
                raise TimeoutError(f"{what} for {timeout:.0f} s")
            self._check()

    def _rest(self, begun: bytes, count: int, timeout: float | None) -> bytes:
        """The first `count` bytes of what has begun with these."""
        found = bytearray(begun)
        while len(found) < count:
            try:
                found += self._read(min(count - len(found), _AT_ONCE))[0]
            except BlockingIOError:
                self._await(self._incoming, timeout, "the rest of a message did not come")
        return bytes(found)


def polling(*fds: int, out: int | None = None) -> select.poll:
    """Looks whether any of these file descriptors can be read, or `out` be written to.

    `out` may be one of them.
    """
    poller = select.poll()
    for fd in fds:
        poller.register(fd, select.POLLIN)
    if out is not None:
        poller.register(out, select.POLLOUT | (select.POLLIN if out in fds else 0))
    return poller


def spin(
    poller: select.poll, timeout: float | None, seconds: float = SPIN
) -> list[tuple[int, int]]:
    """The events that are ready, as `select.poll` gives them; none if the time is over.

    Args:
        poller: polls the file descriptors.
        timeout: seconds to sleep at most, after the spinning; `None` for no limit.
        seconds: how long to look again and again before the thread sleeps, as waking up takes as
            long as many a wait. Use 0 where there are more workers than cores: spinning would keep
            others from working.
    """
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        if ready := poller.poll(0):
            return ready
        os.sched_yield()
    return poller.poll(None if timeout is None else timeout * 1000)
