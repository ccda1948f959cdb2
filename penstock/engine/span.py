"""A stretch of a stage with an autograd graph of its own, kept until the backward or made again.

A stage is one span, unless parts of it are recomputed (Chen et al. 2016, arXiv:1604.06174): of
such a part only what enters it is kept, and its forward runs a second time when its backward is
due. Between two spans values are cut off from their history just as between two stages, so that
gradients are summed in the same order, and the bits are the same with recomputing as without.
(Autocast is an exception where a weight is used on both sides: within one graph it is cast once and
its gradients are summed in the lower precision, across two each side casts for itself.)
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from penstock.capture.attributes import find
from penstock.capture.calls import Ambient, Sizes, ambient
from penstock.capture.lowering import StageModule
from penstock.capture.meta import NoSavedTensors
from penstock.capture.norms import only_normalises
from penstock.capture.one_replica import may_have_a_twin
from penstock.capture.randomness import Key
from penstock.capture.trees import versions
from penstock.devices.layout import alike
from penstock.engine.compiled import Compile, CompiledForward
from penstock.engine.graphs import Graphs
from penstock.engine.residents import Residents, States
from penstock.engine.state import State, ValuesSaved, plain_attributes
from penstock.errors import InputError
from penstock.links.link import Gradients, Roots, Values, edges
from penstock.torch_internals import storage_uses, without_subclass_functions

_ALONE = storage_uses(torch.empty(1))


class MicroBatch(NamedTuple):
    """What every stage knows of a micro-batch.

    Attributes:
        sizes: how large it is.
        key: where its random numbers are.
        way: which of the stage's ways it takes.
        states: its resident values, in a session.
    """

    sizes: Sizes
    key: Key
    way: int = 0
    states: States | None = None


@dataclass
class Span:
    """Some calls of a stage.

    Attributes:
        module: `module(sizes, key, *values) -> tuple`, see `penstock.capture.lowering`.
        recompute: whether its forward runs again before its backward.
        changing: what its forward changes in place: buffers, as a rule.
        overwritten: the places of values that enter, and are changed in place from here on.
        memories: what its forward remembers in attributes: each is the modules that have it.
        saves: whether its forward computes gradients itself, so that it needs what autograd saves.
        apart: norms in training that leave their running statistics alone when the forward runs
            again, as other replicas may be using them; none before `keep_apart`.
        taken: the leaves of the inputs that are resident values; the module takes them last.
        kept: the leaves of the result that become resident values; the module returns them last.
        compile: arguments of `torch.compile`, if forwards without gradients are compiled.
        recorded_on: the device whose work is recorded as CUDA graphs; `None` if it is not recorded.
        keeps_states: whether its backward may set states of torch's generators.
    """

    module: Callable[..., Values]
    recompute: bool = False
    changing: Sequence[torch.Tensor] = ()
    overwritten: Sequence[int] = ()
    memories: Sequence[frozenset[nn.Module]] = ()
    saves: bool = False
    taken: Sequence[int] = ()
    kept: Sequence[int] = ()
    compile: Compile | None = None
    recorded_on: torch.device | None = None
    keeps_states: bool = False

    def __post_init__(self) -> None:
        stage = self.module
        modules = list(stage.modules())[1:] if isinstance(stage, nn.Module) else []
        norms = [module for module in modules if only_normalises(module)]
        unused = {id(buffer) for norm in norms for buffer in norm.buffers(recurse=False)}
        unused -= read_by(stage)
        self._used = [tensor for tensor in self.changing if id(tensor) not in unused]
        self._saving = ValuesSaved(self._used)
        self.apart: frozenset[nn.Module] = frozenset()
        self._modules, self._changing = modules, self.changing
        self._norms = norms
        self._again = _Again()

    def keep_apart(self) -> None:
        """Let norms leave their running statistics alone when the forward runs again.

        Those that others know, by hooks or as parts of modules, are not among them.
        """
        changing = {id(tensor) for tensor in self.changing}
        found = [norm for norm in self._norms if not changing.isdisjoint(map(id, norm.buffers()))]
        self.apart = frozenset(_alone(self.module, found)) if self.recompute else frozenset()
        theirs = {id(buffer) for norm in self.apart for buffer in norm.buffers(recurse=False)}
        self._modules = [module for module in self._modules if module not in self.apart]
        self._changing = [tensor for tensor in self.changing if id(tensor) not in theirs]

    @cached_property
    def without_gradients(self) -> Callable[..., Values]:
        """What runs forwards without gradients: the module, or what it is compiled to here."""
        return self.module if self.compile is None else CompiledForward(self.module, self.compile)

    @cached_property
    def _graphs(self) -> Graphs | None:
        """What runs it as graphs; `None` if nothing does."""
        if self.recorded_on is None or not isinstance(self.module, StageModule):
            return None
        return Graphs(self.module, self._used, self.recorded_on)

    def begin(self) -> None:
        """Begin a pass, for what runs the span as graphs."""
        if self._graphs is not None:
            self._graphs.begin()

    def run(self, sizes: Sizes, key: Key, values: Values) -> Values:
        """Run the forward; autograd saves what changes as it is at that moment."""
        if self._graphs is not None:
            return self._graphs.run(sizes, key, values, partial(self._run, sizes, key, values))
        return self._run(sizes, key, values)

    def _run(self, sizes: Sizes, key: Key, values: Values) -> Values:
        with self._saving():
            return self.module(sizes, key, *values)

    def refresh(self) -> None:
        """Others go on with what this thread's forward has changed so far, see `ValuesSaved`."""
        self._saving.refresh()

    def infer(self, microbatch: MicroBatch, values: Values, residents: Residents) -> Values:
        """Run the forward without gradients, on residents as well."""
        sizes, key, states = microbatch.sizes, microbatch.key, microbatch.states
        if states is None:
            usual = partial(self.without_gradients, sizes, key, *values)
            if self._graphs is not None:
                return self._graphs.run(sizes, key, values, usual)
            return usual()
        taken = [residents.take(leaf, states) for leaf in self.taken]
        results = self.without_gradients(sizes, key, *values, *taken)
        count = len(results) - len(self.kept)
        for leaf, value in zip(self.kept, results[count:], strict=True):
            residents.keep(leaf, value, states)
        return results[:count]

    def state(self) -> State:
        """The buffers, attributes and generators of its modules, without those `apart`, now."""
        return State(self._modules, self._changing)

    def attributes_apart(self) -> Attributes:
        """The plain attributes of the modules `apart`, as they are now."""
        return {module: plain_attributes(module) for module in self.apart}

    def run_again(self, sizes: Sizes, key: Key, values: Values, attributes: Attributes) -> Values:
        """Run the forward as `run` does, with twins of the modules `apart`.

        Args:
            sizes, key, values: as of the first time.
            attributes: what `attributes_apart` gave then.
        """
        again = self._again
        if again.module is None:
            again.twins = {module: nn.Module() for module in self.apart}
            again.module = self.module
            if isinstance(self.module, StageModule) and again.twins:
                again.module = self.module.with_modules(again.twins)
        for module, twin in again.twins.items():
            _become(twin, module, attributes[module])
        with self._saving():
            return again.module(sizes, key, *values)


