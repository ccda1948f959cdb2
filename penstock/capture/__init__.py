"""Records a model's forward as a program that can be cut into stages."""

from penstock.capture.calls import Attribute, Call, Ref, Size, TensorInfo, Trace, Value
from penstock.capture.opening import capture
from penstock.capture.preserve import untouched
from penstock.capture.program import Cuts, Program, StageProgram
from penstock.capture.randomness import Key

__all__ = [
    "Attribute",
    "Call",
    "Cuts",
    "Key",
    "Program",
    "Ref",
    "Size",
    "StageProgram",
    "TensorInfo",
    "Trace",
    "Value",
    "capture",
    "untouched",
]
