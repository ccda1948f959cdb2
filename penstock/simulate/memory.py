"""How much memory every worker holds while a step runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from penstock.errors import InputError
from penstock.schedule.actions import Kind, Timeline


@dataclass(frozen=True)
class HeldMemory:
    """What one worker holds for micro-batches in flight, over one step.

    Attributes:
        seconds: when it changes, rising, since the step began.
        bytes: `bytes[k]` is held from `seconds[k]` to `seconds[k + 1]`.
    """

    seconds: tuple[float, ...]
    bytes: tuple[float, ...]

    @property
    def peak(self) -> float:
        """The most that is held at any time, in bytes."""
        return max(self.bytes, default=0.0)


def memory_over_time(
    timeline: Timeline, held: Sequence[float], put_off: Sequence[float] = ()
) -> tuple[HeldMemory, ...]:
    """What every worker holds over a step.

    A stage holds a micro-batch from the start of its forward to the end of its backward. Where the
    backward comes in halves, what the weight half needs stays until that has ended.

    Args:
        timeline: a simulated step, or a recorded one.
        held: `held[s]` is the bytes that stage `s` holds for one micro-batch.
        put_off: how many bytes remain between the halves. Empty means all of them.

    Returns:
        one `HeldMemory` per worker; weights, gradients and optimizer state are not part of it.

    Raises:
        InputError: `held` or `put_off` lacks a stage.
    """
    remaining = tuple(put_off) or tuple(held)
    stages = 1 + max((event.action.stage for event in timeline.events), default=-1)
    if len(held) < stages or len(remaining) != len(held):
        raise InputError(
            f"the timeline has {stages} stages, but held has {len(held)} entries and put_off "
            f"{len(put_off)}; give one per stage, and put_off may be empty"
        )
    levels = [0.0] * timeline.num_workers
    moments: list[list[float]] = [[] for _ in levels]
    bytes_: list[list[float]] = [[] for _ in levels]
    changes = {
        Kind.FORWARD: list(held),
        Kind.BACKWARD: [-h for h in held],
        Kind.INPUT: [r - h for r, h in zip(remaining, held, strict=True)],
        Kind.WEIGHT: [-r for r in remaining],
    }
    # A worker does one thing at a time, so its own order is all that counts.
    for worker, (kind, stage, _), start, end in sorted(timeline.events, key=itemgetter(2, 3)):
        levels[worker] += changes[kind][stage]
        moments[worker].append(start if kind is Kind.FORWARD else end)
        bytes_[worker].append(levels[worker])
    return tuple(HeldMemory(tuple(m), tuple(b)) for m, b in zip(moments, bytes_, strict=True))
