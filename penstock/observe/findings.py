"""What a report says of a run: numbers and sentences, which the page and the text both show."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from penstock.account.attribution import (
    BETWEEN,
    DATA,
    FILL,
    IMBALANCE,
    LINK,
    OUTSIDE,
    OVERHEAD,
    SLOW,
    UNEVEN,
    WAITING,
    WORKING,
    Account,
    LostTime,
    account,
    mean_losses,
)
from penstock.account.drift import Drift, drift
from penstock.account.history import History, StepTimes
from penstock.account.record import StepRecord, usual
from penstock.account.suggestions import Suggestion, suggestions
from penstock.board.phases import TURN
from penstock.board.status import Happened
from penstock.plan.plan import Plan
from penstock.units import show_seconds

T = TypeVar("T")

PARTS = (*WORKING, *WAITING, *BETWEEN)
"""All parts of a worker's time, in the order in which they are shown."""

MEANINGS: Mapping[str, str] = {
    "forward": "The worker runs its stages of the model on a micro-batch.",
    "backward": "The worker computes the gradients of a micro-batch.",
    "input half": "The first half of a backward: the gradients that the stage before waits for.",
    "weight half": "The second half of a backward: the gradients of weights. Nobody waits for it.",
    "recomputation": "The worker computes activations again that it did not keep, to save memory.",
    "loss": "The last stage computes the loss and the metrics.",
    "send": "The worker hands over what the next stage needs, and cannot work meanwhile.",
    "exchange": "Replicas add up their gradients.",
    FILL: "The first micro-batch has not arrived yet, or the last one has left. The schedule has "
    "this wait even if all workers are equally fast.",
    IMBALANCE: "Other workers are planned to work longer, so this one waits for them.",
    SLOW: "Another worker took longer than planned, compared with the rest, and this one waited.",
    UNEVEN: "Some micro-batches took longer than others, and this worker waited for one of them.",
    LINK: "Values or gradients were on their way between two workers.",
    TURN: "The worker waited until it was its replica's turn to add gradients.",
    OVERHEAD: "A pass was started or ended, or Penstock checked its arguments: nobody worked.",
    "optimizer": "The optimizer updated the weights.",
    "clipping": "Gradients were clipped.",
    "audit": "A micro-batch was run through the model itself, to compare the results.",
    "saving": "A checkpoint was written.",
    "evaluation": "A pass without gradients was run, as for validation.",
    DATA: "The script waited for its data loader.",
    OUTSIDE: "The script did something else between two steps, which Penstock does not see.",
}
"""What every part of a worker's time is."""

_REMEDIES: Mapping[str, str] = {
    FILL: "more micro-batches make it smaller",
    IMBALANCE: "stages of more equal length make it smaller",
    SLOW: "see what else runs on that worker's device",
    UNEVEN: "micro-batches of equal size make it smaller",
    LINK: "fewer bytes between stages or a faster link make it smaller",
    TURN: "fewer replicas make it smaller",
    OVERHEAD: "larger micro-batches or fewer stages make it smaller",
    "recomputation": "more memory for activations makes it smaller",
    "exchange": "fewer replicas or a faster link make it smaller",
    DATA: "more worker processes of the data loader make it smaller",
    OUTSIDE: "see what the script does between two steps",
    "evaluation": "evaluating less often makes it smaller",
    "saving": "saving less often makes it smaller",
    "audit": "auditing less often makes it smaller",
}

_UNUSUAL = 2.0  # times the median; such a step is reported by itself
_OUTLIERS = 12  # that are explained
_WORTH = 0.001  # of a step's time; what costs less is not named
_DIFFERENT = 0.1  # of a step's time
_NOTABLE = 0.05  # of a speed; less is noise


@dataclass(frozen=True)
class Outlier:
    """A step that took much longer than others.

    Attributes:
        step: the number of the step.
        at: when it ended, in seconds since 1970. For a step that is noted together with others,
            when the last of these ended.
        seconds: the time that it took.
        why: what is known of the cause, in words.
    """

    step: int
    at: float
    seconds: float
    why: str


