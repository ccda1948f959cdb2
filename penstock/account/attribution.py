"""Where every worker's time in a step went: parts that add up to the whole, and their causes.

What a worker did is on its record. Why it waited follows from running its actions again with other
durations (`penstock.account.replay`): first as if all workers had equally much to do and links took
no time, which leaves what the schedule costs; then with the stages as they are planned, with
workers as fast as they were, with every micro-batch as long as it took, with links, and with waits
for the turns of other replicas. What each of these adds is what it costs.

How much faster a step would be without one cause (`LostTime`) is found the same way: by running
everything again without it.
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
"""Why it does nothing in a pass."""

BETWEEN = ("optimizer", "clipping", AUDIT, "saving", EVALUATION, DATA, OUTSIDE)
"""What the script does between passes."""

T = TypeVar("T")

_USUAL = 1.5  # times as long on their way as is usual: values that were not delayed


@dataclass(frozen=True)
class LostTime:
    """What a step would take less without one cause.

    Attributes:
        cause: one of `WAITING`, `BETWEEN`, or `"recomputation"`.
        seconds: how much faster it would be.
        worker: which one it is about, if it is about one.
        stage: likewise; for a link the stage before it.
    """

    cause: str
    seconds: float
    worker: int | None = None
    stage: int | None = None


@dataclass(frozen=True)
class Account:
    """Where the time of a step went.

    Attributes:
        step: its number.
        seconds: from the end of the step before to its own end.
        workers: for every worker the seconds of each part, of `WORKING`, `WAITING` and `BETWEEN`;
            they add up to `seconds`.
        waited_for: for every worker how long it waited for each other one, or for links (-1).
        losses: what the step would take less without each cause, the largest first.
        speed: for every worker how many times as long its actions took as planned; `None` if it
            had none.
        normal: this ratio of a worker that is not slow: how much slower than planned all are.
        rows: of its batch.
        as_planned: whether the batch had the size for which the plan was made; otherwise ratios to
            what is planned are of no use but to be compared with each other.
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
        """The time without what the script does between passes, other than in Penstock."""
        return self.seconds - sum(self.workers[0].get(name, 0.0) for name in BETWEEN)

    @property
    def usual_seconds(self) -> float:
        """The same if every micro-batch had taken as long as the median one."""
        uneven = sum(loss.seconds for loss in self.losses if loss.cause == UNEVEN)
        return self.pass_seconds - uneven

    def total(self) -> dict[str, float]:
        """The mean of all workers: the seconds of each part."""
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
    """What steps would take less without each cause: the means, the largest first.

    Args:
        accounts: of some steps.

    Returns:
        those that cost something, each about the worker and stage that it most often is about.
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
    """What they are between these times; those of a worker follow each other."""
    free: dict[int, float] = {}
    for phase in phases:
        start, stop = max(phase.start, free.get(phase.worker, begin)), min(phase.end, end)
        if phase.end > begin and phase.start < end and start <= stop:
            free[phase.worker] = stop
            yield phase._replace(start=start, end=stop)


def _between(record: StepRecord) -> dict[str, float]:
    """The seconds that all workers do nothing as there is no pass, by what the script does."""
    found: dict[str, float] = {}
    for what, begin, end in partition(record.driver, record.begin, record.end):
        if what != PASS:
            name = {CALL: OVERHEAD, "": OUTSIDE}.get(what, what)
            found[name] = found.get(name, 0.0) + (end - begin) / 1e9
    return found


def _summed(losses: Iterable[LostTime]) -> Iterator[LostTime]:
    """One for each cause: of several passes, about what costs most."""
    by_cause: dict[str, list[LostTime]] = {}
    for loss in losses:
        by_cause.setdefault(loss.cause, []).append(loss)
    for cause, own in by_cause.items():
        most = max(own, key=lambda loss: loss.seconds)
        yield LostTime(cause, sum(loss.seconds for loss in own), most.worker, most.stage)


def _speed(passes: Sequence[_Pass], plan: Plan) -> tuple[float, tuple[float | None, ...]]:
    """How many times as long as planned a normal worker's actions take, and those of each."""
    workers = len(plan.devices)
    measured, planned = [0.0] * workers, [0.0] * workers
    for each in passes:
        for worker, (took, should) in enumerate(each.usual_and_planned()):
            measured[worker] += took
            planned[worker] += should
    ratios = tuple(m / p if p else None for m, p in zip(measured, planned, strict=True))
    return normal_of(ratios), ratios


def normal_of(ratios: Sequence[float | None]) -> float:
    """How many times as long as planned actions take on a worker that is not slow.

    It is that of the faster half's slowest, so that one slow worker is told from a slow machine.

    Args:
        ratios: the same of every worker; `None` if it had nothing to do.
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
        """Every action as long as the median of its kind on its worker."""
        return _medians(self._work)

    @cached_property
    def _planned(self) -> dict[WorkerAction, float]:
        """Every action as long as planned, which is without the loss."""
        by_replica = [self._plan.costs_of(k) for k in range(self._plan.replicas)]
        return {(w, a): by_replica[w // self._of].seconds(a) for w, a in self._work}

    def _expected(self, normal: float) -> dict[WorkerAction, float]:
        """Every action as long as planned, on machines that are so much slower, with the loss."""
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
        """The same work, of which every worker has as much as all others, in equal stages."""
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
        """How long what actions of other workers sent was under way."""
        return self._arrivals[0]

    @property
    def _reads(self) -> dict[WorkerAction, float]:
        """How long it took to get values that were there already."""
        return self._arrivals[1]

    @cached_property
    def _arrivals(self) -> tuple[dict[WorkerAction, float], dict[WorkerAction, float]]:
        """For every action that needs another worker's values its delay, and its read.

        How long values are under way is seen where somebody waited before they were sent. Who began
        to wait later, and waited for most of that time, or about as long as is usual there in all,
        waited for what was under way. Else it was there: it had been as long on its way as usual,
        and the wait was for reading it.
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

        While somebody waits for a worker that waits itself, it waits for the one that works.
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
    """What every level adds to the one before; none takes anything away, and none exceeds `whole`.

    A worker that is slow waits less than if all were equal: then it is the later levels that count.
    """
    least, most = [], whole
    for level in reversed(levels):
        most = min(most, level)
        least.append(most)
    least.reverse()
    return [now - before for before, now in zip([0.0, *least], least, strict=False)]
