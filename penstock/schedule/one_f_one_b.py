"""1F1B: after a short warm-up, one forward and one backward in turn.

Known as PipeDream-Flush (Narayanan et al. 2021, arXiv:2006.09503) and as DAPPLE (Fan et al. 2020,
arXiv:2007.01045). It takes GPipe's time with a fraction of its memory, because a stage starts to
give micro-batches back before it has taken all of them:

    worker 0 | F0 F1 F2 .. .. B0 F3 B1 .. B2 .. B3
    worker 1 | .. F0 F1 .. B0 F2 B1 F3 B2 .. B3 ..
    worker 2 | .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..

With stages of equal work `F + B` and links of one-way latency `c` its step takes

    (m + p - 1) (F + B)  +  2c [(p - 1) + (m - 1) - ceil((m - 1) / p)]

so it pays the latency over and over: the warm-up is just deep enough for links that cost nothing.
The eager variant warms up twice as deep, or as deep as requested. It holds nearly twice as much,
and in exchange the step pays every link once, `(m + p - 1) (F + B) + 2c (p - 1)`, as long as
`2c <= F + B`:

    worker 0 | F0 F1 F2 F3 .. B0 .. B1 .. B2 .. B3
    worker 1 | .. F0 F1 F2 B0 F3 B1 .. B2 .. B3 ..
    worker 2 | .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from penstock.errors import ScheduleError
from penstock.schedule.actions import Action, Kind, Schedule


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B with the shortest warm-up: `min(m, p - s)` micro-batches in flight at stage `s`."""
    return _one_f_one_b("1f1b", num_microbatches, _depths(num_stages, 1))


def eager_one_f_one_b(
    num_stages: int, num_microbatches: int, warmup: int | Sequence[int] = 2
) -> Schedule:
    """1F1B with a deeper warm-up.

    Args:
        num_stages: the number of stages, `p`.
        num_microbatches: the number of micro-batches, `m`.
        warmup: how many more forwards each stage begins with than the stage after it, so that
            `min(m, warmup (p - 1 - s) + 1)` micro-batches are in flight at stage `s`; or, stage by
            stage, how many forwards come before its first backward.

    Raises:
        ScheduleError: `warmup` is negative, does not have one entry per stage, or would deadlock:
            every stage needs at least one forward before its first backward, and at least as many
            as the stage after it.
    """
    depths = (
        _depths(num_stages, _checked_factor(warmup))
        if isinstance(warmup, int)
        else _checked_depths(warmup, num_stages)
    )
    return _one_f_one_b("eager-1f1b", num_microbatches, depths)


def alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], warmup: int
) -> Iterator[Action]:
    """`warmup` forwards, then a forward and a backward in turn until both have run out."""
    yield from forwards[:warmup]
    for index, backward in enumerate(backwards):
        yield from forwards[warmup + index : warmup + index + 1]
        yield backward


def _depths(num_stages: int, factor: int) -> Sequence[int]:
    return [factor * (num_stages - 1 - stage) + 1 for stage in range(num_stages)]


def _one_f_one_b(name: str, num_microbatches: int, depths: Sequence[int]) -> Schedule:
    """Stage `s` runs `depths[s]` forwards before its first backward."""
    workers = []
    for stage, depth in enumerate(depths):
        forwards = [Action(Kind.FORWARD, stage, i) for i in range(num_microbatches)]
        backwards = [Action(Kind.BACKWARD, stage, i) for i in range(num_microbatches)]
        workers.append(tuple(alternate(forwards, backwards, depth - 1)))
    return Schedule(name, len(depths), num_microbatches, tuple(workers))


def _checked_factor(warmup: int) -> int:
    if warmup < 0:
        raise ScheduleError(
            f"warmup={warmup}: a stage cannot begin with fewer forwards than the next; "
            f"give 0 or more (1 is 1f1b, 2 is the usual eager-1f1b), or one number per stage"
        )
    return warmup


def _checked_depths(warmup: Sequence[int], num_stages: int) -> Sequence[int]:
    if len(warmup) != num_stages:
        raise ScheduleError(
            f"warmup={tuple(warmup)} has {len(warmup)} entries for {num_stages} stages; "
            f"give the forwards before the first backward of every stage, or one factor"
        )
    if min(warmup, default=1) < 1 or any(a < b for a, b in pairwise(warmup)):
        raise ScheduleError(
            f"warmup={tuple(warmup)} would deadlock: every stage needs at least one forward before "
            f"its first backward, and at least as many as the stage after it"
        )
    return warmup
