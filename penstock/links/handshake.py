"""Where processes that know each other's address and a secret connect to each other.

On one machine they connect over a Unix socket, which carries file descriptors and where other users
are turned away; between machines, over TCP, where only ranks with peers on other machines listen,
and on one address.

Either side proves that it knows the secret, without saying it, before anything else is read:

    who listens                                   who calls
    magic, nonce                          -->
                                          <--     nonce, numbers, HMAC("caller", all of these)
    HMAC("listener", all of these)        -->

All of these messages have a fixed size. Whoever listens waits for all callers at once, so silent
ones hold up no other; with more than 256 of them, the one that came first is turned away.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
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

from penstock.board.process import is_of_this_user
from penstock.devices.interfaces import interface_addresses
from penstock.links.wire import Wire

_MAGIC = b"penstock"
_NONCE = 32  # bytes
_PROOF = hashlib.sha256().digest_size
_NUMBERS = struct.Struct("<ii")
_CHALLENGE = len(_MAGIC) + _NONCE
_ANSWER = _NONCE + _NUMBERS.size + _PROOF
_GREETING_TIMEOUT = 5.0  # seconds that a stranger has to prove that it is none
_PATIENCE = 15.0  # seconds that who listens may be busy with something else
_MOST_STRANGERS = 256  # at once; the one that has been silent for longest goes
_PAUSE = 0.1  # seconds between two attempts to connect
_SILENT = 20  # seconds after which a machine that does not answer is given up
_PROBES, _BETWEEN = 5, 3  # seconds


class Address(NamedTuple):
    """Where a process can be reached.

    Attributes:
        machine: whoever has the same can use `path`.
        path: of its Unix socket.
        host: its IP address, if it listens to other machines.
        port: of its TCP socket.
    """

    machine: str
    path: str
    host: str = ""
    port: int = 0


def this_machine() -> str:
    """A text that is the same in processes which can hand each other file descriptors.

    The user is part of it, as processes of other users are turned away on a Unix socket.
    """
    user = os.geteuid()
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        spaces = [os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "user")]
        return "/".join(map(str, [boot, *spaces, user]))
    except OSError:
        return f"{socket.gethostname()}/{user}"


def new_secret() -> str:
    """256 random bits as hexadecimal text, for one pipeline."""
    return secrets.token_hex(32)


class Listener:
    """The socket, or two, at which other processes connect to this one.

    Args:
        host: the address to listen on for other machines; `None` if there are none.

    Attributes:
        address: of this process.

    Raises:
        OSError: this machine has no such address.
    """

    def __init__(self, host: str | None = None) -> None:
        name = f"penstock-{secrets.token_hex(8)}"
        linux = sys.platform == "linux"  # whose abstract sockets leave no file behind
        path = f"\0{name}" if linux else os.path.join(tempfile.gettempdir(), name)
        self._far = None if host is None else _tcp_server(host)
        self._near = socket.socket(socket.AF_UNIX)
        self._near.bind(path)
        if not linux:
            os.chmod(path, 0o600)
        self._near.listen(128)
        port = 0 if self._far is None else self._far.getsockname()[1]
        self.address = Address(this_machine(), path, host or "", port)

    def accept(
        self, expected: Collection[tuple[int, int]], secret: str, timeout: float
    ) -> dict[tuple[int, int], Wire]:
        """Wait for connections.

        Args:
            expected: of every connection the caller's number and the connection's own.
            secret: that they know.
            timeout: seconds.

        Returns:
            the wire of each.

        Raises:
            TimeoutError: not all came in time.
        """
        with _Door([self._near, *([self._far] if self._far else [])], secret) as door:
            found: dict[tuple[int, int], Wire] = {}
            deadline = time.monotonic() + timeout
            while missing := sorted(set(expected) - found.keys()):
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"rank {missing[0][0]} did not connect within {timeout:.0f} s; is there a "
                        f"firewall between the machines?{door.refusals()}"
                    )
                for numbers, sock in door.entered(deadline):
                    if numbers not in expected:
                        sock.close()
                        continue
                    if numbers in found:  # it has given up the first, and tried again
                        found[numbers].close()
                    found[numbers] = _wire(sock)
            return found

    def close(self) -> None:
        """Close the sockets; connections that were accepted stay open."""
        self._near.close()
        if self._far is not None:
            self._far.close()
        if not self.address.path.startswith("\0"):
            with contextlib.suppress(OSError):
                os.unlink(self.address.path)


class _Stranger:
    """Who has connected, and has not yet proven to be none.

    Args:
        sock: its socket.
        secret: that it should know.

    Raises:
        OSError: it is gone already.
    """

    def __init__(self, sock: socket.socket, secret: str) -> None:
        self.sock = sock
        self.until = time.monotonic() + _GREETING_TIMEOUT
        self._secret = secret
        self._nonce = secrets.token_bytes(_NONCE)
        self._greeting = b""
        sock.setblocking(False)
        sock.send(_MAGIC + self._nonce)  # so few bytes that a new socket has room for them

    def receive(self) -> tuple[int, int] | None:
        """Read on.

        Returns:
            the numbers of caller and connection, when it has proven that it knows the secret.

        Raises:
            OSError: it is gone, or does not know it.
        """
        more = self.sock.recv(_ANSWER - len(self._greeting))
        self._greeting += more
        if not more:
            raise ConnectionError("it closed the connection")
        if len(self._greeting) < _ANSWER:
            return None
        greeting, proof = self._greeting[:-_PROOF], self._greeting[-_PROOF:]
        if not hmac.compare_digest(proof, _proof(self._secret, b"caller", self._nonce + greeting)):
            raise PermissionError("it does not know the secret")
        self.sock.send(_proof(self._secret, b"listener", self._nonce + greeting))
        caller, number = _NUMBERS.unpack(greeting[_NONCE:])
        return caller, number


class _Door:
    """Waits for all who connect, at once.

    Args:
        servers: where they do.
        secret: that they should know.
    """

    def __init__(self, servers: Sequence[socket.socket], secret: str) -> None:
        self._servers = {server.fileno(): server for server in servers}
        self._secret = secret
        self._strangers: dict[int, _Stranger] = {}  # the oldest first
        self._refused = 0
        self._poller = select.poll()
        for server in servers:
            server.setblocking(False)
            self._poller.register(server, select.POLLIN)

    def __enter__(self) -> _Door:
        return self

    def __exit__(self, *_: object) -> None:
        for fd in list(self._strangers):
            self._turn_away(fd)

    def refusals(self) -> str:
        """How many were no ranks, for messages."""
        return f" ({self._refused} others were turned away)" if self._refused else ""

    def entered(self, deadline: float) -> list[tuple[tuple[int, int], socket.socket]]:
        """Wait until something happens, or is late.

        Returns:
            those who have proven to know the secret: their numbers, and sockets.
        """
        until = min([deadline, *(one.until for one in self._strangers.values())])
        left = max(0.0, until - time.monotonic())
        found = []
        for fd, _ in self._poller.poll(left * 1000 + 1):
            if fd in self._servers:
                self._let_come(self._servers[fd])
            elif fd in self._strangers and (numbers := self._heard(fd)) is not None:
                self._poller.unregister(fd)
                found.append((numbers, self._strangers.pop(fd).sock))
        now = time.monotonic()
        for fd in [fd for fd, one in self._strangers.items() if one.until <= now]:
            self._turn_away(fd)
        return found

    def _let_come(self, server: socket.socket) -> None:
        if len(self._strangers) >= _MOST_STRANGERS:
            self._turn_away(next(iter(self._strangers)))
        sock = None
        try:
            sock = server.accept()[0]
            if sock.family == socket.AF_UNIX and not is_of_this_user(sock):
                raise PermissionError("it is of another user")
            self._strangers[sock.fileno()] = _Stranger(sock, self._secret)
            self._poller.register(sock, select.POLLIN)
        except OSError as error:  # it has gone again, say
            if sock is not None:
                self._refused += 1
                sock.close()
            elif error.errno in (errno.EMFILE, errno.ENFILE) and self._strangers:
                self._turn_away(next(iter(self._strangers)))

    def _heard(self, fd: int) -> tuple[int, int] | None:
        try:
            return self._strangers[fd].receive()
        except BlockingIOError:
            return None
        except OSError:
            self._turn_away(fd)
            return None

    def _turn_away(self, fd: int) -> None:
        self._poller.unregister(fd)
        self._strangers.pop(fd).sock.close()
        self._refused += 1


def call(
    address: Address, hosts: Sequence[str], numbers: tuple[int, int], secret: str, timeout: float
) -> Wire:
    """Connect to a process, which has to accept the call.

    Args:
        address: its own.
        hosts: names or addresses of its machine, to be tried in turn if it is another than this.
        numbers: of this process, and of the connection.
        secret: that both know.
        timeout: seconds.

    Raises:
        TimeoutError: it cannot be reached, or does not know the secret.
    """
    near = address.machine == this_machine()
    deadline, failure = time.monotonic() + timeout, ""
    while time.monotonic() < deadline:
        for host in [""] if near else hosts:
            left = max(0.1, deadline - time.monotonic())
            sock = None
            try:
                sock = _connected(address, host, min(left, _GREETING_TIMEOUT))
                _introduce(sock, numbers, secret, min(left, _PATIENCE))
                return _wire(sock)
            except OSError as error:
                failure = f"{host}: {error}" if host else str(error)
                if sock is not None:
                    sock.close()
        time.sleep(_PAUSE)
    where = "a process of this machine" if near else f"port {address.port} of another machine"
    hint = "" if near else "; is it open to this one?"
    raise TimeoutError(f"{where} cannot be reached within {timeout:.0f} s ({failure}){hint}")


def _connected(address: Address, host: str, timeout: float) -> socket.socket:
    if host:
        return socket.create_connection((host, address.port), timeout)
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(timeout)
        sock.connect(address.path)
        if not is_of_this_user(sock):
            raise PermissionError("a process of another user listens there")
    except OSError:
        sock.close()
        raise
    return sock


def _introduce(sock: socket.socket, numbers: tuple[int, int], secret: str, timeout: float) -> None:
    """Prove to who listens that this process knows the secret, and see that it does, too.

    Args:
        sock: to it.
        numbers: of this process, and of the connection.
        secret: that both know.
        timeout: seconds, for it may be busy with something else before it listens.

    Raises:
        OSError: it does not know it, or something else listens there.
    """
    deadline = time.monotonic() + timeout
    challenge = _received(sock, _CHALLENGE, deadline)
    if not challenge.startswith(_MAGIC):
        raise ConnectionError("something else listens there")
    nonce = challenge[len(_MAGIC) :]
    greeting = secrets.token_bytes(_NONCE) + _NUMBERS.pack(*numbers)
    sock.sendall(greeting + _proof(secret, b"caller", nonce + greeting))
    try:
        proof = _received(sock, _PROOF, deadline)
    except ConnectionError as error:
        raise ConnectionError("it turned this process away: it has another secret") from error
    if not hmac.compare_digest(proof, _proof(secret, b"listener", nonce + greeting)):
        raise PermissionError("it does not know the secret")


def _received(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Exactly `count` bytes, or an error by the deadline."""
    found = b""
    while len(found) < count:
        sock.settimeout(max(0.1, deadline - time.monotonic()))
        more = sock.recv(count - len(found))
        if not more:
            raise ConnectionError("it closed the connection")
        found += more
    return found


