"""Where in the user's code an error came from."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from penstock.errors import InputError
from penstock.torch_internals import NormBase

_OURS = str(Path(__file__).parents[1])
_TORCH = str(Path(torch.__file__).parent)
_ROOT = "the model itself"
_OF_THE_MODEL = f"in {_ROOT}"
_ONE_VALUE = re.compile(
    r"Expected more than 1 value per channel when training, got input size torch\.Size\((.*)\)"
)


def where(error: BaseException, model: nn.Module) -> str:
    """The line of the user's code that raised, and the module whose forward it is in.

    Frames of PyTorch and of Penstock do not count as the user's. The text is empty if there is no
    frame of the user's or of a module.
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
    """A text to append to the error: what in the inputs may have caused it; empty if unknown.

    It names the arguments that the forward takes, or the devices if there are several.
    """
    place = where(error, model)
    if isinstance(error, TypeError) and "argument" in str(error) and place == _OF_THE_MODEL:
        taken = inspect.signature(model.forward).parameters.values()
        parameters = ", ".join(str(p.replace(annotation=p.empty)) for p in taken)
        return f"; its forward takes ({parameters})"
    tensors = (t for t in (*leaves, *model.parameters()) if isinstance(t, torch.Tensor))
    devices = dict.fromkeys(str(t.device) for t in tensors)
    if len(devices) > 1:
        return f"; the inputs and the model are on several devices, {' and '.join(devices)}"
    return ""


def lone_row(error: BaseException, rows: Sequence[int]) -> InputError | None:
    """A clearer error if a BatchNorm, or a norm like it, was given a micro-batch of one row.

    Args:
        error: what was raised while a forward ran.
        rows: the number of rows of every micro-batch of the batch.

    Returns:
        the error to raise instead; `None` if this was not the reason.
    """
    raised = error.__cause__ or error  # a recording raises an error of its own from it
    found = _ONE_VALUE.match(str(raised))
    selves = [f.f_locals.get("self") for f, _ in traceback.walk_tb(raised.__traceback__)]
    modules = [each for each in selves if isinstance(each, nn.Module)]
    if found is None or not modules or 1 not in rows:
        return None
    paths = {id(module): path for path, module in modules[0].named_modules()}
    inner = modules[-1]
    name = repr(paths.get(id(inner), "")) if paths.get(id(inner)) else _ROOT
    total = sum(rows)
    fewer = f"with num_microbatches={total // 2} or fewer each has two at least. Otherwise "
    evaluated = ", or put that module into evaluation mode, where it takes its running statistics"
    has_none = isinstance(inner, NormBase) and inner.running_mean is None
    return InputError(
        f"{name} ({type(inner).__name__}) normalises by the statistics of a micro-batch, and was "
        f"given the shape {found[1]}, one value per channel, which has no variance. The batch of "
        f"{total} row{'s' * (total > 1)} is in {len(rows)} micro-batch{'es' * (len(rows) > 1)}, "
        f"the smallest of one row; {fewer if total > 1 else ''}leave out a batch that is so small "
        f"(drop_last=True of a DataLoader){'' if has_none else evaluated}. "
        'batchnorm="deferred" does not help: micro-batches are still normalised separately'
    )


def _is_foreign(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return name.startswith((_OURS, _TORCH, "<"))
