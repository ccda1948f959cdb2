"""Standing between a model's Python and torch while it is recorded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import checkpoint as checkpointing

from penstock.capture.reads import SETTINGS, Reading
from penstock.errors import CaptureError

if TYPE_CHECKING:
    from penstock.capture.recorder import Recorder

_PATCH_LOCK = threading.Lock()
_RECORDING = threading.local()


@contextmanager
def intercepted(recorder: Recorder) -> Iterator[None]:
    """Every `module(...)` and `Function.apply` asks first. One recording at a time per process.

    Checkpoints in open modules do not throw away what they would compute again: the seeds of the
    random calls in them are not those of the backward. Closed modules keep theirs.
    """
    call_module = nn.Module.__call__
    apply = torch.autograd.Function.__dict__["apply"]
    set_plainly = nn.Module.__setattr__
    hook = checkpointing._checkpoint_hook
    find_registered = nn.Module.__getattr__
    grad_enabled = torch.is_grad_enabled
    reading = recorder.reading

    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_module(module, call_module, args, kwargs)

    def checked(function: type, /, *args: Any, **kwargs: Any) -> Any:
        recorder.check_function(function)
        return apply.__get__(None, function)(*args, **kwargs)

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        recorder.check_assignment(module, name)
        set_plainly(module, name, value)

    def get_attribute(module: nn.Module, name: str) -> Any:
        value = object.__getattribute__(module, name)
        reading.attribute(module, name, value)
        return value

    def get_registered(module: nn.Module, name: str) -> Any:
        try:
            with reading.paused():  # of its registries
                value = find_registered(module, name)
        except AttributeError:
            reading.absent(module, name)
            raise
        reading.attribute(module, name, value)
        return value

    def is_grad_enabled() -> bool:
        enabled = grad_enabled()
        reading.asked_for_grad(enabled)
        return enabled

    def checkpoint_hook(frame: Any) -> Any:
        return nullcontext() if recorder.is_outside else hook(frame)

    if getattr(_RECORDING, "model", None) is not None:
        raise CaptureError(
            f"the forward of {_RECORDING.model} captures another model while it is captured itself"
        )
    with _PATCH_LOCK, ExitStack() as stack:
        _RECORDING.model = type(recorder.model).__name__
        stack.callback(setattr, _RECORDING, "model", None)
        for owner, name, ours in (
            (nn.Module, "__call__", call),
            (nn.Module, "__setattr__", set_attribute),
            (nn.Module, "__getattr__", get_registered),
            (nn.Module, "__getattribute__", get_attribute),
            (torch, "is_grad_enabled", is_grad_enabled),
            *((torch, name, _asking(name, reading)) for name in SETTINGS),
            (torch.autograd.Function, "apply", classmethod(checked)),
            (checkpointing, "_checkpoint_hook", checkpoint_hook),
        ):
            original = vars(owner).get(name)
            recorder.patches.append((owner, name, ours, original))
            stack.callback(put_back, owner, name, original)
            setattr(owner, name, ours)
        stack.callback(reading.release)
        yield


def _asking(name: str, reading: Reading) -> Callable[[], Any]:
    """The function of torch of this name, which says how it is set, and that it was asked."""

    def ask() -> Any:
        value = SETTINGS[name]()
        reading.asked_for(name, value)
        return value

    return ask


def put_back(owner: Any, name: str, original: Any) -> None:
    """Let an owner have what it had under this name, if it had anything of its own."""
    if original is None:
        delattr(owner, name)
    else:
        setattr(owner, name, original)
