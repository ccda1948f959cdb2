"""Every error that Penstock raises on purpose.

    PenstockError
    ├── AuditError         the pipeline no longer does what the model's own forward does
    ├── CaptureError       the model's forward cannot be recorded as asked
    ├── CheckpointError    a checkpoint cannot be written, or what is there is not as it was written
    ├── InputError         a batch, target, loss or argument does not fit
    │   └── DeviceError    a device that this machine does not have
    ├── PlanError          no plan satisfies what was asked
    ├── ScheduleError      a schedule that would deadlock or do its work wrongly
    ├── ClosedError        the pipeline was closed, by the user or by an error
    ├── WorkerError        a worker failed; the cause is chained
    │   └── WorkerDied     its process ended, or was killed
    └── WorkerTimeout      a worker did not answer in time

    RowsWarning            a loss or a result of micro-batches is not that of the whole batch

A message says what, the values, why, and the nearest thing that works.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class PenstockError(Exception):
    """Base of every error that Penstock raises on purpose."""


class RowsWarning(UserWarning):
    """Rows meet other rows in a loss or in the model, so micro-batches make something else.

    It is said once. `warnings.filterwarnings("ignore", category=penstock.RowsWarning)` where it is
    meant so, as in gradient accumulation.
    """


@dataclass(frozen=True)
class Difference:
    """Where a model's own forward parts from the program that was recorded of it.

    Attributes:
        stage: the stage that makes the call; `None` if that is not known.
        call: its number in the program; `None` if that is not known.
        label: what it is, `"head.softmax()"` for instance.
        module: whose forward makes it, by name and class.
        why: what is known of the cause.
    """

    stage: int | None
    call: int | None
    label: str
    module: str
    why: str

    def __str__(self) -> str:
        parts = [f"in {self.module}"] if self.module else []
        parts += [f"call {self.call} ({self.label})"] if self.label else []
        parts += [f"stage {self.stage}"] if self.stage is not None else []
        return f"{', '.join(parts)}: {self.why}" if parts else self.why


class AuditError(PenstockError):
    """The pipeline no longer does what the model's own forward does.

    Raised before the pass is run: parameters, gradients, buffers and random generators are as they
    were before it.

    Attributes:
        step: the pass before which it was found, counted from 0 since the pipeline was built.
        microbatch: which of its micro-batches was run both ways.
        stage, call, label, module: where the difference arises, see `Difference`.
        why: what is known of the cause.
    """

    def __init__(self, what: str, microbatch: int, step: int, place: Difference) -> None:
        self.what, self.microbatch, self.step, self.place = what, microbatch, step, place
        self.stage, self.call, self.label = place.stage, place.call, place.label
        self.module, self.why = place.module, place.why
        super().__init__(
            f"micro-batch {microbatch} of pass {step} {what}. It arises {place}. The pipeline runs "
            "what the forward did when it was recorded. If its Python reads something else since "
            "(a module-level variable, a closure, a file, the clock), pass that in as an input, "
            "keep it in a buffer, build the pipeline with keep_closed=[...] for the module that "
            "reads it, which then runs its own Python, or build the pipeline anew after each "
            "change. The pass was not run, and everything is as it was before"
        )

    def __reduce__(self) -> Any:
        return type(self), (self.what, self.microbatch, self.step, self.place)


class CaptureError(PenstockError):
    """The model's forward cannot be recorded as asked."""


class CheckpointError(PenstockError):
    """A checkpoint cannot be written, or what is there is not as it was written."""


class InputError(PenstockError, ValueError):
    """An argument, a batch, a target or a loss does not fit the pipeline."""


class DeviceError(InputError):
    """A device that this machine does not have."""


class PlanError(PenstockError):
    """No plan satisfies what was asked."""


class ScheduleError(PenstockError):
    """A schedule that would deadlock, or that does not do each action exactly once."""


class ClosedError(PenstockError):
    """The pipeline was closed, by the user or by an error."""


