"""What Linux says of a process without asking it; other systems say nothing here."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from zlib import crc32

STATE, USER, SYSTEM, STARTED = 0, 11, 12, 19
"""Places of what `fields` returns: its state, the ticks that it has run for, and when it started,
in ticks of its machine."""

_CREDENTIALS = struct.Struct("3i")  # process, user and group


def fields(pid: int | str = "self") -> list[str]:
    """The fields of `/proc/PID/stat` behind the name; none if there is no such process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return stat.rpartition(")")[2].split()


def started_at(pid: int | str = "self") -> int:
    """When a process started, in ticks of its machine; 0 if that is not known."""
    found = fields(pid)
    return int(found[STARTED]) if found else 0


def is_alive(pid: int, started: int) -> bool:
    """Whether the process of this number that started then still runs, as far as is known."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False  # somebody else's by now
    found = fields(pid)
    return not found or (found[STATE] != "Z" and started in (0, int(found[STARTED])))


def where() -> str:
    """Which processes this one shares numbers with: those of its machine and its container."""
    try:
        namespace = Path("/proc/self/ns/pid").stat().st_ino
    except OSError:
        namespace = 0
    return f"{crc32(f'{socket.gethostname()} {namespace}'.encode()):08x}"


def is_of_this_user(sock: socket.socket) -> bool:
    """Whether the other end of a Unix socket is this user's or root's, as far as is known."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    size = _CREDENTIALS.size
    _, user, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return user in (0, os.geteuid())


def memory_of(pid: int) -> tuple[int, int]:
    """The bytes of memory that a process has resident, and the most it had; 0 if not known."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0, 0
    sizes = {line.split(":")[0]: line.split()[1] for line in lines if line.endswith("kB")}
    return int(sizes.get("VmRSS", 0)) << 10, int(sizes.get("VmHWM", 0)) << 10
