"""Whether the account of a step finds the cause of lost time, in simulated pipelines with a fault.

    python -m penstock.bench attribution [--count 1000] [--seed 0] [--json FILE] [--record]

Every pipeline has a random schedule and random numbers of stages, micro-batches and replicas. The
durations of its actions vary by up to 2 %, and in half of the pipelines it takes time to read the
values of other workers. Each pipeline has one fault: a worker is slower than planned, a link is
slow, a stage is planned to be longer than the others, or data come late. The fault is made so large
that it costs more than anything else; its cost is the simulated step with it less the simulated
step without it. The account of the recorded step must name this cause as the largest loss, with
the worker, the stage or the link. The exit status is 1 if that fails for more than 1 % of the
pipelines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

from penstock.account.attribution import DATA, IMBALANCE, LINK, SLOW, Account, account
from penstock.account.record import PASS, Interval, StepRecord
from penstock.bench import record
from penstock.board.activity import code
from penstock.board.memory import Log
from penstock.display.progress import callback
from penstock.plan.decisions import StagePlan
from penstock.plan.plan import Plan
from penstock.plan.shares import dealt
from penstock.schedule import Action, Costs, Event, Kind, build, placement_of
from penstock.simulate import Network, simulate

CAUSES = (SLOW, LINK, IMBALANCE, DATA)
SCHEDULES = ("gpipe", "1f1b", "eager-1f1b", "interleaved", "zero-bubble")

_FORWARD = 0.01  # seconds of a stage, about
_WORSE = 1.3  # times as much as anything else costs
_SHARE = 0.99  # the share of the causes that must be found
_START = 10**9  # when a recorded step begins, in nanoseconds


@dataclass(frozen=True)
class Case:
    """A simulated pipeline, with or without a fault.

    Attributes:
        schedule: the name of its schedule.
        workers: the number of workers of a replica.
        stages: the number of stages of a replica.
        microbatches: the number of micro-batches of a replica.
        replicas: the number of replicas.
        forward: the planned seconds of every stage's forward, without the fault.
        noise: the seed of the random durations of actions.
        spread: by what share of its duration an action varies at most.
        read: seconds that a worker takes to read another's values, recorded as waiting.
        cause: the fault, one of `CAUSES`; empty if there is none.
        where: the number of the worker, of the stage, or of the stage before the link at fault.
        much: how large the fault is: a factor for `SLOW` and `IMBALANCE`, else seconds.
    """

    schedule: str
    workers: int
    stages: int
    microbatches: int
    replicas: int
    forward: tuple[float, ...]
    noise: int
    spread: float = 0.02
    read: float = 0.0
    cause: str = ""
    where: int = 0
    much: float = 0.0

    @property
    def planned(self) -> Costs:
        """The planned costs of a replica's stages; with an imbalance, one stage is longer."""
        forward = list(self.forward)
        if self.cause == IMBALANCE:
            forward[self.where] *= self.much
        backward = [2 * seconds for seconds in forward]
        weight = tuple(forward) if self.schedule == "zero-bubble" else ()
        return Costs(tuple(forward), tuple(backward), weight)

    @property
    def placement(self) -> tuple[int, ...]:
        """The worker of every stage of a replica."""
        return placement_of(self.schedule, self.stages, self.workers)

    @property
    def data_seconds(self) -> float:
        """For how long the script waits for data before the step."""
        return self.much if self.cause == DATA else 0.0

    def plan(self) -> Plan:
        """The plan that it runs by."""
        costs = self.planned
        stages = tuple(
            StagePlan(
                worker=worker,
                device="cpu",
                calls=(stage, stage + 1),
                first=f"layer{stage}",
                last=f"layer{stage}",
                weight_bytes=0,
                input_bytes=0,
                forward_seconds=costs.forward[stage],
                backward_seconds=costs.backward[stage],
                weight_seconds=costs.weights[stage],
            )
            for stage, worker in enumerate(self.placement)
        )
        return Plan(
            fingerprint="",
            batch_size=self.replicas * self.microbatches,
            num_microbatches=self.replicas * self.microbatches,
            schedule=self.schedule,
            stages=stages,
            predicted_step_seconds=1.0,
            bound_seconds=1.0,
            one_device_seconds=None,
            other_replicas=(("cpu",) * self.workers,) * (self.replicas - 1),
        )

    def events(self) -> list[Event]:
        """When every action begins and ends, with the fault, in seconds since the pass began."""
        costs, noise, spread = self.planned, Random(self.noise), self.spread
        latency, transfer = [0.0] * (self.stages - 1), [0.0] * (self.stages - 1)
        if self.cause == LINK:
            latency[self.where] = self.much / 2
            transfer[self.where] = self.much / 2
        schedule = build(self.schedule, self.stages, self.microbatches, num_workers=self.workers)
        shares = dealt(self.replicas * self.microbatches, (1,) * self.replicas)
        found = []
        for replica, share in enumerate(shares):
            before = replica * self.workers
            slow = self.where - before if self.cause == SLOW else -1

            def seconds(action: Action, slow: int = slow) -> float:
                factor = self.much if self.placement[action.stage] == slow else 1.0
                took = costs.seconds(action) * factor * noise.uniform(1 - spread, 1 + spread)
                return took + self._read_before(action)

            timeline = simulate(schedule, seconds, Network(latency, transfer))
            for worker, action, start, end in timeline.events:
                numbered = action._replace(microbatch=share[action.microbatch])
                found.append(Event(before + worker, numbered, start, end))
        return found

    def _read_before(self, action: Action) -> float:
        """The seconds for reading the input of an action; 0 if its own worker has made it."""
        kind, stage, _ = action
        other = stage - 1 if kind is Kind.FORWARD else stage + 1
        is_sent = kind is not Kind.WEIGHT and 0 <= other < self.stages
        return self.read if is_sent and self.placement[other] != self.placement[stage] else 0.0

    @property
    def seconds(self) -> float:
        """The seconds of the step, including the wait for data before it."""
        return self.data_seconds + max(event.end for event in self.events())

    @property
    def filling(self) -> float:
        """The cost of the schedule: seconds that workers are idle if the work is spread evenly."""
        work = [0.0] * (self.replicas * self.workers)
        for event in self.events():
            work[event.worker] += event.end - event.start
        mean = sum(work) / len(work)
        each = mean / self.microbatches / 3 / (self.stages / self.workers)
        even = replace(self, cause="", spread=0.0, forward=(each,) * self.stages)
        return even.seconds - mean

    def record(self) -> StepRecord:
        """The step as a pipeline would have recorded it."""
        begin = _START + round(1e9 * self.data_seconds)
        logs: dict[int, Log] = {}
        for worker, action, start, end in sorted(self.events(), key=lambda e: (e.worker, e.start)):
            log = logs.setdefault(worker, [(begin, code(action, True))])
            log[-1] = log[-1][0], code(action, True)
            read = self._read_before(action)
            log.append((begin + round(1e9 * (start + read)), code(action, False)))
            log.append((begin + round(1e9 * end), 0))
        end = max(log[-1][0] for log in logs.values())
        driver = [Interval(PASS, begin, end)]
        if self.cause == DATA:
            driver.append(Interval(DATA, _START, begin))
        return StepRecord(
            step=1,
            begin=_START,
            end=end,
            rows=self.replicas * self.microbatches,
            num_workers=self.replicas * self.workers,
            driver=tuple(driver),
            logs=logs,
        )


