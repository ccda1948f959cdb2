"""What comes over the links of a worker while it waits for something else.

A link between processes of one machine has room for some tens of messages. Who waits therefore
takes in whatever comes meanwhile, over any of its links. If it read only what it waits for, it and
a worker that waits for room in another link could wait for each other for ever: a schedule may let
a worker send any number of messages before their receiver wants the first. (A link between machines
has room for tens of thousands.)
"""

from __future__ import annotations

import select
from typing import Protocol
from weakref import WeakSet

from penstock.links.wire import SPIN, Gone, polling, spin


class Incoming(Protocol):
    """Where messages come from another process."""

    def fileno(self) -> int:
        """The file descriptor at which they come."""

    def take_in(self) -> None:
        """Read those that have come, and keep them.

        Raises:
            Gone: the other process is gone, or this end is closed.
        """


class Intake:
    """The places where messages come to a worker, as long as anybody else refers to them.

    One whose other end is gone is forgotten: whoever wants something of it hears of that.
    """

    def __init__(self) -> None:
        self._every: WeakSet[Incoming] = WeakSet()

    def add(self, incoming: Incoming) -> None:
        """Take in what comes here, too."""
        self._every.add(incoming)

    def wait(
        self,
        *fds: int,
        out: int | None = None,
        timeout: float | None = None,
        patience: float = SPIN,
    ) -> set[int]:
        """Wait until something happens, and take in what has come.

        Args:
            fds: file descriptors that are to be read by the caller; nothing is taken in there.
            out: one that is to be written to.
            timeout: seconds to wait at most; `None` for no limit.
            patience: as `seconds` of `spin`.

        Returns:
            those of these file descriptors that are ready, or broken; none if the time is over, or
            something else has come.
        """
        found = {one.fileno(): one for one in self._every}
        others = {fd: one for fd, one in found.items() if fd >= 0 and fd not in fds}
        ready = spin(polling(*fds, *others, out=out), timeout, patience)
        for fd, event in ready:
            if fd in others and event != select.POLLOUT:
                self._take_in(others[fd])
        return {fd for fd, event in ready if fd in fds or (fd == out and event & ~select.POLLIN)}

    def _take_in(self, incoming: Incoming) -> None:
        """Take in what has come, also the last from one who is gone."""
        try:
            incoming.take_in()
        except Gone:
            self._every.discard(incoming)
