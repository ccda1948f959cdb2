"""Records a model's forward as a program that can be cut into stages."""

from penstock.capture.calls import (
    ROWS,
    Attribute,
    Call,
    Join,
    Origin,
    Ref,
    Size,
    Sizes,
    TensorInfo,
    Trace,
    Value,
)
from penstock.capture.capturing import capture
from penstock.capture.cuts import Cuts
from penstock.capture.preserve import untouched
from penstock.capture.program import Program, StageProgram
from penstock.capture.randomness import Key

__all__ = [
    "ROWS",
    "Attribute",
    "Call",
    "Cuts",
    "Join",
    "Key",
    "Origin",
    "Program",
    "Ref",
    "Size",
    "Sizes",
    "StageProgram",
    "TensorInfo",
    "Trace",
    "Value",
    "capture",
    "untouched",
]
