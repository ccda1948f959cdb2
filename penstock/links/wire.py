"""A socket between two processes that carries short messages, and file descriptors."""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple

from penstock.links.local import Aborted

_HEADER = struct.Struct("<qqqqqq")
_AT_ONCE = 1 << 20  # bytes that are read at once; a buffer of that size is made each time
_SLICE = 1.0  # seconds that are waited at once
_FD = struct.Struct("i")
_FD_SPACE = socket.CMSG_SPACE(_FD.size)
SPIN = 50e-6
"""Seconds of looking again and again before a thread is put to sleep."""


class Gone(Aborted):
    """The process at the other end is gone."""


class Message(NamedTuple):
    """What is sent at once.

    Attributes:
        dispatch: of jobs, to which it belongs.
        kind: what the receiver makes of it.
        slot: the segment that it speaks of.
        layout: how the segment is laid out.
        payload: more bytes, of any number.
        fd: of a segment that the receiver does not know yet, or -1.
        size: of that segment.
    """

    dispatch: int
    kind: int = 0
    slot: int = 0
    layout: int = 0
    payload: bytes = b""
    fd: int = -1
    size: int = 0


class Wire:
    """One end of a stream socket.

    Args:
        sock: the socket.
        check: called every second that it waits; raises `TimeoutError` if it waits in vain.

    Attributes:
        busy: whether it is in the midst of a message. If it is interrupted then, nobody knows
            where the next message begins.
        begun: how many messages it has begun to send.
        close: closes this end; the other one notices.
    """

    def __init__(self, sock: socket.socket, check: Callable[[], None] = lambda: None) -> None:
        sock.setblocking(False)
        self._check = check
        self._socket = sock
        self._incoming = select.poll()
        self._incoming.register(sock, select.POLLIN)
        self._outgoing = select.poll()
        self._outgoing.register(sock, select.POLLOUT)
        self.busy = False
        self.begun = 0
        self.close = weakref.finalize(self, sock.close)
        self.close.atexit = False

    def fileno(self) -> int:
        """The socket's file descriptor, so that a wire can be polled."""
        return self._socket.fileno()

    def send(self, message: Message, timeout: float | None = None) -> None:
        """Send a message; waits only if the other end has not read many.

        Raises:
            Gone: the other end is closed, or a message was interrupted in the midst.
            TimeoutError: it did not read for so many seconds.
        """
        if self.busy:  # this one would be taken for the rest of the other
            raise Gone("a message was interrupted")
        numbers = (message.dispatch, message.kind, message.slot, message.layout, message.size)
        data = _HEADER.pack(*numbers, len(message.payload)) + message.payload
        fds = [] if message.fd < 0 else [message.fd]
        self.begun += 1
        self.busy = True
        try:
            sent = self._send(data, fds, timeout)
        except Gone:  # with nothing of it sent; what the other end has said before can be read
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

    def receive(self, timeout: float | None = None) -> Message:
        """The next message; waits for it.

        Raises:
            Gone: the other end is closed, or a message was interrupted in the midst.
            TimeoutError: nothing came for so many seconds.
        """
        if self.busy:
            raise Gone("a message was interrupted")
        data, fd = self._begin(timeout)
        try:
            if len(data) < _HEADER.size:
                data += self._rest(_HEADER.size - len(data), timeout)
            dispatch, kind, slot, layout, size, length = _HEADER.unpack(data)
            payload = self._rest(length, timeout) if length else b""
        except BaseException:
            if fd >= 0:
                os.close(fd)
            raise
        self.busy = False
        return Message(dispatch, kind, slot, layout, payload, fd, size)

    def _begin(self, timeout: float | None) -> tuple[bytes, int]:
        """The beginning of the next message, and the file descriptor that came along, or -1."""
        while True:
            self.busy = True  # before anything is read: an interruption may come right after
            try:
                return self._read(_HEADER.size)
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
        """Whether sending a short message would not wait."""
        return bool(self._outgoing.poll(0))

    def _await(self, poller: select.poll, timeout: float | None, what: str) -> None:
        left = float("inf") if timeout is None else timeout
        while not poller.poll(1000 * min(left, _SLICE)):
            left -= _SLICE
            if left <= 0:
                raise TimeoutError(f"{what} for {timeout:.0f} s")
            self._check()

    def _rest(self, count: int, timeout: float | None) -> bytes:
        """Exactly `count` more bytes of a message that has begun."""
        found = bytearray()
        while len(found) < count:
            try:
                found += self._read(min(count - len(found), _AT_ONCE))[0]
            except BlockingIOError:
                self._await(self._incoming, timeout, "the rest of a message did not come")
        return bytes(found)


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Inside, a Ctrl-C waits until a message is whole; then the user's own handler is called.

    A second one does not wait. Outside of the main thread, which no signal interrupts, and where
    the handler is not one of Python's, nothing is done.
    """
    theirs = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(theirs):
        yield
        return
    came: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            signal.signal(signal.SIGINT, theirs)
            came.clear()
            theirs(number, frame)
        else:
            came.append(frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, theirs)
        if came:
            theirs(signal.SIGINT, came[0])


def spin(
    poller: select.poll, timeout: float | None, seconds: float = SPIN
) -> list[tuple[int, int]]:
    """What is ready; nothing after `timeout` seconds.

    It is looked for without sleep for some `seconds`, since to be woken up takes as long as many
    waits. Where there are more workers than cores that would keep others from working.
    """
    stop = time.perf_counter() + seconds
    while time.perf_counter() < stop:
        if ready := poller.poll(0):
            return ready
        os.sched_yield()
    return poller.poll(None if timeout is None else timeout * 1000)