def _proof(secret: str, who: bytes, greeting: bytes) -> bytes:
    """Of knowing the secret; nobody can use what one side says as the other."""
    return hmac.digest(secret.encode(), who + b"\0" + greeting, "sha256")


def route_to(hosts: Sequence[str]) -> tuple[str, str]:
    """The IP address of another machine, and that of this one on the way there.

    Args:
        hosts: names of the other, to be tried in turn.

    Returns:
        both, or empty texts if there is no way.
    """
    found = []
    for host in hosts:
        with contextlib.suppress(OSError):
            for family, kind, _, _, there in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
                with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                    probe.connect(there)  # which sends nothing
                    found.append((str(there[0]), str(probe.getsockname()[0])))
    beyond = [pair for pair in found if not (pair[0].startswith("127.") or pair[0] == "::1")]
    return next(iter(beyond + found), ("", ""))


def interface_of(address: str) -> str:
    """The name of the network interface that has an IP address; empty if none is known to."""
    found = interface_addresses().items()
    return next((name for name, own in found if own == address), "")


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


def _tcp_server(host: str) -> socket.socket:
    """One that listens on one address; on all if that is `0.0.0.0` or `::`."""
    family, *_, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    both = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server(address[:2], family=family, backlog=128, dualstack_ipv6=both)
