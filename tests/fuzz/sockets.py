"""Every socket on which the processes of a job listen, as Linux has them in `/proc`."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from penstock.board import process

_LISTENS = {"tcp": "0A", "tcp6": "0A", "unix": "01"}
_PARENT = 1  # of what `process.fields` returns


class Listening(NamedTuple):
    """A socket on which a process listens.

    Attributes:
        pid: of the process.
        family: `"tcp"`, `"tcp6"` or `"unix"`.
        host: its IP address; for a Unix socket its name, that of an abstract one with `@`.
        port: of TCP.
    """

    pid: int
    family: str
    host: str
    port: int = 0

    def connect(self, folder: Path) -> socket.socket:
        """A socket that is connected to it, and never waits.

        Args:
            folder: where Unix sockets with a file are, if they were bound by another name.

        Raises:
            OSError: it cannot be reached now.
        """
        family = {"tcp": socket.AF_INET, "tcp6": socket.AF_INET6, "unix": socket.AF_UNIX}
        sock = socket.socket(family[self.family])
        try:
            sock.settimeout(1.0)
            sock.connect(self._path(folder) if self.family == "unix" else self._reachable())
            sock.setblocking(False)
        except OSError:
            sock.close()
            raise
        return sock

    def _reachable(self) -> tuple[str, int]:
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host), self.port

    def _path(self, folder: Path) -> str:
        if self.host.startswith("@"):
            return f"\0{self.host[1:]}"
        return str(next(folder.rglob(Path(self.host).name), self.host))


def family_of(pid: int) -> list[int]:
    """A process, and all that have come from it."""
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdecimal() and (found := process.fields(name)):
            parents[int(name)] = int(found[_PARENT])
    known = [pid]
    for one in known:
        known += [child for child, parent in parents.items() if parent == one]
    return known


def listening(pids: list[int]) -> list[Listening]:
    """The sockets on which these processes listen; one that several have is the first's."""
    found: dict[tuple[str, str, int], Listening] = {}
    for pid in pids:
        try:
            for one in _of(pid):
                found.setdefault(one[1:], one)
        except OSError:  # it has ended
            continue
    return list(found.values())


def _of(pid: int) -> Iterator[Listening]:
    own = set()
    for entry in os.scandir(f"/proc/{pid}/fd"):
        try:
            own.add(os.readlink(entry.path))
        except OSError:  # it is closed by now
            continue
    for family, state in _LISTENS.items():
        for line in Path(f"/proc/{pid}/net/{family}").read_text().splitlines()[1:]:
            words = line.split()
            if family == "unix":
                is_own = words[5] == state and words[3] == "00010000" and len(words) > 7
                if is_own and f"socket:[{words[6]}]" in own:
                    yield Listening(pid, family, words[7])
            elif words[3] == state and f"socket:[{words[9]}]" in own:
                host, port = words[1].split(":")
                yield Listening(pid, family, _ip(host), int(port, 16))


def _ip(text: str) -> str:
    """An address as text, of how `/proc` has it: words of the machine's byte order."""
    words = struct.unpack(f">{len(text) // 8}I", bytes.fromhex(text))
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, struct.pack(f"={len(words)}I", *words))
