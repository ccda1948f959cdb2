"""What lies between the workers: how long values travel, and what that costs the sender."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import InputError
from penstock.schedule.costs import Costs, check_hops


@dataclass(frozen=True)
class Network:
    """The links between neighbouring stages, in seconds.

    What a stage sends first waits until the link is free, occupies it for its `transfer`, and
    arrives `latency` later. A link leads from one worker to another, in one direction: everything
    that the first sends to the second shares it, first in, first out, whichever stages it goes
    between; what goes the other way has a link of its own. Stages of one worker need no link.

    Attributes:
        latency: `latency[s]` is the one-way seconds between stages `s` and `s+1`. Empty means none.
        transfer: `transfer[s]` is the seconds that an activation from stage `s` to `s+1`, or its
            gradient on the way back, occupies the link. Empty means none.
        overlap: whether a worker goes on to its next action while it sends; if not, it is busy
            until the link has taken everything.
        overhead: the seconds that a worker spends on every action besides its work.

    Raises:
        InputError: a time is negative.
    """

    latency: Sequence[float] = ()
    transfer: Sequence[float] = ()
    overlap: bool = True
    overhead: float = 0.0

    def __post_init__(self) -> None:
        least = min((*self.latency, *self.transfer, self.overhead))
        if least < 0:
            raise InputError(f"times are seconds and cannot be negative, got {least}")

    @classmethod
    def of(cls, costs: Costs, *, overlap: bool = True, overhead: float = 0.0) -> Network:
        """The network of these costs."""
        return cls(costs.latency, costs.transfer, overlap, overhead)

    def check(self, num_stages: int) -> None:
        """Raise unless it links `num_stages` stages.

        Raises:
            InputError: the number of latencies or of transfers does not fit.
        """
        check_hops("latency", self.latency, num_stages)
        check_hops("transfer", self.transfer, num_stages)
