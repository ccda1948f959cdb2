"""Turns a stretch of a trace into a `torch.fx.GraphModule` with the user's submodules as leaves.

The module's forward is `forward(sizes, key, *values) -> tuple`: how large the micro-batch is
(`{"B": rows}`), the random key (or `None`), and the values that are live before the stretch; it
returns those that are live after it. It is ordinary fx: print it, pickle it, compile it.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice, zip_longest
from typing import Any

import torch
from torch import fx, nn
from torch.fx.graph import PythonCode

from penstock.capture.attributes import find
from penstock.capture.calls import (
    GRADIENT,
    OPAQUE,
    Ambient,
    Attribute,
    Call,
    GivenArray,
    Irregular,
    Ref,
    Size,
    Sizes,
    Submodule,
    TensorInfo,
    Trace,
    Value,
    function_name,
)
from penstock.capture.functions import Whole, invoke
from penstock.capture.halves import Deferral, Half, may_be_halved, run_halved
from penstock.capture.looking import Recorded, as_recorded, looking
from penstock.capture.numbers import Number, at
from penstock.capture.randomness import draw, draw_in_python
from penstock.capture.trees import Structure, flatten, leaf_paths, tree_leaves, unflatten
from penstock.torch_internals import forget_source

_LITERALS = (  # that generated code can spell; a subclass (numpy's floats, enums) it cannot
    *(int, float, complex, bool, str, type(None), type(Ellipsis), range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_TAKEN = {*dir(fx.GraphModule), *vars(fx.GraphModule({}, fx.Graph()))}
_READ: Callable[..., Any] = getattr
_WRITE: Callable[..., Any] = setattr
_OPERATORS: dict[str, Callable[..., Any]] = {
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
}


def lower(
    model: nn.Module,
    trace: Trace,
    calls: range,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    device: torch.device | None = None,
    deferral: Deferral | None = None,
) -> StageModule:
    """The module that runs `trace.calls[calls]`.

    Args:
        model: where submodules and attributes are looked up; shared, not copied.
        trace: the recording.
        calls: the calls of the stretch.
        inputs: the values that it is given, in order.
        outputs: the values that it returns, in order.
        device: where the stretch will run, if not where it was recorded.
        deferral: where the weight halves of backwards go, see `penstock.capture.halves`; without
            one, backwards are whole.
    """
    lowering = _Lowering(model, device)
    for value in inputs:
        lowering.placeholder(value)
    halved = may_be_halved(trace, model) if deferral is not None else ()
    for number in calls:
        half = Half(deferral) if deferral is not None and halved[number] else None
        lowering.call(number, trace.calls[number], half)
    lowering.graph.output(tuple(lowering.value(value) for value in outputs))
    for node in lowering.graph.nodes:  # what is read for the result alone belongs to the last call
        if node.op not in ("placeholder", "output"):
            node.meta.setdefault("call", calls.stop - 1)
    module = StageModule(lowering.leaves, lowering.graph)
    module.training = model.training  # its own flag only: the user may have frozen submodules
    return module


class _Lowering:
    """The `fx.Graph` of some calls, as far as it has been built."""

    def __init__(self, model: nn.Module, device: torch.device | None) -> None:
        self.model = model
        self.device = device
        self.graph = fx.Graph()
        self.leaves: dict[str, Any] = {}  # what the graph's get_attr and call_module find
        self._nodes: dict[Any, fx.Node] = {}
        self._results: dict[int, tuple[fx.Node, Structure | None]] = {}
        self._sizes = self.graph.placeholder("sizes")
        self._key = self.graph.placeholder("key")

    def placeholder(self, value: Value) -> None:
        """Add one more argument, which carries `value`."""
        if isinstance(value, Attribute):  # the "0.weight" of a Sequential is no name in Python
            name = f"attribute_{value.name}"
        else:
            name = f"value_{value.call}_{value.leaf}" if value.call >= 0 else f"input_{value.leaf}"
        self._nodes[value] = self.graph.placeholder(name.replace(".", "_"))

    def value(self, value: Value) -> fx.Node:
        """The node that holds `value`."""
        node = self._nodes.get(value)
        if node is None:
            made = self._attribute if isinstance(value, Attribute) else self._result
            node = self._nodes[value] = made(value)  # type: ignore[arg-type]
        return node

    def call(self, number: int, call: Call, half: Half | None = None) -> None:
        """Append one call; `meta["call"]` of each new node says which call it is part of."""
        before = len(self.graph.nodes)
        args = self._build(call.args)
        kwargs = self._build(call.kwargs)
        if half is not None:
            halved = (self._constant(half), self._callable(call.target), *args)
            node = self.graph.call_function(run_halved, halved, kwargs)
        elif call.is_seeded or call.ambient is not None:
            node = self._guarded(call, args, kwargs)
        elif call.looks:
            recorded, expected = self._recorded(call)
            looked = recorded, expected, self._callable(call.target), *args
            node = self.graph.call_function(looking, looked, kwargs)
        elif isinstance(call.target, str):
            self._add_module(call.target)
            node = self.graph.call_module(_attribute_path(call.target), args, kwargs)
        else:
            node = self._function(call.target, args, kwargs)
        node.meta["result_of"] = number
        if call.inspected and not call.looks:
            node = self.graph.call_function(as_recorded, (*self._recorded(call), node))
        self._results[number] = node, call.result
        for new in islice(reversed(self.graph.nodes), len(self.graph.nodes) - before):
            new.meta.setdefault("call", number)

    # -- calls ----------------------------------------------------------------------------

    def _guarded(self, call: Call, args: Any, kwargs: Any) -> fx.Node:
        """A call that is seeded, or runs under modes of its own."""
        function = self._callable(call.target)
        if call.looks:
            args = (*self._recorded(call), function, *args)
            function = self._constant(looking)
        drawing = draw_in_python if call.draws_in_python else draw
        if call.ambient is None:
            drawn = (self._key, call.identity, function, *args)
            return self.graph.call_function(drawing, drawn, kwargs)
        ambient = self._constant(call.ambient)
        if not call.is_seeded:
            return self.graph.call_function(under, (ambient, function, *args), kwargs)
        guard = self._constant(under)
        guarded = (self._key, call.identity, guard, ambient, function, *args)
        return self.graph.call_function(drawing, guarded, kwargs)

    def _callable(self, target: str | Callable[..., Any]) -> fx.Node:
        """The node that holds a submodule or a function, to be called by another."""
        if not isinstance(target, str):
            return self._constant(_as_function(target))
        self._add_module(target)
        return self.graph.get_attr(_attribute_path(target))

    def _function(self, function: Callable[..., Any], args: Any, kwargs: Any) -> fx.Node:
        if isinstance(function, Whole):
            return self.graph.call_function(invoke, (self._constant(function), *args), kwargs)
        name = function_name(function)
        python_name = getattr(function, "__name__", "")
        if python_name == "__get__":
            return self.graph.call_function(_READ, (args[0], name))
        if python_name == "__set__":
            return self.graph.call_function(_WRITE, (args[0], name, args[1]))
        if name in _OPERATORS:
            return self.graph.call_function(_OPERATORS[name], args, kwargs)
        if _is_tensor_method(function):
            return self.graph.call_method(name, args, kwargs)
        return self.graph.call_function(function, args, kwargs)

    def _recorded(self, call: Call) -> tuple[fx.Node, list[Any]]:
        """The node of a call's `Recorded`, and what every leaf of its result has to be."""
        leaves = enumerate(tree_leaves((call.args, call.kwargs)))
        written = frozenset(k for k, leaf in leaves if leaf in call.mutates)
        recorded = Recorded(
            call.label, call.path, call.inspected_in, call.result, written, call.same
        )
        expected = [
            self._expected(leaf, call.inspected.get(k, set()), kind)
            for k, (leaf, kind) in enumerate(zip_longest(call.outputs, call.classes))
        ]
        return self._constant(recorded), expected

    def _expected(self, leaf: Any, inspected: Collection[int], kind: type | None) -> Any:
        if not isinstance(leaf, TensorInfo):
            return None if leaf is OPAQUE else ("data", self._leaf(leaf))
        known = enumerate(leaf.shape)
        sizes = [None if k not in inspected or isinstance(n, Irregular) else n for k, n in known]
        built = [None if n is None else self._leaf(n) for n in sizes]
        gradient = leaf.requires_grad if GRADIENT in inspected else None
        built_kind = None if kind is None else self._constant(kind)
        return "tensor", built, leaf.dtype, leaf.layout, built_kind, gradient

    def _add_module(self, path: str) -> None:
        self.leaves[_attribute_path(path)] = self.model.get_submodule(path)

    # -- values ---------------------------------------------------------------------------

    def _attribute(self, attribute: Attribute) -> fx.Node:
        value, name = find(self.model, attribute.name), _attribute_path(attribute.name)
        while self.leaves.get(name, value) is not value or hasattr(nn.Module, name.split(".")[-1]):
            name += "_"  # of an attribute such as "cpu", which modules have as a method
        self.leaves[name] = value
        return self.graph.get_attr(name)

    def _result(self, ref: Ref) -> fx.Node:
        node, structure = self._results[ref.call]
        path = leaf_paths(structure)[ref.leaf]
        if any(key is None for key in path):
            return self._reach(ref, leaf_of, node, ref.leaf)
        for depth, key in enumerate(path, start=1):
            prefix = (ref.call, path[:depth])
            if prefix not in self._nodes:
                how, name = key or ("item", 0)
                reach = operator.getitem if how == "item" else _READ
                self._nodes[prefix] = self._reach(ref, reach, node, name)
            node = self._nodes[prefix]
        return node

    def _reach(self, ref: Ref, reach: Callable[..., Any], node: fx.Node, key: Any) -> fx.Node:
        part = self.graph.call_function(reach, (node, key))
        part.meta["call"] = ref.call  # it belongs to the call that made it, not to the one here
        return part

    def _build(self, tree: object) -> Any:
        """Arguments as fx wants them: nodes and literals in plain containers."""
        leaves, structure = flatten(tree)
        return self._assemble(structure, iter(leaves))

    def _assemble(self, structure: Structure | None, leaves: Iterator[Any]) -> Any:
        if structure is None:
            return self._leaf(next(leaves))
        children = [self._assemble(child, leaves) for child in structure.children]
        if structure.is_builtin:
            return structure.build(children)
        build = self._constant(structure.build)
        return self.graph.call_function(build_with, (build, children))

    def _leaf(self, leaf: object) -> Any:
        if isinstance(leaf, (Ref, Attribute)):
            return self.value(leaf)
        if isinstance(leaf, Size):
            return self._size(leaf)
        if isinstance(leaf, Number):
            return self.graph.call_function(at, (self._constant(leaf), self._sizes))
        if isinstance(leaf, GivenArray):
            return self._constant(leaf.array)
        if isinstance(leaf, Submodule):
            self._add_module(leaf.path)
            return self.graph.get_attr(_attribute_path(leaf.path))
        if isinstance(leaf, torch.device) and self.device is not None:
            return self.device
        if type(leaf) in _LITERALS:
            return leaf
        return self._constant(leaf)

    def _size(self, size: Size) -> fx.Node:
        if size not in self._nodes:
            terms = [self._term(factor, names) for factor, names in size.terms]
            whole = reduce(self._added, terms)
            if size.kind is float:
                whole = self.graph.call_function(float, (whole,))
            self._nodes[size] = whole
        return self._nodes[size]

    def _term(self, factor: int, names: Sequence[str]) -> Any:
        if not names:
            return factor
        product = reduce(self._multiplied, map(self._named, names))
        return product if factor == 1 else self._multiplied(product, factor)

    def _named(self, name: str) -> fx.Node:
        if name not in self._nodes:
            item = self.graph.call_function(operator.getitem, (self._sizes, name))
            self._nodes[name] = item
        return self._nodes[name]

    def _added(self, one: Any, other: Any) -> fx.Node:
        return self.graph.call_function(operator.add, (one, other))

    def _multiplied(self, one: Any, other: Any) -> fx.Node:
        return self.graph.call_function(operator.mul, (one, other))

    def _constant(self, constant: object) -> fx.Node:
        name = f"constant_{len(self.leaves)}"
        self.leaves[name] = constant
        return self.graph.get_attr(name)


