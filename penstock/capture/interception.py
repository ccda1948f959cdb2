"""Standing between a model's Python and torch while it is recorded."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from enum import Enum
from functools import wraps
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from penstock.capture.applying import RECORDING, Applies, Noticing, bound_applies, stand_in
from penstock.capture.casts import Casts
from penstock.capture.closed_functions import ClosedFunctions
from penstock.capture.reads import SETTINGS, NotedReads
from penstock.errors import CaptureError
from penstock.torch_internals import (
    APPLY_IS_IN_C,
    APPLY_OWNER,
    CHECKPOINT_HOOK,
    FunctionMeta,
    applied_by,
)

_PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), Enum, range, type),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)

# Reading these says nothing of a tensor's values, so they are not calls of the program.
METADATA = frozenset(
    """
    shape dtype device ndim is_cuda is_cpu requires_grad layout is_sparse is_quantized is_meta
    is_mkldnn names grad_fn is_leaf itemsize nbytes is_mps is_xpu is_nested output_nr _version
    size dim stride is_contiguous numel nelement is_floating_point is_complex __len__ is_signed
    element_size storage_offset get_device has_names is_inference is_conj is_neg ndimension
    is_tensor __repr__ __hash__ __format__ _is_view is_same_size result_type can_cast
    promote_types broadcast_shapes dim_order is_shared is_pinned
    """.split()
)
# The names in `METADATA` that say whether a tensor requires a gradient.
GRADIENTS = frozenset(["requires_grad", "grad_fn", "is_leaf"])
# The names in `METADATA` that say how a tensor lies in memory, as far as strides tell.
LAYOUT = frozenset("stride is_contiguous dim_order".split())
# The names in `METADATA` of other properties that inputs may have different in every batch.
STATE = frozenset("is_inference storage_offset is_shared is_pinned is_conj is_neg _is_view".split())
# The names in `METADATA` that say how large a tensor is, and the functions whose number of results
# does.
SIZES = frozenset(
    "shape size numel nelement __len__ nbytes stride is_contiguous is_same_size".split()
)
PARTS = frozenset(
    """
    unbind split chunk tensor_split split_with_sizes hsplit vsplit dsplit unsafe_split unsafe_chunk
    unsafe_split_with_sizes
    """.split()
)
# Functions that a program cannot run across its cuts, or whose results no recording can follow, by
# their own names, with what to say of them.
CLOSING = {
    "grad": "computes gradients (torch.autograd.grad)",
    "backward": "computes gradients (backward)",
    "register_hook": "hangs hooks on tensors (register_hook)",
    "register_post_accumulate_grad_hook": "hangs hooks on tensors",
    "data_ptr": "asks for addresses (data_ptr)",
    "_pack_padded_sequence": "packs sequences, whose sizes depend on values",
}

VALUES = frozenset(
    ("numpy", "__array__", "__dlpack__", "storage", "untyped_storage", "__format__", "__repr__")
)
"""Functions that give a tensor's values to Python in another form, where reads are not seen."""


def _noting_values(name: str) -> Callable[..., Any]:
    """A method of tensors that also notes, in this thread's recording, that values are read."""
    give = getattr(torch.Tensor, name)

    @wraps(give)
    def get(*args: Any, **kwargs: Any) -> Any:
        if RECORDING.recorder is not None:
            RECORDING.recorder.note_values()
        return give(*args, **kwargs)

    return get


_GIVING = {name: _noting_values(name) for name in ("tolist", "numpy", "__array__", "__dlpack__")}
"""Replacements of methods by which the Python of a closed module gets values without operators."""

ORIGINAL: dict[Callable[..., Any], Callable[..., Any]] = {
    noting: noting.__wrapped__  # type: ignore[attr-defined]
    for noting in _GIVING.values()
}
"""The original method by its replacement, which is what `__torch_function__` may be given."""

_PATCH_LOCK = threading.Lock()


def is_plain(leaf: object) -> bool:
    """Whether a leaf may be a constant of a program: plain data, or a callable but no module."""
    return isinstance(leaf, _PLAIN) or (callable(leaf) and not isinstance(leaf, nn.Module))