@dataclass(frozen=True)
class Findings:
    """What is found in a run.

    Args:
        history: of the run.
    """

    history: History

    @property
    def plan(self) -> Plan:
        """The plan by which the run's latest part ran."""
        return self.history.about.plan

    @property
    def devices(self) -> str:
        """The devices of all workers in words, such as `2 × cpu`."""
        return _counted(self.plan.devices)

    # -- steps --------------------------------------------------------------------------------

    @cached_property
    def step_seconds(self) -> float | None:
        """The median time of a step, from the end of the one before; `None` if there was none."""
        known = self.history.latest_steps
        steps = sorted((s.seconds / s.steps, s.steps) for s in known if s.steps)
        if steps:
            return _weighted_median(steps)
        records = [record.seconds for record in self.history.records]
        return statistics.median(records) if records else None

    @property
    def num_steps(self) -> int:
        """How many steps are known, by the plan in use."""
        return sum(s.steps for s in self.history.latest_steps) or len(self.history.records)

    @property
    def rows_per_second(self) -> float | None:
        """The median of the rows of a step over the time that it took; `None` if there was none."""
        known = self.history.latest_steps
        steps = sorted((s.rows / s.seconds, s.steps) for s in known if s.seconds > 0)
        if steps:
            return _weighted_median(steps)
        records = [r.rows / r.seconds for r in self.history.records if r.seconds > 0]
        return statistics.median(records) if records else None

    @property
    def as_planned(self) -> bool:
        """Whether all batches had the size for which the plan was made, as far as is known."""
        rows = self.plan.batch_size
        return all(s.rows == s.steps * rows for s in self.history.latest_steps) and all(
            record.as_planned for record in self.history.records
        )

    @cached_property
    def outliers(self) -> list[Outlier]:
        """The steps that took more than twice the median, at most the twelve slowest, in order."""
        usual = self.step_seconds or 0.0
        slow = [s for s in self.history.latest_steps if s.slowest_seconds > _UNUSUAL * usual]
        worst = sorted(slow, key=lambda s: -s.slowest_seconds)[:_OUTLIERS]
        return [
            Outlier(s.slowest, s.at, s.slowest_seconds, self._why(s))
            for s in sorted(worst, key=lambda s: s.slowest)
        ]

    def _why(self, steps: StepTimes) -> str:
        """What is known of the cause of a slow step."""
        found = [event.what for event in self._events_in(steps)]
        recorded = next((a for a in self.accounts if a.step == steps.slowest), None)
        if recorded is not None and (more := self._excess(recorded)):
            found.append(more)
        elif steps.steps == 1 and (where := self._between_or_within(steps)):
            found.append(where)
        if steps.slowest == 1:
            found.append("the first step, which allocates memory and loads code")
        return "; ".join(found) or "nothing is recorded that would explain it"

    def _events_in(self, steps: StepTimes) -> list[Happened]:
        """What happened while these steps were run."""
        begin, first = steps.at - steps.seconds, steps.step - steps.steps
        return [
            event
            for event in self.history.events
            if begin <= event.at <= steps.at or first < event.step < steps.step
        ]

    def _excess(self, found: Account) -> str:
        """Which part of a recorded step was longer than usual."""
        usual = self.mean_parts
        more = {name: s - usual.get(name, 0.0) for name, s in found.total().items()}
        name = max(more, key=more.__getitem__, default="")
        if not name or more[name] <= 0:
            return ""
        return f"{show_seconds(more[name])} more {name} than usual"

    def _between_or_within(self, steps: StepTimes) -> str:
        """A sentence that says whether one slow step was slow in its passes or between them."""
        known = self.history.latest_steps
        passes = sorted((s.pass_seconds / s.steps, s.steps) for s in known if s.steps)
        usual = _weighted_median(passes)
        within = steps.pass_seconds - usual
        between = steps.seconds - (self.step_seconds or 0.0) - within
        if within > between:
            return f"its passes took {show_seconds(steps.pass_seconds)}, usually {_in_words(usual)}"
        return f"{_in_words(between)} more than usual between passes"

    # -- recorded steps -----------------------------------------------------------------------

    @cached_property
    def accounts(self) -> list[Account]:
        """Where the time of every recorded step went."""
        return [account(record, self.plan) for record in self.history.records]

    @cached_property
    def usual(self) -> list[Account]:
        """The accounts of the recorded steps that took at most twice their median.

        Steps with an audit are left out, unless each has one.
        """
        steps = {record.step for record in usual(self.history.records)}
        accounts = [found for found in self.accounts if found.step in steps]
        if not accounts:
            return []
        middle = statistics.median(found.seconds for found in accounts)
        return [found for found in accounts if found.seconds <= _UNUSUAL * middle]

    @property
    def typical(self) -> StepRecord | None:
        """The recorded step of median length."""
        records = sorted(usual(self.history.records), key=lambda record: record.seconds)
        return records[(len(records) - 1) // 2] if records else None

    @cached_property
    def mean_seconds(self) -> float:
        """The mean seconds of the steps in `usual`; the `parts` of every worker add up to it."""
        return statistics.fmean(found.seconds for found in self.usual) if self.usual else 0.0

    @cached_property
    def parts(self) -> list[dict[str, float]]:
        """For every worker the seconds of each part, the mean of `usual`."""
        if not self.usual:
            return []
        every = zip(*(found.workers for found in self.usual), strict=True)
        return [_mean(own, self._names) for own in every]

    @cached_property
    def _names(self) -> list[str]:
        """The names in `PARTS`, and then other parts that the recorded steps have."""
        found = {name for each in self.usual for own in each.workers for name in own}
        return [*PARTS, *sorted(found - {*PARTS})]

    @cached_property
    def mean_parts(self) -> dict[str, float]:
        """The seconds of every part of a step, as the mean over all workers."""
        return _mean(self.parts, self._names) if self.parts else {}

    @property
    def occurring(self) -> list[str]:
        """The parts that any worker has, in their order."""
        return [name for name in self._names if any(own.get(name, 0.0) > 0 for own in self.parts)]

    @cached_property
    def waited_for(self) -> list[dict[int, float]]:
        """For every worker how long it waited for each other one or for links (-1), the mean."""
        if not self.usual:
            return []
        every = zip(*(found.waited_for for found in self.usual), strict=True)
        return [_mean(own, sorted({who for each in own for who in each})) for own in every]

    @cached_property
    def losses(self) -> list[LostTime]:
        """What a step would take less without each cause: the means, the largest first.

        What costs less than a thousandth of a step is left out.
        """
        least = _WORTH * self.mean_seconds
        return [loss for loss in mean_losses(self.usual) if loss.seconds >= least]

    @cached_property
    def drift(self) -> Drift | None:
        """What steps take beside what was predicted."""
        return drift(self.usual, self.plan)

    @cached_property
    def suggestions(self) -> list[Suggestion]:
        """What to try."""
        return suggestions(self.usual, self.plan)

    def why_late(self, worker: int) -> str:
        """Why others wait for a worker, in words; empty if only because of the schedule's order."""
        found = []
        for loss in self.losses:
            if loss.worker != worker or loss.seconds < _NOTABLE * self.mean_seconds:
                continue
            if loss.cause == SLOW:
                found.append("it takes longer than planned, beside the others")
            elif loss.cause == IMBALANCE:
                found.append("it has more to do than the others, by the plan")
        return " and ".join(found)

    # -- sentences ----------------------------------------------------------------------------

    @property
    def plan_in_words(self) -> list[str]:
        """How the model is run, for somebody who has never seen a pipeline."""
        plan = self.plan
        devices = self.devices
        batch = f"a batch of {plan.batch_size} rows"
        if len(plan.devices) == 1:
            text = f"One worker ({devices}) runs the whole model"
            made = f"on {batch}" if self.as_planned else f"by a plan that was made for {batch}"
            return [f"{text} {made}."]
        each, stages = plan.workers_per_replica, len(plan.stages)
        found = []
        if stages > 1:
            found.append(
                f"The model is cut into {stages} stages that follow each other, on {each} "
                f"workers. Each worker runs its own and hands the results to the next."
            )
        if plan.replicas > 1:
            found.append(f"{plan.replicas} replicas of the model share every batch.")
        found.append(
            f"The {len(plan.devices)} workers run on {devices}. "
            f"{'Every step takes' if self.as_planned else 'The plan was made for'} {batch}, in "
            f"{_plural(plan.num_microbatches, 'micro-batch', 'micro-batches')} of "
            f"{'up to ' * bool(plan.batch_size % plan.num_microbatches)}"
            f"{_plural(plan.microbatch_size, 'row')}, in the order of the schedule {plan.schedule}."
        )
        return found

    @property
    def headline(self) -> str:
        """How long a step takes."""
        if self.step_seconds is None:
            return "No step is known yet."
        rate = f"{self.rows_per_second:.3g} rows per second"
        after = self.history.about.since
        since = f" since the plan has changed after step {after}" if after else ""
        return (
            f"A step takes {show_seconds(self.step_seconds)}, the median of "
            f"{_plural(self.num_steps, 'step')}{since}; that is {rate}."
        )

    @property
    def bound_share(self) -> float | None:
        """The lower bound as a share of what the passes of a step take."""
        if self.drift is None:
            return None
        return self.plan.bound_seconds / self.drift.measured_seconds

    @property
    def against_bound(self) -> str:
        """What a step takes beside the least that is possible."""
        bound, share = self.plan.bound_seconds, self.bound_share
        if share is None or self.drift is None:
            return ""
        took, least = show_seconds(self.drift.measured_seconds), show_seconds(bound)
        if share > 1:
            return (
                f"Its passes take {took}, less than the lower bound of {least}, which was computed "
                "for the speed that was profiled."
            )
        return (
            f"By the profile, no order of this work on these devices could take less than {least}: "
            f"that is {share:.0%} of what the passes take."
        )

    @property
    def against_prediction(self) -> str:
        """What a step takes beside what was predicted."""
        if self.drift is not None:
            return f"Without what the script does between passes, {self.drift}."
        if not self.accounts:
            return ""
        return (
            "The recorded steps had batches of other sizes than the one for which the plan was "
            "made, so they are not compared with what was predicted."
        )

    @property
    def against_one_device(self) -> str:
        """What a step takes beside one device alone."""
        alone, found = self.plan.one_device_seconds, self.drift
        if found is None or len(self.plan.devices) == 1:
            return ""
        if alone is None:
            return "One device alone could not run it: the model does not fit its memory."
        ratio = alone / found.measured_seconds
        text = f"One device alone is predicted to take {show_seconds(alone)}"
        if abs(ratio - 1) <= _NOTABLE:
            return f"{text}: this run is about as fast."
        if ratio < 1:
            return f"{text}: it would be {1 / ratio:.2f} times as fast as this run."
        return f"{text}: this run is {ratio:.2f} times as fast."

    @property
    def where_it_goes(self) -> str:
        """The share of work, the largest loss, and what its cause means, in words."""
        if not self.usual:
            return ""
        work = sum(self.mean_parts.get(name, 0.0) for name in WORKING) / self.mean_seconds
        text = f"Workers work for {work:.0%} of a step."
        if not self.losses:
            return f"{text} Nothing else costs a measurable part of it."
        first = self.losses[0]
        share = first.seconds / self.mean_seconds
        return (
            f"{text} What costs most besides is {first.cause}{where(first)}: a step would take "
            f"{show_seconds(first.seconds)} ({share:.0%}) less without it. "
            f"{MEANINGS.get(first.cause, '')}"
        ).rstrip()

    @property
    def left_out(self) -> str:
        """Which steps the means are of."""
        if not self.accounts:
            return ""
        records, without = self.history.records, usual(self.history.records)
        means = {found.step for found in self.usual}
        audited = _steps(record.step for record in records if record not in without)
        long = _steps(record.step for record in without if record.step not in means)
        text = f"The mean of {_plural(len(self.usual), 'recorded step')}."
        if without[0].is_audited:
            text += " There was an audit in each."
        if audited:
            seconds = [record.audit_seconds for record in records if record not in without]
            took = show_seconds(statistics.median(seconds))
            text += f" Left out: {audited}, with an audit, which took {took}."
        if long:
            text += f" Left out: {long}, more than twice as long as the median of them."
        all_steps = self.step_seconds or self.mean_seconds
        if not 1 - _DIFFERENT <= self.mean_seconds / all_steps <= 1 + _DIFFERENT:
            text += f" The median of all steps is {show_seconds(all_steps)}."
        return text


def where(loss: LostTime) -> str:
    """Which worker and stage a loss is about, as ` (worker 1, stage 3)`; empty if it is of all."""
    found = []
    if loss.worker is not None:
        found.append(f"worker {loss.worker}")
    if loss.stage is not None:
        after = loss.cause == LINK
        found.append(f"stages {loss.stage} to {loss.stage + 1}" if after else f"stage {loss.stage}")
    return f" ({', '.join(found)})" if found else ""


def remedy(cause: str) -> str:
    """What makes the cost of a cause smaller, if that is known."""
    return _REMEDIES.get(cause, "")


def awaited(who: int) -> str:
    """Whom or what a worker waited for, in words."""
    return "links" if who < 0 else f"worker {who}"


def rounded(values: Sequence[float], whole: int) -> list[int]:
    """Whole numbers in proportion to these values that add up to exactly `whole`.

    Args:
        values: none of them negative.
        whole: what they should add up to.
    """
    total = sum(values)
    if not total:
        return [0] * len(values)
    exact = [whole * value / total for value in values]
    found = [int(value) for value in exact]
    by_rest = sorted(range(len(values)), key=lambda k: found[k] - exact[k])
    for k in by_rest[: whole - sum(found)]:
        found[k] += 1
    return found


def _in_words(seconds: float) -> str:
    return show_seconds(max(0.0, seconds))


def _mean(every: Sequence[Mapping[T, float]], names: Iterable[T]) -> dict[T, float]:
    """The means of what several have, by name, in the order of the names."""
    sums = {name: sum(each.get(name, 0.0) for each in every) for name in names}
    return {name: total / len(every) for name, total in sums.items() if total > 0}


def _weighted_median(values: Sequence[tuple[float, int]]) -> float:
    """The median of `(value, times)` pairs, sorted by value; each value counts `times` times."""
    half, seen = sum(times for _, times in values) / 2, 0
    for value, times in values:
        seen += times
        if seen >= half:
            return value
    return 0.0


def _counted(names: Sequence[str]) -> str:
    """Names with how often they are there: `2 × cpu, cuda:0`."""
    numbers = {name: names.count(name) for name in names}
    return ", ".join(f"{n} × {name}" if n > 1 else name for name, n in numbers.items())


def _steps(numbers: Iterable[int]) -> str:
    """Steps in words; empty if there are none."""
    found = [*map(str, numbers)]
    return f"step{'s' * (len(found) > 1)} {', '.join(found)}" if found else ""


def _plural(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or f'{one}s'}"
