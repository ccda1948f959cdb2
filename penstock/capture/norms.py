"""Which modules are BatchNorms that use their running statistics as torch's own do."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from penstock.torch_internals import BatchNorm, InstanceNorm

NORMS = (BatchNorm.forward, InstanceNorm.forward)
"""While they train, their backwards do not use the running statistics that forwards change."""

_RUNNING = ("running_mean", "running_var")
_WAYS_ROUND = ("super", "vars", "getattr", "locals", "eval", "exec", "__class__")
_FUNCTIONS = (F.batch_norm, torch.batch_norm)


def is_small_norm(module: nn.Module) -> bool:
    """Whether it is a BatchNorm with something without weights besides, such as an activation."""
    return isinstance(module, BatchNorm) and not any(
        True for child in module.children() for _ in chain(child.parameters(), child.buffers())
    )


def only_normalises(module: nn.Module) -> bool:
    """Whether the backwards of a norm in training do not use its running statistics.

    So it is if its forward is torch's own, or another that does nothing with them but pass them to
    `batch_norm`.
    """
    kind: Any = type(module)
    if getattr(kind, "forward", None) in NORMS:
        return True
    return issubclass(kind, BatchNorm) and _passes_them_on(kind)


@cache
def _passes_them_on(kind: Any) -> bool:
    """Whether a forward passes running statistics to `batch_norm`, or compares them to `None`.

    Nothing else may get at them: the module itself is used for attributes alone, and none of these
    is a method or a property but the check of the input's dimensions.
    """
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(kind.forward))).body[0]
    except (OSError, TypeError, SyntaxError):
        return False
    if not isinstance(function, ast.FunctionDef) or function.decorator_list:
        return False
    own, nodes = function.args.args[0].arg, list(ast.walk(function))
    attributes = [n for n in nodes if isinstance(n, ast.Attribute) and _is_name(n.value, own)]
    names = [node.id for node in nodes if isinstance(node, ast.Name)]
    allowed = {id(node) for node in _harmless(nodes, kind.forward.__globals__)}
    return (
        names.count(own) == len(attributes)
        and not set(names) & {*_WAYS_ROUND}
        and all(_is_harmless(kind, n.attr) or id(n) in allowed for n in attributes)
    )


def _is_harmless(kind: type[nn.Module], attribute: str) -> bool:
    """Whether an attribute of a norm does not lead to its running statistics."""
    found = getattr(kind, attribute, None)
    if attribute == "_check_input_dim":
        return getattr(found, "__module__", "").startswith("torch.")
    return attribute not in _RUNNING and found is None and not attribute.startswith("__")


def _harmless(nodes: list[ast.AST], known: dict[str, Any]) -> Iterator[ast.AST]:
    """What is an argument of `batch_norm`, itself or if something holds, or compared to `None`.

    Args:
        nodes: of a function.
        known: its global names.
    """
    for node in nodes:
        if isinstance(node, ast.Call) and _called(node.func, known) in _FUNCTIONS:
            for argument in (*node.args, *(keyword.value for keyword in node.keywords)):
                if isinstance(argument, ast.IfExp):
                    yield from (argument.body, argument.orelse)
                yield argument
        if isinstance(node, ast.Compare) and all(
            isinstance(other, ast.Constant) and other.value is None for other in node.comparators
        ):
            yield node.left


def _called(function: ast.AST, known: dict[str, Any]) -> Any:
    """What is called by a global name, or as an attribute of one."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return getattr(known.get(function.value.id), function.attr, None)
    return known.get(function.id) if isinstance(function, ast.Name) else None


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
