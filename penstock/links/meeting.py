"""Where processes that know each other's address and a secret connect to each other.

On one machine they meet at a Unix socket, which carries file descriptors, between machines over
TCP. Whoever does not say the secret is turned away before anything that it sends is looked at.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from penstock.links.wire import Wire

_GREETING = struct.Struct("<32sii")
_GREETING_TIMEOUT = 5.0  # seconds that a stranger has to say something
_SILENT = 20  # seconds after which a machine that does not answer is given up
_PROBES, _BETWEEN = 5, 3  # seconds


class Address(NamedTuple):
    """Where a process can be reached.

    Attributes:
        machine: whoever has the same can use `path`.
        path: of its Unix socket.
        port: of its TCP socket.
    """

    machine: str
    path: str
    port: int


def this_machine() -> str:
    """What two processes have in common that can hand each other file descriptors."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        return f"{boot}/{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def new_secret() -> str:
    """One that nobody guesses."""
    return secrets.token_hex(16)


class Meeting:
    """The place where other processes connect to this one.

    Attributes:
        address: of this process.
    """

    def __init__(self) -> None:
        name = f"penstock-{secrets.token_hex(8)}"
        linux = sys.platform == "linux"  # whose abstract sockets leave no file behind
        path = f"\0{name}" if linux else os.path.join(tempfile.gettempdir(), name)
        self._near = socket.socket(socket.AF_UNIX)
        self._near.bind(path)
        self._near.listen(128)
        self._far = _tcp_server()
        self.address = Address(this_machine(), path, self._far.getsockname()[1])

    def accept(
        self, expected: Collection[tuple[int, int]], secret: str, timeout: float
    ) -> dict[tuple[int, int], tuple[Wire, str]]:
        """Wait for connections.

        Args:
            expected: of every connection the caller's number and the connection's own.
            secret: that they say.
            timeout: seconds.

        Returns:
            for each its wire, and the caller's IP address, which is empty on one machine.

        Raises:
            TimeoutError: not all came in time.
        """
        found: dict[tuple[int, int], tuple[Wire, str]] = {}
        deadline = time.monotonic() + timeout
        while missing := sorted(set(expected) - found.keys()):
            left = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([self._near, self._far], [], [], left)
            if not ready:
                raise TimeoutError(
                    f"rank {missing[0][0]} did not connect within {timeout:.0f} s; a firewall "
                    "between the machines?"
                )
            for server in ready:
                sock, peer = server.accept()
                numbers = _greeted(sock, secret)
                if numbers is None or numbers in found or numbers not in expected:
                    sock.close()
                    continue
                found[numbers] = _wire(sock), peer[0] if server is self._far else ""
        return found

    def close(self) -> None:
        """Take no more."""
        self._near.close()
        self._far.close()
        if not self.address.path.startswith("\0"):
            with contextlib.suppress(OSError):
                os.unlink(self.address.path)


def call(
    address: Address, hosts: Sequence[str], numbers: tuple[int, int], secret: str, timeout: float
) -> Wire:
    """Connect to a process.

    Args:
        address: its own.
        hosts: names or addresses of its machine, to be tried in turn if it is another than this.
        numbers: of this process, and of the connection.
        secret: that it wants to hear.
        timeout: seconds.

    Raises:
        TimeoutError: it cannot be reached.
    """
    if address.machine == this_machine():
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(address.path)
        return _introduced(sock, numbers, secret)
    deadline, failure = time.monotonic() + timeout, ""
    while time.monotonic() < deadline:
        for host in hosts:
            left = max(0.1, min(5.0, deadline - time.monotonic()))
            try:
                sock = socket.create_connection((host, address.port), left)
                return _introduced(sock, numbers, secret)
            except OSError as error:
                failure = f"{host}: {error}"
        time.sleep(0.1)
    raise TimeoutError(
        f"port {address.port} of another machine cannot be reached within {timeout:.0f} s "
        f"({failure}); is it open to this one?"
    )


def _introduced(sock: socket.socket, numbers: tuple[int, int], secret: str) -> Wire:
    sock.sendall(_GREETING.pack(secret.encode(), *numbers))
    return _wire(sock)


def _greeted(sock: socket.socket, secret: str) -> tuple[int, int] | None:
    """What a caller says it is; `None` if it does not know the secret."""
    sock.settimeout(_GREETING_TIMEOUT)
    said = b""
    with contextlib.suppress(OSError):
        while len(said) < _GREETING.size and (more := sock.recv(_GREETING.size - len(said))):
            said += more
    if len(said) < _GREETING.size:
        return None
    word, caller, number = _GREETING.unpack(said)
    return (caller, number) if hmac.compare_digest(word, secret.encode()) else None


def _wire(sock: socket.socket) -> Wire:
    """A wire that notices within seconds when the other machine is gone."""
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (
            ("TCP_KEEPIDLE", _SILENT - _PROBES * _BETWEEN),
            ("TCP_KEEPINTVL", _BETWEEN),
            ("TCP_KEEPCNT", _PROBES),
            ("TCP_USER_TIMEOUT", 1000 * _SILENT),
        ):
            if hasattr(socket, option):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return Wire(sock)


def _tcp_server() -> socket.socket:
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):
            return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
