"""Naive model parallelism: one micro-batch in the pipeline at a time.

This is what `device_map="auto"` does, and the floor that every other schedule is measured from:

    worker 0 | F0 .. .. .. .. B0 F1 .. .. .. .. B1
    worker 1 | .. F0 .. .. B0 .. .. F1 .. .. B1 ..
    worker 2 | .. .. F0 B0 .. .. .. .. F1 B1 .. ..
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
