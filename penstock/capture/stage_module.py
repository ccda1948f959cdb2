"""The module of a stage: an `fx.GraphModule` that can be pickled with everything in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

_Nodes = list[tuple[str, str, Any, Any, Any, dict[str, Any]]]


@dataclass(frozen=True, slots=True)
class _Named:
    """Stands for another node, in what is pickled."""

    name: str


class Stage(fx.GraphModule):
    """A stretch of a program: `forward(sizes, key, *values) -> tuple`.

    An `fx.GraphModule` is unpickled by tracing its code once more, which calls that draw random
    numbers do not survive. This one is put together again from its nodes.
    """

    def __reduce__(self) -> Any:
        leaves: dict[str, Any] = {}
        nodes: _Nodes = []
        for node in self.graph.nodes:
            if node.op in ("get_attr", "call_module"):
                leaves[node.target] = _lookup(self, node.target)
            args, kwargs = (fx.node.map_arg(tree, _named) for tree in (node.args, node.kwargs))
            meta = {k: v for k, v in node.meta.items() if k == "call"}
            nodes.append((node.op, node.name, node.target, args, kwargs, meta))
        return _restored, (leaves, nodes, self.training)


def _named(node: fx.Node) -> Any:
    return _Named(node.name)


def _restored(leaves: dict[str, Any], nodes: _Nodes, training: bool) -> Stage:
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}

    def found(leaf: Any) -> Any:
        return made[leaf.name] if isinstance(leaf, _Named) else leaf

    for op, name, target, args, kwargs, meta in nodes:
        args, kwargs = (fx.node.map_aggregate(tree, found) for tree in (args, kwargs))
        made[name] = graph.create_node(op, target, args, kwargs, name)
        made[name].meta.update(meta)
    module = Stage(leaves, graph, class_name="Stage")
    module.training = training
    return module


def _lookup(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module
