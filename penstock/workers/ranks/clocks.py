"""How far apart the clocks of ranks on several machines are, as their messages show."""

from __future__ import annotations

from collections import deque
from functools import cache
from pathlib import Path
from time import monotonic_ns

_KEPT = 64  # of the latest messages: clocks drift


@cache
def machine() -> str:
    """Names this machine since it was started: processes with the same name share a clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class ClockOffset:
    """By how much the receiver's clock is ahead of the sender's, estimated from messages.

    The time between sending and receiving, each by the own clock, is the time of travel plus the
    difference of the clocks. The least of many such times is nearest to that difference.
    """

    def __init__(self) -> None:
        self._seen: deque[int] = deque(maxlen=_KEPT)

    def note(self, sent: int, received: int) -> None:
        """Note a message.

        Args:
            sent: when it was sent, in nanoseconds of the sender's clock.
            received: when it was received, in nanoseconds of the receiver's clock.
        """
        self._seen.append(received - sent)

    @property
    def least(self) -> int | None:
        """Nanoseconds that a message seemed to take at least; `None` before the first."""
        return min(self._seen, default=None)


class Clock:
    """This rank's clock beside that of rank 0 (Cristian 1989, doi:10.1007/BF01784024).

    Messages to rank 0 and back are assumed to take equally long at least.

    Attributes:
        ahead: nanoseconds by which rank 0's clock is ahead of this one; 0 on the same machine.
    """

    def __init__(self) -> None:
        self.ahead = 0
        self._back = ClockOffset()

    def note(self, machine_of_0: str, there: int | None, sent: int) -> None:
        """Note a message of rank 0.

        Args:
            machine_of_0: the machine of rank 0, see `machine`.
            there: the least nanoseconds that messages of this rank to rank 0 seemed to take, as
                `ClockOffset.least` has it.
            sent: when rank 0 sent the message, in nanoseconds of its clock.
        """
        self._back.note(sent, monotonic_ns())
        back = self._back.least
        if machine_of_0 and machine_of_0 == machine():
            self.ahead = 0
        elif there is not None and back is not None:
            self.ahead = (there - back) // 2
