"""Everything private to PyTorch that Penstock uses; a test checks that it is named nowhere else.

So if a version of torch moves or renames one of these, only this module changes. "All versions"
are those that pyproject.toml allows. None of these has a public equivalent yet.

Attributes of public objects that start with an underscore (`_version`, `_parameters`, `_buffers`,
`_forward_hooks` and their kind) are used where they are; they have been there for years.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import BuiltinMethodType
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass
from torch._ops import OpOverload, OpOverloadPacket
from torch.autograd.function import Function, FunctionMeta, _SingleLevelFunction
from torch.fx import graph_module
from torch.nn.modules import module as modules
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as NormBase
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm
from torch.nn.utils.parametrize import _inject_new_class as inject_parametrized_class
from torch.nn.utils.parametrize import _inject_property as inject_parametrized_property
from torch.overrides import _get_current_function_mode as current_function_mode
from torch.overrides import _pop_mode_temporarily as without_function_mode
from torch.utils import _pytree as pytree
from torch.utils import checkpoint
from torch.utils._device import DeviceContext
from torch.utils._foreach_utils import (
    _group_tensors_by_device_and_dtype as group_by_device_and_dtype,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from torch.autograd.graph import Node

# The same in all versions:
# - operators, with all their overloads and of one: OpOverloadPacket, OpOverload
# - the operator by which autocast casts: TO_COPY
# - layers with running statistics, of any number of dimensions: BatchNorm, NormBase, InstanceNorm
# - the leaves of containers of every registered type, DynamicCache among them: pytree
# - what watches the operators that a call runs: TorchDispatchMode
# - what every `autograd.Function.apply` ends in, and the class of their classes: plain_apply,
#   FunctionMeta
# - how the recorder steps aside while a closed module runs: current_function_mode,
#   without_function_mode
# - norms and copies in the bits of torch's own: group_by_device_and_dtype, foreach_...
# - a tensor with a shape and without memory: wrapper_subclass
# - what throws away what a checkpoint computes again, as an owner and a name, so that it can be
#   replaced: CHECKPOINT_HOOK
# - the hooks of all modules: GLOBAL_HOOKS
# - the class and the properties of a module that is parametrized: inject_parametrized_...
# - what a CUDA graph leaves undone whose recording has failed: end_allocating
# - torch.compile: what it asks of a callable (ASKED_BY_COMPILE), the names of its backends, and
#   whether inductor finds a C++ compiler
# - the sources of generated code, which fx keeps for tracebacks: forget_source
# - tensors of the user's own classes, read without their __torch_function__: without_...functions
#
# Not the same: until torch 2.14, `Function.apply` is Python, and calls the `apply` that its class
# inherits. Since 2.15 it is in C, and so are its bound methods, which models store under names of
# their own (APPLY_OWNER, APPLY_IS_IN_C, applied_by).
__all__ = [
    "APPLY_IS_IN_C",
    "APPLY_OWNER",
    "ASKED_BY_COMPILE",
    "CHECKPOINT_HOOK",
    "GLOBAL_HOOKS",
    "TO_COPY",
    "BatchNorm",
    "FunctionMeta",
    "InstanceNorm",
    "NormBase",
    "OpOverload",
    "OpOverloadPacket",
    "PlainDispatchMode",
    "TorchDispatchMode",
    "applied_by",
    "backends_of_compile",
    "check_cxx_compiler",
    "current_function_mode",
    "end_allocating",
    "foreach_add_",
    "foreach_copy_",
    "foreach_norms",
    "foreach_zero",
    "forget_source",
    "group_by_device_and_dtype",
    "has_function_modes",
    "has_tangents",
    "inject_parametrized_class",
    "inject_parametrized_property",
    "is_batched",
    "is_profiling",
    "is_transformed",
    "keeps_graph",
    "modes_around",
    "nnpack_is_used",
    "plain_apply",
    "profiler_config",
    "pytree",
    "saving",
    "set_version",
    "storage_uses",
    "will_run",
    "will_start_workers",
    "without_function_mode",
    "without_functions",
    "without_subclass_functions",
    "wrapper_subclass",
]

ASKED_BY_COMPILE = "_torchdynamo_orig_callable"
CHECKPOINT_HOOK = checkpoint, "_checkpoint_hook"
GLOBAL_HOOKS = (
    *(modules._global_forward_pre_hooks, modules._global_forward_hooks),
    *(modules._global_backward_pre_hooks, modules._global_backward_hooks),
)
_APPLY = vars(torch._C._FunctionBase)["apply"]
APPLY_IS_IN_C = vars(Function)["apply"] is _APPLY
TO_COPY = torch.ops.aten._to_copy.default
APPLY_OWNER = Function if APPLY_IS_IN_C else _SingleLevelFunction
foreach_add_ = torch._foreach_add_
foreach_copy_ = torch._foreach_copy_
foreach_norms = torch._foreach_norm
foreach_zero = torch.ops.aten._foreach_zero_.default
wrapper_subclass = torch.Tensor._make_wrapper_subclass
without_functions = DisableTorchFunction
without_subclass_functions = DisableTorchFunctionSubclass


def plain_apply(function: type[Function]) -> Callable[..., Any]:
    """The `apply` that torch itself gives a function, even if `function.apply` was replaced."""
    bound: Callable[..., Any] = _APPLY.__get__(None, function)
    return bound


def applied_by(value: object) -> type[Function] | None:
    """The function `F` whose `F.apply` this is, in C, under whatever name; `None` if it is none."""
    if type(value) is not BuiltinMethodType:
        return None
    bound: Any = value
    is_apply = bound.__name__ == "apply" and isinstance(bound.__self__, FunctionMeta)
    return bound.__self__ if is_apply else None


def is_transformed() -> bool:
    """Whether a transform of `torch.func` is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def has_tangents() -> bool:
    """Whether tensors may have forward-mode tangents."""
    return torch.autograd.forward_ad._current_level >= 0


