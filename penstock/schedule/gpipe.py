"""GPipe: all forwards, then all backwards (Huang et al. 2019, arXiv:1811.06965).

    worker 0 | F0 F1 F2 F3 .. .. .. .. B0 B1 B2 B3
    worker 1 | .. F0 F1 F2 F3 .. .. B0 B1 B2 B3 ..
    worker 2 | .. .. F0 F1 F2 F3 B0 B1 B2 B3 .. ..

The paper runs the backwards in reverse order. Here they run in micro-batch order, like in every
schedule, so that gradients are summed in the order in which one device would sum them; the time
is the same.
"""

from __future__ import annotations

from penstock.schedule.actions import Action, Kind, Schedule


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
