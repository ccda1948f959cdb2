"""Which spans are recorded as CUDA graphs, and why others are not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import fx, nn

from penstock.capture.calls import Ambient
from penstock.capture.closed_functions import ClosedFunction
from penstock.capture.functions import Applied
from penstock.capture.lowering import StageModule
from penstock.capture.randomness import draw_in_python
from penstock.capture.watching import is_compiled
from penstock.engine.known_python import why_unknown, why_unknown_function
from penstock.errors import InputError

_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)


class GraphError(RuntimeError):
    """A span cannot be recorded."""


def check_records(compiles: bool, batchnorm: str) -> None:
    """Raise unless stages of such a pipeline may be recorded.

    Args:
        compiles: whether they are compiled.
        batchnorm: as of `Pipeline`.

    Raises:
        InputError: they may not.
    """
    if compiles:
        raise InputError(
            "cuda_graphs=True records the model's own kernels, and compile= makes others; with "
            'compile={"mode": "reduce-overhead"} torch records those'
        )
    if batchnorm == "deferred":
        raise InputError(
            'cuda_graphs=True does not go with batchnorm="deferred", which looks at BatchNorms '
            'from Python; use batchnorm="microbatch"'
        )


def check_recorded(stages: int, not_recorded: Mapping[int, str], replicas: int) -> None:
    """Raise if the plan has several replicas, or if no stage can be recorded.

    Args:
        stages: how many there are.
        not_recorded: why some are not, by number.
        replicas: of the plan.

    Raises:
        InputError: there are several replicas, or all stages are in `not_recorded`.
    """
    if replicas > 1:
        raise InputError(
            f"cuda_graphs=True is for one replica, and the plan has {replicas}; use replicas=1"
        )
    if len(not_recorded) == stages:
        why = "; ".join(f"stage {number}: {why}" for number, why in sorted(not_recorded.items()))
        raise InputError(f"cuda_graphs=True: no stage can be recorded as CUDA graphs ({why})")


def why_not(module: Callable[..., Any], recompute: bool, memories: Sequence[Any]) -> str:
    """Why a span is not recorded, in words; empty if it is.

    Args:
        module: of the span.
        recompute: whether its forward runs again before its backward.
        memories: what its forward remembers in attributes.
    """
    if recompute:
        return "its forward runs again before its backward"
    if memories:
        return "its forward remembers something in attributes"
    if not isinstance(module, StageModule):
        return "it is no stretch of recorded calls"
    for each in module.modules():
        if isinstance(each, torch.jit.ScriptModule) or is_compiled(each):
            return f"its module {type(each).__name__} is compiled"
    if any(type(parameter) is not nn.Parameter for parameter in module.parameters()):
        return "one of its parameters is of a class of its own"
    reasons = (_why_not_called(module, node) for node in module.graph.nodes)
    return next(filter(None, reasons), "")


def _why_not_called(module: StageModule, node: fx.Node) -> str:
    if node.op == "call_module":
        return why_unknown(module.get_submodule(str(node.target)))
    if node.op != "call_function":
        return ""
    if node.target is draw_in_python:
        return "it draws random numbers in Python"
    if node.target is setattr:
        return "it writes attributes"
    if str(getattr(node.target, "__module__", "")).startswith("torch.autograd"):
        return "it computes gradients itself"
    called = [_held(module, str(a.target)) for a in node.all_input_nodes if a.op == "get_attr"]
    if any(isinstance(each, Applied) for each in called):
        return "it computes gradients itself"
    if any(isinstance(each, ClosedFunction) for each in called):
        return "it calls a function that looks at values"
    if any(isinstance(each, Ambient) and each.casting for each in called):
        return "a part of it runs under an autocast of its own"
    modules = (why_unknown(each) for each in called if isinstance(each, nn.Module))
    functions = (each for each in (node.target, *called) if isinstance(each, _FUNCTIONS))
    reasons = (*modules, *map(why_unknown_function, functions))
    return next((f"it {reason}" for reason in reasons if reason), "")


def _held(module: nn.Module, path: str) -> Any:
    found: Any = module
    for name in path.split("."):
        found = getattr(found, name)
    return found
