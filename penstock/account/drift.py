"""Whether a plan still holds: what steps take beside what was predicted of them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.account.attribution import BETWEEN, account
from penstock.account.record import StepRecord
from penstock.plan.plan import Plan
from penstock.units import show_seconds

_NOTABLE = 1.1  # times as slow as predicted


@dataclass(frozen=True)
class Drift:
    """What some steps took beside what was predicted of them.

    Attributes:
        steps: how many were looked at.
        measured_seconds: of their passes, the median.
        predicted_seconds: of a step, by the plan.
        calibrated_seconds: what is predicted now, from what actions took in these steps.
        machine: how many times as long as planned actions take on a worker that is not slow.
        workers: the same of every worker; `None` if it had nothing to do.
    """

    steps: int
    measured_seconds: float
    predicted_seconds: float
    calibrated_seconds: float
    machine: float
    workers: tuple[float | None, ...]

    @property
    def ratio(self) -> float:
        """How many times as long as predicted a step takes."""
        return self.measured_seconds / self.predicted_seconds

    @property
    def is_notable(self) -> bool:
        """Whether a step takes much longer, or much less long, than predicted."""
        return not 1 / _NOTABLE <= self.ratio <= _NOTABLE

    def __str__(self) -> str:
        took, said = show_seconds(self.measured_seconds), show_seconds(self.predicted_seconds)
        text = f"a step takes {took}, {self.ratio:.2f} times the predicted {said}"
        if not self.is_notable:
            return text
        slower = "slower" if self.machine >= 1 else "faster"
        factor = self.machine if self.machine >= 1 else 1 / self.machine
        return f"{text}; the machine is {factor:.2f} times {slower} than when it was profiled"


def drift(records: Sequence[StepRecord], plan: Plan) -> Drift | None:
    """What steps took beside what was predicted.

    Args:
        records: of steps.
        plan: by which they ran.

    Returns:
        `None` if nothing was recorded.
    """
    if not records:
        return None
    accounts = [account(record, plan) for record in records]
    taken = [
        found.seconds - sum(found.workers[0].get(name, 0.0) for name in BETWEEN)
        for found in accounts
    ]
    normal = statistics.median(found.normal for found in accounts)
    ratios = list(zip(*(found.speed for found in accounts), strict=True))
    workers = [[ratio for ratio in own if ratio is not None] for own in ratios]
    return Drift(
        steps=len(records),
        measured_seconds=statistics.median(taken),
        predicted_seconds=plan.predicted_step_seconds,
        calibrated_seconds=plan.predicted_step_seconds * normal,
        machine=normal,
        workers=tuple(statistics.median(own) if own else None for own in workers),
    )
