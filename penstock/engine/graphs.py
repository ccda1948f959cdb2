"""Spans as CUDA graphs: recorded once, then given to the GPU as a whole.

A model of many small kernels is bound by the CPU that launches them. A graph launches all kernels
of a span's forward, or of its backward, at once. They are the same kernels on the same values, so
the bits are the same.

A recording reads and writes memory of its own, also that of values that are gone when it ends. So
every micro-batch that has passed forward and waits for its backward has a *slot*: what enters a
span is copied there, what leaves it is copied from there. A slot is free again when nothing can go
back through it any more. A span is recorded for everything on which its kernels depend: the sizes
and strides of values, modes, and whatever else is in `Graphs.signature`. The first micro-batch of a
kind runs as ever, and warms up what libraries do when they are first called; the second is
recorded.

Python runs only while a span is recorded. Spans of which it is not known what their Python does are
not recorded (`recordable.py`, `known_python.py`). What it may read is looked at before every pass:
there are recordings for each state of the modules.

CUDA graphs for training are in PyTorch's `torch.cuda.make_graphed_callables`, which needs the
micro-batches in an order that is fixed, and no random numbers that are seeded by call.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, saved_tensors_hooks

from penstock.capture.calls import Ambient, Sizes, ambient
from penstock.capture.lowering import StageModule
from penstock.capture.randomness import (
    Key,
    draw,
    undisturbed,
    undisturbed_within,
)
from penstock.devices.kind import GraphRecorder, Recording
from penstock.devices.kinds import kind_of
from penstock.devices.layout import ALIGNMENT, alike
from penstock.devices.settings import TorchSettings
from penstock.engine.hooks import hooks_of
from penstock.engine.known_python import PLAIN, is_plain
from penstock.engine.recordable import GraphError
from penstock.links.link import Roots, Values, edges

_EVERY = vars(nn.Module()).keys() - {"training"}  # attributes: what modules register, and hooks
_MOST = 64  # kinds of micro-batches that are recorded
_PATIENCE = 10.0  # seconds
_STATES = 4  # of modules, such as training and evaluation, for which recordings are kept


class _Entered(NamedTuple):
    """What a value is like, as far as kernels depend on it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    requires_grad: bool


@dataclass
class _Slot:
    """Memory for one micro-batch, and what is recorded of it.

    Attributes:
        entered: the values, in memory of the slot.
        aliases: the leaves that stand for the parameters, see `_alias`.
        results: of the forward, in memory of the slot.
        roots: for every tensor among the results where its backward starts. This is kept from the
            recording: once the base of a view has been written, autograd gives the view another
            history, which leaves gradients in another layout.
        forward: the recording of the forward.
        calls: the calls that draw random numbers, in order.
        anchor: the leaf in the slot that its graph of autograd begins with.
        caught: the gradients of the values, once a backward has run or was recorded.
        backwards: the recorded backwards, by which results have gradients and what those are like.
    """

    entered: list[Any]
    aliases: Sequence[nn.Parameter]
    results: Values = ()
    roots: Roots = ()
    forward: Recording | None = None
    calls: list[int] = field(default_factory=list)
    anchor: torch.Tensor | None = None
    caught: list[torch.Tensor | None] = field(default_factory=list)
    backwards: dict[Hashable, _Backward] = field(default_factory=dict)


class _Backward(NamedTuple):
    """A recorded backward.

    Attributes:
        recording: itself.
        given: the gradients of results, in memory of the slot.
        inputs: those of the differentiable values.
        parameters: those of the parameters.
    """

    recording: Recording
    given: list[torch.Tensor]
    inputs: list[torch.Tensor | None]
    parameters: list[torch.Tensor | None]


@dataclass
class _Known:
    """A kind of micro-batch. Attributes: the slots that are free."""

    free: list[_Slot] = field(default_factory=list)


@dataclass
class _State:
    """What was recorded of modules as they were.

    Attributes:
        addresses: of their tensors.
        known: the kinds of micro-batches that came.
    """

    addresses: Sequence[int]
    known: dict[Hashable, _Known] = field(default_factory=dict)


class _Lease:
    """A slot that a micro-batch has until its backward, or until nobody knows of it any more."""

    def __init__(self, slot: _Slot, known: _Known) -> None:
        self.slot: _Slot | None = slot
        self._known = known

    def end(self) -> None:
        """Let the slot be used for another micro-batch."""
        slot, self.slot = self.slot, None
        if slot is not None:
            self._known.free.append(slot)

    __del__ = end


