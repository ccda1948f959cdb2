"""Every error that Penstock raises on purpose.

    PenstockError
    ├── AuditError         the pipeline no longer computes what the model's own forward computes
    ├── CaptureError       the model's forward cannot be recorded
    ├── CheckpointError    a checkpoint cannot be written or read
    ├── InputError         a batch, target, loss or argument does not fit
    │   └── DeviceError    this machine does not have the device
    ├── PlanError          no plan satisfies the request
    │   └── RequestError   cuts or modules do not fit the program; an InputError as well
    ├── ScheduleError      a schedule would deadlock or is incorrect
    ├── StatesLost         the states of a session are gone with the worker that had them
    ├── ClosedError        the pipeline was closed, by the user or by an error
    ├── WorkerError        a worker failed; the cause is chained
    │   └── WorkerDied     its process ended or was killed
    └── WorkerTimeout      a worker did not answer in time

    RowsWarning            a loss or a result of micro-batches is not that of the whole batch

A message says what is wrong, with the values, why, and the nearest thing that works.
"""

from __future__ import annotations

from dataclasses import dataclass


class PenstockError(Exception):
    """Base of every error that Penstock raises on purpose."""


class RowsWarning(UserWarning):
    """Rows depend on other rows in a loss or in the model, so micro-batches give other values.

    Issued once. If this is intended, as in gradient accumulation, use
    `warnings.filterwarnings("ignore", category=penstock.RowsWarning)`.
    """


@dataclass(frozen=True)
class Difference:
    """The first call in which a model's own forward differs from the recorded program.

    Attributes:
        stage: the stage of the call; `None` if unknown.
        call: its number in the program; `None` if unknown.
        label: its description, such as `"head.softmax()"`.
        module: name and class of the module whose forward makes it.
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
        if not parts:
            return self.why[:1].upper() + self.why[1:]
        return f"It arises {', '.join(parts)}: {self.why}"


class AuditError(PenstockError):
    """The pipeline no longer computes what the model's own forward computes.

    Raised before the pass runs. Parameters, gradients, buffers and random generators are unchanged.

    Attributes:
        step: the number of the pass, counted from 0 since the pipeline was built.
        microbatch: the number of the audited micro-batch, from 0.
        stage, call, label, module: where the difference arises, see `Difference`.
        why: what is known of the cause.
    """

    def __init__(self, what: str, microbatch: int, step: int, place: Difference) -> None:
        self.what, self.microbatch, self.step, self.place = what, microbatch, step, place
        self.stage, self.call, self.label = place.stage, place.call, place.label
        self.module, self.why = place.module, place.why
        super().__init__(
            f"micro-batch {microbatch} of pass {step} {what}. {place}. The pipeline runs "
            "the forward as it was recorded. If its Python reads a value that has changed since "
            "(a module-level variable, a closure, a file, the clock), pass it in as an input, "
            "keep it in a buffer, build the pipeline with keep_closed=[...] for the module that "
            "reads it, which then runs its own Python, or build the pipeline again after each "
            "change. The pass was not run, and nothing has changed"
        )

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.what, self.microbatch, self.step, self.place)


class CaptureError(PenstockError):
    """The model's forward cannot be recorded."""


class CheckpointError(PenstockError):
    """A checkpoint cannot be written, or is missing, incomplete or damaged."""


class InputError(PenstockError, ValueError):
    """An argument, a batch, a target or a loss does not fit the pipeline."""


class DeviceError(InputError):
    """This machine does not have the device."""


class PlanError(PenstockError):
    """No plan satisfies the request."""


class RequestError(PlanError, InputError):
    """The requested cuts or modules do not fit the program."""


class ScheduleError(PenstockError):
    """A schedule would deadlock, or does not run each action exactly once."""


class StatesLost(PenstockError):  # noqa: N818 - named like WorkerDied, which is its cause
    """The states of a session are gone with the worker that had them. Begin the session again."""


class ClosedError(PenstockError):
    """The pipeline was closed, by the user or by an error."""


