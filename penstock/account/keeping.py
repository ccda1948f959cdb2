"""Keeps what is known of a run while it goes on: in memory, and in a folder if there is one."""

from __future__ import annotations

import time
import warnings
from collections import deque

from msgspec.structs import replace

from penstock.account.history import About, Happened, History, RunFolder, StepTime
from penstock.account.record import StepRecord
from penstock.errors import InputError

_RECORDS, _TIMES, _EVENTS = 12, 4096, 256  # that are kept in memory
_SHOWN = 3  # of the latest events, in a status
_TOGETHER = 1.0  # seconds; steps that end within are noted together


class Kept:
    """What is known of a run so far.

    Attributes:
        folder: where it is written as well; `None` for nowhere.
        records: what some of the latest steps did, oldest first.
    """

    def __init__(self) -> None:
        self.folder: RunFolder | None = None
        self.records: deque[StepRecord] = deque(maxlen=_RECORDS)
        self._times: deque[StepTime] = deque(maxlen=_TIMES)
        self._events: deque[Happened] = deque(maxlen=_EVENTS)
        self._now: StepTime | None = None  # steps that are not noted yet
        self._since = 0.0
        self._steps = 0
        self._changed_after = 0

    def step(self, number: int, seconds: float, pass_seconds: float, rows: int) -> None:
        """A step has ended.

        Args:
            number: of it, from 1.
            seconds: that it took, from the end of the step before.
            pass_seconds: the part of it in which workers ran passes.
            rows: of its batch.
        """
        self._steps, now, before = number, time.time(), self._now
        if before is None:
            self._since = now
            self._now = StepTime(number, now, 1, seconds, pass_seconds, number, seconds, rows)
        else:
            is_slowest = seconds > before.slowest_seconds
            self._now = StepTime(
                step=number,
                at=now,
                steps=before.steps + 1,
                seconds=before.seconds + seconds,
                pass_seconds=before.pass_seconds + pass_seconds,
                slowest=number if is_slowest else before.slowest,
                slowest_seconds=seconds if is_slowest else before.slowest_seconds,
                rows=before.rows + rows,
            )
        if seconds >= _TOGETHER or now - self._since >= _TOGETHER:
            self.flush()

    def go_on(self, about: About) -> None:
        """The run goes on with another plan; what was recorded is of the old one."""
        self.flush()  # or steps of both plans would be noted together
        self.records.clear()
        self._changed_after = self._steps
        if self.folder is not None:
            try:
                self.folder.go_on(replace(about, since=self._changed_after))
            except (OSError, InputError) as error:
                self._leave(error)

    def flush(self) -> None:
        """Note the steps that are not noted yet."""
        if self._now is not None:
            self._times.append(self._now)
            self._write(self._now)
            self._now = None

    def record(self, record: StepRecord) -> None:
        """A step was recorded."""
        self.records.append(record)
        self._write(record)

    def happened(self, what: str) -> None:
        """Something happened, in words."""
        event = Happened(time.time(), self._steps, what)
        self._events.append(event)
        self._write(event)

    def latest(self) -> list[str]:
        """What happened last, in words."""
        return [f"after step {event.step}: {event.what}" for event in [*self._events][-_SHOWN:]]

    def history(self, about: About) -> History:
        """All that is kept in memory.

        Args:
            about: what was run.
        """
        times = [*self._times, *([self._now] if self._now else [])]
        return History(
            about=replace(about, since=self._changed_after),
            steps=times,
            records=list(self.records),
            events=list(self._events),
        )

    def _write(self, item: StepTime | StepRecord | Happened) -> None:
        """Write it to the folder; if that fails, the run goes on without one."""
        if self.folder is None:
            return
        try:
            self.folder.add(item)
        except OSError as error:
            self._leave(error)

    def _leave(self, error: Exception) -> None:
        """Do without the folder, as it cannot be written."""
        if self.folder is not None:
            warnings.warn(
                f"{self.folder.path} cannot be written any more ({error}), so nothing is added to "
                "it; the training goes on",
                stacklevel=3,
            )
        self.folder = None
