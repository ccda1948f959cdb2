"""A thread that answers whoever connects: one request and one response for each connection.

Whoever connects may be a stranger who says nothing, says too much, drips bytes, or never reads.
None of that may stop others from being answered, nor the process from what it really does. So one
thread serves a bounded number of connections, each for a bounded time, and rests for most of the
time: what it costs does not grow with the number of those who connect.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable

from penstock.board.process import is_of_this_user

_MOST = 64  # connections at once; the oldest goes
_AT_ONCE = 32  # that are accepted before those that are there are looked at
_LONGEST = 1 << 13  # bytes of a request
_PATIENCE = 5.0  # seconds for a request to come, and for a response to be read
_REST = 9.0  # seconds of rest for a second of work
_PAUSE, _LONG_PAUSE = 0.05, 0.5  # seconds of rest at least, and at most
_LOOK = 1.0  # seconds after which it looks whether it is closed, if nothing wakes it

Parse = Callable[[bytes], str | None]
"""What is asked for by the bytes that have come; `None` as long as the request is not whole."""

Respond = Callable[[str], bytes]
"""The response to what is asked for."""


class _Connection:
    """One who has connected.

    Args:
        sock: to it.

    Attributes:
        until: when it is given up, by `time.monotonic()`.
        received: of its request so far.
        response: what is left to be sent to it; `None` until it has asked for something.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock, self.until = sock, time.monotonic() + _PATIENCE
        self.received = b""
        self.response: memoryview | None = None

    def receive(self) -> None:
        """Read what is there.

        Raises:
            OSError: it is gone, or says more than a request can have.
        """
        more = self.sock.recv(_LONGEST)
        self.received += more
        if not more or len(self.received) > _LONGEST:
            raise ConnectionError

    def begin(self, response: bytes) -> None:
        """Have a response to send, with the seconds that the client has to read it."""
        self.response, self.until = memoryview(response), time.monotonic() + _PATIENCE

    def send(self) -> bool:
        """Send what there is room for; returns whether that was all.

        Raises:
            OSError: it is gone.
        """
        if self.response:
            with contextlib.suppress(BlockingIOError):  # it does not read
                self.response = self.response[self.sock.send(self.response) :]
        return not self.response

    def close(self) -> None:
        """Close the connection, also where a fork of this process has it as well."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()


class Server:
    """Answers whoever connects, until it is closed.

    Those who ask for the same at the same time get the same response, which is made once. On a Unix
    socket, users other than this one (and root) are turned away.

    Args:
        listener: that is bound; it becomes the server's own.
        parse: says what is asked for, see `Parse`.
        respond: gives the response, in the server's thread. If it raises, the connection is closed.
        name: of the thread.

    Attributes:
        thread: in which it answers.
    """

    def __init__(self, listener: socket.socket, parse: Parse, respond: Respond, name: str) -> None:
        self._listener, self._parse, self._respond = listener, parse, respond
        self._connections: dict[int, _Connection] = {}  # the oldest first
        self._poller = select.poll()
        self._is_closed, self._process = threading.Event(), os.getpid()
        listener.setblocking(False)
        listener.listen(128)
        self._poller.register(listener, select.POLLIN)
        self.thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Answer no more; may be called again, by the server's own thread, and in a fork."""
        if os.getpid() != self._process:  # a fork, which has not the thread
            self._listener.close()
            return
        if self._is_closed.is_set():
            return
        self._is_closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread
        if threading.current_thread() is not self.thread:
            self.thread.join(_PATIENCE)

    def _serve(self) -> None:
        try:
            while not self._is_closed.is_set():
                ready = self._poller.poll(1000 * self._wait())
                began = time.monotonic()
                self._turn([fd for fd, _ in ready])
                if ready:
                    worked = time.monotonic() - began
                    self._is_closed.wait(min(_LONG_PAUSE, max(_PAUSE, _REST * worked)))
        finally:
            for fd in list(self._connections):
                self._drop(fd)
            self._listener.close()

    def _wait(self) -> float:
        """Seconds until somebody is late, or it is time to look."""
        first = min((one.until for one in self._connections.values()), default=float("inf"))
        return min(_LOOK, max(0.0, first - time.monotonic()) + 0.001)

    def _turn(self, ready: list[int]) -> None:
        """Read from and answer the connections with these file descriptors."""
        wanted: dict[str, list[int]] = {}
        for fd in ready:
            if fd in self._connections and (path := self._heard(fd)) is not None:
                wanted.setdefault(path, []).append(fd)
        for path, fds in wanted.items():
            try:
                response = self._respond(path)
            except Exception:
                response = b""
            for fd in fds:
                self._connections[fd].begin(response)
                self._poller.modify(fd, select.POLLOUT)
                self._send(fd)
        now = time.monotonic()
        for fd in [fd for fd, one in self._connections.items() if one.until <= now]:
            self._drop(fd)
        if self._listener.fileno() in ready:
            self._accept()

    def _heard(self, fd: int) -> str | None:
        """What is asked for by one who is ready, if that is whole now."""
        one = self._connections[fd]
        if one.response is not None:
            self._send(fd)
            return None
        try:
            one.receive()
            return self._parse(one.received)
        except BlockingIOError:
            return None
        except OSError:
            self._drop(fd)
            return None

    def _send(self, fd: int) -> None:
        try:
            if self._connections[fd].send():
                self._drop(fd)
        except OSError:
            self._drop(fd)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock = self._listener.accept()[0]
            except OSError:  # nobody any more, or too many open files
                return
            if sock.family == socket.AF_UNIX and not is_of_this_user(sock):
                sock.close()
                continue
            if len(self._connections) >= _MOST:
                self._drop(next(iter(self._connections)))
            self._connections[sock.fileno()] = _Connection(sock)
            self._poller.register(sock, select.POLLIN)

    def _drop(self, fd: int) -> None:
        self._poller.unregister(fd)
        self._connections.pop(fd).close()


def read_all(sock: socket.socket, end: float, most: int) -> bytes:
    """What a peer says until it closes the connection.

    Args:
        sock: to it.
        end: when that has to be done, by `time.monotonic()`.
        most: bytes that it may say.

    Raises:
        OSError: it is gone; `TimeoutError` if it has not sent all in time.
        ValueError: it says more.
    """
    data = bytearray()
    while True:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(left)
        more = sock.recv(1 << 16)
        if not more:
            return bytes(data)
        data += more
        if len(data) > most:
            raise ValueError(f"the answer has more than {most >> 20} MiB")