class _Again(threading.local):
    """How one thread runs a span's forward again.

    Attributes:
        module: the span's, with twins of the modules `apart`; `None` before the first time.
        twins: by the module that each stands for.
    """

    module: Callable[..., Values] | None = None
    twins: dict[nn.Module, nn.Module]

    def __reduce__(self) -> Any:
        return _Again, ()


def _become(twin: nn.Module, module: nn.Module, attributes: Mapping[str, Any]) -> None:
    """Make the twin what the module is, with its weights and with buffers of its own.

    In training a norm does not read these, and others may be writing to the module's. One that is
    frozen reads them, and nobody writes to them.
    """
    new = torch.zeros_like if attributes["training"] else torch.clone
    with torch.no_grad(), without_subclass_functions():
        buffers = {n: None if b is None else new(b) for n, b in module._buffers.items()}
    object.__setattr__(twin, "__class__", type(module))
    object.__setattr__(twin, "__dict__", {**vars(module), **attributes, "_buffers": buffers})


def _alone(stage: Callable[..., Any], norms: Collection[nn.Module]) -> Iterator[nn.Module]:
    """Those that nothing but a call of their own uses, and that do nothing unusual."""
    if not isinstance(stage, StageModule):
        return
    called, leaves = calls_of(stage), stage.leaves()
    holders = Counter(id(b) for m in stage.modules() for b in m.buffers(recurse=False))
    read = read_by(stage)
    for norm in norms:
        own = [id(buffer) for buffer in norm.buffers(recurse=False)]
        held_once = all(holders[buffer] == 1 and buffer not in read for buffer in own)
        users = [leaf for leaf in leaves if isinstance(leaf, nn.Module) and norm in leaf.modules()]
        if held_once and norm in called and users == [norm] and may_have_a_twin(norm):
            yield norm


