"""Timing the calls of a model whose weights are not there: one of each kind, with made-up weights.

Only one call's weights exist at a time, so that a model can be profiled that does not fit. Calls
that are alike, those of equal layers above all, are measured once.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from penstock.capture import Attribute, Call, Program, Ref, Sizes, TensorInfo
from penstock.capture.attributes import find, put
from penstock.capture.calls import INPUTS
from penstock.capture.lowering import lower
from penstock.capture.randomness import Key
from penstock.capture.trees import flatten
from penstock.profile.shadow import shadow
from penstock.profile.timing import Timing, now, timed_backward

_FILL = 0.01  # what made-up weights and activations are; kernels take as long for any number
_REPEATS = 3
_SECONDS = 0.2  # after which a call is not repeated


class Sampler:
    """Measures calls on their own, on modules of its own.

    Args:
        program: what to measure.
        device: where.
    """

    def __init__(self, program: Program, device: torch.device) -> None:
        self.program = program
        self.device = device
        self.model = shadow(program.model, device, program.written)
        if not self.model.training:
            self.model.train()

    def passes(self, leaves: Sequence[Any], sizes: Sizes) -> Generator[Timing]:
        """Time every kind of call, again and again."""
        moved = [x.to(self.device) if isinstance(x, torch.Tensor) else x for x in leaves]
        with torch.enable_grad():
            while True:
                known: dict[Any, tuple[float, float]] = {}
                times = []
                for number, call in enumerate(self.program.train.calls):
                    kind = self._kind(call)
                    if kind not in known:
                        known[kind] = self._measured(number, call, moved, sizes)
                    times.append(known[kind])
                forward, backward = ([t[k] for t in times] for k in (0, 1))
                yield Timing(forward, backward, [(sum(forward), sum(backward))])

    def _kind(self, call: Call) -> Any:
        """Equal for calls that take as long."""
        leaves, structure = flatten((call.args, call.kwargs))
        shown = tuple(self._shown(leaf) for leaf in leaves)
        if not isinstance(call.target, str):
            return call.target, structure, shown, call.ambient
        module = self.model.get_submodule(call.target)
        return type(module), repr(module), structure, shown, call.ambient

    def _shown(self, leaf: Any) -> str:
        if not isinstance(leaf, (Ref, Attribute)):
            return repr(leaf)
        info = self.program.train.info(leaf)
        return f"{info} {info.requires_grad}" if isinstance(info, TensorInfo) else repr(info)

    def _measured(
        self, number: int, call: Call, leaves: Sequence[Any], sizes: Sizes
    ) -> tuple[float, float]:
        """Forward and backward seconds of one call; nothing for one of unknown objects."""
        inputs = tuple(dict.fromkeys(v for v in call.reads() if isinstance(v, Ref)))
        infos = [self.program.train.info(value) for value in inputs]
        if not all(isinstance(info, TensorInfo) for info in infos):
            return 0.0, 0.0
        outputs = [Ref(number, k) for k, o in enumerate(call.outputs) if isinstance(o, TensorInfo)]
        calls = range(number, number + 1)
        found = []
        with self._made_up_weights(call):
            module = lower(self.model, self.program.train, calls, inputs, outputs, self.device)
            for _ in range(_REPEATS):
                values = [
                    leaves[value.leaf] if value.call == INPUTS else self._made_up(info, sizes)
                    for value, info in zip(inputs, infos, strict=True)
                ]
                start = now(self.device)
                results = module(sizes, Key(0, 0, 0), *values)
                forward = now(self.device) - start
                found.append((forward, timed_backward(results, self.device)))
                if sum(map(sum, found)) > _SECONDS:
                    break
        return min(found, key=sum)

    def _made_up(self, info: TensorInfo, sizes: Sizes) -> torch.Tensor:
        shape, dtype = info.at(sizes), info.dtype
        if not (dtype.is_floating_point or dtype.is_complex):
            return torch.zeros(shape, dtype=dtype, device=self.device)
        made = torch.full(shape, _FILL, dtype=dtype, device=self.device)
        # A leaf, and a view of one, could not be changed in place.
        return made.requires_grad_().clone() if info.requires_grad else made

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
