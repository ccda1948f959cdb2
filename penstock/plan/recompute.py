"""Which parts of a stage to recompute in the backward instead of keeping what they save.

A knapsack whose weights are bytes and whose costs are seconds of any size, so the exact programme
runs over the Pareto front: the choices of which no other saves as much in less time.

The largest working set of what is recomputed counts too. Segments are added by ascending working
set: the choices that exist when all up to some size have been added are those whose working sets
are no larger, and need that size in addition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.errors import InputError
from penstock.plan.problem import Floats

MOST_CHOICES = 1 << 16
"""How many undominated choices among the first segments are followed up."""


@dataclass(frozen=True)
class Piece:
    """A part of a stage that is recomputed as a whole, or not at all.

    Attributes:
        seconds: of its forward, which recomputing runs once more.
        kept: bytes that it holds per micro-batch for its backward, if it is not recomputed.
        entry: bytes that it holds per micro-batch if it is: what enters it.
        working: bytes that it takes while it is run again, for one micro-batch at a time.
    """

    seconds: float
    kept: float
    entry: float
    working: float


@dataclass(frozen=True)
class Recomputation:
    """What to recompute.

    Attributes:
        segments: their numbers, ascending.
        seconds: what that adds to every micro-batch.
        bound: no choice that fits adds less; nearly always these seconds themselves.
        peak: bytes, of all micro-batches in flight and the largest working set.
    """

    segments: tuple[int, ...]
    seconds: float
    bound: float
    peak: float


def choose_recomputed(
    segments: Sequence[Piece], *, in_flight: int, available: float
) -> Recomputation | None:
    """The segments to recompute that add the fewest seconds and fit.

    Minimises, over all sets `R` of segments, their seconds, subject to

        in_flight * (sum over R of entry + sum over the others of kept)
            + max over R of working  <=  available

    Exact; bytes are rounded up to whole ones first. The front has at most as many choices as there
    are different sums of savings, so alike segments are cheap, and choices that could not even
    become the best with parts of segments are left out. Only where dozens of segments all save
    different bytes at the same price can more than `MOST_CHOICES` remain. Then those are followed
    up that promise most, and `bound` says how far from the least the result can be.

    Args:
        segments: of the stage.
        in_flight: how many micro-batches are held at once.
        available: bytes.

    Returns:
        the choice, or None if none fits.

    Raises:
        InputError: a number that is negative or not finite, or no micro-batch in flight.
    """
    _check(segments, in_flight, available)
    segments, available = [_whole(segment) for segment in segments], math.floor(available)
    excess = in_flight * sum(segment.kept for segment in segments) - available
    numbers: tuple[int, ...] = ()
    bound = math.inf
    if excess > 0:
        items = _Items.of(segments, in_flight, excess)
        found = _best(items)
        if found is None:
            return None
        chosen, bound = found
        numbers = tuple(sorted(items.number[chosen].tolist()))
    seconds = float(sum(segments[i].seconds for i in numbers))
    return Recomputation(numbers, seconds, min(bound, seconds), _peak(segments, numbers, in_flight))


@dataclass(frozen=True, eq=False)
class _Items:
    """The segments that save something, by ascending working set."""

    number: NDArray[np.intp]
    seconds: Floats
    saving: Floats
    target: Floats  # what has to be saved if this is the largest working set

    @classmethod
    def of(cls, segments: Sequence[Piece], in_flight: int, excess: float) -> _Items:
        table = np.array(
            [(s.seconds, in_flight * (s.kept - s.entry), excess + s.working) for s in segments]
        ).reshape(-1, 3)
        useful = np.flatnonzero(table[:, 1] > 0)
        number = useful[np.argsort(table[useful, 2], kind="stable")]
        seconds, saving, target = table[number].T
        return cls(number, seconds, saving, target)

    def __len__(self) -> int:
        return len(self.number)


_Step = tuple[NDArray[np.int32], NDArray[np.bool_]]  # `before` and `taken` of a front


class _Front(NamedTuple):
    """The undominated choices among the first items, by descending saving and seconds."""

    seconds: Floats
    saving: Floats
    before: NDArray[np.int32]  # the choice in the front before that each comes from
    taken: NDArray[np.bool_]  # whether the last item was added to that

    def with_item(self, kept: NDArray[np.intp], seconds: float, saving: float) -> _Front:
        """The undominated of the choices that are kept, without and with one more item."""
        both = _Front(
            np.concatenate([self.seconds[kept], self.seconds[kept] + seconds]),
            np.concatenate([self.saving[kept], self.saving[kept] + saving]),
            np.concatenate([kept, kept]).astype(np.int32),
            np.repeat([False, True], len(kept)),
        )
        both = both.only(np.lexsort((both.seconds, -both.saving)))
        cheapest = np.minimum.accumulate(both.seconds)
        is_faster = both.seconds[1:] < cheapest[:-1]
        return both.only(np.flatnonzero(np.concatenate([[True], is_faster])))

    def only(self, which: NDArray[np.intp]) -> _Front:
        return _Front(
            self.seconds[which], self.saving[which], self.before[which], self.taken[which]
        )


def _best(items: _Items) -> tuple[list[int], float] | None:
    """The cheapest items that save the target of the largest working set among them.

    And the least seconds that a choice which was not followed up could have had, or inf.
    """
    by_ratio = np.argsort(items.seconds / items.saving, kind="stable")
    best = _greedy(items, by_ratio)
    if best is None:
        return None
    limit, bound = float(items.seconds[best].sum()), math.inf
    front = _Front(np.zeros(1), np.zeros(1), np.zeros(1, np.int32), np.zeros(1, bool))
    steps: list[_Step] = []
    for i, target in enumerate(items.target):
        # What saves enough already has been looked at, and adding to it only costs more.
        missing = target - front.saving
        least = front.seconds + _relaxed(items, by_ratio[by_ratio >= i], missing)
        kept = np.flatnonzero((missing > 0) & (least < limit))
        if len(kept) > MOST_CHOICES:
            kept = kept[np.argsort(least[kept], kind="stable")]
            bound = min(bound, float(least[kept[MOST_CHOICES]]))
            kept = np.sort(kept[:MOST_CHOICES])
        if not kept.size:
            break
        front = front.with_item(kept, float(items.seconds[i]), float(items.saving[i]))
        steps.append((front.before, front.taken))
        # Of the choices that save enough the last is the cheapest.
        enough = int(np.count_nonzero(front.saving >= target)) - 1
        if enough >= 0 and front.seconds[enough] < limit:
            limit, best = float(front.seconds[enough]), _items_of(steps, enough)
    return best, bound


def _greedy(items: _Items, by_ratio: NDArray[np.intp]) -> list[int] | None:
    """A choice that saves enough, or None if there is none.

    For every largest working set: as many as are needed of the items that save most per second.
    """
    best: list[int] | None = None
    limit = math.inf
    for i, target in enumerate(items.target):
        which = by_ratio[by_ratio <= i]
        needed = int(np.searchsorted(items.saving[which].cumsum(), target)) + 1
        seconds = float(items.seconds[which[:needed]].sum())
        if needed <= len(which) and seconds < limit:
            limit, best = seconds, which[:needed].tolist()
    return best


def _relaxed(items: _Items, which: NDArray[np.intp], missing: Floats) -> Floats:
    """The least seconds to save what is missing if parts of these items could be chosen.

    `which` is sorted by the seconds per byte.
    """
    saving = np.concatenate([[0.0], items.saving[which].cumsum()])
    seconds = np.concatenate([[0.0], items.seconds[which].cumsum()])
    return np.asarray(np.interp(missing, saving, seconds, left=0.0, right=math.inf))


def _items_of(steps: Sequence[_Step], choice: int) -> list[int]:
    found = []
    for i in range(len(steps) - 1, -1, -1):
        before, taken = steps[i]
        if taken[choice]:
            found.append(i)
        choice = int(before[choice])
    return found


def _peak(segments: Sequence[Piece], chosen: Sequence[int], in_flight: int) -> float:
    held = sum(s.entry if i in chosen else s.kept for i, s in enumerate(segments))
    return in_flight * held + max((segments[i].working for i in chosen), default=0.0)


def _whole(segment: Piece) -> Piece:
    """In whole bytes, whose sums are exact."""
    kept, entry, working = map(math.ceil, (segment.kept, segment.entry, segment.working))
    return Piece(segment.seconds, kept, entry, working)


def _check(segments: Sequence[Piece], in_flight: int, available: float) -> None:
    if in_flight < 1:
        raise InputError(f"in_flight must be at least 1, got {in_flight}")
    if not (math.isfinite(available) and available >= 0):
        raise InputError(f"available must be finite and not negative, got {available}")
    for number, segment in enumerate(segments):
        for name, value in vars(segment).items():
            if not (math.isfinite(value) and value >= 0):
                raise InputError(
                    f"segment {number}: {name} must be finite and not negative, got {value}"
                )
