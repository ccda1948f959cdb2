"""A plan: everything that was decided, as a file that a person can read and commit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import msgspec

from penstock.errors import PlanError
from penstock.schedule import Schedule, build

_VERSION = 2


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
    """A configuration that was considered, with the step time predicted for it."""

    schedule: str
    num_microbatches: int
    predicted_step_seconds: float


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Where to cut, how many micro-batches, in which order, and what to expect of it.

    Attributes:
        fingerprint: of the program that it was made for.
        batch_size: rows of the batch that it was made for.
        num_microbatches: into how many micro-batches a batch is split.
        schedule: the name of the schedule.
        stages: the stages, in order.
        predicted_step_seconds: simulated time of one `train_step`, without the optimizer.
        bound_seconds: no cut and no schedule of this many micro-batches on these devices, one
            contiguous stage on each, can be faster (`penstock.plan.bound`).
        one_device_seconds: predicted for the first device alone, at its best micro-batch size.
        considered: the best of every schedule and micro-batch count that was looked at.
        version: of the file format.
    """

    fingerprint: str
    batch_size: int
    num_microbatches: int
    schedule: str
    stages: tuple[StagePlan, ...]
    predicted_step_seconds: float
    bound_seconds: float
    one_device_seconds: float
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

    def schedule_for(self, num_microbatches: int) -> Schedule:
        """The schedule, for a batch of this many micro-batches."""
        stages, workers = len(self.stages), len(self.devices)
        return build(self.schedule, stages, num_microbatches, num_workers=workers)

    @property
    def microbatch_size(self) -> int:
        """The rows of the largest micro-batch."""
        return -(-self.batch_size // self.num_microbatches)

    @property
    def is_worth_it(self) -> bool:
        """Whether the plan is predicted to be faster than one device alone."""
        return self.predicted_step_seconds < self.one_device_seconds

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; an existing file is replaced in one move."""
        target = Path(path)
        text = msgspec.json.format(msgspec.json.encode(self), indent=2)
        scratch = target.with_name(f".{target.name}.{os.getpid()}")
        scratch.write_bytes(text + b"\n")
        scratch.replace(target)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanError: the file is not a plan, or one of another version.
        """
        try:
            plan = msgspec.json.decode(Path(path).read_bytes(), type=cls)
        except msgspec.DecodeError as error:
            raise PlanError(f"{path} is not a plan that Plan.save wrote: {error}") from error
        if plan.version != _VERSION:
            raise PlanError(
                f"{path} is a plan of version {plan.version}, this Penstock reads version "
                f"{_VERSION}; plan again"
            )
        return plan

    def check_fits(self, fingerprint: str, devices: Sequence[str]) -> None:
        """Raise unless the plan was made for this program and this many devices.

        Raises:
            PlanError: it was made for another.
        """
        if fingerprint != self.fingerprint:
            raise PlanError(
                f"the plan was made for another model (its program is {self.fingerprint}, this "
                f"one is {fingerprint}); its stages began with "
                f"{', '.join(stage.first for stage in self.stages)}. Plan again for this model"
            )
        if len(devices) != len(self.devices):
            raise PlanError(
                f"the plan is for {len(self.devices)} devices and there are {len(devices)}; "
                f"give it {len(self.devices)} devices or plan again"
            )

    def __str__(self) -> str:
        rows = [("stage", "device", "calls", "from", "to", "weights", "input", "fwd", "bwd")]
        for index, s in enumerate(self.stages):
            cells = (f"{s.calls[0]}-{s.calls[1] - 1}", s.first, s.last)
            sizes = (_megabytes(s.weight_bytes), _megabytes(s.input_bytes))
            times = (_milliseconds(s.forward_seconds), _milliseconds(s.backward_seconds))
            rows.append((str(index), s.device, *cells, *sizes, *times))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)) for r in rows]
        return "\n".join([*(line.rstrip() for line in lines), self.summary])

    @property
    def summary(self) -> str:
        """One or two sentences: the configuration, the prediction, and whether it is worth it."""
        share = self.bound_seconds / self.predicted_step_seconds
        text = (
            f"{self.schedule}, {self.num_microbatches} micro-batches of up to "
            f"{self.microbatch_size} rows: {_milliseconds(self.predicted_step_seconds)} predicted, "
            f"{share:.0%} of the bound; one device {_milliseconds(self.one_device_seconds)}"
        )
        if not self.is_worth_it and len(self.stages) > 1:
            text += ". One device alone is predicted to be faster: splitting is not worth it here"
        return text


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
