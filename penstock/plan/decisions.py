"""What a plan decides and predicts, as data, and what follows from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Literal

import msgspec

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

VERSION = 3
"""Of the format of a plan's file."""

HALF = ("bfloat16", "float16")
"""The half-precision dtypes to which boundary values may be rounded."""

WORTH_FEWER = 1.02
"""How many times as fast fewer workers have to be to be preferred: a profile has some noise.

Also if they have as many cores: one worker's threads wait for each other in every operation, so
that it suffers most where something else runs.
"""

SHORT = 0.05
"""Steps that take fewer seconds than this may be as fast on one worker with one thread.

The threads of short operations spin as they wait for each other. That takes another core, and is
slow whenever this core has anything else to do.
"""

WORTH_THREADS = 1.1
"""How many times as fast one worker has to be with more threads for them to be used, in `SHORT`."""

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
        schedule: its name; empty for replicas of the whole model or one device that are only
            compared with, and for inference.
        num_microbatches: the number of micro-batches of a batch, of all replicas together.
        predicted_step_seconds: seconds of a step; `None` if it does not fit the memory.
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


def batches_under_way(stages: int, replicas: int, num_microbatches: int) -> int:
    """How many batches keep all stages of all replicas busy with forwards."""
    return 1 + -(-stages * replicas // num_microbatches)


class Decisions(msgspec.Struct, frozen=True, kw_only=True):
    """Cuts, placement, number of micro-batches and schedule, with the predicted step time.

    Attributes:
        fingerprint: of the program for which it was made.
        batch_size: rows of the batch for which it was made.
        num_microbatches: the number of micro-batches of a batch.
        schedule: the name of the schedule.
        stages: the stages, in order.
        predicted_step_seconds: of one `train_step` without the optimizer: the simulated seconds of
            its actions, and `pass_seconds`. In a plan for inference, the seconds from one batch to
            the next in a steady flow.
        bound_seconds: a lower bound for every schedule with this number of micro-batches on these
            devices (`penstock.plan.bound`). It holds for any cuts if every device has one stage
            with whole backwards, otherwise for the cuts of this plan.
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
            together, there is room for states; 0 in older plans, which do not say (see `groups`).
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
    version: int = VERSION

    @property
    def layout(self) -> tuple[object, ...]:
        """Who runs what in which order in a step: plans of one layout differ in what they predict.

        The order of forwards alone, and of backwards alone, depends on predictions, too.
        """
        stages = tuple((s.worker, s.calls, s.recompute) for s in self.stages)
        return (self.schedule, self.rules, self.devices, self.shares, self.boundary_dtype, stages)

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
        return batches_under_way(len(self.stages), self.replicas, self.num_microbatches)

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


def fastest_of(candidates: Iterable[Candidate]) -> float | None:
    """The seconds of the fastest one that fits the memory."""
    known = [c.predicted_step_seconds for c in candidates if c.predicted_step_seconds is not None]
    return min(known, default=None)
