"""Walking through a program call by call: what each takes, and what is saved for its backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.capture import Program, Sizes, Trace
from penstock.capture.attributes import named_tensors
from penstock.capture.calls import input_leaves
from penstock.capture.cuts import Cuts
from penstock.capture.halves import Deferral
from penstock.capture.lowering import lower
from penstock.capture.randomness import Key
from penstock.capture.trees import flatten_result, parts_of, unflatten
from penstock.profile.halving import halved_calls, trained_weights, weight_share
from penstock.profile.timing import Stopwatch, Timing, timed_backward

KEY = Key(0, 0, 0)
"""Where everything that is measured draws its random numbers."""


def trace_of_forwards(program: Program) -> Trace:
    """The trace that is measured for inference: that of evaluation, if it makes the same calls."""
    same = [call.label for call in program.eval.calls] == list(program.labels)
    return program.eval if same else program.train


class Steps:
    """A program on modules of its own, whole and as the nodes of every call.

    Args:
        program: what is run.
        model: the modules.
        device: where they are.
        inference: whether there are forwards only.

    Attributes:
        module: the whole program.
        halving: the whole program, with every backward in halves that can be split.
        deferral: where the backwards of `halving` leave their weight halves.
        inputs: the values that the program is given.
        calls: the nodes of every call.
        last_used: for every call the nodes whose values no later call needs.
        mutating: the calls that change a value in place.
        weights: the parameters of every call whose backward can be halved.
    """

    def __init__(
        self, program: Program, model: nn.Module, device: torch.device, inference: bool = False
    ) -> None:
        self.device = device
        self.model = model
        self.inference = inference
        trace = trace_of_forwards(program) if inference else program.train
        cuts = program.cuts if trace is program.train else Cuts(trace)
        self.inputs = cuts.boundary(0)
        everything, outputs = range(len(program)), cuts.results
        parts = model, trace, everything, self.inputs, outputs, device
        self.module = lower(*parts)
        self.deferral = Deferral()
        self.halving = lower(*parts, self.deferral)
        self.calls = _by_call(self.module, len(program))
        self.last_used = _last_used(self.calls)
        self.mutating = {i for i, c in enumerate(trace.calls) if c.mutates}
        halved = halved_calls(program)
        self.weights = {
            i: trained_weights(c, model) for i, c in enumerate(program.train.calls) if halved[i]
        }

    def values(self, leaves: Sequence[Any]) -> list[Any]:
        """The program's inputs out of those of a batch, on its device.

        They are copies where a forward may write into them: others run at the same time.
        """
        copies = bool(self.mutating)
        moved = [
            x.to(self.device, copy=copies) if isinstance(x, torch.Tensor) else x for x in leaves
        ]
        return input_leaves(self.inputs, moved)

    def start(self, values: Sequence[Any], sizes: Sizes) -> dict[fx.Node, Any]:
        """The values of the placeholder nodes: sizes, random key and inputs."""
        placeholders = [n for n in self.module.graph.nodes if n.op == "placeholder"]
        return dict(zip(placeholders, [sizes, KEY, *values], strict=True))

    def timed(
        self, values: Sequence[Any], sizes: Sizes, wholes: list[tuple[float, float]], halves: bool
    ) -> Timing:
        """Time every call, each cut off from the others.

        Args:
            values: the program's inputs.
            sizes: how large they are.
            wholes: what the whole program took, for the record.
            halves: also measure how the backwards divide.
        """
        results = self.start(values, sizes)
        forward, backward = Stopwatch(self.device), Stopwatch(self.device)
        shares: list[float] | None = [] if halves else None
        for index in range(len(self.calls)):
            self._step(index, results, forward, backward, shares)
            for done in self.last_used[index]:  # memory fresh from the kernel is slow
                results.pop(done, None)
        backwards = [0.0] * len(self.calls) if self.inference else backward.seconds()
        return Timing(forward.seconds(), backwards, wholes, shares)

    def _step(
        self,
        index: int,
        results: dict[fx.Node, Any],
        forward: Stopwatch,
        backward: Stopwatch,
        shares: list[float] | None,
    ) -> None:
        nodes, clone = self.calls[index], index in self.mutating
        own = set(nodes)
        entering = {a for n in nodes for a in n.all_input_nodes if a not in own}
        scope = {node: _severed(results[node], clone) for node in entering}
        given = [v for v in scope.values() if not isinstance(v, nn.Parameter)]
        with forward:
            for node in nodes:
                scope[node] = _run(self.module, node, scope)
        made = [scope[n] for n in nodes]
        if not self.inference:
            halves = shares is not None and index in self.weights
            timed_backward(made, backward, again=halves)
        if shares is not None:
            weights = self.weights.get(index, ())
            shares.append(weight_share(made, given, weights, self.device))
        results.update({n: scope[n] for n in nodes})
        changed = [n for n in entering if clone or not isinstance(scope[n], torch.Tensor)]
        results.update({n: scope[n] for n in changed})  # later calls read what was changed

    def saved_bytes(self, leaves: Sequence[Any], sizes: Sizes) -> list[int]:
        """The bytes that every call is the first to hold for its backward, after one forward.

        Args:
            leaves: the inputs, in memory of their own: no views of a larger batch.
            sizes: how large they are.
        """
        results = self.start(self.values(leaves), sizes)
        found = []
        with torch.enable_grad(), Saved(t for _, t in named_tensors(self.model)) as saved:
            for index, nodes in enumerate(self.calls):
                for node in nodes:
                    results[node] = _run(self.module, node, results)
                for done in self.last_used[index]:
                    results.pop(done, None)
                found.append(sum(saved.take().values()))
        return found


def _severed(value: object, clone: bool) -> Any:
    """The value without its history; a copy where the call will change it in place.

    An object that holds tensors is replaced by a new one that holds them without their history.
    """
    if isinstance(value, nn.Parameter):
        return value
    if not isinstance(value, torch.Tensor):
        if not parts_of(value):
            return value
        leaves, structure = flatten_result(value)
        return unflatten(structure, [_severed(leaf, clone) for leaf in leaves])
    fresh = value.detach().requires_grad_(value.requires_grad)
    return fresh.clone() if clone else fresh


def _run(module: fx.GraphModule, node: fx.Node, scope: Mapping[fx.Node, Any]) -> Any:
    args = fx.map_arg(node.args, lambda n: scope[n])
    kwargs = fx.map_arg(node.kwargs, lambda n: scope[n])
    if node.op == "get_attr":
        return attrgetter(str(node.target))(module)
    if node.op == "call_module":
        return attrgetter(str(node.target))(module)(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _by_call(module: fx.GraphModule, num_calls: int) -> list[list[fx.Node]]:
    calls: list[list[fx.Node]] = [[] for _ in range(num_calls)]
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            calls[min(node.meta["call"], num_calls - 1)].append(node)
    return calls


def _last_used(calls: Sequence[Sequence[fx.Node]]) -> list[list[fx.Node]]:
    """For every call the values that no later call needs."""
    last: dict[fx.Node, int] = {}
    for index, nodes in enumerate(calls):
        for node in nodes:
            last.update(dict.fromkeys((node, *node.all_input_nodes), index))
    done: list[list[fx.Node]] = [[] for _ in calls]
    for node, index in last.items():
        done[index].append(node)
    return done


class Saved:
    """While open, notes the memory that forwards save for their backwards.

    What is saved as a view counts with all of the memory that it keeps, and memory counts once.
    All of it stays alive meanwhile, so that no address stands for two things.

    Args:
        own: the model's tensors, which are there anyway.
    """

    def __init__(self, own: Iterable[torch.Tensor]) -> None:
        self._seen = {address(tensor) for tensor in own if not tensor.is_meta}
        self._new: dict[int, int] = {}
        self._alive: list[torch.Tensor] = []
        self._hooks = saved_tensors_hooks(self._note, lambda tensor: tensor)

    def __enter__(self) -> Saved:
        self._hooks.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._hooks.__exit__(*_)
        self._alive.clear()

    def take(self) -> dict[int, int]:
        """What was saved for the first time since the last call: bytes, by address."""
        new, self._new = self._new, {}
        return new

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        bare = tensor.detach()  # with its history, a saved result would hold itself for ever
        place = address(bare)
        if place and place not in self._seen:
            self._seen.add(place)
            self._new[place] = bare.untyped_storage().nbytes()
            self._alive.append(bare)
        return bare


def address(tensor: torch.Tensor) -> int:
    """Where the memory begins that a tensor is a view of; 0 if it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # sparse tensors have no storage
        return 0
