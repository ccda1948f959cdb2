"""Turns: whoever has a number waits until all before it are done."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from penstock.board.memory import Record
from penstock.links.local import Aborted

Records = Mapping[int, Record]
"""Where threads note what they do, by their identifiers."""


class Turns(Protocol):
    """Numbers that have their turns one after the other, whoever has them.

    Every replica has the numbers of its own micro-batches, and goes through them in ascending
    order.
    """

    def begin(self, numbers: Sequence[int], end: int) -> None:
        """A replica begins a pass.

        Args:
            numbers: its own, ascending.
            end: the first number behind all of the pass.
        """

    def has_come(self, number: int) -> bool:
        """Whether all before this number are done.

        Raises:
            Aborted: the pass is given up.
        """

    def wait(self, number: int) -> None:
        """Wait until all before this number are done.

        Raises:
            Aborted: the pass is given up.
        """

    def done(self, number: int) -> None:
        """Note that this number has had its turn, or needs none; a second call has no effect."""


class LocalTurns:
    """Turns of threads.

    Args:
        first: of the numbers.
        records: where those that wait note it; others do not.
    """

    def __init__(self, first: int = 0, records: Records | None = None) -> None:
        self._changed = threading.Condition()
        self._records: Records = {} if records is None else records
        self.reset(first)

    def reset(self, first: int = 0) -> None:
        """Begin with the number `first` again; nobody may be waiting."""
        self._next = first
        self._done: set[int] = set()
        self._aborted = False

    def begin(self, numbers: Sequence[int], end: int) -> None:
        """Everybody says when a number is done, so there is nothing to note."""

    def has_come(self, number: int) -> bool:
        """Whether all before this number are done."""
        if self._aborted:
            raise Aborted
        return self._next >= number

    def wait(self, number: int) -> None:
        """Wait until all before this number are done."""
        with self._changed:
            if self.has_come(number):
                return
            with self._waiting():
                while not self.has_come(number):
                    self._changed.wait()

    def _waiting(self) -> AbstractContextManager[None]:
        record = self._records.get(threading.get_ident())
        return nullcontext() if record is None else record.waiting()

    def done(self, number: int) -> None:
        """This number has had its turn, or does not need it."""
        with self._changed:
            if number >= self._next:
                self._done.add(number)
            while self._next in self._done:
                self._done.remove(self._next)
                self._next += 1
            self._changed.notify_all()

    def abort(self) -> None:
        """Wake whoever waits, now and until `reset`."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()


class AllTurns:
    """The turns of threads that can be given up together.

    Args:
        records: where those that wait note it.
    """

    def __init__(self, records: Records) -> None:
        self._every: list[LocalTurns] = []
        self._records = records

    def make(self, first: int = 0) -> Turns:
        """Turns that begin with this number."""
        self._every.append(LocalTurns(first, self._records))
        return self._every[-1]

    def abort(self) -> None:
        """Wake whoever waits, now and until `reset`."""
        for turns in self._every:
            turns.abort()

    def reset(self) -> None:
        """Start all of them anew. Nobody may be waiting."""
        for turns in self._every:
            turns.reset()
