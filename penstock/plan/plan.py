"""A plan: everything that was decided, as a file that a person can read and commit, and as text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from penstock.display.tables import aligned
from penstock.errors import PlanError
from penstock.files import read_whole, readable, save_whole, version_of, what_is
from penstock.plan.shares import dealt
from penstock.schedule import (
    SCHEDULES,
    Costs,
    Event,
    Kind,
    Rules,
    Schedule,
    Timeline,
    build,
    check,
)
from penstock.simulate import Network, simulate
from penstock.units import show_bytes, show_seconds

_VERSION = 3

HALF = ("bfloat16", "float16")
"""The half-precision dtypes to which boundary values may be rounded."""

_STAGE_HEADING = (
    *("stage", "worker", "modules", "weights", "enters", "forward", "backward", "memory", ""),
)
_STAGE_TEXTS = (1, 2, 8)
_FORWARD_HEADING = (
    *("stage", "worker", "modules", "weights", "states", "enters", "forward", "memory"),
)
_CONSIDERED_HEADING = (
    *("considered", "replicas", "stages", "micro-batches", "predicted", "memory", ""),
)
_REPLICA_HEADING = ("replica", "devices", "micro-batches", "slowest stage", "memory")
_RING = "as with DistributedDataParallel, which sums gradients in another order than one device"
_IN_ORDER = "replicas={} does that, and sums gradients in the order of one device"

_IDLE = 0.1  # of a step; a worker that is busy for less is hardly needed

WORTH_FEWER = 1.02
"""How many times as fast fewer devices have to be to be preferred: a profile has some noise."""

Way = Literal["pipeline", "one device", "data parallel"]
"""A kind of plan: with stages, a single worker, or a replica of the whole model on every device."""


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a plan.

    Attributes:
        worker: the number of its worker, from 0.
        device: the device of the worker.
        calls: the first call, and the one after the last.
        first: the label of its first call.
        last: the label of its last call.
        weight_bytes: bytes of the parameters that it owns.
        input_bytes: bytes that enter it per micro-batch.
        forward_seconds: predicted, per micro-batch.
        backward_seconds: predicted, per micro-batch, including recomputation.
        weight_seconds: the part of the backward that can be deferred (`W`).
        halving_seconds: how much longer the two halves take than a whole backward.
        latency_seconds: one way from the previous stage, for the smallest message.
        transfer_seconds: how long the input of one micro-batch occupies the link.
        held_bytes: bytes held for every micro-batch in flight.
        memory_bytes: the most it holds: weights, gradients, optimizer state, activations; in a plan
            for inference weights, states, activations.
        state_bytes: the part of it that is states of sessions, such as keys and values, of as many
            groups of sequences as `Plan.groups` says; in plans for inference.
        recompute: spans of its calls, each `(first, one after the last)`, whose activations are
            recomputed in the backward instead of held.
    """

    worker: int
    device: str
    calls: tuple[int, int]
    first: str
    last: str
    weight_bytes: int
    input_bytes: int
    forward_seconds: float
    backward_seconds: float
    weight_seconds: float = 0.0
    halving_seconds: float = 0.0
    latency_seconds: float = 0.0
    transfer_seconds: float = 0.0
    held_bytes: int = 0
    memory_bytes: int = 0
    state_bytes: int = 0
    recompute: tuple[tuple[int, int], ...] = ()

    @property
    def seconds(self) -> float:
        """Seconds of the forward and backward of one micro-batch."""
        return self.forward_seconds + self.backward_seconds

    @property
    def spans(self) -> list[tuple[int, int, bool]]:
        """Its calls as spans `(first, one after the last, whether they are recomputed)`."""
        edges = sorted({*self.calls, *(edge for span in self.recompute for edge in span)})
        return [(a, b, (a, b) in self.recompute) for a, b in pairwise(edges)]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that was considered.

    Attributes:
        way: `"pipeline"` (stages, with or without replicas), `"one device"`, or `"data parallel"`:
            a replica of the whole model on every device.
        schedule: its name; empty for what is only compared with.
        num_microbatches: of every replica.
        predicted_step_seconds: `None` if it does not fit the memory.
        replicas: the number of replicas of the model.
        stages: the number of stages of every replica.
        threads: intra-op threads of each CPU worker; 0 where it is not known.
        memory_bytes: the most that any device holds.
        only_compared: whether it was not asked for, or cannot be run here.
        why: the finding, in words.
    """

    way: Way = "pipeline"
    schedule: str
    num_microbatches: int
    predicted_step_seconds: float | None
    replicas: int = 1
    stages: int = 1
    threads: int = 0
    memory_bytes: int = 0
    only_compared: bool = False
    why: str = ""

    @property
    def seconds(self) -> float:
        """The predicted time of a step; infinite if it does not fit the memory."""
        found = self.predicted_step_seconds
        return float("inf") if found is None else found


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Cuts, placement, number of micro-batches and schedule, with the predicted step time.

    Attributes:
        fingerprint: of the program for which it was made.
        batch_size: rows of the batch for which it was made.
        num_microbatches: the number of micro-batches of a batch.
        schedule: the name of the schedule.
        stages: the stages, in order.
        predicted_step_seconds: of one `train_step`, without the optimizer: simulated, and what a
            pass takes besides its actions. In a plan for inference from one batch to the next, in a
            steady flow.
        bound_seconds: a lower bound for every schedule with this number of micro-batches on these
            devices (`penstock.plan.bound`); with one stage per device for any cuts, otherwise for
            the cuts of this plan.
        one_device_seconds: predicted for one device alone; `None` if the model does not fit its
            memory.
        data_parallel_seconds: predicted for a replica of the model on every device, each with a
            share of the batch; `None` if a replica does not fit the memory.
        overhead_seconds: per action of a worker, besides its work.
        pass_seconds: of a pass, besides its actions.
        overlap: whether a worker continues while its messages are being sent.
        rules: the priority rules of a fitted schedule.
        memory_limit: bytes that every worker may hold, if requested.
        boundary_dtype: the dtype to which boundary values are rounded, if requested.
        other_replicas: for every replica but the first the devices of its workers.
        other_stages: for every replica but the first its stages, which have the same calls, but
            other times if its devices are others; empty if all replicas have the same devices.
        shares: how many of the micro-batches every replica runs; empty if they are dealt evenly.
        threads: intra-op threads of each CPU worker for which it was made, on which bits depend; 0
            where it is not known.
        note: why there is one replica, if several were not possible.
        considered: the other candidates, fastest first.
        inference: whether it is for a steady flow of forwards (`penstock.plan.flow`), and cannot
            train.
        way_seconds: of a plan for inference: how long one batch takes alone, from the first stage
            to the last.
        in_flight: of a plan for inference: for how many groups of sequences, of all replicas
            together, there is room for states; 0 in plans of before that was said.
        version: of the file format.
    """

    fingerprint: str
    batch_size: int
    num_microbatches: int
    schedule: str
    stages: tuple[StagePlan, ...]
    predicted_step_seconds: float
    bound_seconds: float
    one_device_seconds: float | None
    data_parallel_seconds: float | None = None
    overhead_seconds: float = 0.0
    pass_seconds: float = 0.0
    overlap: bool = True
    rules: Rules | None = None
    memory_limit: int | None = None
    boundary_dtype: str | None = None
    other_replicas: tuple[tuple[str, ...], ...] = ()
    other_stages: tuple[tuple[StagePlan, ...], ...] = ()
    shares: tuple[int, ...] = ()
    threads: int = 0
    note: str = ""
    considered: tuple[Candidate, ...] = ()
    inference: bool = False
    way_seconds: float = 0.0
    in_flight: int = 0
    version: int = _VERSION

    @property
    def cuts(self) -> tuple[int, ...]:
        """The first call of each stage except the first stage."""
        return tuple(stage.calls[0] for stage in self.stages[1:])

    @property
    def placement(self) -> tuple[int, ...]:
        """The number of every stage's worker, stage by stage."""
        return tuple(stage.worker for stage in self.stages)

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of every worker, replica after replica."""
        found = {stage.worker: stage.device for stage in self.stages}
        first = (found[worker] for worker in range(len(found)))
        return (*first, *(device for replica in self.other_replicas for device in replica))

    @property
    def replicas(self) -> int:
        """The number of replicas of all stages, which share the micro-batches of a batch."""
        return 1 + len(self.other_replicas)

    @property
    def workers_per_replica(self) -> int:
        """How many workers run the stages of one replica."""
        return 1 + max(self.placement)

    @property
    def microbatch_size(self) -> int:
        """The rows of the largest micro-batch."""
        return -(-self.batch_size // self.num_microbatches)

    @property
    def batches_per_second(self) -> float:
        """Batches in a second: steps of training, or of a plan for inference in a steady flow."""
        return 1 / self.predicted_step_seconds

    @property
    def microbatches_per_second(self) -> float:
        """Micro-batches in a second, likewise."""
        return self.num_microbatches * self.batches_per_second

    @property
    def splits_backward(self) -> bool:
        """Whether the schedule splits backwards in halves."""
        by_rules = self.rules is not None and self.rules.split
        return SCHEDULES[self.schedule].splits_backward or by_rules

    @property
    def costs(self) -> Costs:
        """The times of the first replica's stages for the largest micro-batch."""
        return costs_of(self.stages)

    def schedule_for(self, num_microbatches: int) -> Schedule:
        """The schedule of a replica that runs this many micro-batches."""
        if self.rules is not None:
            return build(
                self.schedule,
                len(self.stages),
                num_microbatches,
                costs=self.costs,
                placement=self.placement,
                rules=self.rules,
            )
        workers = self.workers_per_replica
        return build(self.schedule, len(self.stages), num_microbatches, num_workers=workers)

    @property
    def largest_share(self) -> int:
        """The most micro-batches that a replica runs."""
        return max(map(len, dealt(self.num_microbatches, self.weights)))

    def memory_with(self, in_flight: Sequence[int]) -> int:
        """The most bytes that a worker of the first replica holds, if its stages hold so much.

        Args:
            in_flight: for every stage, how many micro-batches it holds at once.
        """
        planned = check(self.schedule_for(self.largest_share)).in_flight
        held = [0] * len(self.devices)
        for stage, now, then in zip(self.stages, in_flight, planned, strict=True):
            held[stage.worker] += stage.memory_bytes + (now - then) * stage.held_bytes
        return max(held)

    @property
    def batches_under_way(self) -> int:
        """How many batches `Pipeline.map` has under way, so that all stages are busy."""
        return 1 + -(-len(self.stages) * self.replicas // self.num_microbatches)

    @property
    def groups(self) -> int:
        """For how many groups of sequences a plan for inference has room for states."""
        return self.in_flight or len(self.devices)

    @property
    def weights(self) -> tuple[int, ...]:
        """By which the replicas share the micro-batches, one for each; see `shares.dealt`."""
        return self.shares or (1,) * self.replicas

    def share(self, replica: int) -> tuple[int, ...]:
        """The numbers of the micro-batches of a replica, where they are dealt one by one."""
        return dealt(self.num_microbatches, self.weights)[replica]

    def stages_of(self, replica: int) -> tuple[StagePlan, ...]:
        """The stages of a replica."""
        return self.other_stages[replica - 1] if replica and self.other_stages else self.stages

    def costs_of(self, replica: int) -> Costs:
        """The times of a replica's stages for the largest micro-batch."""
        return costs_of(self.stages_of(replica))

    def timeline(self) -> Timeline:
        """The predicted step, if all micro-batches were as large as the largest.

        Replicas with shares of their own have the schedules of so many micro-batches; where they
        are dealt evenly, all have that of the largest share. A plan for inference has the forwards
        of the first batches of a flow, two for every stage.
        """
        batches = 2 * len(self.stages) if self.inference else 1
        shares = dealt(batches * self.num_microbatches, self.weights)
        most = max(map(len, shares))
        alike: dict[tuple[tuple[StagePlan, ...], int], Timeline] = {}
        events = []
        for replica, share in enumerate(shares):
            own, before = self.stages_of(replica), replica * self.workers_per_replica
            kind = own, len(share) if self.shares else most
            if kind not in alike:
                costs = costs_of(own)
                network = Network.of(costs, overlap=self.overlap, overhead=self.overhead_seconds)
                alike[kind] = simulate(self.schedule_for(kind[1]), costs.seconds, network)
            events += [
                Event(before + worker, action._replace(microbatch=share[action.microbatch]), *times)
                for worker, action, *times in alike[kind].events
                if action.microbatch < len(share)
                and not (self.inference and action.kind is not Kind.FORWARD)
            ]
        return Timeline(len(self.devices), events)

    @property
    def way(self) -> Way:
        """What kind of plan it is."""
        if len(self.devices) == 1:
            return "one device"
        return "data parallel" if self.workers_per_replica == 1 else "pipeline"

    @property
    def is_worth_it(self) -> bool:
        """Whether the plan is predicted to be faster than one device alone."""
        alone = self.one_device_seconds
        return alone is None or self.predicted_step_seconds < alone

    @property
    def rates(self) -> dict[str, float]:
        """What a plan for inference says besides: how many batches there are in a second."""
        if not self.inference:
            return {}
        return {
            "batches_per_second": self.batches_per_second,
            "microbatches_per_second": self.microbatches_per_second,
        }

    def encode(self) -> bytes:
        """JSON with a line for everything that was decided, and for every candidate."""
        return readable({**msgspec.to_builtins(self), **self.rates})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; an existing file is replaced in one move.

        Raises:
            InputError: it cannot be written there.
        """
        save_whole(path, self.encode(), "plan")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanError: the file is not a plan, or one of another version.
            InputError: it cannot be read.
        """
        text = read_whole(path, "plan")
        if what_is(text) == "profile":
            raise PlanError(f"{path} is a profile; give a plan that was made from it")
        try:
            version = version_of(text)
            if version != _VERSION:
                raise PlanError(
                    f"{path} is a plan of version {version}, this Penstock reads version "
                    f"{_VERSION}; plan again"
                )
            found = msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise PlanError(f"{path} is not a plan that Plan.save wrote: {error}") from error
        if wrong := next(found._mistakes(), None):
            raise PlanError(f"{path} is not a plan that can be followed: {wrong}")
        return found

    def _mistakes(self) -> Iterator[str]:
        """What somebody may have got wrong who wrote to the file by hand."""
        if self.schedule not in SCHEDULES:
            yield f"schedule={self.schedule!r} is unknown; there are {', '.join(SCHEDULES)}"
            return
        if not 1 <= self.num_microbatches <= self.batch_size:
            yield f"{self.num_microbatches} micro-batches of {self.batch_size} rows"
        if not (self.predicted_step_seconds > 0 and self.bound_seconds > 0):
            yield "predicted_step_seconds and bound_seconds have to be more than zero"
        if not self.stages or {*self.placement} != {*range(len({*self.placement}))}:
            yield "stages: their workers have to be numbered from 0, without gaps"
        elif self.rules is None:
            workers = max(self.placement) + 1
            recipe, stages = SCHEDULES[self.schedule], len(self.stages)
            takes = recipe.takes(stages, workers)
            if not takes or recipe.place(stages, workers) != self.placement:
                yield f"{self.schedule} does not run stages on workers {self.placement}"
        if self.boundary_dtype not in (None, *HALF):
            yield f"boundary_dtype={self.boundary_dtype!r} is none of {', '.join(HALF)}"
        if self.stages and (self.other_replicas or self.other_stages or self.shares):
            yield from self._mistakes_of_replicas()
        begin = 0
        yield from self._mistakes_of_inference()
        for number, stage in enumerate(self.stages):
            first, end = stage.calls
            if first != begin or end <= first:
                yield f"stage {number}: calls={first, end} do not go on from call {begin}"
            begin = end
            edges = [first, *(edge for span in stage.recompute for edge in span), end]
            if edges != sorted(edges) or any(a == b for a, b in stage.recompute):
                yield f"stage {number}: recompute={stage.recompute} are no spans of {first, end}"

    def _mistakes_of_inference(self) -> Iterator[str]:
        if self.inference and any(stage.recompute for stage in self.stages):
            yield "a plan for inference recomputes nothing, as it has no backwards"
        if self.inference and len(self.stages) != len({*self.placement}):
            yield "a plan for inference has one stage on each worker"
        if self.in_flight < 0:
            yield f"in_flight={self.in_flight} is less than 0"

    def _mistakes_of_replicas(self) -> Iterator[str]:
        each = self.workers_per_replica
        if any(len(devices) != each for devices in self.other_replicas):
            yield f"other_replicas={self.other_replicas}: each needs {each} devices"
        if self.replicas > self.num_microbatches:
            yield f"{self.replicas} replicas cannot share {self.num_microbatches} micro-batches"
        if self.splits_backward and self.replicas > 1:
            yield f"{self.schedule} halves backwards, which replicas do not"
        if self.shares and (
            len(self.shares) != self.replicas
            or min(self.shares) < 1
            or sum(self.shares) != self.num_microbatches
        ):
            yield (
                f"shares={self.shares} are not {self.replicas} numbers from 1 whose sum is "
                f"{self.num_microbatches} micro-batches"
            )
        if self.other_stages and any(
            [stage.calls for stage in stages] != [stage.calls for stage in self.stages]
            for stages in self.other_stages
        ):
            yield "other_stages: a replica has other calls than the first"
        if len(self.other_stages) not in (0, len(self.other_replicas)):
            yield (
                f"other_stages is for {len(self.other_stages)} replicas, and other_replicas for "
                f"{len(self.other_replicas)}"
            )

    def check_fits(self, fingerprint: str, devices: Sequence[str], calls: int) -> None:
        """Raise unless the plan was made for this program and this many devices.

        Args:
            fingerprint: of the program.
            devices: that there are.
            calls: of the program.

        Raises:
            PlanError: it was made for another.
        """
        if fingerprint != self.fingerprint:
            raise PlanError(
                f"the plan was made for another model (its program is {self.fingerprint}, this "
                f"one is {fingerprint}); its stages began with "
                f"{', '.join(stage.first for stage in self.stages)}. Plan again for this model"
            )
        if self.stages[-1].calls[1] != calls:
            raise PlanError(
                f"the plan's last stage ends with call {self.stages[-1].calls[1] - 1}, and the "
                f"program has {calls} calls; plan again"
            )
        if len(devices) != len(self.devices):
            raise PlanError(
                f"the plan is for {len(self.devices)} devices and there are {len(devices)}; "
                f"give it {len(self.devices)} devices or plan again"
            )

    def __str__(self) -> str:
        said = [verdict(self), *filter(None, [self.note])]
        lines = [*said, "", *stages(self), "", prediction(self)]
        if self.other_stages:
            lines += ["", *replicas(self)]
        if self.considered:
            lines += ["", *considered(self)]
        return "\n".join(lines)

    @property
    def summary(self) -> str:
        """What wins, the configuration, and what is predicted of it."""
        alone, parallel, _ = _predicted(self)
        text = prediction(self)
        if len(self.devices) == 1:
            return text
        return f"{text}; one device {_fitting(alone)}; data parallel {_fitting(parallel)}"


def costs_of(stages: Sequence[StagePlan]) -> Costs:
    """The times of these stages for the largest micro-batch."""
    return Costs(
        forward=tuple(stage.forward_seconds for stage in stages),
        backward=tuple(stage.backward_seconds for stage in stages),
        weight=tuple(stage.weight_seconds for stage in stages),
        halving=tuple(stage.halving_seconds for stage in stages),
        latency=tuple(stage.latency_seconds for stage in stages[1:]),
        transfer=tuple(stage.transfer_seconds for stage in stages[1:]),
    )


# -- as text ------------------------------------------------------------------------------


def winner(plan: Plan) -> Way:
    """What was predicted to be the fastest: the kind of the plan, unless something beats it."""
    return _beaten_by(plan) or plan.way


def _beaten_by(plan: Plan) -> Way | None:
    """What is predicted to be faster than the plan, and was not asked for or is not possible."""
    alone, parallel, here = _predicted(plan)
    if len(plan.devices) == 1:
        return None
    chosen_from = any(c.way == "one device" and not c.only_compared for c in plan.considered)
    if plan.inference and here <= min(
        alone, parallel
    ):  # as fast as what the script can keep up with
        return None
    if alone <= here and not chosen_from:  # else it is too little faster
        return "one device" if alone <= parallel or plan.replicas > 1 else "data parallel"
    return "data parallel" if parallel <= here and plan.replicas == 1 else None


def verdict(plan: Plan) -> str:
    """What is the fastest thing to do with these devices."""
    alone, parallel, here = _predicted(plan)
    beaten_by = _beaten_by(plan)
    if plan.inference and beaten_by == "data parallel":
        return (
            f"Replicas of the whole model are predicted to be faster ({show_seconds(parallel)} a "
            f"batch): replicas={len(plan.devices)} runs one on every device."
        )
    if beaten_by == "one device":
        return (
            f"One device alone is predicted to be faster ({show_seconds(alone)}): splitting is not "
            "worth it here."
        )
    if beaten_by == "data parallel":
        on_cpus = all(device == "cpu" for device in plan.devices) and not plan.note
        how = _IN_ORDER.format(len(plan.devices)) if on_cpus else _RING
        return (
            f"Data parallelism is predicted to be faster ({show_seconds(parallel)}): a replica of "
            f"the model on every device; {how}."
        )
    if len(plan.devices) == 1:
        return _of_one_worker(plan)
    if plan.replicas == 1:
        what, other = "Splitting is", _against(here, parallel, "data parallelism")
        if plan.inference and plan.data_parallel_seconds is None:
            other = ""  # a micro-batch is on one replica, so one of them has no data parallelism
    else:
        split = fastest_of(c for c in plan.considered if c.replicas == 1 and c.way == "pipeline")
        what = f"{plan.replicas} replicas are"
        other = "" if split is None else _against(here, split, "one replica")
    compared = ", ".join(filter(None, (_against(here, alone, "one device"), other)))
    return f"{what} predicted to be the fastest: {_each(plan)}, {compared}."


def _each(plan: Plan) -> str:
    """The seconds of a step, or of a batch in a steady flow."""
    return f"{show_seconds(plan.predicted_step_seconds)} a {'batch' if plan.inference else 'step'}"


def _of_one_worker(plan: Plan) -> str:
    """What is said of a plan of one worker: whether it is the best of several."""
    here = plan.predicted_step_seconds
    if plan.inference and len(plan.considered) == 1:
        return f"There is one device: nothing to split. {_each(plan)} in a steady flow."
    others = [c for c in plan.considered if c.way != "one device" and not c.only_compared]
    best = fastest_of(others)
    if not others:
        return "There is one device: nothing to split."
    which = "One device alone"
    if not _left_out(plan):
        which = f"One worker with {plan.threads} intra-op threads"
    if best is None:
        return f"{which} is all that fits the memory: {_each(plan)}."
    return (
        f"{which} is predicted to be the fastest: {_each(plan)}, "
        f"{_against(here, best, 'the best plan of several workers')}."
    )


def _left_out(plan: Plan) -> list[Candidate]:
    """What else was possible with workers like that of this plan, if it is the only one."""
    if len(plan.devices) > 1:
        return []
    return [
        candidate
        for candidate in plan.considered
        if candidate.threads == plan.threads
        and candidate.way != "one device"
        and not candidate.only_compared
    ]


def fastest_of(candidates: Iterable[Candidate]) -> float | None:
    """The seconds of the fastest one that fits the memory."""
    known = [c.predicted_step_seconds for c in candidates if c.predicted_step_seconds is not None]
    return min(known, default=None)


def advice(plan: Plan) -> list[str]:
    """What somebody should know before he runs this plan: a sentence for each, if any."""
    found = []
    if _beaten_by(plan) is not None:
        found.append(f"{verdict(plan)} The pipeline is predicted to take {_each(plan)}.")
    if left_out := _left_out(plan):
        numbers = {candidate.replicas for candidate in left_out}
        ways = ["replicas=1 splits the model over all of them"] if 1 in numbers else []
        if max(numbers) > 1:
            ways.append(f"replicas={max(numbers)} runs {max(numbers)} replicas")
        found.append(
            f"{verdict(plan).rstrip('.')}, so the other devices are not used; {', '.join(ways)}."
        )
    timeline = plan.timeline()
    for worker, busy in enumerate(timeline.busy()):
        if busy < _IDLE * timeline.seconds:
            share = f"{busy / timeline.seconds:.0%} of {'the time' if plan.inference else 'a step'}"
            found.append(
                f"Worker {worker} is predicted to work for {share} "
                "only: the model has too little that can be given to it. Fewer devices would do."
            )
    return found


def prediction(plan: Plan) -> str:
    """The configuration, and what is predicted of it."""
    replicas = f"{plan.replicas} replicas, " if plan.replicas > 1 else ""
    if plan.inference:
        return _prediction_of_flow(plan)
    return (
        f"{replicas}{plan.schedule}, {_counted(plan)}{_boundaries(plan)}: "
        f"{show_seconds(plan.predicted_step_seconds)} "
        f"predicted, {_share(plan)} of the bound ({show_seconds(plan.bound_seconds)})"
    )


def _prediction_of_flow(plan: Plan) -> str:
    """The configuration of a plan for inference, and what is predicted of a steady flow."""
    counted = [f"{plan.replicas} replicas"] if plan.replicas > 1 else []
    number = len(plan.stages)
    counted.append(f"{number} stage{'s' * (number > 1)}")
    rate = f"{_rate(plan.batches_per_second)} batches a second"
    if plan.num_microbatches > 1:
        rate += f" ({_rate(plan.microbatches_per_second)} micro-batches)"
    return (
        f"inference, {', '.join(counted)}, {_counted(plan)}{_boundaries(plan)}: "
        f"{show_seconds(plan.predicted_step_seconds)} a batch predicted in a steady flow, {rate}, "
        f"{_share(plan)} of the bound ({show_seconds(plan.bound_seconds)}); "
        f"one batch alone takes {show_seconds(plan.way_seconds)}"
    )


def _rate(number: float) -> str:
    """How many there are in a second, with three digits at least."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def stages(plan: Plan, width: int | None = None) -> list[str]:
    """A line for every stage, and what the columns do not say; no longer than `width`."""
    if plan.inference:
        forwards = [_row_of_flow(number, stage) for number, stage in enumerate(plan.stages)]
        return aligned([_FORWARD_HEADING, *forwards], _STAGE_TEXTS[:2], width)
    rows = [_row(number, stage) for number, stage in enumerate(plan.stages)]
    return aligned([_STAGE_HEADING, *rows], _STAGE_TEXTS, width)


def flow(plan: Plan) -> list[str]:
    """A line per worker of a plan for inference, a cell per unit of time: which batch is where.

    A cell is `F` and the number of the batch, with that of the micro-batch after it where there are
    several: `F2.0`. All forwards take one unit here, and what comes after goes on in this way.
    """
    stages, has_several = len(plan.stages), plan.num_microbatches > 1
    lines = []
    for replica in range(plan.replicas):
        share = plan.share(replica)
        batches = range(1 + -(-2 * stages // len(share)))
        cells = [f"F{b}.{m}" if has_several else f"F{b}" for b in batches for m in share]
        lines += [[".."] * stage + cells[: len(cells) - stage] for stage in range(stages)]
    width = max(len(cell) for line in lines for cell in line)
    digits = len(str(len(lines) - 1))
    return [
        f"worker {worker:>{digits}} | {' '.join(cell.ljust(width) for cell in line)} …"
        for worker, line in enumerate(lines)
    ]


def replicas(plan: Plan, width: int | None = None) -> list[str]:
    """A line for every replica, if they have other devices; no longer than `width`."""
    if not plan.other_stages:
        return []
    each = plan.workers_per_replica
    rows = [_REPLICA_HEADING]
    for replica, share in enumerate(plan.weights):
        own = plan.stages_of(replica)
        devices = plan.devices[replica * each : (replica + 1) * each]
        slowest = max(stage.seconds for stage in own)
        memory = max(stage.memory_bytes for stage in own)
        row = f"{replica}", ", ".join(devices), f"{share}", show_seconds(slowest)
        rows.append((*row, show_bytes(memory)))
    return aligned(rows, (1,), width)


def considered(plan: Plan, width: int | None = None) -> list[str]:
    """A line for the best of every way and schedule, the fastest first; no longer than `width`.

    Where plans differ in the intra-op threads of their workers, a column says how many.
    """
    best: dict[tuple[str, str, int, int], Candidate] = {}
    for found in plan.considered:
        schedule = found.schedule if found.stages > 1 else ""  # they are all the same with one
        kind = found.way, schedule, found.replicas, found.threads
        if kind not in best or found.why == "chosen":  # others may be as fast
            best[kind] = found
    has_threads = len({candidate.threads for candidate in plan.considered}) > 1
    heading = (*_CONSIDERED_HEADING[:1], "threads", *_CONSIDERED_HEADING[1:])
    rows = [heading, *(_considered(candidate) for candidate in best.values())]
    texts = (0, 7)
    if not has_threads:
        rows, texts = [(row[0], *row[2:]) for row in rows], (0, 6)
    lines = aligned(rows, texts, width)
    others = len(plan.considered) - len(best)
    if others:
        lines.append(f"and {others} other micro-batch counts and stages; plan.considered has all")
    return lines


def _predicted(plan: Plan) -> tuple[float, float, float]:
    """Seconds of one device, of data parallelism and of the plan; infinite if it does not fit."""
    alone, parallel = plan.one_device_seconds, plan.data_parallel_seconds
    never = float("inf")
    return (
        never if alone is None else alone,
        never if parallel is None else parallel,
        plan.predicted_step_seconds,
    )


def _against(here: float, other: float, name: str) -> str:
    if other == float("inf"):
        return f"and {name} does not fit the memory"
    return f"{other / here:.2f} times as fast as {name} ({show_seconds(other)})"


def _fitting(seconds: float) -> str:
    return "does not fit" if seconds == float("inf") else show_seconds(seconds)


def _counted(plan: Plan) -> str:
    size = f"{plan.microbatch_size} row{'s' * (plan.microbatch_size > 1)}"
    if plan.num_microbatches == 1:
        return f"1 micro-batch of {size}"
    upto = "up to " if plan.batch_size % plan.num_microbatches else ""
    return f"{plan.num_microbatches} micro-batches of {upto}{size}"


def _boundaries(plan: Plan) -> str:
    return f", boundaries in {plan.boundary_dtype}" if plan.boundary_dtype else ""


def _share(plan: Plan) -> str:
    return f"{plan.bound_seconds / plan.predicted_step_seconds:.0%}"


def _what(number: int, stage: StagePlan) -> tuple[str, str, str, str]:
    """The first cells of a stage's line: which it is, and what is in it."""
    return (
        str(number),
        f"{stage.worker} {stage.device}",
        stage.first if stage.first == stage.last else f"{stage.first} … {stage.last}",
        show_bytes(stage.weight_bytes),
    )


def _row(number: int, stage: StagePlan) -> tuple[str, ...]:
    first, last = stage.calls
    again = sum(b - a for a, b in stage.recompute)
    return (
        *_what(number, stage),
        show_bytes(stage.input_bytes),
        show_seconds(stage.forward_seconds),
        show_seconds(stage.backward_seconds),
        show_bytes(stage.memory_bytes),
        f"recomputes {again} of {last - first} calls" if again else "",
    )


def _row_of_flow(number: int, stage: StagePlan) -> tuple[str, ...]:
    """A line for a stage of a plan for inference."""
    return (
        *_what(number, stage),
        show_bytes(stage.state_bytes),
        show_bytes(stage.input_bytes),
        show_seconds(stage.forward_seconds),
        show_bytes(stage.memory_bytes),
    )


def _considered(found: Candidate) -> tuple[str, ...]:
    seconds = found.predicted_step_seconds
    if found.way == "pipeline":
        name = found.schedule or "stages"  # of a plan for inference
    else:
        name = f"{found.way}, {found.schedule}" if found.stages > 1 else found.way
    return (
        name,
        str(found.threads or "-"),
        str(found.replicas),
        str(found.stages),
        str(found.num_microbatches),
        "-" if seconds is None else show_seconds(seconds),
        show_bytes(found.memory_bytes) if found.memory_bytes else "-",
        found.why,
    )
