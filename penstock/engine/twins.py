"""Replicas of stages on other devices of one process: twins of modules, with weights there.

The user's modules and parameters are on the devices of the first replica. Another replica runs
twins: modules of the same classes that share everything with the user's but what is in a device's
memory. Before a pass, twins are given what the user's modules have by then (`refresh`). Gradients
travel to the user's parameters, where they are added in the order of micro-batches
(`gathered.py`).
Buffers that forwards change travel there and back when a micro-batch has its turn (`fetch`,
`give_back`).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.capture.attributes import REGISTRIES, held_tensors
from penstock.capture.lowering import StageModule
from penstock.capture.preserve import own_generators
from penstock.devices.kind import Event
from penstock.devices.kinds import kind_of
from penstock.devices.streams import Copies
from penstock.engine.span import Span
from penstock.errors import InputError


class _Twin:
    """A tensor, and its twin, which stays the same object.

    Args:
        original: the user's.
        device: where the twin is.

    Attributes:
        original: the same.
        twin: that on the other device.
    """

    def __init__(self, original: torch.Tensor, device: torch.device) -> None:
        self.original = original
        there = self._memory(device)
        is_parameter = isinstance(original, nn.Parameter)
        self.twin = nn.Parameter(there, original.requires_grad) if is_parameter else there
        self._like = self._now()

    def follow(self) -> bool:
        """Be like the original, but for what is in it; returns whether there is other memory."""
        if self.twin.is_leaf and self.original.is_leaf:
            self.twin.requires_grad_(self.original.requires_grad)
        if self._like == (now := self._now()):
            return False
        self.twin.data = self._memory(self.twin.device)
        self._like = now
        return True

    def _now(self) -> tuple[Any, ...]:
        return self.original.shape, self.original.dtype, self.original.stride()

    def _memory(self, device: torch.device) -> torch.Tensor:
        with torch.no_grad():
            return torch.empty_like(self.original.detach(), device=device)


class _Contents(NamedTuple):
    """What a tensor held: it holds something else if any of these is another one."""

    version: int
    address: int


class Twins:
    """The twins on one device of what is on another one.

    Args:
        home: where the originals are.
        device: where the twins are.

    Attributes:
        stream: a stream of the home device, by which what forwards change comes and goes.
    """

    def __init__(self, home: torch.device, device: torch.device) -> None:
        self.home, self.device = home, device
        self._lock = threading.Lock()
        self._modules: dict[nn.Module, nn.Module] = {}
        self._originals: dict[nn.Module, nn.Module] = {}
        self._direct: dict[int, torch.Tensor] = {}  # that stages read by themselves
        self._tensors: dict[int, _Twin] = {}  # by the original's id
        self._leaves: dict[int, torch.Tensor] = {}  # originals, by the twin's id
        self._held: dict[int, _Contents] = {}  # by the original's id, when it was copied
        self._changing: dict[int, _Twin] = {}
        self._there = Copies(home, device)
        self._back = Copies(device, home)
        self.stream = kind_of(home).new_stream(home)

    # -- what a stage runs --------------------------------------------------------------------

    def spans(self, spans: Sequence[Span]) -> list[Span]:
        """The same spans, of twins.

        Raises:
            InputError: a module remembers something that twins would not have in common.
        """
        with self._lock:
            return [self._span(span) for span in spans]

    def _span(self, span: Span) -> Span:
        module = span.module
        if isinstance(module, StageModule):
            _check(span, module)
            module = module.elsewhere(self._in_place_of)
        changing = [self._tensor(tensor) for tensor in span.changing]
        for tensor in span.changing:
            if id(tensor) in self._tensors:
                self._changing[id(tensor)] = self._tensors[id(tensor)]
        found = replace(span, module=module, changing=changing)
        found.keep_apart()
        return found

    def _in_place_of(self, leaf: Any) -> Any:
        if isinstance(leaf, nn.Module):
            return self._module(leaf)
        if isinstance(leaf, torch.Tensor):
            self._direct[id(leaf)] = leaf
            return self._tensor(leaf)
        return self.device if isinstance(leaf, torch.device) and leaf == self.home else leaf

    def _module(self, original: nn.Module) -> nn.Module:
        if original not in self._modules:
            twin = self._modules[original] = nn.Module()
            self._originals[twin] = original
            self._become(twin, original)
        return self._modules[original]

    def _become(self, twin: nn.Module, original: nn.Module) -> None:
        """Make a twin what the original is by now, with tensors of its own."""
        own = dict(vars(original))
        own |= {n: self._tensor(v) for n, v in own.items() if isinstance(v, torch.Tensor)}
        own |= {n: self._container(v) for n, v in own.items() if _may_hold(n, v)}
        for registry in ("_parameters", "_buffers"):
            own[registry] = {
                n: None if t is None else self._tensor(t) for n, t in own[registry].items()
            }
        own["_modules"] = {
            n: None if m is None else self._module(m) for n, m in own["_modules"].items()
        }
        object.__setattr__(twin, "__class__", type(original))
        object.__setattr__(twin, "__dict__", own)

    def _container(self, value: Any) -> Any:
        """The same list, tuple or dictionary, with tensors of its own if it has some."""
        if not (held := held_tensors(value)):
            return value
        items = dict(value) if isinstance(value, dict) else dict(enumerate(value))
        items |= {key: self._tensor(tensor) for key, tensor in held}
        return items if isinstance(value, dict) else type(value)(items.values())

    def _tensor(self, original: torch.Tensor) -> Any:
        if original.device != self.home:
            return original
        known = self._tensors.get(id(original))
        if known is None:
            known = self._tensors[id(original)] = _Twin(original, self.device)
            self._held.pop(id(original), None)
            self._leaves[id(known.twin)] = original
        if known.follow():
            self._held.pop(id(original), None)
        return known.twin

    # -- what is in it ------------------------------------------------------------------------

    def refresh(self, made: Event, all_of_it: bool, fetched: Collection[int]) -> None:
        """Bring the twins up to date with the originals; called by the worker that runs the twins.

        Args:
            made: when the originals are what they are to be.
            all_of_it: whether to copy tensors even if their versions and addresses are the same: a
                write to `.data` does not increase the version.
            fetched: the ids of twins that forwards of this pass change: `fetch` brings these.
        """
        with self._lock:
            before, self._tensors = self._tensors, {}
            self._tensors.update(self._changing)
            kept = {key: pair for key, pair in before.items() if key in self._direct}
            self._tensors |= kept  # what is no longer used goes with `before`
            self._again(before)
            stale = []
            for key, pair in self._tensors.items():
                if id(pair.twin) in fetched:
                    continue
                is_new = pair.follow()
                now = _Contents(_version_of(pair.original), pair.original.data_ptr())
                if all_of_it or is_new or key in self._changing or self._held.get(key) != now:
                    stale.append((pair.twin, pair.original.detach()))
                    self._held[key] = now
            self._leaves = {id(pair.twin): pair.original for pair in self._tensors.values()}
            self._there.into(stale, made)

    def _again(self, before: Mapping[int, _Twin]) -> None:
        for original, twin in list(self._modules.items()):
            for tensor in _tensors_of(original):
                if id(tensor) in before:
                    self._tensors[id(tensor)] = before[id(tensor)]
            self._become(twin, original)

    def wait_for_copies(self) -> None:
        """Let what comes on the originals' device wait until they are copied: it may write them."""
        self._there.wait_for_copies()

    def fetch(self, among: Iterable[torch.Tensor], after: Iterable[Event]) -> Event:
        """Let twins that forwards change be what the originals are now.

        Args:
            among: the twins, and others.
            after: when the originals are what they are now, and may be changed.

        Returns:
            when the originals have been read.
        """
        for event in after:
            self.stream.wait_event(event)
        with kind_of(self.home).using(self.stream):
            for pair in self._changing_among(among):
                # autograd may have saved it; norms do not use that
                pair.twin.data.copy_(pair.original.data)
        return self.stream.record_event()

    def give_back(self, among: Iterable[torch.Tensor]) -> Event:
        """Let the originals be what these are now.

        Returns:
            when they are.
        """
        with kind_of(self.home).using(self.stream):
            for pair in self._changing_among(among):
                pair.original.data.copy_(pair.twin.data)
        return self.stream.record_event()

    def _changing_among(self, tensors: Iterable[torch.Tensor]) -> list[_Twin]:
        chosen = set(map(id, tensors))
        return [pair for pair in self._changing.values() if id(pair.twin) in chosen]

    @contextmanager
    def lent(self, leaves: Iterable[torch.Tensor]) -> Iterator[None]:
        """While open, these leaves have the `.grad` of the originals, to which a backward adds."""
        pairs = [(self._leaves[id(t)], t) for t in leaves if id(t) in self._leaves]
        for original, twin in pairs:
            twin.grad = None if original.grad is None else original.grad.to(self.device)
        try:
            yield
        finally:
            for original, twin in pairs:
                if twin.grad is not None and original.grad is None:
                    original.grad = twin.grad.to(self.home)
                elif twin.grad is not None and original.grad is not None:
                    original.grad.copy_(twin.grad)
                twin.grad = None

    def original(self, twin: nn.Module) -> nn.Module:
        """The module that a twin stands for."""
        return self._originals[twin]

    def modules(self) -> list[nn.Module]:
        """All twins."""
        return list(self._originals)

    def parameters(self, originals: Iterable[nn.Parameter]) -> list[Any]:
        """The twins of those of these parameters that have one."""
        known = (self._tensors.get(id(parameter)) for parameter in originals)
        return [found.twin for found in known if found is not None]

    # -- gradients ----------------------------------------------------------------------------

    def send(self, terms: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Sent:
        """Start to copy gradients of twins to the originals' device.

        Until `wait_before_reuse`, the gradients and the copies must be kept.
        """
        leaves = [self._leaves.get(id(leaf), leaf) for leaf, _ in terms]
        gradients = [gradient for _, gradient in terms]
        made, arrival = self._back.begin(gradients)
        return Sent(leaves, made, arrival, gradients)

    def wait_before_reuse(self, sent: Sent, added: Event) -> None:
        """Let what follows wait until gradients are copied, and until the copies are added.

        Args:
            sent: the gradients.
            added: when they are added.
        """
        self._back.wait_before_reuse(sent.ready, added)


class Sent(NamedTuple):
    """Gradients on their way to where they are added.

    Attributes:
        leaves: what they are of: the originals.
        gradients: on the originals' device.
        ready: when they are there.
        twins: what they are copies of, whose memory is kept so; none if they were computed there.
    """

    leaves: Sequence[torch.Tensor]
    gradients: Sequence[torch.Tensor]
    ready: Event
    twins: Sequence[torch.Tensor] = ()


def _tensors_of(module: nn.Module) -> Iterator[torch.Tensor]:
    """The module's own parameters, buffers and tensor attributes, without those of its children."""
    own = vars(module)
    for registry in (own["_parameters"], own["_buffers"], own):
        yield from (value for value in registry.values() if isinstance(value, torch.Tensor))
    for name, value in own.items():
        if _may_hold(name, value):
            yield from (held for _, held in held_tensors(value))


def _may_hold(name: str, value: Any) -> bool:
    """Whether an attribute may be a container of tensors."""
    return type(value) in (list, tuple, dict) and name not in REGISTRIES


def _version_of(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _check(span: Span, stage: nn.Module) -> None:
    """Raise unless twins of these modules can do what they do."""
    modules = [module for module in stage.modules() if module is not stage]
    remembering = {module for memory in span.memories for module in memory}
    for module in modules:
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{type(module).__name__} is a scripted module, of which there cannot be another "
                "one on the device of another replica; use replicas=1, or torchrun"
            )
        if module in remembering or any(own_generators(module)):
            raise InputError(
                f"{type(module).__name__} remembers something from forward to forward in an "
                "attribute or a random generator of its own, which replicas on other devices do "
                "not see; use replicas=1"
            )
