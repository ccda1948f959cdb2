"""What the stages of a pipeline cost: what schedules are fitted to and simulated with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.errors import InputError
from penstock.schedule.actions import Action, Kind


@dataclass(frozen=True)
class Costs:
    """The seconds that one micro-batch takes, stage by stage and hop by hop.

    Attributes:
        forward: `forward[s]` is the seconds of stage `s`'s forward.
        backward: of its whole backward.
        weight: of the part of the backward that can be put off as the weight half `W`; the input
            half `I` takes the rest. Empty means that nothing can be put off.
        halving: what the two halves together take longer than a whole backward; the input half
            bears it. Empty means nothing.
        latency: `latency[s]` is the one-way seconds between stages `s` and `s+1`, for activations
            and for gradients. Empty means none.
        transfer: `transfer[s]` is the seconds that what crosses from stage `s` to `s+1`, or its
            gradient on the way back, occupies the link. Empty means none.

    Neither latency nor transfer is paid between two stages of one worker.

    Raises:
        InputError: there is no stage, the lengths don't fit, a time is negative, or a `weight` is
            longer than its backward.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...] = ()
    latency: tuple[float, ...] = ()
    transfer: tuple[float, ...] = ()
    halving: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        stages = len(self.forward)
        if stages < 1:
            raise InputError("costs need at least one stage, got forward=()")
        if len(self.backward) != stages or len(self.weight) not in (0, stages):
            raise InputError(
                f"every stage needs a forward, a backward and a weight half, or no stage a weight "
                f"half: got {stages}, {len(self.backward)} and {len(self.weight)}"
            )
        if len(self.halving) not in (0, stages):
            raise InputError(f"{stages} stages, but halving has {len(self.halving)} entries")
        for name in ("latency", "transfer"):
            check_hops(name, getattr(self, name), stages)
        times = (
            *(*self.forward, *self.backward, *self.weight),
            *(*self.latency, *self.transfer, *self.halving),
        )
        if min(times) < 0:
            raise InputError(f"times are seconds and cannot be negative, got {min(times)}")
        for stage, weight in enumerate(self.weight):
            if weight > self.backward[stage]:
                raise InputError(
                    f"stage {stage}: the weight half is a part of the backward, "
                    f"but weight={weight} and backward={self.backward[stage]}"
                )

    @classmethod
    def equal(cls, num_stages: int, forward: float, input: float, weight: float) -> Costs:
        """Stages that are all alike, with links that cost nothing."""
        backward = input + weight
        return cls((forward,) * num_stages, (backward,) * num_stages, (weight,) * num_stages)

    @property
    def num_stages(self) -> int:
        """The number of stages, `p`."""
        return len(self.forward)

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """`weight`, with a zero for every stage where it is empty."""
        return self.weight or (0.0,) * self.num_stages

    @cached_property
    def inputs(self) -> tuple[float, ...]:
        """The seconds of every stage's input half, with what halving costs."""
        halving = self.halving or (0.0,) * self.num_stages
        parts = zip(self.backward, self.weights, halving, strict=True)
        return tuple(backward - weight + more for backward, weight, more in parts)

    @cached_property
    def by_kind(self) -> dict[Kind, tuple[float, ...]]:
        """The seconds of every kind of action, stage by stage."""
        return {
            Kind.FORWARD: self.forward,
            Kind.BACKWARD: self.backward,
            Kind.INPUT: self.inputs,
            Kind.WEIGHT: self.weights,
        }

    def seconds(self, action: Action) -> float:
        """The seconds of one action on its stage."""
        return self.by_kind[action[0]][action[1]]


def check_hops(name: str, values: Sequence[float], num_stages: int) -> None:
    """Raise unless there is one value per pair of neighbouring stages, or none at all.

    Raises:
        InputError: saying how many there are and how many there should be.
    """
    links = num_stages - 1
    if len(values) not in (0, links):
        raise InputError(
            f"{num_stages} stages have {links} links between them, "
            f"but {name} has {len(values)} entries; give one per link, or none"
        )
