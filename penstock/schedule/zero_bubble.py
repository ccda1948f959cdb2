"""Zero bubble: weight halves fill the time in which workers would wait.

(Qi et al. 2023, arXiv:2401.10241.) Both schedules split every backward in `I`, which the stage
before waits for, and `W`, which nobody waits for.

ZB-H1 is 1F1B whose stage `s` puts its weight halves off by `s` micro-batches. It holds no more than
1F1B's first stage does, `min(m, p)` micro-batches, everywhere:

    worker 0 | F0 F1 F2 .. .. I0 W0 F3 I1 W1 I2 W2 I3 W3
    worker 1 | .. F0 F1 .. I0 F2 I1 W0 F3 I2 W1 I3 W2 W3
    worker 2 | .. .. F0 I0 F1 I1 F2 I2 W0 F3 I3 W1 W2 W3

With equal stages and links that cost nothing it takes

    m (F + B)  +  (p - 1) (F + I - W)       if m >= p, W <= F and W <= I

with `B = I + W`. A weight half that is longer than a forward or an input half fills no more than
those leave, so in general the bubble is `(p - 1) (F + I - min(F, I, W))` for `m >= p`. With `m < p`
and a short `W` there is not enough to fill it: `(m + p - 1) (F + I) + W`.

ZB-V puts two stages on every worker, the second on the way back: worker `w` has `w` and `2W-1-w`.
The last worker turns a micro-batch round without sending it, and the first one ends what it began:

    worker 0 | F0.0 F0.1 F0.2 F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 F3.2 ...
    worker 1 | ..   F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 F1.2 I1.0 W1.0 F2.2 I2.1 ...

With `F = I = W` per stage and `m >= 2W - 1` it takes `m (F + B) + (W - 1) F / 2`, `F` and `B` being
those of both stages of a worker: nobody waits but for the first micro-batch to arrive. It holds
what 1F1B's first stage would, `2W` micro-batches of half the size.
"""

from __future__ import annotations

from penstock.schedule.actions import Action, Kind, Schedule


def in_a_v(num_stages: int, num_workers: int) -> tuple[int, ...]:
    """The worker of every stage: there, and back again."""
    return tuple(min(stage, num_stages - 1 - stage) for stage in range(num_stages))


def zero_bubble(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H1: 1F1B with the weight halves put off by as many micro-batches as stages come before."""
    workers = []
    for stage in range(num_stages):
        worker = _Worker(num_microbatches)
        worker.add("F" * (num_stages - 1 - stage), stage)
        for microbatch in range(num_microbatches):
            worker.add("FI" if microbatch < stage else "FIW", stage)
        worker.add("W" * num_microbatches, stage)
        workers.append(worker.actions())
    return Schedule("zero-bubble", num_stages, num_microbatches, tuple(workers))


def zero_bubble_v(num_stages: int, num_microbatches: int, num_workers: int) -> Schedule:
    """ZB-V: a stage on the way there and one on the way back on every worker."""
    workers = tuple(
        _v_worker(worker, num_microbatches, num_workers).actions() for worker in range(num_workers)
    )
    return Schedule("zero-bubble-v", num_stages, num_microbatches, workers)


def _v_worker(rank: int, num_microbatches: int, num_workers: int) -> _Worker:
    """The four phases of the paper's figure; what goes beyond the last micro-batch is left out."""
    there, back = rank, 2 * num_workers - 1 - rank
    after = num_workers - rank  # workers from here to the turn, this one included
    worker = _Worker(num_microbatches)
    # Until the first micro-batch is back, forwards; until the others have theirs, one of each.
    worker.add("F" * (2 * after - 1), there)
    for _ in range(rank):
        worker.add("F", back)
        worker.add("F", there)
    for _ in range(after):
        worker.add("FIW", back)
    # One micro-batch in, one out. The last `num_workers` have entered before.
    for _ in range(max(num_microbatches, 2 * num_workers - 1) - num_workers):
        worker.add("FIW", there)
        worker.add("FIW", back)
    # Gradients first, as others wait for them; then what was put off.
    for _ in range(rank):
        worker.add("I", there)
        worker.add("I", back)
    worker.add("IW" * after, there)
    worker.add("W" * rank, back)
    worker.add("W" * rank, there)
    return worker


class _Worker:
    """A worker's list, written as kinds: each takes the next micro-batch of its kind and stage."""

    def __init__(self, num_microbatches: int) -> None:
        self._count = num_microbatches
        self._next: dict[tuple[str, int], int] = {}
        self._actions: list[Action] = []

    def add(self, kinds: str, stage: int) -> None:
        """These actions of `stage`, as far as there are micro-batches left."""
        for kind in kinds:
            microbatch = self._next.get((kind, stage), 0)
            self._next[kind, stage] = microbatch + 1
            if microbatch < self._count:
                self._actions.append(Action(Kind(kind), stage, microbatch))

    def actions(self) -> tuple[Action, ...]:
        """The actions so far, in the order in which the worker does them."""
        return tuple(self._actions)
