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
The eager variant warms up twice as deep. It holds nearly twice as much, and in exchange the step
pays every link once, `2c (p - 1)`, as long as `2c <= F + B`:

    worker 0 | F0 F1 F2 F3 .. B0 .. B1 .. B2 .. B3
    worker 1 | .. F0 F1 F2 B0 F3 B1 .. B2 .. B3 ..
    worker 2 | .. .. F0 B0 F1 B1 F2 B2 F3 B3 .. ..
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.schedule.actions import Action, Kind, Schedule


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B with the shortest warm-up: `min(m, p - s)` micro-batches in flight at stage `s`."""
    return _one_f_one_b("1f1b", num_stages, num_microbatches, warmup_per_stage=1)


def eager_one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B with twice the warm-up: `min(m, 2(p - s) - 1)` micro-batches in flight at stage `s`."""
    return _one_f_one_b("eager-1f1b", num_stages, num_microbatches, warmup_per_stage=2)


def _one_f_one_b(
    name: str, num_stages: int, num_microbatches: int, *, warmup_per_stage: int
) -> Schedule:
    """Stage `s` starts with one warm-up of forwards for each of the `p - 1 - s` stages after it."""
    workers = tuple(
        tuple(_alternate(stage, num_microbatches, warmup_per_stage * (num_stages - 1 - stage)))
        for stage in range(num_stages)
    )
    return Schedule(name, num_stages, num_microbatches, workers)


def _alternate(stage: int, num_microbatches: int, warmup: int) -> Iterator[Action]:
    """`warmup` forwards, then a forward and a backward in turn until both have run out."""
    warmup = min(warmup, num_microbatches)
    for microbatch in range(warmup):
        yield Action(Kind.FORWARD, stage, microbatch)
    for microbatch in range(num_microbatches):
        if warmup + microbatch < num_microbatches:
            yield Action(Kind.FORWARD, stage, warmup + microbatch)
        yield Action(Kind.BACKWARD, stage, microbatch)
