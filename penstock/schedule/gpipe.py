"""The two plainest schedules: one micro-batch at a time, and GPipe.

Naive model parallelism has one micro-batch in the pipeline at a time. This is what
`device_map="auto"` does, and the floor that every other schedule is measured from:

    worker 0 | F0 .. .. .. .. B0 F1 .. .. .. .. B1
    worker 1 | .. F0 .. .. B0 .. .. F1 .. .. B1 ..
    worker 2 | .. .. F0 B0 .. .. .. .. F1 B1 .. ..

GPipe runs all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965):

    worker 0 | F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
    worker 1 | .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..
    worker 2 | .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..

The paper runs the backwards in reverse order. Here they run in micro-batch order, like in every
schedule, so that gradients are summed in the order in which one device would sum them; the time
is the same.
"""

from __future__ import annotations

from penstock.schedule.actions import Action, Kind, Schedule


def naive(num_stages: int, num_microbatches: int) -> Schedule:
    """Each micro-batch goes all the way down and back before the next one enters.

    Every stage holds one micro-batch in flight.
    """
    workers = tuple(
        tuple(
            Action(kind, stage, microbatch)
            for microbatch in range(num_microbatches)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        )
        for stage in range(num_stages)
    )
    return Schedule("naive", num_stages, num_microbatches, workers)


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Fill the pipeline with every forward, then drain it with every backward.

    Every stage holds all `num_microbatches` micro-batches in flight.
    """
    workers = tuple(
        tuple(
            Action(kind, stage, microbatch)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for microbatch in range(num_microbatches)
        )
        for stage in range(num_stages)
    )
    return Schedule("gpipe", num_stages, num_microbatches, workers)