class Graphs:
    """Runs a span's forwards, and their backwards, as graphs.

    Args:
        module: of the span.
        changing: what its forward changes in place, of which autograd saves copies.
        device: where it runs.
    """

    def __init__(
        self, module: StageModule, changing: Sequence[torch.Tensor], device: torch.device
    ) -> None:
        self._module, self._device = module, device
        self._changing = list(changing)
        self._modules = list(module.modules())[1:]
        self._parameters = list(dict.fromkeys(module.parameters()))
        self._tensors = [*self._parameters, *dict.fromkeys(module.buffers())]
        self._draws = sum(node.target is draw for node in module.graph.nodes)
        self._recorder: GraphRecorder | None = None
        self._states: dict[Hashable, _State] = {}
        self._now = _State(())
        self._is_hooked = False

    def begin(self) -> None:
        """Begin a pass: use the recordings that were made with the modules in their present state.

        While a module or parameter has a hook, no graph is used, so that the hook is called.
        """
        settings = TorchSettings.here(), kind_of(self._device).settings()
        places = tuple(map(_place, self._tensors))
        key = settings, places, tuple(map(_attributes, self._modules))
        hooks = hooks_of(map(vars, self._modules))
        self._is_hooked = bool(hooks) or any(p._backward_hooks for p in self._parameters)
        if key not in self._states and len(self._states) == _STATES:
            self._forget()
        addresses = [place[0] for place in places]
        self._now = self._states.pop(key) if key in self._states else _State(addresses)
        self._states[key] = self._now  # the last that was used

    def _forget(self) -> None:
        """Forget the recordings that were not used for longest, once the device has done them."""
        kind = kind_of(self._device)
        if kind.has_streams:
            kind.current_stream(self._device).record_event().synchronize()
        del self._states[next(iter(self._states))]

    def signature(self, sizes: Sizes, key: Key | None, values: Values, modes: Ambient) -> Hashable:
        """Equal for micro-batches of which the same is recorded; `None` if nothing is.

        Args:
            sizes, key: of the micro-batch.
            values: what enters.
            modes: the thread's.
        """
        if self._is_hooked or (key is None and self._draws):
            return None
        if list(map(torch.Tensor.data_ptr, self._tensors)) != self._now.addresses:
            return None  # a forward of this pass has moved one
        like: list[Any] = []
        memory: set[int] = set()
        for value in values:
            if isinstance(value, torch.Tensor):
                if type(value) is not torch.Tensor or value.device != self._device:
                    return None
                if value.layout is not torch.strided or value.is_conj() or value.is_neg():
                    return None
                memory.add(value.untyped_storage()._cdata)
                like.append(_like(value))
            elif is_plain(value):
                like.append(_read(value))
            else:
                return None
        if len(memory) < sum(isinstance(value, torch.Tensor) for value in values):
            return None  # one may be changed in place, and be seen in another
        numbers = tuple([(name, _read(size)) for name, size in sorted(sizes.items())])
        return numbers, tuple(like), modes

    def run(self, sizes: Sizes, key: Key, values: Values, usual: Callable[[], Values]) -> Values:
        """The results of the span.

        Args:
            sizes, key: of the micro-batch.
            values: what enters.
            usual: runs it as it is.

        Raises:
            GraphError: something in it cannot be recorded.
        """
        modes = ambient()
        signature = self.signature(sizes, key, values, modes)
        known = None if signature is None else self._now.known.get(signature)
        if known is None:
            results = usual()
            if signature is not None and len(self._now.known) < _MOST:
                self._now.known[signature] = _Known()
            return results
        slot = known.free.pop() if known.free else None
        if slot is None:
            slot = self._recorded(sizes, key, values, modes)
        else:
            with torch.no_grad():
                for there, value in zip(slot.entered, values, strict=True):
                    if isinstance(value, torch.Tensor):
                        _fill(there, value)
        lease = _Lease(slot, known)
        _replay(slot, key)
        if not any(isinstance(r, torch.Tensor) and r.requires_grad for r in slot.results):
            copies = tuple(_copied(result) for result in slot.results)
            lease.end()
            return copies
        entered = [v for v in values if isinstance(v, torch.Tensor) and v.requires_grad]
        wanted = [p for p in self._parameters if p.requires_grad]
        copies = _Replayed.apply(self, lease, *entered, *wanted)
        tensors = iter(copies)
        return tuple(
            next(tensors) if isinstance(result, torch.Tensor) else result for result in slot.results
        )

    # -- recording ----------------------------------------------------------------------------

    def _check(self, slot: _Slot) -> None:
        """Raise if gradients would flow to others than those that stand for parameters.

        Raises:
            GraphError: they would.
        """
        if [(p.data_ptr(), p.shape, p.stride()) for p in self._parameters] != [
            (alias.data_ptr(), alias.shape, alias.stride()) for alias in slot.aliases
        ]:
            raise GraphError(
                "this stage cannot be recorded as a CUDA graph: its forward moves a parameter "
                "(.data = ...). Leave out cuda_graphs=True, or write into it (.copy_())"
            )
        results = slot.results
        known = {id(alias) for alias in (*slot.aliases, slot.anchor)}
        left = [r.grad_fn for r in results if isinstance(r, torch.Tensor) and r.grad_fn is not None]
        seen = set(left)
        while left:
            node = left.pop()
            leaf = getattr(node, "variable", None)
            if leaf is not None and id(leaf) not in known:
                raise GraphError(
                    "this stage cannot be recorded as a CUDA graph: its gradients flow to a leaf "
                    f"of shape {tuple(leaf.shape)} that the forward makes, or to a parameter that "
                    "it reaches by another way than its modules. Leave out cuda_graphs=True, or "
                    "register the parameter"
                )
            fresh = {each for each, _ in node.next_functions if each is not None} - seen
            seen |= fresh
            left += fresh

    def _recorded(self, sizes: Sizes, key: Key, values: Values, modes: Ambient) -> _Slot:
        """A new slot, which holds these values, and its forward."""
        aliases = {id(p): _alias(p) for p in self._parameters}
        slot = _Slot(list(map(_copied, values)), list(aliases.values()))
        made: dict[int, nn.Module] = {}
        stands = partial(_in_place_of, aliases=aliases, made=made)
        stage = self._module.elsewhere(stands)
        changing = frozenset(t.untyped_storage()._cdata for t in self._changing)
        differentiable = [
            k for k, v in enumerate(values) if isinstance(v, torch.Tensor) and v.requires_grad
        ]

        def work(generators: Sequence[AbstractContextManager[None]]) -> Values:
            slot.calls.clear()
            left = iter(generators)

            def drawn(
                key: Key | None, call: int, function: Any, /, *args: Any, **kwargs: Any
            ) -> Any:
                slot.calls.append(call)
                with undisturbed(), next(left):
                    return function(*args, **kwargs)

            module = stage.with_functions({draw: drawn}) if self._draws else stage
            entered = list(slot.entered)
            if differentiable and modes.grad:
                slot.anchor = torch.empty(0, requires_grad=True)
                given = [slot.entered[k] for k in differentiable]
                for k, value in zip(
                    differentiable, _Caught.apply(slot, slot.anchor, *given), strict=True
                ):
                    entered[k] = value
            # Autograd keeps what saves, which must not lead to the slot.
            with saved_tensors_hooks(partial(_save, changing), _load), self._without_cpu_draws():
                results: Values = module(sizes, key, *entered)
            return results

        slot.results, slot.forward = self._record(work, self._draws)
        self._check(slot)
        slot.roots = edges(tuple(r for r in slot.results if isinstance(r, torch.Tensor)))
        return slot

    @contextmanager
    def _without_cpu_draws(self) -> Iterator[None]:
        """Raise if a stage of a GPU draws from the CPU's generator, which a replay does not.

        Raises:
            GraphError: it has drawn.
        """
        if self._device.type == "cpu":
            yield
            return
        with _alone():  # a stage on the CPU seeds its generator for each call
            before = torch.get_rng_state()
        yield
        with _alone():
            after = torch.get_rng_state()
        if not torch.equal(before, after):
            raise GraphError(
                "this stage cannot be recorded as a CUDA graph: it draws random numbers on the "
                "CPU. Leave out cuda_graphs=True, or draw them on the GPU (device=x.device)"
            )

    def _record(
        self, work: Callable[..., Any], generators: int = 0, after: Recording | None = None
    ) -> tuple[Any, Recording]:
        if self._recorder is None:
            self._recorder = kind_of(self._device).recorder(self._device)
        try:
            return self._recorder.record(work, generators, after, _alone)
        except GraphError:
            self._states.clear()
            raise
        except RuntimeError as error:
            self._states.clear()  # with what may be in memory that is gone
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise GraphError(
                "this stage cannot be recorded as a CUDA graph: it may read values on the CPU "
                "(.item(), a mask as an index, nonzero), or another thread has disturbed it. Leave "
                f"out cuda_graphs=True, or keep that out of the model. CUDA says: {error}"
            ) from error

    def backward(self, slot: _Slot, gradients: Sequence[torch.Tensor | None]) -> _Backward:
        """Replay the backward from these gradients of a slot's tensors, recorded if it is new."""
        kind = tuple(None if g is None else _like(g) for g in gradients)
        found = slot.backwards.get(kind)
        if found is not None:
            present = (g for g in gradients if g is not None)
            with torch.no_grad():
                for there, gradient in zip(found.given, present, strict=True):
                    _fill(there, gradient)
        else:
            pairs = zip(slot.roots, gradients, strict=True)
            found = self._recorded_backward(slot, [(r, g) for r, g in pairs if r and g is not None])
            slot.backwards[kind] = found
        found.recording.replay()
        return found

    def _recorded_backward(
        self, slot: _Slot, pairs: Sequence[tuple[GradientEdge, torch.Tensor]]
    ) -> _Backward:
        given = [_copied(gradient) for _, gradient in pairs]
        roots = [root for root, _ in pairs]
        wanted = [alias for alias in slot.aliases if alias.requires_grad]
        leaves = [*([] if slot.anchor is None else [slot.anchor]), *wanted]

        def work(_: Sequence[AbstractContextManager[None]]) -> list[torch.Tensor | None]:
            slot.caught = []
            with torch.enable_grad():
                found = torch.autograd.grad(
                    roots, leaves, given, retain_graph=True, allow_unused=True
                )
            return list(found[len(leaves) - len(wanted) :])

        parameters, recording = self._record(work, after=slot.forward)
        if any(g is not None and g.layout is not torch.strided for g in parameters):
            raise GraphError(
                "this stage cannot be recorded as a CUDA graph: gradients of its parameters are "
                "sparse. Leave out cuda_graphs=True, or sparse=True"
            )
        return _Backward(recording, given, slot.caught, parameters)


