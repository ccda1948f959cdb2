"""Every error that Penstock raises on purpose.

    PenstockError
    ├── CaptureError       the model's forward cannot be recorded as asked
    ├── InputError         a batch, target, loss or argument does not fit
    │   └── DeviceError    a device that this machine does not have
    ├── PlanError          no plan satisfies what was asked
    ├── ScheduleError      a schedule that would deadlock or do its work wrongly
    ├── ClosedError        the pipeline was closed, by the user or by an error
    ├── WorkerError        a worker failed; the cause is chained
    │   └── WorkerDied     its process ended, or was killed
    └── WorkerTimeout      a worker did not answer in time

A message says what, the values, why, and the nearest thing that works.
"""

from __future__ import annotations

from typing import Any


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

    def __init__(
        self, stage: int | None, microbatch: int | None, action: str, cause: BaseException | None
    ) -> None:
        self.stage = stage
        self.microbatch = microbatch
        self.action = action
        self.__cause__ = cause
        super().__init__(self._text())

    def _text(self) -> str:
        return (
            f"stage {self.stage} failed in the {self.action} of micro-batch {self.microbatch}: "
            f"{type(self.__cause__).__name__}: {self.__cause__}"
        )

    def __reduce__(self) -> Any:
        state = {k: v for k, v in vars(self).items() if k == "__notes__"}
        return type(self), (self.stage, self.microbatch, self.action, self.__cause__), state


class WorkerDied(WorkerError):  # noqa: N818 - it is a WorkerError, and says which
    """The process of a worker ended while it was needed. The pipeline is closed.

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
        super().__init__(stage, microbatch, action, None)

    def _text(self) -> str:
        where = f"during {self.action}" if self.action else "between two passes"
        if self.stage is not None:
            where = f"in the {self.action} of micro-batch {self.microbatch} in stage {self.stage}"
        return f"worker {self.worker} {self._how} {where}; the pipeline is closed"

    def __reduce__(self) -> Any:
        where = (self.stage, self.microbatch, self.action)
        return type(self), (self.worker, self._how, *where), super().__reduce__()[2]


class WorkerTimeout(PenstockError, TimeoutError):  # noqa: N818 - "TimeoutError" is Python's own
    """A worker did not answer within the pipeline's timeout."""
