"""Where every worker's time in a step went: parts that add up to the whole, and their causes.

What a worker did is on its record. Why it waited is found by simulating its actions again with
other durations (`penstock.account.replay`). The first replay has equal work on all workers and
links that take no time: its waits are the cost of the schedule. Each further replay adds one real
cause: the stages as planned, the measured speed of each worker, the measured time of each
micro-batch, links, and waits for the turns of other replicas. The waits that it adds are the cost
of that cause.

How much faster a step would be without one cause (`LostTime`) is found by a replay without it.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from penstock.account.record import AUDIT, CALL, EVALUATION, PASS, StepRecord, partition
from penstock.account.replay import Durations, Replay, WorkerAction
from penstock.board.phases import TURN, WAIT, WORK
from penstock.plan.plan import Plan
from penstock.schedule import Action, Kind, Phase

FILL, IMBALANCE, SLOW, UNEVEN = "fill and drain", "imbalance", "slow worker", "uneven micro-batches"
LINK, OVERHEAD = "link", "overhead"
DATA, OUTSIDE = "data", "outside"

WORKING = (*WORK.values(), "recomputation", "loss", "send", "exchange")
"""What a worker does in a pass."""

WAITING = (FILL, IMBALANCE, SLOW, UNEVEN, LINK, TURN, OVERHEAD)
"""Why a worker waits in a pass."""

BETWEEN = ("optimizer", "clipping", AUDIT, "saving", EVALUATION, DATA, OUTSIDE)
"""What the script does between passes."""

T = TypeVar("T")

_USUAL = 1.5  # times the usual transfer time; values that took no longer were not delayed


@dataclass(frozen=True)
class LostTime:
    """How much less time a step would take without one cause.

    Attributes:
        cause: one of `WAITING` or `BETWEEN`, `"recomputation"` or `"exchange"`.
        seconds: how much less time the step would take.
        worker: the worker that causes the loss; `None` if no single one does.
        stage: the stage that causes the loss, and for a link the stage before it; `None` if no
            single one does.
    """

    cause: str
    seconds: float
    worker: int | None = None
    stage: int | None = None


@dataclass(frozen=True)
class Account:
    """Where the time of a step went.

    Attributes:
        step: the number of the step.
        seconds: the time from the end of the previous step to the end of this one.
        workers: for every worker the seconds of each part, by its name in `WORKING`, `WAITING` or
            `BETWEEN`; they add up to `seconds`.
        waited_for: for every worker the seconds that it waited for each other worker, by number;
            -1 stands for links.
        losses: how much less time the step would take without each cause, the largest first.
        speed: for every worker the measured time of its actions over the planned time; `None` for
            a worker without actions.
        normal: the ratio in `speed` of a worker that is not slow, see `normal_of`.
        rows: the number of rows of the batch.
        as_planned: whether the batch had the size for which the plan was made. If not, the ratios
            in `speed` can be compared with each other, but mean nothing by themselves.
    """

    step: int
    seconds: float
    workers: tuple[Mapping[str, float], ...]
    waited_for: tuple[Mapping[int, float], ...]
    losses: tuple[LostTime, ...]
    speed: tuple[float | None, ...]
    normal: float
    rows: int = 0
    as_planned: bool = True

    @property
    def pass_seconds(self) -> float:
        """The seconds of the step without `BETWEEN`; calls into Penstock are included."""
        return self.seconds - sum(self.workers[0].get(name, 0.0) for name in BETWEEN)

    @property
    def usual_seconds(self) -> float:
        """`pass_seconds` if every micro-batch had taken as long as the median one."""
        uneven = sum(loss.seconds for loss in self.losses if loss.cause == UNEVEN)
        return self.pass_seconds - uneven

    def total(self) -> dict[str, float]:
        """The seconds of each part, as the mean of all workers; parts of 0 are left out."""
        names = [*WORKING, *WAITING, *BETWEEN]
        sums = {name: sum(own.get(name, 0.0) for own in self.workers) for name in names}
        return {name: found / len(self.workers) for name, found in sums.items() if found}


def account(record: StepRecord, plan: Plan) -> Account:
    """Where the time of a recorded step went.

    Args:
        record: the step.
        plan: by which it ran.
    """
    passes = [_Pass(phases, plan, span) for phases, span in _by_pass(record)]
    between = _between(record)
    normal, speed = _speed(passes, plan)
    parts: list[dict[str, float]] = [dict(between) for _ in range(record.num_workers)]
    blamed: list[dict[int, float]] = [{} for _ in parts]
    for each in passes:
        for own, found in zip(parts, each.parts(normal), strict=True):
            _add(own, found)
        for waited, found_for in zip(blamed, each.waited_for(), strict=True):
            _add(waited, found_for)
    losses = [loss for each in passes for loss in each.losses(normal, speed)]
    losses += [LostTime(what, seconds) for what, seconds in between.items()]
    return Account(
        record.step,
        record.seconds,
        tuple(parts),
        tuple(blamed),
        tuple(sorted(_summed(losses), key=lambda loss: -loss.seconds)),
        speed,
        normal,
        record.rows,
        record.as_planned,
    )


def mean_losses(accounts: Sequence[Account]) -> list[LostTime]:
    """How much less time steps would take without each cause, on average, the largest first.

    Args:
        accounts: the accounts of the steps.

    Returns:
        the mean losses that are greater than 0, each with its most frequent worker and stage.
    """
    by_cause: dict[str, list[LostTime]] = {}
    for found in accounts:
        for loss in found.losses:
            if loss.seconds > 0:
                by_cause.setdefault(loss.cause, []).append(loss)
    means = []
    for cause, own in by_cause.items():
        worker, stage = statistics.mode((loss.worker, loss.stage) for loss in own)
        mean = sum(loss.seconds for loss in own) / len(accounts)
        means.append(LostTime(cause, mean, worker, stage))
    return sorted(means, key=lambda loss: -loss.seconds)


def _add(to: dict[T, float], more: Mapping[T, float]) -> None:
    for name, seconds in more.items():
        to[name] = to.get(name, 0.0) + seconds


def _by_pass(record: StepRecord) -> Iterator[tuple[list[Phase], tuple[float, float]]]:
    """The phases of each pass, and when it began and ended."""
    phases = record.timeline.phases
    for begin, end in record.passes:
        yield list(_within(phases, begin, end)), (begin, end)


def _within(phases: Iterable[Phase], begin: float, end: float) -> Iterator[Phase]:
    """The phases cut to the time from `begin` to `end`, without overlaps on one worker."""
    free: dict[int, float] = {}
    for phase in phases:
        start, stop = max(phase.start, free.get(phase.worker, begin)), min(phase.end, end)
        if phase.end > begin and phase.start < end and start <= stop:
            free[phase.worker] = stop
            yield phase._replace(start=start, end=stop)


def _between(record: StepRecord) -> dict[str, float]:
    """The seconds between passes, in which all workers are idle, by what the script does."""
    found: dict[str, float] = {}
    for what, begin, end in partition(record.driver, record.begin, record.end):
        if what != PASS:
            name = {CALL: OVERHEAD, "": OUTSIDE}.get(what, what)
            found[name] = found.get(name, 0.0) + (end - begin) / 1e9
    return found


def _summed(losses: Iterable[LostTime]) -> Iterator[LostTime]:
    """The sum of the losses of each cause, with the worker and stage of the largest one."""
    by_cause: dict[str, list[LostTime]] = {}
    for loss in losses:
        by_cause.setdefault(loss.cause, []).append(loss)
    for cause, own in by_cause.items():
        most = max(own, key=lambda loss: loss.seconds)
        yield LostTime(cause, sum(loss.seconds for loss in own), most.worker, most.stage)


def _speed(passes: Sequence[_Pass], plan: Plan) -> tuple[float, tuple[float | None, ...]]:
    """Measured over planned time of actions: of a normal worker, and of every worker."""
    workers = len(plan.devices)
    measured, planned = [0.0] * workers, [0.0] * workers
    for each in passes:
        for worker, (took, should) in enumerate(each.usual_and_planned()):
            measured[worker] += took
            planned[worker] += should
    ratios = tuple(m / p if p else None for m, p in zip(measured, planned, strict=True))
    return normal_of(ratios), ratios


def normal_of(ratios: Sequence[float | None]) -> float:
    """The ratio of measured to planned time of actions on a worker that is not slow.

    This is the lower median of all workers, so one slow worker does not count as a slow machine.

    Args:
        ratios: the ratio of every worker; `None` for a worker without actions.

    Returns:
        the lower median; 1 if no ratio is known.
    """
    known = [ratio for ratio in ratios if ratio is not None]
    return statistics.median_low(known) if known else 1.0


class _Pass:
    """One pass: what happened in it, to be run again.

    Args:
        phases: of all workers.
        plan: by which it ran.
        span: when it began and ended, in the time of the phases.
    """

    def __init__(self, phases: Sequence[Phase], plan: Plan, span: tuple[float, float]) -> None:
        self._plan = plan
        self._span = span
        self._of = plan.workers_per_replica
        self._phases: list[list[Phase]] = [[] for _ in plan.devices]
        for phase in phases:
            self._phases[phase.worker].append(phase)
        self._sends = self._spent("send")
        self._turns = self._spent(TURN)
        self._losses = self._spent("loss")
        self._again = self._spent("recomputation")
        work: dict[WorkerAction, float] = {}
        for worker, what, action, start, end in phases:
            if action is not None and what != WAIT:
                own = 0.0 if what in ("send", TURN) else end - start
                work[worker, action] = work.get((worker, action), 0.0) + own
        self._work = work
        lists: list[list[Action]] = [[] for _ in plan.devices]
        for worker, action in work:
            lists[worker].append(action)
        self._replay = Replay(lists, self._of)

    # -- durations ----------------------------------------------------------------------------

    def _spent(self, on: str) -> dict[WorkerAction, float]:
        """The seconds of one part in every action that has it."""
        found: dict[WorkerAction, float] = {}
        for own in self._phases:
            for worker, what, action, start, end in own:
                if what == on and action is not None:
                    found[worker, action] = found.get((worker, action), 0.0) + end - start
        return found

    @cached_property
    def _usual(self) -> dict[WorkerAction, float]:
        """The durations of all actions, each the median of its kind and stage on its worker."""
        return _medians(self._work)

    @cached_property
    def _planned(self) -> dict[WorkerAction, float]:
        """Every action as long as planned, which is without the loss."""
        by_replica = [self._plan.costs_of(k) for k in range(self._plan.replicas)]
        return {(w, a): by_replica[w // self._of].seconds(a) for w, a in self._work}

    def _expected(self, normal: float) -> dict[WorkerAction, float]:
        """The planned duration of every action times `normal`, plus the median measured loss."""
        planned = {place: normal * seconds for place, seconds in self._planned.items()}
        losses = _medians({place: self._losses.get(place, 0.0) for place in self._work})
        return {place: seconds + losses[place] for place, seconds in planned.items()}

    def usual_and_planned(self) -> list[tuple[float, float]]:
        """For every worker the seconds of its actions, as they usually took and as planned."""
        without = {p: s - self._losses.get(p, 0.0) for p, s in self._work.items()}
        usual = self._replay.work(Durations(_medians(without)))
        planned = self._replay.work(Durations(self._planned))
        return list(zip(usual, planned, strict=True))

    def _balanced(self, of: Mapping[WorkerAction, float]) -> dict[WorkerAction, float]:
        """The durations `of`, spread evenly: equal stages, and equal work on every worker."""
        kinds: dict[Kind, list[float]] = {}
        for (_, action), seconds in of.items():
            kinds.setdefault(action.kind, []).append(seconds)
        means = {kind: statistics.fmean(every) for kind, every in kinds.items()}
        even = {(worker, action): means[action.kind] for worker, action in of}
        work = self._replay.work(Durations(even))
        mean = sum(of.values()) / len(work)
        return {(w, a): s * mean / work[w] if work[w] else 0.0 for (w, a), s in even.items()}

    @property
    def _delays(self) -> dict[WorkerAction, float]:
        """For actions that need another worker's values, how long these were on their way."""
        return self._arrivals[0]

    @property
    def _reads(self) -> dict[WorkerAction, float]:
        """How long it took to get values that were there already."""
        return self._arrivals[1]

    @cached_property
    def _arrivals(self) -> tuple[dict[WorkerAction, float], dict[WorkerAction, float]]:
        """The delays of values from other workers, and the times to read them, by action.

        The delay is the time from sending values until the action that needs them began, if the
        worker began to wait before they were sent. If it began to wait later, this holds as well if
        the time is at most 1.5 times the usual delay between these workers, or if the worker waited
        for at least half of it. Otherwise the values had arrived already: their delay is taken to
        be the usual one, and the wait is the time to read them.
        """
        found: dict[WorkerAction, float] = {}
        late: dict[WorkerAction, tuple[float, float]] = {}
        seen: dict[tuple[int, int, bool], list[float]] = {}
        least: dict[tuple[int, int, bool], float] = {}
        for place, other in self._replay.before.items():
            if place[0] == other[0]:
                continue
            begun, ended = self._begun[place], self._ended[other]
            since, took = self._waits.get(place, begun), max(0.0, begun - ended)
            if since <= ended:
                found[place] = took
                seen.setdefault(_way(place, other), []).append(took)
            else:
                late[place] = took, begun - since
                way = _way(place, other)
                least[way] = min(took, least.get(way, took))
        reads: dict[WorkerAction, float] = {}
        for place, (took, waited) in late.items():
            way = _way(place, self._replay.before[place])
            usual = statistics.median(seen[way]) if way in seen else least[way]
            if took <= _USUAL * usual or waited >= took / 2:
                found[place] = took
            else:
                found[place], reads[place] = usual, waited
        return found, reads

    @cached_property
    def _begun(self) -> dict[WorkerAction, float]:
        """When the work of every action began."""
        found: dict[WorkerAction, float] = {}
        for own in self._phases:
            for worker, what, action, start, _ in own:
                if action is not None and what != WAIT:
                    found.setdefault((worker, action), start)
        return found

    @cached_property
    def _ended(self) -> dict[WorkerAction, float]:
        """When everything of an action had ended."""
        found: dict[WorkerAction, float] = {}
        for own in self._phases:
            for worker, what, action, _, end in own:
                if action is not None and what != WAIT:
                    found[worker, action] = end
        return found

    @cached_property
    def _waits(self) -> dict[WorkerAction, float]:
        """When workers began to wait for the values of every action."""
        return {
            (phase.worker, phase.action): phase.start
            for own in self._phases
            for phase in own
            if phase.what == WAIT and phase.action is not None
        }

    def _with(self, *parts: Mapping[WorkerAction, float]) -> dict[WorkerAction, float]:
        """The sums of durations."""
        return {place: sum(part.get(place, 0.0) for part in parts) for place in self._work}

    def _levels(self, normal: float) -> Iterator[tuple[str, Durations]]:
        """Durations that come nearer and nearer to the real ones, and what each step adds."""
        expected = self._expected(normal)
        yield FILL, Durations(self._balanced(expected))
        yield IMBALANCE, Durations(expected)
        yield SLOW, Durations(self._usual)
        yield UNEVEN, Durations(self._work)
        yield LINK, Durations(self._with(self._work, self._sends, self._reads), self._delays)
        yield TURN, self._real

    @cached_property
    def _real(self) -> Durations:
        """Everything as it was."""
        every = self._with(self._work, self._sends, self._reads, self._turns)
        return Durations(every, self._delays)

    # -- what is found ------------------------------------------------------------------------

    def parts(self, normal: float) -> list[dict[str, float]]:
        """For every worker the seconds of each part; they add up to those of the pass.

        Args:
            normal: how many times as long as planned actions take on a worker that is not slow.
        """
        whole = self._span[1] - self._span[0]
        idle: list[list[float]] = [[] for _ in self._phases]
        reads = self._replay.work(Durations(self._with(self._reads)))
        for name, durations in self._levels(normal):
            end, work = self._replay.seconds(durations), self._replay.work(durations)
            for own, worked, read in zip(idle, work, reads, strict=True):
                own.append(max(0.0, end - worked + (read if name in (LINK, TURN) else 0.0)))
        names = [name for name in WAITING if name not in (TURN, OVERHEAD)]
        found = []
        for phases, levels in zip(self._phases, idle, strict=True):
            parts: dict[str, float] = {}
            for phase in phases:
                if phase.what != WAIT:
                    parts[phase.what] = parts.get(phase.what, 0.0) + phase.seconds
            left = max(0.0, whole - sum(parts.values()))
            for name, seconds in zip([*names, TURN], _rising(levels, left), strict=True):
                parts[name] = parts.get(name, 0.0) + seconds
                left -= seconds
            parts[OVERHEAD] = left
            found.append(parts)
        return found

    def losses(self, normal: float, speed: Sequence[float | None]) -> Iterator[LostTime]:
        """What the pass would take less without each cause."""
        real = self._real
        now = self._replay.seconds(real)

        def without(
            work: Mapping[WorkerAction, float], delays: Mapping[WorkerAction, float]
        ) -> float:
            return max(0.0, now - self._replay.seconds(Durations(work, delays)))

        known = [(ratio, worker) for worker, ratio in enumerate(speed) if ratio is not None]
        slowest = max(known, default=(normal, 0))
        brake = slowest[0] / normal if normal else 1.0
        quick = {p: s / brake if p[0] == slowest[1] else s for p, s in real.work.items()}
        yield LostTime(SLOW, without(quick, real.delays), slowest[1])
        expected = self._expected(normal)
        even = self._balanced(expected)
        fair = {p: s * even[p] / expected[p] if expected[p] else s for p, s in real.work.items()}
        work = self._replay.work(Durations(expected))
        most = max(range(len(work)), key=work.__getitem__)
        yield LostTime(IMBALANCE, without(fair, real.delays), most, self._longest_stage(most))
        usual = self._with(self._usual, self._sends, self._reads, self._turns)
        yield LostTime(UNEVEN, without(usual, real.delays))
        hops: dict[int, float] = {}
        for (_, action), seconds in self._delays.items():
            stage = action.stage - (action.kind is Kind.FORWARD)
            hops[stage] = hops.get(stage, 0.0) + seconds
        slowest_hop = max(hops, key=hops.__getitem__, default=None)
        at_once = self._with(self._work, self._turns)
        yield LostTime(LINK, without(at_once, {}), stage=slowest_hop)
        in_turn = self._with(self._work, self._sends, self._reads)
        yield LostTime(TURN, without(in_turn, real.delays))
        once = {place: s - self._again.get(place, 0.0) for place, s in real.work.items()}
        yield LostTime("recomputation", without(once, real.delays))
        balanced = Durations(self._balanced(self._work))
        filling = self._replay.seconds(balanced) - max(self._replay.work(balanced), default=0.0)
        yield LostTime(FILL, max(0.0, filling))
        exchange = [sum(p.seconds for p in own if p.what == "exchange") for own in self._phases]
        yield LostTime("exchange", max(exchange, default=0.0))
        rest = self._span[1] - self._span[0] - now - max(exchange, default=0.0)
        yield LostTime(OVERHEAD, max(0.0, rest))

    def _longest_stage(self, worker: int) -> int | None:
        """The stage in which a worker is planned to work longest."""
        totals: dict[int, float] = {}
        for (who, action), seconds in self._planned.items():
            if who == worker:
                totals[action.stage] = totals.get(action.stage, 0.0) + seconds
        return max(totals, key=totals.__getitem__, default=None)

    def waited_for(self) -> list[dict[int, float]]:
        """For every worker how long it waited for each other one, or for links (-1).

        A wait for a worker that is itself waiting counts as a wait for the worker at the end of
        the chain, which works.
        """
        found: list[dict[int, float]] = [{} for _ in self._phases]
        for place, begin in self._waits.items():
            other = self._replay.before.get(place)
            if other is None or place not in self._begun:
                continue
            end = self._begun[place]
            self._blame(found[place[0]], other, begin, end, len(self._phases))
        return found

    def _blame(
        self, found: dict[int, float], awaited: WorkerAction, begin: float, end: float, depth: int
    ) -> None:
        """Add who was at work from `begin` to `end`, when this action was awaited."""
        worker = awaited[0]
        sent = min(end, max(begin, self._ended.get(awaited, end)))
        if end > sent:
            found[-1] = found.get(-1, 0.0) + end - sent
        for phase in self._phases[worker]:
            start, stop = max(begin, phase.start), min(sent, phase.end)
            if stop <= start:
                continue
            further = None
            if phase.what == WAIT and phase.action is not None:
                further = self._replay.before.get((worker, phase.action))
            if further is not None and depth:
                self._blame(found, further, start, stop, depth - 1)
            else:
                found[worker] = found.get(worker, 0.0) + stop - start


def _way(place: WorkerAction, other: WorkerAction) -> tuple[int, int, bool]:
    """From which worker to which other values go, and whether they are a forward's."""
    return other[0], place[0], place[1].kind is Kind.FORWARD


def _medians(of: Mapping[WorkerAction, float]) -> dict[WorkerAction, float]:
    """For every action the median of those of the same kind and stage on the same worker."""
    groups: dict[tuple[int, Kind, int], list[float]] = {}
    for (worker, action), seconds in of.items():
        groups.setdefault((worker, action.kind, action.stage), []).append(seconds)
    medians = {group: statistics.median(own) for group, own in groups.items()}
    return {(w, a): medians[w, a.kind, a.stage] for w, a in of}


def _rising(levels: Sequence[float], whole: float) -> list[float]:
    """What every level adds to the one before, never less than 0, and at most `whole` in all.

    Where a level is higher than a later one, it is lowered to that one: a slow worker waits less
    than if all were equal, and only the real, later levels are true of it.
    """
    least, most = [], whole
    for level in reversed(levels):
        most = min(most, level)
        least.append(most)
    least.reverse()
    return [now - before for before, now in zip([0.0, *least], least, strict=False)]