class _Caught(torch.autograd.Function):
    """The identity; its backward leaves the gradients in the slot."""

    @staticmethod
    def forward(ctx: Any, slot: _Slot, anchor: torch.Tensor, *values: torch.Tensor) -> Values:
        ctx.slot = weakref.ref(slot)  # whose results have this in their history
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.slot().caught = list(gradients)
        return (None, None, *(None for _ in gradients))


class _Replayed(torch.autograd.Function):
    """The results of a slot whose forward has been replayed; its backward replays the slot's."""

    @staticmethod
    def forward(ctx: Any, graphs: Graphs, lease: _Lease, *leaves: torch.Tensor) -> Values:
        slot = lease.slot
        if slot is None:
            raise GraphError("a slot was given back before it was read")
        ctx.graphs, ctx.lease, ctx.count = graphs, lease, len(leaves)
        ctx.versions = [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, nn.Parameter)]
        ctx.set_materialize_grads(False)
        tensors = [result for result in slot.results if isinstance(result, torch.Tensor)]
        copies = [_copied(tensor) for tensor in tensors]
        ctx.mark_non_differentiable(
            *(c for c, t in zip(copies, tensors, strict=True) if not t.requires_grad)
        )
        return tuple(copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        slot = ctx.lease.slot
        if slot is None:
            raise GraphError("a slot was given back before its backward")
        if any(leaf._version != version for leaf, version in ctx.versions):
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: a parameter of this stage was changed after its forward"
            )
        tensors = [result for result in slot.results if isinstance(result, torch.Tensor)]
        pairs = zip(tensors, gradients, strict=True)
        found = ctx.graphs.backward(slot, [g if t.requires_grad else None for t, g in pairs])
        inputs = [None if g is None else _copied(g) for g in found.inputs]
        inputs = inputs or [None] * (ctx.count - len(found.parameters))
        # The slot refers to them as well, so that autograd copies what becomes a `.grad`.
        return (None, None, *inputs, *found.parameters)


