"""Several stages per worker, in a loop: stage `s` is on worker `s % W`.

A micro-batch passes every worker `v` times, so the pipeline fills and drains with work that is `v`
times finer. With `F` and `B` the seconds of all of a worker's stages for one micro-batch, equal
stages and links that cost nothing, both schedules take, for every `m`,

    ((v - 1) max(m, W) + m + W - 1) (F + B) / v     =  m (F + B) + (W - 1) (F + B) / v  if m >= W

Breadth-first (Lamy-Poirier 2022, arXiv:2211.05953) runs all micro-batches through a stage before it
turns to the next: GPipe's order on a loop. It holds all of them, and in exchange it needs the
weights of a stage in two stretches only:

    worker 0 | F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 ..   ..   B2.0 B2.1 B2.2 B0.0 B0.1 B0.2
    worker 1 | ..   F1.0 F1.1 F1.2 F3.0 F3.1 F3.2 B3.0 B3.1 B3.2 B1.0 B1.1 B1.2 ..

Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473) takes micro-batches through all stages
group by group, and after its warm-up alternates forwards and backwards, so it holds few groups:

    worker 0 | F0.0 F0.1 F2.0 F2.1 F0.2 B2.0 F0.3 B2.1 F2.2 B0.0 F2.3 B0.1 ..   B2.2 ...
    worker 1 | ..   F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 F1.2 B1.0 F1.3 B1.1 F3.2 B3.2 F3.3 ...
"""

from __future__ import annotations

from penstock.schedule.actions import Action, Kind, Schedule
from penstock.schedule.one_f_one_b import alternate


def on_a_loop(num_stages: int, num_workers: int) -> tuple[int, ...]:
    """The worker of every stage: the workers in turn, over and over."""
    return tuple(stage % num_workers for stage in range(num_stages))


def interleaved(num_stages: int, num_microbatches: int, num_workers: int) -> Schedule:
    """1F1B over the stages of a loop.

    The paper needs a multiple of `W` micro-batches, in groups of `W`. Here the groups are as many
    and as even as they can be with at least `W` each (all in one if there are fewer), which is the
    same where the paper's works and takes the time above everywhere else.

    The last worker holds `(v - 1)` groups and one, and every worker before it two more, as in the
    paper. On one stage per worker this is 1F1B.
    """
    passes = num_stages // num_workers
    groups = _groups(num_microbatches, num_workers)
    # With one stage there is nothing to interleave: the next micro-batch is not a pass away.
    per_worker = 2 if passes > 1 else 1
    workers = []
    for worker in range(num_workers):
        own = range(worker, num_stages, num_workers)
        forwards = [Action(Kind.FORWARD, s, i) for group in groups for s in own for i in group]
        backwards = [
            Action(Kind.BACKWARD, s, i) for group in groups for s in reversed(own) for i in group
        ]
        warmup = (passes - 1) * len(groups[0]) + per_worker * (num_workers - 1 - worker)
        workers.append(tuple(alternate(forwards, backwards, warmup)))
    return Schedule("interleaved", num_stages, num_microbatches, tuple(workers))


def breadth_first(num_stages: int, num_microbatches: int, num_workers: int) -> Schedule:
    """All micro-batches through one stage, then through the next. Every stage holds all of them."""
    workers = []
    for worker in range(num_workers):
        own = range(worker, num_stages, num_workers)
        forwards = [Action(Kind.FORWARD, s, i) for s in own for i in range(num_microbatches)]
        backwards = [
            Action(Kind.BACKWARD, s, i) for s in reversed(own) for i in range(num_microbatches)
        ]
        workers.append((*forwards, *backwards))
    return Schedule("breadth-first", num_stages, num_microbatches, tuple(workers))


def _groups(num_microbatches: int, num_workers: int) -> list[range]:
    """As many groups as possible with at least `num_workers` each, the larger ones first."""
    count = max(1, num_microbatches // num_workers)
    size, larger = divmod(num_microbatches, count)
    sizes = [size + 1] * larger + [size] * (count - larger)
    ends = [sum(sizes[: k + 1]) for k in range(count)]
    return [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