_AGAIN = (
    ". Its model is as it was left, with its weights: to go on, build another pipeline, "
    "Pipeline(pipe.model, ..., plan=pipe.plan)"
)
_IN_RANKS = (
    ". Every rank's model has the weights of its own stages only: to go on, build another pipeline "
    "on all ranks and restore a checkpoint"
)
TORN = "some have done their part, and others not: load a checkpoint"
IN_A_FORK = "this process is a fork of the one that has built it, which alone can use it"


def closed(why: str, in_ranks: bool = False) -> ClosedError:
    """The error for a pipeline that is closed: why, and how to go on.

    Args:
        why: in words.
        in_ranks: whether it has ranks, each with a copy of the model.
    """
    if why == IN_A_FORK or TORN in why:
        return ClosedError(f"the pipeline is closed: {why}")
    return ClosedError(f"the pipeline is closed: {why}{_IN_RANKS if in_ranks else _AGAIN}")


class WorkerError(PenstockError):
    """A worker failed while running an action; `__cause__` is the original exception.

    If that happened in another process, the traceback from there is a note.

    Attributes:
        stage: the stage that failed, from 0; `None` if the worker ran none.
        microbatch: the micro-batch it was working on, from 0; `None` if it was at none.
        action: what it was doing, `"forward"`, `"loss"`, `"metrics"` or `"backward"`; or
            `"optimizer step"`, which may have updated some parameters and others not; or
            `"start"`.
        worker: which, from 0.
    """

    def __init__(
        self,
        stage: int | None,
        microbatch: int | None,
        action: str,
        cause: BaseException | None,
        worker: int | None = None,
    ) -> None:
        self.stage = stage
        self.microbatch = microbatch
        self.action = action
        self.worker = worker
        self.__cause__ = cause
        super().__init__(self._text())

    def _text(self) -> str:
        cause = f"{type(self.__cause__).__name__}: {self.__cause__}"
        if self.stage is None:
            return f"worker {self.worker} failed in the {self.action}: {cause}{_torn(self.action)}"
        return (
            f"stage {self.stage} failed in the {self.action} of micro-batch {self.microbatch}: "
            f"{cause}"
        )

    def _arguments(self) -> tuple[Any, ...]:
        return self.stage, self.microbatch, self.action, self.__cause__, self.worker

    def __reduce__(self) -> Any:
        state = {k: v for k, v in vars(self).items() if k == "__notes__"}
        return type(self), self._arguments(), state


class WorkerDied(WorkerError):  # noqa: N818 - it is a WorkerError, and says which
    """The process of a worker ended while it was needed. The pipeline is closed.

    What its interpreter has written in the end, if anything, is a note.

    Attributes:
        worker: which, from 0.
        stage, microbatch, action: what it was doing; `None` if that is not known, and `""` if it
            was between passes.
    """

    def __init__(
        self, worker: int, how: str, stage: int | None, microbatch: int | None, action: str
    ) -> None:
        self.worker = worker
        self._how = how
        super().__init__(stage, microbatch, action, None, worker)

    def _text(self) -> str:
        where = f"during {self.action}" if self.action else "between two passes"
        if self.stage is not None:
            where = f"in the {self.action} of micro-batch {self.microbatch} in stage {self.stage}"
        ending = f"; the pipeline is closed{_torn(self.action)}"
        return f"worker {self.worker} {self._how} {where}{ending}"

    def _arguments(self) -> tuple[Any, ...]:
        return self.worker, self._how, self.stage, self.microbatch, self.action


class WorkerTimeout(PenstockError, TimeoutError):  # noqa: N818 - "TimeoutError" is Python's own
    """A worker did not answer within the pipeline's timeout.

    The message says what every worker was doing.

    Attributes:
        worker: the one that is late, from 0; of several, one that does not wait for another.
        stage, microbatch, action: what it was doing, as far as that is known.
    """

    def __init__(
        self,
        message: str,
        worker: int | None = None,
        stage: int | None = None,
        microbatch: int | None = None,
        action: str = "",
    ) -> None:
        super().__init__(message)
        self.worker = worker
        self.stage = stage
        self.microbatch = microbatch
        self.action = action


def _torn(action: str) -> str:
    """What else there is to say of a failed action."""
    if action != "optimizer step":
        return ""
    return ". Some parameters may have been updated, and others not: load a checkpoint"