def _in_place_of(leaf: Any, aliases: dict[int, nn.Parameter], made: dict[int, nn.Module]) -> Any:
    """What stands for a parameter, or for a module that has some, while it is recorded.

    Autograd remembers for every leaf on which stream its gradients are added. Those of recordings
    have leaves of their own.

    Args:
        leaf: a parameter, a module, or anything else, which stands for itself.
        aliases: of the parameters, by their ids.
        made: the modules that were made, by the ids of those that they stand for.
    """
    if isinstance(leaf, nn.Parameter):
        return aliases[id(leaf)]
    if not isinstance(leaf, nn.Module) or not any(True for _ in leaf.parameters()):
        return leaf
    if id(leaf) not in made:
        twin = made[id(leaf)] = nn.Module()
        stands = partial(_in_place_of, aliases=aliases, made=made)
        own = {name: stands(parameter) for name, parameter in leaf._parameters.items()}
        children = {name: stands(child) for name, child in leaf._modules.items()}
        object.__setattr__(twin, "__class__", type(leaf))
        others = {**vars(leaf), "_parameters": own, "_modules": children}
        object.__setattr__(twin, "__dict__", others)
    return made[id(leaf)]


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    """Another leaf, with the same memory and the same attributes."""
    alias = nn.Parameter(parameter.detach(), parameter.requires_grad)
    alias.__dict__.update(vars(parameter))
    return alias


