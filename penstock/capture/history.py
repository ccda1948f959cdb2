"""Walking the history of results: the nodes of autograd's graph that a backward comes to."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.autograd.graph import Node


def history(roots: Iterable[Node]) -> Iterator[Node]:
    """The nodes that a backward from these comes to, each once."""
    waiting = list(dict.fromkeys(roots))
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)


def nests(node: Node) -> bool:
    """Whether this is the node of an autograd Function whose backward runs another backward.

    Its code then names `backward`. Reversible networks and reentrant checkpoints have such nodes.
    """
    function: Any = getattr(node, "_forward_cls", None)
    code = getattr(inspect.unwrap(function.backward), "__code__", None) if function else None
    return code is not None and "backward" in code.co_names


def any_nests(results: Iterable[object]) -> bool:
    """Whether a backward from these results runs another backward inside it."""
    tensors = [value for value in results if isinstance(value, torch.Tensor)]
    return any(map(nests, history(t.grad_fn for t in tensors if t.grad_fn is not None)))
