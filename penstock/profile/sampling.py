"""Timing the calls of a model whose weights are not there: one of each kind, with made-up weights.

Only one call's weights exist at a time, so that a model can be profiled that does not fit. Calls
that are alike, those of equal layers above all, are measured once.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.capture import Attribute, Call, Program, Ref, Sizes, TensorInfo
from penstock.capture.attributes import find, named_tensors, put
from penstock.capture.calls import INPUTS
from penstock.capture.lowering import lower
from penstock.capture.trees import flatten
from penstock.profile.halving import halved_calls, trained_weights, weight_share
from penstock.profile.shadow import shadow
from penstock.profile.stepping import KEY, Saved, address
from penstock.profile.timing import Stopwatch, Timing, timed_backward

_FILL = 0.01  # what made-up weights and activations are; kernels take as long for any number
_REPEATS = 3
_SECONDS = 0.2  # after which a call is not repeated


class _Sample(NamedTuple):
    """Seconds of one call, and the share of its backward that can be put off."""

    forward: float
    backward: float
    share: float


class _Single(NamedTuple):
    """One call as a module, its inputs and outputs, and whether made-up inputs may be leaves."""

    module: nn.Module
    inputs: tuple[Ref, ...]
    outputs: list[Ref]
    takes_leaves: bool


class _Holding(NamedTuple):
    """What one call saves for its backward.

    Attributes:
        reads: the values that it reads, by their place among them.
        outputs: its results, by leaf.
        inside: bytes of anything else.
    """

    reads: list[int]
    outputs: list[int]
    inside: int


class Sampler:
    """Measures calls on their own, on modules of its own.

    Args:
        program: what to measure.
        device: where.
        inference: whether forwards alone are measured, in evaluation mode.
    """

    def __init__(self, program: Program, device: torch.device, inference: bool = False) -> None:
        self.program = program
        self.inference = inference
        self.device = device
        self.model = shadow(program.model, device, program.written)
        self._halved = halved_calls(program)
        if self.model.training is inference:
            self.model.train(not inference)

    def passes(self, leaves: Sequence[Any], sizes: Sizes, brief: bool) -> Generator[Timing]:
        """Time every kind of call, again and again.

        Without weights the whole program cannot be timed: its times are the sums over the calls.
        """
        moved, is_first = self._moved(leaves), True
        with torch.set_grad_enabled(not self.inference):
            while True:
                known: dict[Hashable, _Sample] = {}
                for number, call in enumerate(self.program.train.calls):
                    kind = self._kind(call)
                    if kind not in known:
                        known[kind] = self._measured(number, moved, sizes, is_first)
                samples = [known[self._kind(call)] for call in self.program.train.calls]
                forward, backward, shares = map(list, zip(*samples, strict=True))
                wholes = [(sum(forward), sum(backward))]
                yield Timing(forward, backward, wholes, shares if is_first else None)
                is_first = False

    def saved_bytes(self, leaves: Sequence[Any], sizes: Sizes) -> list[int]:
        """The bytes that every call is the first to hold for its backward."""
        moved, trace = self._moved(leaves), self.program.train
        known: dict[Hashable, _Holding] = {}
        memory = self._memory(sizes)
        found = []
        for number, call in enumerate(trace.calls):
            kind = self._kind(call)
            if kind not in known:
                with torch.enable_grad():
                    known[kind] = self._held(number, moved, sizes)
            holding = known[kind]
            infos = [trace.info(call.reads()[k]) for k in holding.reads]
            infos += [call.outputs[k] for k in holding.outputs]
            new = sum(memory.pop(info.storage, 0) for info in infos)  # 0 if it was held before
            found.append(holding.inside + new)
        return found

    def _memory(self, sizes: Sizes) -> dict[int, int]:
        """The bytes of all memory that values share, which are those of the largest."""
        trace = self.program.train
        found: dict[int, int] = {}
        for info in (*trace.inputs, *(o for call in trace.calls for o in call.outputs)):
            if isinstance(info, TensorInfo):
                found[info.storage] = max(found.get(info.storage, 0), info.num_bytes(sizes))
        return found

    def _moved(self, leaves: Sequence[Any]) -> list[Any]:
        return [x.to(self.device) if isinstance(x, torch.Tensor) else x for x in leaves]

    def _kind(self, call: Call) -> Hashable:
        """A key that is equal for calls of the same kind and sizes, which take equally long."""
        leaves, structure = flatten((call.args, call.kwargs))
        described = tuple(self._describe(leaf) for leaf in leaves)
        if not isinstance(call.target, str):
            return call.target, structure, described, call.ambient
        module = self.model.get_submodule(call.target)
        return type(module), repr(module), structure, described, call.ambient

    def _describe(self, leaf: object) -> str:
        if not isinstance(leaf, (Ref, Attribute)):
            return repr(leaf)
        info = self.program.train.info(leaf)
        return f"{info} {info.requires_grad}" if isinstance(info, TensorInfo) else repr(info)

    def _measured(self, number: int, leaves: Sequence[Any], sizes: Sizes, halves: bool) -> _Sample:
        """Time one call; zeros for one that reads objects other than tensors."""
        found: list[_Sample] = []
        halves = halves and not self.inference
        with self._alone(number) as single:
            if single is None:
                return _Sample(0.0, 0.0, 0.0)
            share = 0.0
            for _ in range(_REPEATS):
                values = self._values(single, leaves, sizes)
                watch = Stopwatch(self.device)
                with watch:
                    results = single.module(sizes, KEY, *values)
                divides = halves and self._halved[number] and not found
                if not self.inference:
                    timed_backward(results, watch, again=divides)
                forward, backward = (*watch.seconds(), 0.0)[:2]
                if divides:
                    weights = trained_weights(self.program.train.calls[number], self.model)
                    share = weight_share(results, values, weights, self.device)
                found.append(_Sample(forward, backward, share))
                if sum(forward + backward for forward, backward, _ in found) > _SECONDS:
                    break
        return min(found, key=lambda sample: sample.forward + sample.backward)

    def _held(self, number: int, leaves: Sequence[Any], sizes: Sizes) -> _Holding:
        """What one call saves for its backward; nothing for one of unknown objects."""
        call = self.program.train.calls[number]
        with self._alone(number) as single:
            if single is None:
                return _Holding([], [], 0)
            values = self._values(single, leaves, sizes)
            with Saved(t for _, t in named_tensors(self.model)) as saved:
                results = single.module(sizes, KEY, *values)
                held = saved.take()
        given = dict(zip(single.inputs, values, strict=True))
        reads = {k: given[v] for k, v in enumerate(call.reads()) if v in given}
        made = {ref.leaf: r for ref, r in zip(single.outputs, results, strict=True)}
        of_outputs, of_reads = _taken(made, held), _taken(reads, held)
        return _Holding(of_reads, of_outputs, sum(held.values()))

    def _values(self, single: _Single, leaves: Sequence[Any], sizes: Sizes) -> list[Any]:
        """What a call is given: the model's inputs, or something like what other calls make."""
        trace = self.program.train
        return [
            leaves[value.leaf]
            if value.call == INPUTS
            else self._made_up(trace.info(value), sizes, single.takes_leaves)
            for value in single.inputs
        ]

    @contextmanager
    def _alone(self, number: int) -> Iterator[_Single | None]:
        """While open, one call can run, on made-up weights; `None` if it reads unknown objects."""
        trace = self.program.train
        call = trace.calls[number]
        inputs = tuple(dict.fromkeys(v for v in call.reads() if isinstance(v, Ref)))
        if not all(isinstance(trace.info(value), TensorInfo) for value in inputs):
            yield None
            return
        outputs = [Ref(number, k) for k, o in enumerate(call.outputs) if isinstance(o, TensorInfo)]
        with self._made_up_weights(call):
            calls = range(number, number + 1)
            module = lower(self.model, trace, calls, inputs, outputs, self.device)
            yield _Single(module, inputs, outputs, self._halved[number])

    def _made_up(self, info: TensorInfo, sizes: Sizes, leaf: bool) -> torch.Tensor:
        shape, dtype = info.at(sizes), info.dtype
        if not (dtype.is_floating_point or dtype.is_complex):
            return torch.zeros(shape, dtype=dtype, device=self.device)
        made = torch.full(shape, _FILL, dtype=dtype, device=self.device)
        made.requires_grad_(info.requires_grad)
        return made if leaf else made.clone()  # a leaf, and a view of one, cannot be changed

    @contextmanager
    def _made_up_weights(self, call: Call) -> Iterator[None]:
        """While open, the weights that the call uses exist."""
        read = (v.name for v in call.reads() if isinstance(v, Attribute))
        names = dict.fromkeys((*call.hidden, *read))
        absent = {n: t for n in names if (t := find(self.model, n)) is not None and t.is_meta}
        try:
            for name, tensor in absent.items():
                made = torch.full(tensor.shape, _FILL, dtype=tensor.dtype, device=self.device)
                if isinstance(tensor, nn.Parameter):
                    made = nn.Parameter(made, requires_grad=tensor.requires_grad)
                put(self.model, name, made)
            yield
        finally:
            for name, tensor in absent.items():
                put(self.model, name, tensor)


def _taken(tensors: Mapping[int, Any], held: dict[int, int]) -> list[int]:
    """Which of the tensors are held; they are taken out of `held`."""
    places = {k: address(t) for k, t in tensors.items() if isinstance(t, torch.Tensor)}
    found = [k for k, place in places.items() if place in held]
    for k in found:
        held.pop(places[k], None)
    return found