def calls_of(stage: Callable[..., Any]) -> Counter[nn.Module]:
    """The user's modules that a stage calls directly, and how often.

    Modules that draw random numbers are left out: they are called with a lock held, so they must
    not wait.
    """
    calls: Counter[nn.Module] = Counter()
    if not isinstance(stage, fx.GraphModule):
        return calls
    for node in stage.graph.nodes:
        if node.op == "call_module":
            calls[stage.get_submodule(str(node.target))] += 1
    return calls


def read_by(stage: Callable[..., Any]) -> set[int]:
    """The ids of tensors that a stage reads by itself, from attributes of modules."""
    if not isinstance(stage, fx.GraphModule):
        return set()
    names = [str(node.target) for node in stage.graph.nodes if node.op == "get_attr"]
    return {id(find(stage, name)) for name in names}


class Passed(NamedTuple):
    """What is held of a micro-batch that has passed a span.

    Attributes:
        entry: catches the gradients of what entered.
        roots: where the backward starts.
    """

    entry: EntryNode
    roots: Roots


Attributes = Mapping[nn.Module, Mapping[str, Any]]
"""The plain attributes of some modules."""


class Rerun(NamedTuple):
    """How to pass a span again: the same values, random numbers, buffers and modes.

    Attributes:
        span: the span.
        values: what entered it.
        sizes: of the micro-batch.
        key: of its random numbers.
        state: what the modules remembered then.
        modes: autocast, as it was.
        attributes: of the modules that run apart, as they were.
        versions: how often each of the values was written to.
    """

    span: Span
    values: Values
    sizes: Sizes
    key: Key
    state: State
    modes: Ambient
    attributes: Attributes
    versions: Sequence[int]

    def run(self) -> Passed:
        """Run the forward again; what modules remember is left as it is now.

        Raises:
            InputError: an input of the model was written to meanwhile.
        """
        if versions(self.values) != self.versions:
            raise InputError(
                "a tensor that the forward needs again for recomputation was written to between "
                "the forward and the backward. Give the pipeline a copy of it, x.clone(), or call "
                "backward() before you write to it"
            )
        now = self.span.state()
        self.state.put_back()
        try:
            entry, entered = enter(self.values)
            with torch.enable_grad(), self.modes.autocasting():
                again = self.span.run_again(self.sizes, self.key, entered, self.attributes)
                return Passed(entry, edges(again))
        finally:
            now.put_back()


def run_span(
    span: Span, values: Values, sizes: Sizes, key: Key
) -> tuple[Rerun | EntryNode, Values]:
    """Run a span; what its backward needs, apart from its roots, and its results.

    The results of a span that is recomputed have no history, but ask for a gradient where they
    would have one.
    """
    if not span.recompute:
        entry, entered = enter(values)
        return entry, span.run(sizes, key, entered)
    state = span.state()
    kept = tuple(_copied(v) if k in span.overwritten else v for k, v in enumerate(values))
    apart = span.attributes_apart()
    recomputation = Rerun(span, kept, sizes, key, state, ambient(), apart, versions(kept))
    entry, results = _run_without_saving(recomputation, values)
    if not any(isinstance(r, torch.Tensor) and r.requires_grad for r in results):
        return entry, results  # all of it is frozen: there is no backward to run it again for
    return recomputation, tuple(_as_leaf(value) for value in results)


def _run_without_saving(recomputation: Rerun, values: Values) -> tuple[EntryNode, Values]:
    """Run a span's forward for its results, unless it computes gradients itself."""
    span = recomputation.span
    if not span.saves:
        hooks = NoSavedTensors()
        try:
            with hooks:
                entry, entered = enter(values)
                results = span.module(recomputation.sizes, recomputation.key, *entered)
            if not hooks.was_needed:
                return entry, results
        except Exception:
            if not hooks.was_needed:
                raise
        span.saves = True
        recomputation.state.put_back()
        for k in span.overwritten:
            if isinstance(values[k], torch.Tensor):
                values[k].detach().copy_(recomputation.values[k].detach())
    entry, entered = enter(values)
    return entry, span.module(recomputation.sizes, recomputation.key, *entered)


