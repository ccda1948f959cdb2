"""Whether a plan still holds: the measured times of steps compared with the predicted ones."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.account.attribution import OVERHEAD, Account, normal_of
from penstock.plan.decisions import Candidate
from penstock.plan.plan import Plan
from penstock.units import show_seconds

_NOTABLE = 1.1  # times as slow as predicted
_LATEST = 6  # accounts that are looked at: what was long ago says nothing of now
_BETTER = 0.97  # of a step's time; another plan is named only if it takes less


@dataclass(frozen=True)
class Drift:
    """The measured times of some steps compared with the predicted ones.

    Attributes:
        steps: how many steps were compared.
        measured_seconds: the median time of the passes of a step.
        predicted_seconds: the time of a step that the plan predicts.
        calibrated_seconds: the time of a step if every action takes the median of its kind in
            these steps.
        machine: the ratio of measured to planned time of actions on a worker that is not slow: the
            lower median of `workers`.
        workers: this ratio for every worker; `None` for a worker without actions.
        better: the fastest of the considered candidates that would now be faster than the plan;
            `None` if there is none.
        better_seconds: the time of a step that is now predicted for `better`; 0 without one.
        microbatches: the number of micro-batches of a batch in the plan.
    """

    steps: int
    measured_seconds: float
    predicted_seconds: float
    calibrated_seconds: float
    machine: float
    workers: tuple[float | None, ...]
    better: Candidate | None = None
    better_seconds: float = 0.0
    microbatches: int = 0

    @property
    def ratio(self) -> float:
        """How many times as long as predicted a step takes."""
        return self.measured_seconds / self.predicted_seconds

    @property
    def is_notable(self) -> bool:
        """Whether a step takes much longer, or much less long, than predicted."""
        return not 1 / _NOTABLE <= self.ratio <= _NOTABLE

    @property
    def has_news(self) -> bool:
        """Whether a step takes another time than predicted, or another plan would be faster."""
        return self.is_notable or self.better is not None

    def __str__(self) -> str:
        took, predicted = show_seconds(self.measured_seconds), show_seconds(self.predicted_seconds)
        first = f"a step takes {took}, {self.ratio:.2f} times the predicted {predicted}"
        return "; ".join([first, *self.reasons])

    @property
    def reasons(self) -> list[str]:
        """What explains the measured time, and what would be faster now, in words."""
        parts = []
        explains = (self.ratio > 1) == (self.machine > 1)
        if self.is_notable and explains and not 1 / _NOTABLE <= self.machine <= _NOTABLE:
            slower = "slower" if self.machine >= 1 else "faster"
            factor = max(self.machine, 1 / self.machine)
            parts.append(f"the machine is {factor:.2f} times {slower} than when it was profiled")
        for worker, ratio in enumerate(self.workers):
            if ratio is not None and ratio > _NOTABLE * self.machine:
                than = f"{ratio / self.machine:.2f} times slower than the others"
                parts.append(f"worker {worker} is {than}, against the plan")
        if self.is_notable:
            now = show_seconds(self.calibrated_seconds)
            parts.append(f"by what actions take now, a step is predicted to take {now}")
        if self.better is not None:
            faster = show_seconds(self.better_seconds)
            parts.append(f"{_named(self.better)} would take {faster} now{self._what_changes}")
        return parts

    @property
    def _what_changes(self) -> str:
        """A note in words if the better plan has another number of micro-batches; else empty."""
        better, now = self.better, self.microbatches
        if better is None or better.num_microbatches == now:
            return ""
        return (
            f" (replan() keeps {now} micro-batches: another number, which "
            "Pipeline(num_microbatches=) takes, changes bits)"
        )


def drift(accounts: Sequence[Account], plan: Plan, seconds: float | None = None) -> Drift | None:
    """What steps took beside what was predicted.

    Args:
        accounts: the accounts of steps, oldest first. Only the latest six count, of the steps
            whose batch had the size for which the plan was made.
        plan: the plan by which they ran.
        seconds: the median time of the passes of the latest steps; by default that of `accounts`.

    Returns:
        the comparison; `None` if no account counts.
    """
    accounts = [found for found in accounts if found.as_planned][-_LATEST:]
    if not accounts:
        return None
    ratios = list(zip(*(found.speed for found in accounts), strict=True))
    known = [[ratio for ratio in own if ratio is not None] for own in ratios]
    workers = tuple(statistics.median(own) if own else None for own in known)
    machine = normal_of(workers)
    calibrated = statistics.median(found.usual_seconds for found in accounts)
    better, then = _better(accounts, plan, machine, calibrated)
    return Drift(
        steps=len(accounts),
        measured_seconds=seconds or statistics.median(found.pass_seconds for found in accounts),
        predicted_seconds=plan.predicted_step_seconds,
        calibrated_seconds=calibrated,
        machine=machine,
        workers=workers,
        better=better,
        better_seconds=then,
        microbatches=plan.num_microbatches,
    )


def _better(
    accounts: Sequence[Account], plan: Plan, machine: float, now: float
) -> tuple[Candidate | None, float]:
    """The candidate that is now predicted to be faster than the plan, and its seconds.

    Candidates were predicted with the overhead per action in the profile. Here the overhead per
    action is measured: the median overhead of a worker over the number of its actions. Whatever
    else steps take longer than predicted is assumed to slow all candidates by the same factor.
    That includes one slow worker, as candidates do not say how much work each plan gives it;
    `replan` measures and cuts again.

    Returns:
        the candidate and its seconds; `(None, 0.0)` if none takes less than 97 % of `now`.
    """
    actions = 2 * plan.num_microbatches / plan.replicas
    lost = statistics.median(
        statistics.fmean(own.get(OVERHEAD, 0.0) for own in found.workers) for found in accounts
    )
    lost = max(0.0, lost - plan.pass_seconds)
    more = max(0.0, lost / actions - plan.overhead_seconds)
    beyond = now / (machine * plan.predicted_step_seconds + more * actions)
    best: tuple[Candidate | None, float] = (None, _BETTER * now)
    for candidate in plan.considered:
        if candidate.predicted_step_seconds is None or candidate.only_compared:
            continue
        count = 2 * candidate.num_microbatches / candidate.replicas
        seconds = beyond * (machine * candidate.predicted_step_seconds + more * count)
        if seconds < best[1] and candidate.why != "chosen":
            best = candidate, seconds
    return best if best[0] is not None else (None, 0.0)


def _named(candidate: Candidate) -> str:
    replicas = f"{candidate.replicas} replicas" if candidate.replicas > 1 else "1 replica"
    stages = f"{candidate.stages} stages" if candidate.stages > 1 else "1 stage"
    return f"{replicas} of {stages} with {candidate.num_microbatches} micro-batches"