def case(random: Random) -> Case:
    """A random pipeline with a fault that costs more than anything else."""
    schedule = random.choice(SCHEDULES)
    workers = random.randint(2, 6)
    stages = workers * (2 if schedule == "interleaved" else 1)
    replicas = 1 if schedule == "zero-bubble" else random.choice((1, 1, 2))
    right = Case(
        schedule,
        workers,
        stages,
        workers * random.randint(2, 5),
        replicas,
        tuple(_FORWARD * random.uniform(0.97, 1.03) for _ in range(stages)),
        random.getrandbits(32),
        read=random.choice((0.0, random.uniform(1e-5, 1e-3))),
    )
    cause = random.choice(CAUSES)
    places = {SLOW: replicas * workers, LINK: stages - 1, IMBALANCE: stages, DATA: 1}
    where = random.randrange(places[cause])
    much = random.uniform(1.2, 1.6) if cause in (SLOW, IMBALANCE) else random.uniform(0.002, 0.02)
    wrong = replace(right, cause=cause, where=where, much=much)
    while _cost(wrong) < _WORSE * max(wrong.filling, 0.03 * right.seconds):
        much = 1 + 1.2 * (much - 1) if cause in (SLOW, IMBALANCE) else 1.2 * much
        wrong = replace(wrong, much=much)
    return wrong