def _copied(value: object) -> Any:
    """A copy of a tensor, which no change of the original reaches; all else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


def _as_leaf(value: object) -> Any:
    """A tensor without its history, which asks for a gradient if it did; all else as it is."""
    if not isinstance(value, torch.Tensor) or not value.requires_grad:
        return value
    return value.detach().requires_grad_()


def run_backward(
    roots: Roots, gradients: Gradients, leaves: Sequence[torch.Tensor] | None = None
) -> None:
    """Run autograd's backward from those roots for which there is a gradient.

    Args:
        roots: where it starts; `None` where nothing is differentiable.
        gradients: one for each root, or `None`.
        leaves: the leaves whose gradients it computes; `None` for all that it reaches.
    """
    pairs = [
        (root, gradient)
        for root, gradient in zip(roots, gradients, strict=True)
        if root is not None and gradient is not None
    ]
    if pairs and leaves is None:
        torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
    elif pairs and leaves:
        torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs], inputs=leaves)


def apart(gradients: Gradients) -> Gradients:
    """Gradients that a backward leaves for later, so that nobody writes to them meanwhile.

    Autograd may keep as `.grad` a view of a gradient that others get as well, as that of `p` in
    `x + p.unsqueeze(0)`, and add to it in place later. So those are copied whose memory is used
    elsewhere.

    Args:
        gradients: all that are left; `None` where there is none.
    """
    shared = {
        id(gradient): gradient
        for gradient in gradients
        if gradient is not None
        and gradient.layout is torch.strided
        and storage_uses(gradient) > _ALONE
    }
    if not shared:
        return gradients
    bases = [g._base for g in shared.values() if g._base is not None]  # autograd keeps them
    own = {id(tensor): tensor for tensor in (*shared.values(), *bases)}
    among = Counter(tensor.untyped_storage().data_ptr() for tensor in own.values())
    copies = {
        key: alike(gradient, torch.clone, sparse=True)
        for key, gradient in shared.items()
        if storage_uses(gradient) - _ALONE >= among[gradient.untyped_storage().data_ptr()]
    }
    return [
        None if gradient is None else copies.get(id(gradient), gradient) for gradient in gradients
    ]


class EntryNode:
    """Catches the gradients of the values that entered a stage.

    Attributes:
        gradients: for every value its gradient, once the backward has run.
        anchor: the leaf that a backward has to reach to pass here; none if no value is
            differentiable.
    """

    __slots__ = ("anchor", "differentiable", "gradients")

    def __init__(self, values: Values) -> None:
        self.differentiable = [
            k for k, v in enumerate(values) if isinstance(v, torch.Tensor) and v.requires_grad
        ]
        self.gradients: list[torch.Tensor | None] = [None] * len(values)
        self.anchor: torch.Tensor | None = None

    def catch(self, gradients: Gradients) -> None:
        """Called by autograd with the gradients of the differentiable values."""
        for k, gradient in zip(self.differentiable, gradients, strict=True):
            self.gradients[k] = gradient


def enter(values: Values) -> tuple[EntryNode, Values]:
    """The values without their history, in an autograd graph of the stage's own.

    They share memory with the originals and are no leaves, so a stage may begin with an operation
    in place; and all of them come from one autograd node, so that their gradients are caught
    together without passing through `.grad`.
    """
    entry = EntryNode(values)
    if not entry.differentiable:
        return entry, values
    detached = [values[k].detach() for k in entry.differentiable]
    entered = list(values)
    entry.anchor = torch.empty(0, requires_grad=True)
    fresh = _Enter.apply(entry, entry.anchor, *detached)
    for k, value in zip(entry.differentiable, fresh, strict=True):
        entered[k] = value
    return entry, tuple(entered)


class _Enter(torch.autograd.Function):
    """The identity; its backward hands the gradients to the entry and ends there."""

    @staticmethod
    def forward(ctx: Any, entry: EntryNode, anchor: torch.Tensor, *values: torch.Tensor) -> Values:
        ctx.entry = entry
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.entry.catch(gradients)
        return (None, None, *(None for _ in gradients))


OWN_FUNCTIONS: frozenset[type] = frozenset({_Enter})
"""Autograd Functions that stages put into graphs; their backwards run no other."""
