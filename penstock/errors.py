"""Every error that Penstock raises on purpose.

    PenstockError
    ├── CaptureError       the model's forward cannot be recorded as asked
    ├── InputError         a batch, target, loss or argument does not fit
    │   └── DeviceError    a device that this machine does not have
    ├── PlanError          no plan satisfies what was asked
    ├── ScheduleError      a schedule that would deadlock or do its work wrongly
    ├── ClosedError        the pipeline was closed, by the user or by an error
    ├── WorkerError        a worker failed; the cause is chained
    └── WorkerTimeout      a worker did not answer in time

A message says what, the values, why, and the nearest thing that works.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base of every error that Penstock raises on purpose."""


class CaptureError(PenstockError):
    """The model's forward cannot be recorded as asked."""


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


class WorkerError(PenstockError):
    """A worker failed while running an action; `__cause__` is the original exception.

    Attributes:
        stage: the stage that failed, from 0.
        microbatch: the micro-batch it was working on, from 0.
        action: what it was doing, `"forward"`, `"loss"` or `"backward"`.
    """

    def __init__(self, stage: int, microbatch: int, action: str, cause: BaseException) -> None:
        self.stage = stage
        self.microbatch = microbatch
        self.action = action
        super().__init__(
            f"stage {stage} failed in the {action} of micro-batch {microbatch}: "
            f"{type(cause).__name__}: {cause}"
        )


class WorkerTimeout(PenstockError, TimeoutError):  # noqa: N818 - "TimeoutError" is Python's own
    """A worker did not answer within the pipeline's timeout."""