@contextmanager
def _alone() -> Iterator[None]:
    """While open, no other thread draws random numbers.

    Raises:
        GraphError: one does for too long, such as a loss that calls another pipeline.
    """
    with undisturbed_within(_PATIENCE) as is_alone:
        if not is_alone:
            raise GraphError(
                "this stage cannot be recorded as a CUDA graph: another thread draws random "
                f"numbers for more than {_PATIENCE:.0f} s, such as a loss that calls another "
                "pipeline. Leave out cuda_graphs=True there"
            )
        yield


def _replay(slot: _Slot, key: Key) -> None:
    """Run a slot's forward, with the random numbers of this key."""
    if slot.forward is None:
        raise GraphError("a slot was not recorded")
    slot.forward.replay([key.for_call(call) for call in slot.calls])


def _save(changing: frozenset[int], tensor: torch.Tensor) -> torch.Tensor:
    """What autograd saves of a tensor; a replay writes it anew, so its version is not checked.

    Args:
        changing: the storages of what the forward changes.
        tensor: what is saved.
    """
    if tensor.untyped_storage()._cdata in changing:
        return alike(tensor, torch.clone, sparse=True)
    return tensor.detach()


def _load(saved: torch.Tensor) -> torch.Tensor:
    return saved


def _like(tensor: torch.Tensor) -> _Entered:
    offset = tensor.data_ptr() % ALIGNMENT
    return _Entered(
        tuple(tensor.shape), tensor.stride(), tensor.dtype, offset, tensor.requires_grad
    )


def _copied(value: Any) -> Any:
    """A copy with the same strides, without history; what is no tensor is the same."""
    if not isinstance(value, torch.Tensor):
        return value
    unique = _unique(value)
    copy = alike(unique, torch.clone, sparse=True)
    return copy if unique is value else copy.expand(value.shape)


def _fill(there: torch.Tensor, value: torch.Tensor) -> None:
    """Copy a value to where `_copied` has put one like it."""
    _unique(there).detach().copy_(_unique(value).detach())


def _unique(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements without those that are in memory once for several places."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size > 1 and stride == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _attributes(module: nn.Module) -> tuple[Any, ...]:
    """What the Python of a module may read: flags, numbers, and which objects there are."""
    attributes = vars(module).items()
    return tuple([(name, _read(value)) for name, value in attributes if name not in _EVERY])


def _read(value: Any) -> Any:
    """Equal as long as a value is the same, as far as can be seen; `1`, `1.0` and `True` differ."""
    if isinstance(value, float):
        return float, value.hex()
    if isinstance(value, PLAIN):
        return type(value), value
    if type(value) in (list, tuple):
        return type(value), tuple(map(_read, value))
    if type(value) is dict:
        return dict, tuple([(_read(name), _read(each)) for name, each in value.items()])
    return _Same(value)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor is, and how it lies there."""
    shape, stride = tuple(tensor.shape), tensor.stride()
    return tensor.data_ptr(), shape, stride, tensor.dtype, tensor.requires_grad


class _Same:
    """Equal for one and the same object, which goes on to exist."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)
