"""One training step as it was recorded: what every worker noted, and what the script did."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from penstock.board.memory import Log
from penstock.board.phases import timeline_of
from penstock.schedule import Timeline

PASS, CALL, AUDIT, EVALUATION = "pass", "call", "audit", "evaluation"
"""What the script's thread does: it waits for a pass of the step (`PASS`), runs a method of a
pipeline (`CALL`), audits a micro-batch (`AUDIT`), or waits for a pass that belongs to no step, such
as one without gradients (`EVALUATION`)."""


class Interval(NamedTuple):
    """The script's thread did one thing.

    Attributes:
        what: `PASS`, `CALL`, or another thing that has a name, such as `"optimizer"`.
        begin: when it began, in nanoseconds of `time.monotonic_ns()`.
        end: when it ended.
    """

    what: str
    begin: int
    end: int


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One training step, from the end of the step before to the end of its own last pass.

    Attributes:
        step: its number, from 1.
        begin: when the step before had ended, in nanoseconds of `time.monotonic_ns()`; for the
            first step when its first interval in `driver` began.
        end: when its last pass had ended, by the same clock.
        rows: the number of rows of its batch.
        num_workers: the number of workers of the pipeline.
        driver: what the script's thread did meanwhile, as far as Penstock sees it; intervals may
            be nested.
        logs: what every worker noted in its passes, by the worker's number.
        as_planned: whether its batch had the size for which the plan was made.
    """

    step: int
    begin: int
    end: int
    rows: int
    num_workers: int
    driver: tuple[Interval, ...]
    logs: Mapping[int, Log]
    as_planned: bool = True

    def later(self, by: int) -> StepRecord:
        """The same record with all times moved by this many nanoseconds, for another clock."""
        return replace(
            self,
            begin=self.begin + by,
            end=self.end + by,
            driver=tuple(Interval(i.what, i.begin + by, i.end + by) for i in self.driver),
            logs={k: [(when + by, code) for when, code in log] for k, log in self.logs.items()},
        )

    @property
    def seconds(self) -> float:
        """How long it took, with everything since the end of the step before."""
        return (self.end - self.begin) / 1e9

    @property
    def passes(self) -> list[tuple[float, float]]:
        """When its passes began and ended, in seconds since `begin`: one after another."""
        return [
            ((begin - self.begin) / 1e9, (end - self.begin) / 1e9)
            for _, begin, end in _passes(self.driver, self.begin, self.end)
        ]

    @property
    def timeline(self) -> Timeline:
        """What workers did, in seconds since `begin`."""
        return timeline_of(self.logs, self.num_workers, self.begin)

    @property
    def is_audited(self) -> bool:
        """Whether a micro-batch was audited meanwhile, which only few steps are."""
        return self.audit_seconds > 0

    @property
    def audit_seconds(self) -> float:
        """How long the script's thread had a micro-batch audited."""
        audits = (i.end - i.begin for i in self.driver if i.what == AUDIT)
        return sum(audits) / 1e9


def usual(records: Sequence[StepRecord]) -> list[StepRecord]:
    """The records without audits, which are typical; all records if each has an audit."""
    return [record for record in records if not record.is_audited] or list(records)


def partition(intervals: Sequence[Interval], begin: int, end: int) -> Iterator[Interval]:
    """What was done at every moment: a pass if there was one, or else the shortest interval.

    Args:
        intervals: what was done, in any order. Two of them are usually disjoint or nested.
        begin: the start of the time to cover, in nanoseconds.
        end: the end of the time to cover.

    Yields:
        intervals that cover the time from `begin` to `end` without gaps; `what` is `""` where
        nothing was done.
    """
    edges = sorted({begin, end, *(t for i in intervals for t in i[1:] if begin < t < end)})
    later = sorted(intervals, key=itemgetter(1), reverse=True)
    over: list[Interval] = []
    for a, b in pairwise(edges):
        while later and later[-1].begin <= a:
            over.append(later.pop())
        over = [i for i in over if b <= i.end]
        inner = over[0] if len(over) == 1 else min(over, key=_how_outer, default=_NOTHING)
        yield Interval(inner.what, a, b)


_NOTHING = Interval("", 0, 0)


def _how_outer(interval: Interval) -> tuple[bool, int]:
    """A sort key: passes come first, then shorter intervals before longer ones."""
    return interval.what != PASS, interval.end - interval.begin


def shortened(intervals: Sequence[Interval], begin: int, end: int) -> list[Interval]:
    """Merge intervals: between two passes, those of one name become one of their total length.

    The merged intervals follow each other in the order in which their names first occurred.

    Args:
        intervals: what was done, in any order; where they overlap, see `partition`.
        begin: the start of the time to cover, in nanoseconds.
        end: the end of the time to cover.
    """
    pieces = deque(piece for piece in partition(intervals, begin, end) if piece.what != PASS)
    found: list[Interval] = []
    at = begin
    for each in [*_passes(intervals, begin, end), Interval(PASS, end, end)]:
        sums: dict[str, int] = {}
        while pieces and pieces[0].end <= each.begin:
            what, start, stop = pieces.popleft()
            sums[what] = sums.get(what, 0) + stop - start
        for what, duration in sums.items():
            found += [Interval(what, at, at + duration)] if what else []
            at += duration
        found += [each] if each.end > each.begin else []
        at = each.end
    return found


def _passes(intervals: Sequence[Interval], begin: int, end: int) -> list[Interval]:
    """The passes among `intervals`, in order; a pass that overlaps the one before is cut."""
    found: list[Interval] = []
    free = begin
    for what, start, stop in sorted(i for i in intervals if i.what == PASS):
        start, stop = max(start, free), min(stop, end)
        if start < stop:
            found.append(Interval(what, start, stop))
            free = stop
    return found