_AGAIN = (
    ". Its model keeps its weights: to continue, build another pipeline, "
    "Pipeline(pipe.model, ..., plan=pipe.plan)"
)
_IN_RANKS = (
    ". Every rank's model has the weights of its own stages only: to continue, build another "
    "pipeline on all ranks and restore a checkpoint"
)
_IN_ACTORS = (
    ". The script's model has what was last fetched from the workers: to continue, build another "
    "pipeline and restore a checkpoint"
)
TORN = "some have done their part, and others not: load a checkpoint"
BY_USER = "close() was called"
IN_A_FORK = "this process is a fork of the process that has built it; only that one can use it"


def closed(why: str, in_ranks: bool = False, in_actors: bool = False) -> ClosedError:
    """The error for a closed pipeline: why it is closed, and how to continue.

    Args:
        why: the reason, in words.
        in_ranks: whether its workers are ranks, each with its own model.
        in_actors: whether they are in a Ray cluster, and had the weights.
    """
    if in_actors and why != BY_USER:
        return ClosedError(f"the pipeline is closed: {why}{_IN_ACTORS}")
    if why == IN_A_FORK or TORN in why:
        return ClosedError(f"the pipeline is closed: {why}")
    return ClosedError(f"the pipeline is closed: {why}{_IN_RANKS if in_ranks else _AGAIN}")


class WorkerError(PenstockError):
    """A worker failed while running an action; `__cause__` is the original exception.

    If it failed in another process, the traceback from there is added as a note.

    Attributes:
        stage: the stage that failed, from 0; `None` if no stage was running.
        microbatch: the micro-batch, from 0; `None` if there was none.
        action: what the worker was doing, such as `"forward"`, `"loss"`, `"metrics"`, `"backward"`,
            `"start"`, or `"optimizer step"`, after which only some parameters may be updated.
        worker: the number of the worker, from 0.
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

    def _arguments(self) -> tuple[object, ...]:
        return self.stage, self.microbatch, self.action, self.__cause__, self.worker

    def __reduce__(self) -> tuple[object, ...]:
        state = {k: v for k, v in vars(self).items() if k == "__notes__"}
        return type(self), self._arguments(), state


class WorkerDied(WorkerError):  # noqa: N818 - it is a WorkerError, and says which
    """The process of a worker ended while it was needed. The pipeline is closed.

    The last output of its interpreter, if any, is added as a note.

    Attributes:
        worker: the number of the worker, from 0.
        stage, microbatch: what it was working on; `None` if unknown.
        action: what it was doing; `""` between passes.
    """

    def __init__(
        self, worker: int, how: str, stage: int | None, microbatch: int | None, action: str
    ) -> None:
        self.worker = worker
        self._how = how
        self._advice = ""
        super().__init__(stage, microbatch, action, None, worker)

    def advise(self, advice: str) -> None:
        """Add sentences on consequences or a remedy to the message, unless it has them already."""
        if advice not in self._advice:
            self._advice += f". {advice}"
        self.args = (self._text(),)

    @property
    def what(self) -> str:
        """What has happened, without what came of it."""
        where = f"during {self.action}" if self.action else "between two passes"
        if self.stage is not None:
            where = f"in the {self.action} of micro-batch {self.microbatch} in stage {self.stage}"
        return f"worker {self.worker} {self._how} {where}"

    def _text(self) -> str:
        torn = "" if self._advice else _torn(self.action)
        return f"{self.what}; the pipeline is closed{torn}{self._advice}"

    def _arguments(self) -> tuple[object, ...]:
        return self.worker, self._how, self.stage, self.microbatch, self.action


class WorkerTimeout(PenstockError, TimeoutError):  # noqa: N818 - "TimeoutError" is Python's own
    """A worker did not answer within the pipeline's timeout.

    The message says what every worker was doing.

    Attributes:
        worker: the late worker, from 0; if there are several, one that does not wait for another.
        stage, microbatch, action: what it was doing, as far as known.
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
    """What a message adds for a failed optimizer step."""
    if action != "optimizer step":
        return ""
    return ". Only some parameters may have been updated: load a checkpoint"
