"""Whether a process runs, or has been stopped.

A worker that computes cannot answer, so its silence says nothing. On one machine the kernel knows
the difference, and shows it in `/proc` (`Pulse`). Processes of two machines send each other a
heartbeat, by threads that do nothing else (`Beats`).
"""

from __future__ import annotations

import os
import signal
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Protocol

from penstock.board import process
from penstock.links.local import Aborted
from penstock.links.wire import Wire

STOPPED = "stopped by a signal (such as SIGSTOP), and has been for seconds"

_LASTING = 2.0  # seconds of standing still that are no short pause any more
_APART = 2.5  # seconds between two looks, after which the first says nothing any more
_EVERY = 1.0  # seconds from beat to beat
_SILENT = 20.0  # seconds without a beat; an interpreter may be in the midst of a long call of C

_STOPPED = "T"  # by a signal; "t" is a debugger's, whose user knows what he does


class HasStopped(Protocol):
    """What is known of whether another process runs."""

    def has_stopped(self) -> bool:
        """Whether it has not run for seconds, as far as is known."""


class Pulse:
    """Looks at a process of this machine now and then.

    Args:
        pid: its number.
        started: what `started_at` said in that process; a process of this number that started at
            another time is another one. `None` to believe the number.
    """

    def __init__(self, pid: int, started: int | None = None) -> None:
        self.pid = pid
        self._started = started
        self._seen: int | None = None
        self._looked = self._since = float("-inf")

    def is_stopped(self) -> bool:
        """Whether a signal has stopped it, as far as is known."""
        return self._look() is not None

    def has_stopped(self) -> bool:
        """Whether it has been stopped for seconds, as seen at this look and at earlier ones.

        Only looks in quick succession count, between which it has used no processor time. So
        neither a pause of both processes counts, nor being stopped and resumed again and again.
        """
        now, seen = time.monotonic(), self._look()
        if seen is None or seen != self._seen or now - self._looked > _APART:
            self._since = now
        self._seen, self._looked = seen, now
        return seen is not None and now - self._since >= _LASTING

    def kill(self) -> None:
        """End it at once, unless it is gone already."""
        if self._fields():
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)

    def _look(self) -> int | None:
        """The time that it has run for, if it is stopped."""
        fields = self._fields()
        if not fields or fields[process.STATE] != _STOPPED:
            return None
        return int(fields[process.USER]) + int(fields[process.SYSTEM])

    def _fields(self) -> Sequence[str]:
        """What the kernel says of it; nothing if another process has its number now."""
        fields = process.fields(self.pid)
        is_it = fields and self._started in (None, int(fields[process.STARTED]))
        return fields if is_it else ()


class Beats:
    """Sends other processes a heartbeat every second, and listens to theirs.

    Args:
        wires: to them, by the numbers of their ranks; for nothing else.
    """

    def __init__(self, wires: Mapping[int, Wire]) -> None:
        now = time.monotonic()
        self._heard = dict.fromkeys(wires, now)
        self._over = threading.Event()
        self.close = weakref.finalize(self, self._over.set)
        arguments = dict(wires), self._heard, self._over
        threading.Thread(target=_beat, args=arguments, name="penstock-beats", daemon=True).start()

    def of(self, rank: int) -> Beat:
        """The beat of one of them."""
        return Beat(self, rank)

    def silent_for(self, rank: int) -> float:
        """Seconds since this process heard from a rank; reset if it did not run itself.

        It is negative infinity once the rank has ended, which is noticed elsewhere.
        """
        return time.monotonic() - self._heard[rank]


class Beat:
    """The heartbeat of a process of another machine.

    Args:
        beats: that hear it.
        rank: its rank.
    """

    def __init__(self, beats: Beats, rank: int) -> None:
        self._beats = beats
        self._rank = rank

    def has_stopped(self) -> bool:
        """Whether there has been no beat for so long that the process cannot be running."""
        return self._beats.silent_for(self._rank) >= _SILENT


def _beat(wires: dict[int, Wire], last_beats: dict[int, float], over: threading.Event) -> None:
    """Send and receive heartbeats until `over`; runs in a thread of its own."""
    before = time.monotonic()
    while not over.wait(_EVERY):
        now = time.monotonic()
        if now - before > 3 * _EVERY:  # this one did not run itself, and may not have heard
            last_beats.update(dict.fromkeys(wires, now))
        before = now
        for rank, wire in list(wires.items()):
            try:
                if wire.has_room():
                    wire.send(b"", -1, _EVERY)
                while wire.ready():
                    wire.receive(_EVERY)
                    last_beats[rank] = now
            except (Aborted, TimeoutError):  # who has ended is noticed elsewhere
                del wires[rank]
                last_beats[rank] = float("inf")
    for wire in wires.values():
        wire.close()
