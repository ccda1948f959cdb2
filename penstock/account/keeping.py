"""Keeps what is known of a run while it goes on: in memory, and in a folder if there is one."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable

from msgspec.structs import replace

from penstock.account.attribution import Account, account
from penstock.account.history import About, History, Item, RunFolder, Sample, StepTimes
from penstock.account.record import StepRecord, usual
from penstock.board.status import Happened
from penstock.errors import InputError
from penstock.plan.plan import Plan
from penstock.profile.data import Profile

_RECORDS, _TIMES, _EVENTS = 12, 4096, 256  # how many of each are kept in memory
_SHOWN = 3  # of the latest events, in a status
_TOGETHER = 1.0  # seconds; steps that end within are noted together
_SAMPLES = 500  # over the run: at least 1/500 of its time so far is between two of them


class Kept:
    """What is known of a run so far.

    Attributes:
        records: what some of the latest steps did, oldest first.
    """

    def __init__(self) -> None:
        self.records: list[StepRecord] = []
        self._written = _Written()
        self._times = _Times(self._written)
        self._events: deque[Happened] = deque(maxlen=_EVENTS)
        self._accounts: tuple[Plan | None, list[tuple[StepRecord, Account]]] = (None, [])
        self._samples: deque[Sample] = deque(maxlen=_TIMES)
        self._sample: Callable[[int], Sample | None] = lambda step: None
        self._began = self._next_sample = time.monotonic()
        self._steps = 0
        self._changed_after = 0
        weakref.finalize(self, _flush_here, self._times, os.getpid())  # also at a Ctrl-C

    def write_to(self, folder: RunFolder) -> None:
        """Write everything that is added from now on to a folder as well."""
        self._written.folder = folder

    def step(self, number: int, seconds: float, pass_seconds: float, rows: int) -> None:
        """A step has ended.

        Args:
            number: the number of the step, from 1.
            seconds: the time from the end of the step before to its own end.
            pass_seconds: the part of `seconds` in which workers ran passes.
            rows: the number of rows of its batch.
        """
        self._steps = number
        self._times.step(number, seconds, pass_seconds, rows)
        now = time.monotonic()
        if now >= self._next_sample and (sample := self._sample(number)) is not None:
            every = max(_TOGETHER, (now - self._began) / _SAMPLES)
            self._next_sample = now + every
            self._samples.append(sample)
            self._written.add(sample)

    def sample_by(self, sample: Callable[[int], Sample | None]) -> None:
        """Set the function that samples the workers.

        Args:
            sample: called now and then with the number of completed steps; `None` for no sample.
        """
        self._sample = sample

    def go_on(self, about: About, profile: Profile | None) -> None:
        """Go on with another plan; drop the records and samples of the old one from memory.

        Args:
            about: what is run from now on.
            profile: the profile from which the plan was made; `None` if it is not known.
        """
        self._times.flush()  # or steps of both plans would be noted together
        self.records = []
        self._samples.clear()
        self._changed_after = self._steps
        self._written.go_on(replace(about, since=self._changed_after), profile)

    def close(self) -> None:
        """Write the steps that are not written yet, and close the folder."""
        self._times.flush()
        self._written.close()

    def record(self, record: StepRecord, is_written: bool = True) -> None:
        """Keep the record of the latest step, and forget one if there are too many.

        The oldest with an audit is forgotten, as its times are not typical, or else the oldest.

        Args:
            record: what was recorded.
            is_written: whether to write it to the folder of the run as well, which keeps all that
                are written to it.
        """
        self._times.flush()
        records = [*self.records, record]
        if len(records) > _RECORDS:
            audited = (k for k, each in enumerate(records) if each.is_audited)
            del records[next(audited, 0)]
        self.records = records
        if is_written:
            self._written.add(record)

    def happened(self, what: str) -> None:
        """Note an event, in words, after the latest step."""
        self._times.flush()
        words = what.encode(errors="backslashreplace").decode()  # a file's name may have surrogates
        event = Happened(time.time(), self._steps, words)
        self._events.append(event)
        self._written.add(event)

    def latest(self) -> list[Happened]:
        """The latest events, oldest first."""
        return [*self._events][-_SHOWN:]

    def accounts(self, plan: Plan) -> list[Account]:
        """Where the time of the recorded steps went; accounts are cached as long as `plan` stays.

        Args:
            plan: the plan by which the steps ran.
        """
        of, found = self._accounts
        known = {id(record): own for record, own in found} if of is plan else {}
        now = [(r, known.get(id(r)) or account(r, plan)) for r in usual(self.records)]
        self._accounts = plan, now
        return [own for _, own in now]

    def history(self, about: About) -> History:
        """All that is kept in memory.

        Args:
            about: what was run.
        """
        return History(
            about=replace(about, since=self._changed_after),
            steps=self._times.all(),
            records=self.records,
            samples=list(self._samples),
            events=list(self._events),
            notes=[],
        )


class _Written:
    """What is written to the folder of a run, if there is one.

    Attributes:
        folder: where.
    """

    def __init__(self) -> None:
        self.folder: RunFolder | None = None

    def add(self, item: Item) -> None:
        """Write something; if that fails, the run goes on without a folder."""
        if self.folder is not None:
            try:
                self.folder.add(item)
            except OSError as error:
                self._give_up(self.folder, error)

    def go_on(self, about: About, profile: Profile | None) -> None:
        """Begin another part of the run's folder, with another plan or other workers."""
        if self.folder is not None:
            try:
                self.folder.go_on(about, profile)
            except (OSError, InputError) as error:
                self._give_up(self.folder, error)

    def _give_up(self, folder: RunFolder, error: Exception) -> None:
        self.close()
        warnings.warn(
            f"{folder.path} cannot be written any more ({error}), so nothing is added to it; "
            "the training goes on",
            stacklevel=2,
        )

    def close(self) -> None:
        """Close the folder; what comes after is not kept."""
        folder, self.folder = self.folder, None
        if folder is not None:
            folder.close()


class _Times:
    """The times of steps; steps that end within a second of each other share one entry.

    Args:
        written: where the entries are written as well.
    """

    def __init__(self, written: _Written) -> None:
        self._written = written
        self._noted: deque[StepTimes] = deque(maxlen=_TIMES)
        self._now: StepTimes | None = None  # steps that are not noted yet
        self._since = 0.0

    def step(self, number: int, seconds: float, pass_seconds: float, rows: int) -> None:
        """Note the seconds of a step; short ones are written together."""
        now, before = time.time(), self._now
        if before is None:
            self._since = now
            self._now = StepTimes(number, now, 1, seconds, pass_seconds, number, seconds, rows)
        else:
            is_slowest = seconds > before.slowest_seconds
            self._now = StepTimes(
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

    def flush(self) -> None:
        """Note the steps that are not noted yet."""
        now, self._now = self._now, None
        if now is not None:
            self._noted.append(now)
            self._written.add(now)

    def all(self) -> list[StepTimes]:
        """All that are known, oldest first, with those that are not written yet."""
        now = self._now
        return [*self._noted, *([now] if now else [])]


def _flush_here(times: _Times, process: int) -> None:
    """Note the steps that are not noted yet, unless this is a fork of the given process."""
    if os.getpid() == process:
        times.flush()
