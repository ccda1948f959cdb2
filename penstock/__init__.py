"""Penstock splits one PyTorch model over many devices and keeps all of them busy.

import penstock as ps

The public names are loaded when they are first used: `import penstock` does not import torch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.capture import Program, capture
    from penstock.checkpoint.autosave import resume
    from penstock.checkpoint.batches import Batches
    from penstock.checkpoint.checkpoint import Checkpoint, load
    from penstock.comparison.compare import VerifyReport
    from penstock.engine.whole_batch import whole_batch
    from penstock.errors import (
        AuditError,
        CaptureError,
        CheckpointError,
        ClosedError,
        DeviceError,
        InputError,
        PenstockError,
        PlanError,
        RowsWarning,
        ScheduleError,
        StatesLost,
        WorkerDied,
        WorkerError,
        WorkerTimeout,
    )
    from penstock.generation.generate import Tokens
    from penstock.passes import StepResult
    from penstock.pipeline import Pipeline
    from penstock.plan import Plan, plan
    from penstock.profile import Profile
    from penstock.profile.measure import profile
    from penstock.sessions.resident import Resident
    from penstock.sessions.session import Session
    from penstock.verification import verify
    from penstock.weights import SeededWeights, empty_weights
    from penstock.workers.ray.options import Ray

_HOMES = {
    "AuditError": "penstock.errors",
    "Batches": "penstock.checkpoint.batches",
    "CaptureError": "penstock.errors",
    "Checkpoint": "penstock.checkpoint.checkpoint",
    "CheckpointError": "penstock.errors",
    "ClosedError": "penstock.errors",
    "DeviceError": "penstock.errors",
    "InputError": "penstock.errors",
    "PenstockError": "penstock.errors",
    "Pipeline": "penstock.pipeline",
    "Plan": "penstock.plan",
    "PlanError": "penstock.errors",
    "Profile": "penstock.profile",
    "Program": "penstock.capture",
    "Ray": "penstock.workers.ray.options",
    "Resident": "penstock.sessions.resident",
    "RowsWarning": "penstock.errors",
    "ScheduleError": "penstock.errors",
    "SeededWeights": "penstock.weights",
    "Session": "penstock.sessions.session",
    "StatesLost": "penstock.errors",
    "StepResult": "penstock.passes",
    "Tokens": "penstock.generation.generate",
    "VerifyReport": "penstock.comparison.compare",
    "WorkerDied": "penstock.errors",
    "WorkerError": "penstock.errors",
    "WorkerTimeout": "penstock.errors",
    "capture": "penstock.capture",
    "empty_weights": "penstock.weights",
    "load": "penstock.checkpoint.checkpoint",
    "plan": "penstock.plan",
    "profile": "penstock.profile.measure",
    "resume": "penstock.checkpoint.autosave",
    "verify": "penstock.verification",
    "whole_batch": "penstock.engine.whole_batch",
}

__all__ = [
    "AuditError",
    "Batches",
    "CaptureError",
    "Checkpoint",
    "CheckpointError",
    "ClosedError",
    "DeviceError",
    "InputError",
    "PenstockError",
    "Pipeline",
    "Plan",
    "PlanError",
    "Profile",
    "Program",
    "Ray",
    "Resident",
    "RowsWarning",
    "ScheduleError",
    "SeededWeights",
    "Session",
    "StatesLost",
    "StepResult",
    "Tokens",
    "VerifyReport",
    "WorkerDied",
    "WorkerError",
    "WorkerTimeout",
    "capture",
    "empty_weights",
    "load",
    "plan",
    "profile",
    "resume",
    "verify",
    "whole_batch",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


class _Package(ModuleType):
    """Keeps the function `ps.plan` when the import system binds the module `penstock.plan`."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)

    def __reduce__(self) -> Any:
        """Pickle this module by name, as cloudpickle does with modules of the plain class."""
        return import_module, (self.__name__,)


sys.modules[__name__].__class__ = _Package