def _cost(wrong: Case) -> float:
    """By how many seconds a step is longer because of the fault.

    For an imbalance, this is the step less one in which the same work is spread evenly over the
    stages.
    """
    right = replace(wrong, cause="")
    if wrong.cause == IMBALANCE:
        costs = wrong.planned.forward
        mean = sum(costs) / len(costs)
        right = replace(right, forward=(mean,) * len(costs))
    return wrong.seconds - right.seconds


def is_found(wrong: Case, found: Account) -> bool:
    """Whether the largest loss in the account has the cause of the fault, and its place."""
    first = found.losses[0]
    if first.cause != wrong.cause:
        return False
    if wrong.cause == SLOW:
        return first.worker == wrong.where
    if wrong.cause == IMBALANCE:
        return first.stage == wrong.where
    return wrong.cause != LINK or first.stage == wrong.where


@dataclass(frozen=True)
class Score:
    """How many causes were found.

    Attributes:
        cases: the number of pipelines with each cause.
        found: for each cause, how many times it was found.
        most_apart: the largest difference between the sum of a worker's parts and the step, as a
            share of the step.
        missed: the pipelines whose cause was not found, each with the loss that was named instead.
    """

    cases: Counter[str]
    found: Counter[str]
    most_apart: float
    missed: Sequence[tuple[Case, str]]


def judged(count: int, seed: int, progress: Callable[[int], None] = lambda done: None) -> Score:
    """Account for random pipelines, and count the causes that are found.

    Args:
        count: the number of pipelines.
        seed: the seed of the random numbers.
        progress: called with the number of pipelines that are done.
    """
    cases, hits, apart, missed = Counter[str](), Counter[str](), 0.0, []
    for number in range(count):
        wrong = case(Random(seed * 1_000_003 + number))
        found = account(wrong.record(), wrong.plan())
        cases[wrong.cause] += 1
        hits[wrong.cause] += is_found(wrong, found)
        for own in found.workers:
            apart = max(apart, abs(sum(own.values()) / found.seconds - 1))
        if not is_found(wrong, found):
            missed.append((wrong, str(found.losses[0])))
        progress(number + 1)
    return Score(cases, hits, apart, missed)


def main(arguments: Sequence[str]) -> int:
    """Print how many causes are found; returns 1 if they are too few, see `_SHARE`."""
    parser = record.parser("attribution", __doc__)
    parser.add_argument("--count", type=int, default=1000, help="number of pipelines")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random numbers")
    options = parser.parse_args(arguments)
    with callback("pipelines") as progress:
        score = judged(
            options.count, options.seed, lambda done: progress(done, options.count, "pipelines")
        )
    for cause in CAUSES:
        print(f"{cause:12} {score.found[cause]:4} of {score.cases[cause]:4} found")
    share = sum(score.found.values()) / max(1, sum(score.cases.values()))
    print(
        f"{share:.1%} of {options.count}; parts add up to within {score.most_apart:.1e} of a step"
    )
    for wrong, named in score.missed:
        print(f"missed {wrong}: {named}")
    found = {"cases": score.cases, "found": score.found, "most apart": score.most_apart}
    record.save("attribution", found, options)
    return 0 if share >= _SHARE else 1