def is_batched(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a batch inside either of torch's two kinds of vmap."""
    return "Batched" in torch._C._dispatch_keyset_to_string(torch._C._dispatch_keys(tensor))


class PlainDispatchMode(TorchDispatchMode):
    """A mode that is called as it is: not by way of torch.compile, whose import takes a second."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def saving() -> tuple[Any, Any] | None:
    """This thread's innermost hooks for tensors that autograd saves, if any are open."""
    found: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return found


def will_start_workers(loader: object) -> bool:
    """Whether a loader keeps its workers from epoch to epoch, and has not started them yet.

    Starting the workers draws a random number from torch's generator; later epochs draw none.
    """
    keeps = isinstance(loader, DataLoader) and loader.persistent_workers and loader.num_workers
    return bool(keeps) and loader._iterator is None  # type: ignore[attr-defined]


def nnpack_is_used() -> bool:
    """Whether convolutions may use NNPACK; torch has a public way to set it only."""
    return torch._C._get_nnpack_enabled()


def modes_around() -> list[str]:
    """The names of this thread's active modes for functions and operators of torch.

    The modes of `torch.device` and `torch.set_default_device` are left out.
    """
    modes: list[Any] = []
    if count := torch._C._len_torch_function_stack():
        modes += map(torch._C._get_function_stack_at, range(count))
    if count := torch._C._len_torch_dispatch_stack():
        modes += map(torch._C._get_dispatch_stack_at, range(count))
    return [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]


def has_function_modes() -> bool:
    """Whether this thread has any modes for functions, such as that of `torch.device`."""
    return bool(torch._C._len_torch_function_stack())


def will_run(node: Node) -> bool:
    """Whether the backward that is running runs this node.

    Raises:
        RuntimeError: it is a leaf that `autograd.grad` asks for.
    """
    return torch._C._will_engine_execute_node(node)


def keeps_graph() -> bool:
    """Whether the running backward keeps its graph (`retain_graph=True`), for another one."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def set_version(tensor: torch.Tensor, version: int) -> None:
    """Set the version counter of a tensor, by which autograd notices changes in place."""
    torch._C._autograd._unsafe_set_version_counter((tensor,), (version,))


def storage_uses(tensor: torch.Tensor) -> int:
    """How many references a tensor's memory has, from tensors and from storages in Python.

    The count includes the references that this function makes itself, so it is to be compared with
    the count of a new tensor.
    """
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


def end_allocating(device: int, pool: tuple[int, int]) -> None:
    """Let CUDA's caching allocator serve a GPU from where it did before a graph was recorded.

    Raises:
        RuntimeError: it does so already.
    """
    torch._C._cuda_endAllocateToPool(device, pool)


def backends_of_compile() -> list[str]:
    """The names of the backends of torch.compile, those for debugging among them."""
    from torch._dynamo.backends.registry import list_backends

    return list_backends(exclude_tags=())


def check_cxx_compiler() -> None:
    """Raise unless inductor finds a C++ compiler.

    Raises:
        RuntimeError: it does not, and where it has looked.
    """
    from torch._inductor.cpp_builder import get_cpp_compiler

    get_cpp_compiler()


def forget_source(filename: str) -> None:
    """Have `torch.fx` keep the source of some generated code no longer.

    Args:
        filename: that the code says it is from.
    """
    graph_module._loader.eval_cache.pop(filename, None)  # linecache only knows where to ask


def is_profiling() -> bool:
    """Whether torch.profiler is running."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def profiler_config(all_threads: bool) -> Any:
    """What torch.profiler gets as `experimental_config`.

    Args:
        all_threads: whether it sees all threads of the process; by default it sees the caller's.
    """
    from torch._C._profiler import _ExperimentalConfig

    return _ExperimentalConfig(profile_all_threads=all_threads)