class Patch(NamedTuple):
    """An attribute that is replaced while a forward is recorded.

    Attributes:
        owner: the class, Python module or function that has the attribute.
        name: the name of the attribute.
        ours: its value during the recording.
        original: the owner's own value before; `None` if the owner had none of its own.
    """

    owner: object
    name: str
    ours: object
    original: object

    def apply(self) -> None:
        """Put ours in the place of the attribute."""
        setattr(self.owner, self.name, self.ours)

    def undo(self) -> None:
        """Put the original back, or delete the attribute where the owner had none of its own."""
        if self.original is None:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.original)


class Interceptor(Noticing, Protocol):
    """The interface of a recorder, which is called in the place of modules and functions.

    Attributes:
        functions: which plain functions are closed.
        reading: notes what the model's Python reads.
        patches: the patches that are in force.
        casts: knows which weights the model's own autocast regions have cast.
    """

    functions: ClosedFunctions
    reading: NotedReads
    patches: list[Patch]
    casts: Casts

    @property
    def is_outside(self) -> bool:
        """Whether the Python that runs now is an open module's own."""

    def call_module(
        self,
        module: nn.Module,
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """What `module(*args, **kwargs)` does; `call` is `nn.Module.__call__`."""

    def note_state(self, sets: bool) -> None:
        """Note that Python asks for the state of a generator of torch, or sets it."""

    def check_unseen_application(self, function: type[torch.autograd.Function]) -> None:
        """Raise if the Python that runs now may not apply a function where nobody sees it."""

    def check_assignment(self, owner: nn.Module | type, name: str) -> None:
        """Raise if this attribute of a module or an `autograd.Function` may not be assigned to."""


@contextmanager
def intercepted(recorder: Interceptor) -> Iterator[None]:
    """While open, calls of modules and of `autograd.Function.apply` go through `recorder`.

    There is one recording at a time in a process: other threads wait.

    Raises:
        CaptureError: this thread is recording already.
    """
    if RECORDING.recorder is not None:
        captured = type(RECORDING.recorder.model).__name__
        raise CaptureError(
            f"the forward of {captured} captures another model while it is captured itself"
        )
    with _PATCH_LOCK, ExitStack() as stack:
        RECORDING.recorder = recorder
        stack.callback(setattr, RECORDING, "recorder", None)
        stack.callback(_mend_imports, recorder.patches, set(sys.modules))
        ours = (
            *_of_modules(recorder),
            *_of_functions(recorder),
            *_of_torch(recorder),
            *recorder.functions.codes(),
        )
        for owner, name, replacement in ours:
            plain = vars(owner).get(name)
            original = owner.__code__ if isinstance(owner, FunctionType) else plain
            patch = Patch(owner, name, replacement, original)
            recorder.patches.append(patch)
            stack.callback(patch.undo)
            patch.apply()
        stack.callback(recorder.reading.release)
        yield


def _mend_imports(patches: Sequence[Patch], before: Collection[str]) -> None:
    """Restore originals in Python modules that were imported during a recording and kept patches.

    `torch._dynamo` keeps `nn.Module.__call__`, if a forward is the first to import it.

    Args:
        patches: the patches of the recording, which have been undone.
        before: the names of the Python modules that were imported before it.
    """
    originals = {id(patch.ours): getattr(patch.owner, patch.name, None) for patch in patches}
    for module in [sys.modules.get(name) for name in sys.modules.keys() - before]:
        if not isinstance(module, ModuleType):  # whatever a library has put there
            continue
        for key, value in list(vars(module).items()):
            if id(value) in originals:
                setattr(module, key, originals[id(value)])


def _of_modules(recorder: Interceptor) -> list[tuple[object, str, object]]:
    """What stands in the place of methods of `nn.Module`."""
    call_module = nn.Module.__call__
    set_plainly = nn.Module.__setattr__
    find_registered = nn.Module.__getattr__
    reading = recorder.reading

    def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return recorder.call_module(module, call_module, args, kwargs)

    def set_attribute(module: nn.Module, name: str, value: Any) -> None:
        recorder.check_assignment(module, name)
        set_plainly(module, name, value)

    def get_attribute(module: nn.Module, name: str) -> Any:
        value = object.__getattribute__(module, name)
        if not reading.quiet:  # torch's own code reads some with every call of a module
            reading.note_attribute(module, name, value)
        function = applied_by(value)
        return value if function is None else stand_in(function)

    def get_registered(module: nn.Module, name: str) -> Any:
        try:
            with reading.paused():  # of its registries
                value = find_registered(module, name)
        except AttributeError:
            reading.note_missing(module, name)
            raise
        reading.note_attribute(module, name, value)
        return value

    return [
        (nn.Module, "__call__", call),
        (nn.Module, "__setattr__", set_attribute),
        (nn.Module, "__getattr__", get_registered),
        (nn.Module, "__getattribute__", get_attribute),
    ]


def _of_functions(recorder: Interceptor) -> Iterator[tuple[object, str, object]]:
    """Replacements of what applies custom functions, and of what assigns to their attributes.

    A bound `F.apply` may be stored under other names. If it is in C, such names in Python modules
    are replaced as well; an application by any other is noticed when C reads `_backward_cls`.
    """

    def set_attribute(function: type, name: str, value: Any) -> None:
        if not name.startswith("_"):  # as torch does when a class is made
            recorder.check_assignment(function, name)
        type.__setattr__(function, name, value)

    def get_attribute(function: type[torch.autograd.Function], name: str) -> Any:
        if name == "_backward_cls":
            recorder.check_unseen_application(function)
        return type.__getattribute__(function, name)

    yield APPLY_OWNER, "apply", Applies()
    yield FunctionMeta, "__setattr__", set_attribute
    if APPLY_IS_IN_C:
        yield FunctionMeta, "__getattribute__", get_attribute
        for module, name in bound_applies(len(sys.modules)):
            if (function := applied_by(vars(module).get(name))) is not None:
                yield module, name, stand_in(function)


def _of_torch(recorder: Interceptor) -> list[tuple[object, str, object]]:
    """What stands in the place of functions of torch.

    Checkpoints in open modules keep their activations instead of recomputing them, as random calls
    would be seeded otherwise in the backward. Those in closed modules work as usual.
    """
    grad_enabled, clear_casts = torch.is_grad_enabled, torch.clear_autocast_cache
    state, set_state = torch.get_rng_state, torch.set_rng_state
    checkpointing, hook_name = CHECKPOINT_HOOK
    hook = getattr(checkpointing, hook_name)
    reading = recorder.reading

    def is_grad_enabled() -> bool:
        enabled = grad_enabled()
        reading.note_grad_mode(enabled)
        return enabled

    def setting(name: str) -> Callable[[], Any]:
        def get() -> Any:
            value = SETTINGS[name]()
            reading.note_setting(name, value)
            return value

        return get

    def clear_autocast_cache() -> None:
        if RECORDING.recorder is recorder:
            recorder.casts.clear()
        clear_casts()

    def get_rng_state() -> torch.Tensor:  # called by fork_rng and checkpoints on all devices
        if RECORDING.recorder is recorder:
            recorder.note_state(sets=False)
        return state()

    def set_rng_state(new: torch.Tensor) -> None:
        if RECORDING.recorder is recorder:
            recorder.note_state(sets=True)
        set_state(new)

    def checkpoint_hook(frame: object) -> Any:
        return nullcontext() if recorder.is_outside else hook(frame)

    return [
        (torch, "is_grad_enabled", is_grad_enabled),
        *((torch, name, setting(name)) for name in SETTINGS),
        *((torch.Tensor, name, noting) for name, noting in _GIVING.items()),
        (checkpointing, hook_name, checkpoint_hook),
        (torch, "clear_autocast_cache", clear_autocast_cache),
        (torch, "get_rng_state", get_rng_state),
        (torch, "set_rng_state", set_rng_state),
    ]
