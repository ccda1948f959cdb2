"""Where in the user's code an error came from."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_ROOT = "the model itself"
_OF_THE_MODEL = f"in {_ROOT}"


def where(error: BaseException, model: nn.Module) -> str:
    """The line of the user's code that raised, and the module whose forward it is in.

    Frames of PyTorch and of Penstock are not the user's; if there is no other, it is an empty
    text, as when the model does not take the arguments that it was called with.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    found, module = "", ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        path = paths.get(id(frame.f_locals.get("self")))
        if path is not None:
            module = path or _ROOT
        if not _is_foreign(frame):
            found = f"{frame.f_code.co_filename}:{line}, in {frame.f_code.co_name}"
    in_module = f"in {module}" if module else ""
    return ", ".join(part for part in (in_module, found) if part)


def hint(error: BaseException, model: nn.Module, leaves: Sequence[Any]) -> str:
    """What about the inputs may be the reason: the arguments' names, or their devices."""
    place = where(error, model)
    if isinstance(error, TypeError) and "argument" in str(error) and place == _OF_THE_MODEL:
        taken = inspect.signature(model.forward).parameters.values()
        shown = ", ".join(str(p.replace(annotation=p.empty)) for p in taken)
        return f"; its forward takes ({shown})"
    tensors = (t for t in (*leaves, *model.parameters()) if isinstance(t, torch.Tensor))
    devices = dict.fromkeys(str(t.device) for t in tensors)
    if len(devices) > 1:
        return f"; the inputs and the model are on several devices, {' and '.join(devices)}"
    return ""


def _is_foreign(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith((_OURS, _TORCH, "<"))
