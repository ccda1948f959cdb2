"""Records a model's forward as a program that can be cut into stages."""

from penstock.capture.calls import Attribute, Call, Origin, Ref, Size, TensorInfo, Trace, Value
from penstock.capture.cuts import Cuts
from penstock.capture.opening import capture
from penstock.capture.preserve import untouched
from penstock.capture.program import Program, StageProgram
from penstock.capture.randomness import Key
from penstock.capture.sizes import num_rows

__all__ = [
    "Attribute",
    "Call",
    "Cuts",
    "Key",
    "Origin",
    "Program",
    "Ref",
    "Size",
    "StageProgram",
    "TensorInfo",
    "Trace",
    "Value",
    "capture",
    "num_rows",
    "untouched",
]
