"""A plan: everything that was decided, as a file that a person can read and commit."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec

from penstock.errors import PlanError
from penstock.files import read_whole, readable, save_whole, version_of, what_is
from penstock.plan.describe import describe, summarise
from penstock.schedule import SCHEDULES, Costs, Rules, Schedule, Timeline, build
from penstock.simulate import Network, simulate

_VERSION = 2

HALF = ("bfloat16", "float16")
"""Types of half precision, in which boundary values may travel."""


class StagePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a plan.

    Attributes:
        worker: who runs it, counted from 0.
        device: where it runs.
        calls: the first call, and the one after the last.
        first: the label of its first call.
        last: the label of its last call.
        weight_bytes: bytes of the parameters that it owns.
        input_bytes: bytes that enter it, per micro-batch.
        forward_seconds: predicted, per micro-batch.
        backward_seconds: predicted, per micro-batch, recomputing included.
        weight_seconds: the part of it that a schedule with halved backwards puts off (`W`).
        halving_seconds: what the two halves take longer than the whole.
        latency_seconds: one way from the stage before, for the smallest message.
        transfer_seconds: for which what enters occupies the link.
        held_bytes: what it holds for every micro-batch in flight.
        memory_bytes: the most it holds: weights, gradients, optimizer state, activations.
        recompute: spans of its calls, each `(first, one after the last)`, whose activations are not
            held but computed a second time in the backward.
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
    recompute: tuple[tuple[int, int], ...] = ()

    @property
    def seconds(self) -> float:
        """Forward and backward of one micro-batch."""
        return self.forward_seconds + self.backward_seconds

    @property
    def spans(self) -> list[tuple[int, int, bool]]:
        """Its calls in spans `(first, one after the last, whether they are recomputed)`."""
        edges = sorted({*self.calls, *(edge for span in self.recompute for edge in span)})
        return [(a, b, (a, b) in self.recompute) for a, b in pairwise(edges)]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration that was considered.

    Attributes:
        way: `"pipeline"`, `"one device"` or `"data parallel"`; replicas of a pipeline are both.
        schedule: its name; empty without a pipeline.
        num_microbatches: of every replica.
        predicted_step_seconds: `None` if it does not fit the memory.
        replicas: how many there are of the model.
        stages: of every replica.
        memory_bytes: the most that any device holds.
        why: what was found of it, in words.
    """

    way: str = "pipeline"
    schedule: str
    num_microbatches: int
    predicted_step_seconds: float | None
    replicas: int = 1
    stages: int = 1
    memory_bytes: int = 0
    why: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Where to cut, how many micro-batches, in which order, and what to expect of it.

    Attributes:
        fingerprint: of the program that it was made for.
        batch_size: rows of the batch that it was made for.
        num_microbatches: into how many micro-batches a batch is split.
        schedule: the name of the schedule.
        stages: the stages, in order.
        predicted_step_seconds: simulated time of one `train_step`, without the optimizer.
        bound_seconds: no schedule of this many micro-batches can be faster on these devices
            (`penstock.plan.bound`): with one stage on each no cut either, with several the cuts
            are taken as they are.
        one_device_seconds: predicted for the first device alone, at its best micro-batch size;
            `None` if the model does not fit its memory.
        data_parallel_seconds: predicted for a replica of the model on every device, with a share of
            the batch each; `None` if a replica does not fit the memory.
        overhead_seconds: for every action of a worker, besides its work.
        overlap: whether a worker goes on while what it sends is under way.
        rules: what a fitted schedule prefers.
        memory_limit: bytes that every worker may hold, if that was asked for.
        boundary_dtype: the type of half precision in which boundary values travel, if that was
            asked for.
        considered: what else was looked at, the fastest first.
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
    overlap: bool = True
    rules: Rules | None = None
    memory_limit: int | None = None
    boundary_dtype: str | None = None
    considered: tuple[Candidate, ...] = ()
    version: int = _VERSION

    @property
    def cuts(self) -> tuple[int, ...]:
        """The call before which each stage but the first begins."""
        return tuple(stage.calls[0] for stage in self.stages[1:])

    @property
    def placement(self) -> tuple[int, ...]:
        """The worker of every stage."""
        return tuple(stage.worker for stage in self.stages)

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of every worker."""
        found = {stage.worker: stage.device for stage in self.stages}
        return tuple(found[worker] for worker in range(len(found)))

    @property
    def microbatch_size(self) -> int:
        """The rows of the largest micro-batch."""
        return -(-self.batch_size // self.num_microbatches)

    @property
    def splits_backward(self) -> bool:
        """Whether backwards come in halves."""
        by_rules = self.rules is not None and self.rules.split
        return SCHEDULES[self.schedule].splits_backward or by_rules

    @property
    def costs(self) -> Costs:
        """What the stages take for the largest micro-batch."""
        return Costs(
            forward=tuple(stage.forward_seconds for stage in self.stages),
            backward=tuple(stage.backward_seconds for stage in self.stages),
            weight=tuple(stage.weight_seconds for stage in self.stages),
            halving=tuple(stage.halving_seconds for stage in self.stages),
            latency=tuple(stage.latency_seconds for stage in self.stages[1:]),
            transfer=tuple(stage.transfer_seconds for stage in self.stages[1:]),
        )

    def schedule_for(self, num_microbatches: int) -> Schedule:
        """The schedule, for a batch of this many micro-batches."""
        if self.rules is not None:
            return build(
                self.schedule,
                len(self.stages),
                num_microbatches,
                costs=self.costs,
                placement=self.placement,
                rules=self.rules,
            )
        workers = len(self.devices)
        return build(self.schedule, len(self.stages), num_microbatches, num_workers=workers)

    def timeline(self) -> Timeline:
        """The step as predicted, with all micro-batches of the largest one's size."""
        costs = self.costs
        network = Network.of(costs, overlap=self.overlap, overhead=self.overhead_seconds)
        return simulate(self.schedule_for(self.num_microbatches), costs.seconds, network)

    @property
    def is_worth_it(self) -> bool:
        """Whether the plan is predicted to be faster than one device alone."""
        alone = self.one_device_seconds
        return alone is None or self.predicted_step_seconds < alone

    def encode(self) -> bytes:
        """JSON with a line for everything that was decided, and for every candidate."""
        return readable(msgspec.to_builtins(self))

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
        begin = 0
        for number, stage in enumerate(self.stages):
            first, end = stage.calls
            if first != begin or end <= first:
                yield f"stage {number}: calls={first, end} do not go on from call {begin}"
            begin = end
            edges = [first, *(edge for span in stage.recompute for edge in span), end]
            if edges != sorted(edges) or any(a == b for a, b in stage.recompute):
                yield f"stage {number}: recompute={stage.recompute} are no spans of {first, end}"

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
        return describe(self)

    @property
    def summary(self) -> str:
        """What wins, the configuration, and what is predicted of it."""
        return summarise(self)