def under(ambient: Ambient, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Run `function` under the modes that the model's own code had set for it."""
    grad = ambient.grad and torch.is_grad_enabled()
    cache = ambient.cache and torch.is_autocast_cache_enabled()
    with torch.set_grad_enabled(grad), ambient._replace(cache=cache).autocasting():
        return function(*args, **kwargs)


def leaf_of(tree: object, leaf: int) -> Any:
    """Leaf number `leaf` of a container whose items have no public key."""
    return tree_leaves(tree)[leaf]


def build_with(build: Callable[[list[Any]], Any], children: list[Any]) -> Any:
    """Put a container of the user's own type together."""
    return build(list(children))


def assemble(trace: Trace, values: dict[Value, Any], sizes: Sizes) -> Any:
    """The model's result, in its own structure, from the values that it is made of."""
    return assembled(trace.outputs, trace.output_structure, values, sizes)


def assembled(
    outputs: Sequence[Any], structure: Structure | None, values: dict[Value, Any], sizes: Sizes
) -> Any:
    """A result with these leaves, in this structure, from the values that it is made of."""
    leaves = []
    for leaf in outputs:
        if isinstance(leaf, (Ref, Attribute)):
            leaves.append(values[leaf])
        else:
            leaves.append(leaf.at(sizes) if isinstance(leaf, (Size, Number)) else leaf)
    return unflatten(structure, leaves)


def _attribute_path(path: str) -> str:
    """The path in a graph module for a path in the model; it avoids names that the former uses."""
    if path and path.partition(".")[0] in _TAKEN:
        return f"model_.{path}"
    return path or "model"


def _is_tensor_method(function: Callable[..., Any]) -> bool:
    owner = getattr(function, "__objclass__", None)
    if owner is not None:
        return issubclass(torch.Tensor, owner)
    return getattr(function, "__qualname__", "").startswith(("Tensor.", "TensorBase."))


def _as_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """A tensor property's getter as a function of the tensor alone."""
    if getattr(function, "__name__", "") == "__get__":
        return operator.attrgetter(function_name(function))
    return function


# -- the module of a stage --------------------------------------------------------------------

_PickledNode = tuple[str, str, Any, Any, Any, dict[str, Any]]
"""The operation, name, target, arguments, keyword arguments and `meta["call"]` of a node."""


@dataclass(frozen=True, slots=True)
class _Named:
    """Stands for the node of this name among the arguments of a node that is pickled."""

    name: str


_CALL = nn.Module.__call__


class StageModule(fx.GraphModule):
    """A stretch of a program: `forward(sizes, key, *values) -> tuple`.

    An `fx.GraphModule` is unpickled by tracing its code once more, which calls that draw random
    numbers do not survive. This one is put together again from its nodes.

    Args:
        leaves: what its nodes refer to, by name.
        graph: its nodes.
    """

    def __init__(self, leaves: dict[str, Any], graph: fx.Graph) -> None:
        super().__init__(leaves, graph, class_name="Stage")
        # Python looks in `vars` first, and only in the end where modules have their submodules:
        # that would be a tenth of the time of a forward of small calls. The user's modules, which
        # are leaves, stay as they are; what leads to them was made here.
        known = set(map(id, leaves.values()))
        made: list[nn.Module] = [self]
        while made:
            module = made.pop()
            vars(module).update(module._modules)
            made += [child for child in module.children() if id(child) not in known]

    def recompile(self) -> PythonCode:
        """Generate the code of the graph as it is now; errors in it are raised unchanged.

        `fx` would print them as well, and drop their tracebacks. Here errors are raised with their
        stage and micro-batch, and some are expected, as when other sizes are tried. `fx` would also
        keep the source for tracebacks for ever; here it is dropped with the module.
        """
        code = super().recompile()
        type(self).__call__ = _CALL  # type: ignore[method-assign]
        weakref.finalize(self, forget_source, self.forward.__code__.co_filename).atexit = False
        return code

    def with_modules(self, others: Mapping[nn.Module, nn.Module]) -> StageModule:
        """The same stretch, with others in the places of these modules.

        Args:
            others: for each module to replace the one to call instead. The stage has to call the
                former directly, not inside another module.
        """
        restored, (leaves, nodes, training) = self.__reduce__()
        made: StageModule = restored(
            {name: others.get(leaf, leaf) for name, leaf in leaves.items()}, nodes, training
        )
        return made

    def elsewhere(self, in_place_of: Callable[[Any], Any]) -> StageModule:
        """The same stretch on another device.

        Args:
            in_place_of: a function that returns what replaces a leaf, or a device among the
                arguments, and returns anything else as it is.
        """
        restored, (leaves, nodes, training) = self.__reduce__()
        moved = [
            (op, name, target, *(fx.node.map_aggregate(tree, in_place_of) for tree in trees), meta)
            for op, name, target, *trees, meta in nodes
        ]
        leaves = {name: in_place_of(leaf) for name, leaf in leaves.items()}
        made: StageModule = restored(leaves, moved, training)
        return made

    def with_functions(
        self, others: Mapping[Callable[..., Any], Callable[..., Any]]
    ) -> StageModule:
        """The same stretch, with other functions called in the places of these."""
        restored, (leaves, nodes, training) = self.__reduce__()
        replaced = [
            (op, name, others.get(target, target) if op == "call_function" else target, *rest)
            for op, name, target, *rest in nodes
        ]
        made: StageModule = restored(leaves, replaced, training)
        return made

    def leaves(self) -> list[Any]:
        """What its nodes refer to by name, each once: modules, parameters and others."""
        names = (node.target for node in self.graph.nodes if node.op in ("get_attr", "call_module"))
        found = [operator.attrgetter(name)(self) for name in dict.fromkeys(names)]
        return list({id(leaf): leaf for leaf in found}.values())

    def __reduce__(self) -> Any:
        leaves: dict[str, Any] = {}
        nodes: list[_PickledNode] = []
        for node in self.graph.nodes:
            if node.op in ("get_attr", "call_module"):
                leaves[node.target] = operator.attrgetter(node.target)(self)
            args, kwargs = (fx.node.map_arg(tree, _named) for tree in (node.args, node.kwargs))
            meta = {k: v for k, v in node.meta.items() if k == "call"}
            nodes.append((node.op, node.name, node.target, args, kwargs, meta))
        return _restored, (leaves, nodes, self.training)


def _named(node: fx.Node) -> Any:
    return _Named(node.name)


def _restored(leaves: dict[str, Any], nodes: list[_PickledNode], training: bool) -> StageModule:
    graph = fx.Graph()
    made: dict[str, fx.Node] = {}

    def found(leaf: object) -> Any:
        return made[leaf.name] if isinstance(leaf, _Named) else leaf

    for op, name, target, args, kwargs, meta in nodes:
        args, kwargs = (fx.node.map_aggregate(tree, found) for tree in (args, kwargs))
        made[name] = graph.create_node(op, target, args, kwargs, name)
        made[name].meta.update(meta)
    module = StageModule(leaves, graph)
    module.training = training
    return module
