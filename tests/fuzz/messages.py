"""What strangers say: nothing, nonsense, half of something, and what is nearly right."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import socket
import struct
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

from penstock.links import handshake

Delivery = Generator[float, None, None]
"""Delivers a message; yields seconds to wait until it goes on."""

_HUGE = (2**31 - 1, 2**32 - 1, 2**48, 2**62, 2**63 - 1, -1, -(2**63))
_HEAR = 0.5  # seconds to wait for what the other end says first


class _Payload:
    """Makes a folder if it is unpickled."""

    def __init__(self, mark: str) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.makedirs, (self._mark, 0o777, True)


def payload(mark: str, protocol: int) -> bytes:
    """A pickle that makes a folder when it is read."""
    return pickle.dumps(_Payload(mark), protocol=protocol)


class Hostile(NamedTuple):
    """Whoever sends messages knows this.

    Attributes:
        mark: the folder that pickles make.
        secret: of the pipelines, for what is nearly right.
    """

    mark: str
    secret: str

    def message(self, seed: int) -> tuple[str, Callable[[socket.socket], Delivery]]:
        """The message of a number: its kind, and what delivers it."""
        rng = random.Random(seed)
        if rng.random() < 0.3:
            kind = rng.choice(["a flipped bit", "a replayed greeting", "another secret",
                               "an echo", "half a greeting"])  # fmt: skip
            return kind, lambda sock: self._greeting(sock, kind, rng)
        kind, make = rng.choice(_CONTENTS)
        data = make(rng, self.mark)
        return kind, lambda sock: _delivered(sock, data, rng)

    def _greeting(self, sock: socket.socket, kind: str, rng: random.Random) -> Delivery:
        """Answer a challenge of Penstock, nearly right."""
        said = bytearray()
        for _ in range(int(_HEAR / 0.02)):
            _hear(sock, said)
            if len(said) >= handshake._CHALLENGE:
                break
            yield 0.02
        nonce = bytes(said[len(handshake._MAGIC) : handshake._CHALLENGE])
        if kind == "a replayed greeting" or len(nonce) < handshake._NONCE:
            nonce = rng.randbytes(handshake._NONCE)  # that of another connection
        secret = rng.randbytes(32).hex() if kind == "another secret" else self.secret
        numbers = handshake._NUMBERS.pack(rng.choice([0, 1, 2]), rng.choice([0, -1, -2, 1]))
        own = rng.randbytes(handshake._NONCE) + numbers
        answer = bytearray(own + handshake._proof(secret, b"caller", nonce + own))
        if kind == "a flipped bit":
            answer[rng.randrange(len(answer))] ^= 1 << rng.randrange(8)
        elif kind == "an echo":
            answer = said
        elif kind == "half a greeting":
            answer = answer[: rng.randrange(1, len(answer))]
        answer += payload(self.mark, 4)
        yield from _delivered(sock, bytes(answer), rng)


def _delivered(sock: socket.socket, data: bytes, rng: random.Random) -> Delivery:
    """Say this in one of several ways."""
    way = rng.choice(["at once", "at once", "dripping", "cut off", "stays", "reset", "deaf"])
    if way == "dripping":
        for byte in data[:24]:
            sock.send(bytes([byte]))
            yield 0.05
    elif way in ("cut off", "stays"):
        sock.send(data[: rng.randrange(len(data) + 1)])
        yield 0.0 if way == "cut off" else rng.uniform(0.5, 4.0)
    elif way == "reset":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        sock.send(data)
    elif way == "deaf":
        sock.send(data)
        yield rng.uniform(0.5, 4.0)
    else:
        sock.send(data)
        if rng.random() < 0.5:
            sock.shutdown(socket.SHUT_WR)
        yield 0.1
        _hear(sock, bytearray())


def _hear(sock: socket.socket, said: bytearray) -> None:
    with contextlib.suppress(BlockingIOError):
        said += sock.recv(1 << 16)


def _noise(rng: random.Random, mark: str) -> bytes:
    return rng.randbytes(rng.choice([1, 7, 40, 104, 1000, 20_000]))


def _huge(rng: random.Random, mark: str) -> bytes:
    size = struct.pack(rng.choice(["<q", ">q"]), rng.choice(_HUGE[2:]))
    short = struct.pack(rng.choice(["<I", ">I"]), rng.choice(_HUGE[:2]))
    return rng.choice([size, short, size * 8]) + rng.randbytes(rng.randrange(200))


def _pickle(rng: random.Random, mark: str) -> bytes:
    data = payload(mark, rng.choice([0, 2, 4, 5]))
    framed = struct.pack("<q", len(data)) + data
    return rng.choice([data, framed, framed.ljust(48, b"\0"), b"penstock" + data, data + b"\n"])


def _http(rng: random.Random, mark: str) -> bytes:
    line = rng.choice(
        [
            *(b"GET /metrics HTTP/1.1", b"GET /state HTTP/1.1", b"GET /state HTTP/9.9", b"GET"),
            *(b"POST /state HTTP/1.1", b"GET /../../../etc/passwd HTTP/1.1", b"\0\0\0 / HTTP/1.1"),
            *(b"GET /%2e%2e%2fetc%2fpasswd HTTP/1.0", b"GET http://169.254.169.254/ HTTP/1.1"),
            b"GET /" + b"a" * rng.randrange(20_000) + b" HTTP/1.1",
        ]
    )
    headers = rng.choice(
        [
            *(b"", b"Host: a\r\n", b"Accept: application/openmetrics-text;version=9\r\n"),
            *(b"Content-Length: 99999999999999\r\n", b"Transfer-Encoding: chunked\r\n"),
            b"".join(b"X-%d: %s\r\n" % (k, rng.randbytes(20).hex().encode()) for k in range(300)),
            b"A: " + rng.randbytes(300) + b"\r\n",
        ]
    )
    rest = rng.choice([b"", b"7fffffff\r\n", payload(mark, 0)])
    return line + rng.choice([b"\r\n", b"\n"]) + headers + rng.choice([b"\r\n", b""]) + rest


def _question(rng: random.Random, mark: str) -> bytes:
    return rng.choice(
        [
            *(b"stacks", b"stacks\n", b"__class__\n", b"\xff\xfe\n", b"\n" * 500, b"\0\n"),
            *(b"[" * 4000 + b"\n", b'{"a":' * 1000 + b"\n", b"x" * 50_000),
            payload(mark, 0) + b"\n",
        ]
    )


def _other_protocols(rng: random.Random, mark: str) -> bytes:
    return rng.choice(
        [
            *(b"SSH-2.0-OpenSSH_9.2\r\n", b"*1\r\n$4\r\nPING\r\n", b"\x16\x03\x01\x02\x00\x01\x00"),
            *(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x80\x02}q\x00.", b"AUTH ANONYMOUS\r\n"),
            handshake._MAGIC + rng.randbytes(handshake._NONCE),
        ]
    )


_CONTENTS: list[tuple[str, Callable[[random.Random, str], bytes]]] = [
    ("silence", lambda rng, mark: b""),
    ("noise", _noise),
    ("a huge length", _huge),
    ("a pickle", _pickle),
    ("HTTP", _http),
    ("a question", _question),
    ("another protocol", _other_protocols),
]
