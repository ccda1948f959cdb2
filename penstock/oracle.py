"""One device that runs the micro-batches of a batch one after the other: what is exact.

This is the loop that anybody would write, in plain PyTorch: the batch is divided by
`torch.tensor_split`, the model is called as it is, then the loss, then its backward, one
micro-batch after the other. Nothing of Penstock is imported here, so nothing that is wrong there
can be wrong here in the same way.

One thing has to come from outside. Dropout draws other numbers for every micro-batch, and Penstock
defines them by (seed, step, micro-batch, call). Whoever compares models that draw gives an
`Around` that seeds their random calls (`penstock.comparison.reference`); without one, the models'
forwards and losses run with nothing around them.
"""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree

Dim = int | tuple[int, int] | None
"""A dimension that counts the rows; or that and how many entries each row has; `None`: no rows."""

BatchDim = int | Mapping[str | int, Dim]
"""One dimension for every input, or one per argument (by position or name)."""


class Around:
    """What is open around the parts of a pass: nothing, unless a subclass says otherwise."""

    def batch(self, step: int) -> AbstractContextManager[None]:
        """Around all micro-batches of a step."""
        return nullcontext()

    def forward(self, step: int, microbatch: int) -> AbstractContextManager[None]:
        """Around the forward of one micro-batch."""
        return nullcontext()

    def loss(self, step: int, microbatch: int) -> AbstractContextManager[None]:
        """Around the loss of one micro-batch, but not around its backward."""
        return nullcontext()


class Oracle:
    """A batch in micro-batches, and the model that runs them on one device.

    Args:
        model: the model, unsplit; gradients add up in its `.grad`.
        args: positional arguments of the batch.
        kwargs: keyword arguments of the batch.
        num_microbatches: the number of micro-batches; at most as many as the batch has rows.
        batch_dim: the dimension that counts the rows, as in `Pipeline`.
        around: context managers to open around forwards and losses.

    Attributes:
        model: the model.
        rows: the number of rows of every micro-batch.
        microbatches: for every micro-batch its positional and its keyword arguments.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        num_microbatches: int,
        *,
        batch_dim: BatchDim = 0,
        around: Around | None = None,
    ) -> None:
        self.model = model
        self._around = around or Around()
        self._whole: tuple[tuple[Any, ...], dict[str, Any]] = (tuple(args), dict(kwargs))
        self._seen: tuple[tuple[int, ...], Any] | None = None  # by mode and versions of weights
        self._batch_dim = batch_dim
        self.rows = self._divided(num_microbatches)
        self.microbatches = self._split(self.rows)

    @property
    def gradients(self) -> dict[str, torch.Tensor | None]:
        """The gradients of all parameters, by name."""
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}

    def train_step(
        self,
        step: int,
        loss_fn: Callable[..., torch.Tensor],
        target: object = None,
        weight: str | Callable[..., Any] | None = "rows",
    ) -> torch.Tensor:
        """Accumulate the gradients of a batch.

        Args:
            step: how many there were before, which random numbers depend on.
            loss_fn: of the output and the target, or of the output alone if there is no target.
            target: split along dimension 0.
            weight: how the losses add up, as in `Pipeline.train_step`. A micro-batch of weight 0
                runs its forward, for what that does to buffers, and is left out.

        Returns:
            the loss of the batch, detached.
        """
        targets = split(target, self.rows, 0)
        shares = self._shares(weight, targets)
        total: Any = 0.0
        with self._around.batch(step):
            for k, (part, share) in enumerate(zip(targets, shares, strict=True)):
                output = self.forward(step, k)
                with self._around.loss(step, k):
                    loss = loss_fn(output) if target is None else loss_fn(output, part)
                if share:  # else nothing counts in it, so its mean may be no number
                    with _without_autocast():
                        (loss * share).backward()
                    total = total + loss.detach() * share
        result: torch.Tensor = total
        return result

    def forward(self, step: int, microbatch: int) -> Any:
        """What the model gives for the micro-batch of this number, with its history."""
        args, kwargs = self.microbatches[microbatch]
        with self._around.forward(step, microbatch):
            return self.model(*args, **kwargs)

    def forwards(self, step: int) -> list[Any]:
        """What the model gives for every micro-batch, in order."""
        with self._around.batch(step):
            return [self.forward(step, k) for k in range(len(self.rows))]

    def call(self, step: int) -> Any:
        """The result of the batch, put together as the unsplit model gives it.

        Raises:
            ValueError: it cannot be put together, see `merged`.
        """
        return self.merged(self.forwards(step))

    def call_and_backward(
        self, step: int, loss_fn: Callable[..., torch.Tensor], target: object = None
    ) -> Any:
        """Compute one loss of the batch's result, and run its backward by micro-batch.

        Returns:
            the result of the batch.

        Raises:
            ValueError: the result cannot be put together, see `merged`.
        """
        return self._whole_step(step, loss_fn, target, nullcontext())[0]

    def whole_step(
        self, step: int, loss_fn: Callable[..., torch.Tensor], target: object = None
    ) -> torch.Tensor:
        """Accumulate the gradients of one loss of the batch's result; the loss, detached.

        Random numbers that the loss draws are those of the first micro-batch's.

        Raises:
            ValueError: the result cannot be put together, see `merged`.
        """
        return self._whole_step(step, loss_fn, target, self._around.loss(step, 0))[1]

    def _whole_step(
        self,
        step: int,
        loss_fn: Callable[..., torch.Tensor],
        target: object,
        around: AbstractContextManager[Any],
    ) -> tuple[Any, torch.Tensor]:
        """The result of the batch, and the loss, which is computed in this context."""
        outputs = self.forwards(step)
        result = map_tensors(_as_leaf, self.merged(outputs))
        with around:
            loss = loss_fn(result) if target is None else loss_fn(result, target)
        loss.backward()
        whole = tensors(result)
        dims = self._row_dims([tensors(output) for output in outputs])
        starts = list(accumulate(self.rows, initial=0))
        for k, output in enumerate(outputs):
            pairs = [
                (own, _part(all_.grad, dim, starts[k], self.rows[k]))
                for own, all_, dim in zip(tensors(output), whole, dims, strict=True)
                if own.requires_grad and all_.grad is not None
                if dim is not None or k == 0  # which `merged` has taken
            ]
            if pairs:
                torch.autograd.backward([own for own, _ in pairs], [g for _, g in pairs])
        return result, loss.detach()

    def unsplit(self) -> Any:
        """What the model in its present mode gives for the whole batch, without history.

        A copy is called, and random generators are put back, so nothing is left of it.
        """
        weights = self.model.parameters()
        now = self.model.training, *(-1 if w.is_inference() else w._version for w in weights)
        if self._seen is None or self._seen[0] != now:
            args, kwargs = self._whole
            devices = sorted({p.device.index for p in self.model.parameters() if p.is_cuda})
            in_python = np.random.get_state(), random.getstate()
            try:
                with torch.no_grad(), torch.random.fork_rng(devices):
                    self._seen = now, without_history(self.model)(*args, **kwargs)
            finally:
                np.random.set_state(in_python[0])
                random.setstate(in_python[1])
        return self._seen[1]

    def merged(self, outputs: Sequence[Any]) -> Any:
        """The results of all micro-batches in the structure of what the unsplit model gives.

        A tensor is concatenated along the dimension in which the unsplit model's has an entry for
        each row of the batch, and every micro-batch's an entry for each of its own. One that is
        the same for all of them, and for the whole batch, is taken as it is.

        Raises:
            ValueError: a tensor is neither; it has two entries a row, say, or one for each pair of
                rows, so nobody knows where the unsplit model would have them.
        """
        if len(outputs) == 1:
            return outputs[0]
        groups = [tensors(output) for output in outputs]
        dims = self._row_dims(groups)
        merged = iter(
            parts[0] if dim is None else torch.cat(parts, dim)
            for parts, dim in zip(zip(*groups, strict=True), dims, strict=True)
        )
        return map_tensors(lambda _: next(merged), self.unsplit())

    def without_last_row(self, target: object = None) -> tuple[Oracle, Any]:
        """The same for a batch, and its target, that lack the last row of these."""
        most = [sum(self.rows) - 1, 1]
        args, kwargs = self._split(most)[0]
        count, dim = len(self.rows), self._batch_dim
        smaller = Oracle(self.model, args, kwargs, count, batch_dim=dim, around=self._around)
        return smaller, split(target, most, 0)[0]

    @property
    def batch(self) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """The positional and keyword arguments of the batch."""
        return self._whole

    def _dim(self, name: str | int) -> Dim:
        return self._batch_dim if isinstance(self._batch_dim, int) else self._batch_dim.get(name, 0)

    def _divided(self, num_microbatches: int) -> list[int]:
        """The rows of every micro-batch, as `torch.tensor_split` divides those of the batch."""
        args, kwargs = self._whole
        named: list[tuple[str | int, Any]] = [*enumerate(args), *kwargs.items()]
        for name, value in named:
            dim = self._dim(name)
            axis, per = dim if isinstance(dim, tuple) else (dim, 1)
            for leaf in tensors(value):
                if axis is not None and leaf.ndim:
                    count = leaf.shape[axis] // per
                    parts = torch.empty(count).tensor_split(min(num_microbatches, count))
                    return [len(part) for part in parts]
        raise ValueError("no input has a batch dimension")

    def _split(self, rows: Sequence[int]) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        """The arguments of micro-batches of so many rows."""
        args, kwargs = self._whole
        positional = [split(value, rows, self._dim(k)) for k, value in enumerate(args)]
        named = {name: split(value, rows, self._dim(name)) for name, value in kwargs.items()}
        return [
            (tuple(parts[k] for parts in positional), {n: parts[k] for n, parts in named.items()})
            for k in range(len(rows))
        ]

    def _row_dims(self, groups: Sequence[Sequence[torch.Tensor]]) -> list[int | None]:
        """For every tensor of the result the dimension of its rows, by what is unsplit."""
        if len(groups) == 1:
            return [None] * len(groups[0])
        found = []
        for k, (whole, *parts) in enumerate(zip(tensors(self.unsplit()), *groups, strict=True)):
            dim = row_dim(whole, parts, self.rows)
            if dim is None and not all(torch.equal(whole, part) for part in parts):
                shapes = ", ".join(str(tuple(part.shape)) for part in parts)
                raise ValueError(
                    f"tensor {k} of the result has shape {tuple(whole.shape)} for a batch of "
                    f"{sum(self.rows)} rows, and {shapes} for its micro-batches: no dimension has "
                    "one entry for each row, so these cannot be put together"
                )
            found.append(dim)
        return found

    def _shares(
        self, weight: str | Callable[..., Any] | None, targets: Sequence[Any]
    ) -> list[float]:
        if weight is None:
            return [1.0] * len(self.rows)
        counts: list[float] = [float(rows) for rows in self.rows]
        if callable(weight):
            counts = [float(weight(target)) for target in targets]
        return [count / sum(counts) for count in counts]


def generated(
    model: nn.Module, arguments: Mapping[str, Any], sizes: Sequence[int], seeds: Sequence[int]
) -> list[list[int]]:
    """The tokens that a model's own `generate` returns, for one group of rows after the other.

    Args:
        model: on one device.
        arguments: of its `generate`; tensors with as many rows as the groups have are split.
        sizes: how many rows each group has.
        seeds: of torch's generators, when each group begins.

    Returns:
        the tokens of every sequence, as many as its group has.
    """
    found: list[list[int]] = []
    start = 0
    with torch.random.fork_rng():
        for size, seed in zip(sizes, seeds, strict=True):
            own = {
                name: value[start : start + size]
                if isinstance(value, torch.Tensor) and value.ndim and len(value) == sum(sizes)
                else value
                for name, value in arguments.items()
            }
            torch.manual_seed(seed)
            tokens = model.generate(**own)  # type: ignore[operator]
            found += getattr(tokens, "sequences", tokens).tolist()
            start += size
    return found


def row_dim(whole: torch.Tensor, parts: Sequence[torch.Tensor], rows: Sequence[int]) -> int | None:
    """The dimension in which a result has one entry for each row of the batch, if there is one.

    Args:
        whole: of the unsplit batch.
        parts: of every micro-batch.
        rows: of every micro-batch.
    """
    for dim in range(whole.ndim):
        shapes = [[*whole.shape[:dim], n, *whole.shape[dim + 1 :]] for n in rows]
        if whole.shape[dim] == sum(rows) and [list(part.shape) for part in parts] == shapes:
            return dim
    return None


def split(tree: object, rows: Sequence[int], dim: Dim) -> list[Any]:
    """For every micro-batch of so many rows its part of all tensors with this dimension."""
    if dim is None:
        return [tree] * len(rows)
    axis, per = dim if isinstance(dim, tuple) else (dim, 1)
    stops = [stop * per for stop in accumulate(rows)][:-1]

    def part(k: int) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda leaf: leaf.tensor_split(stops, axis)[k] if leaf.ndim else leaf

    return [map_tensors(part(k), tree) for k in range(len(rows))]


def map_tensors(function: Callable[[torch.Tensor], Any], tree: object) -> Any:
    """The same tree with `function` applied to its tensors, from left to right."""
    if isinstance(tree, torch.Tensor):
        return function(tree)
    kind = _pytree.SUPPORTED_NODES.get(type(tree))
    if kind is not None:
        children, context = kind.flatten_fn(tree)
        return kind.unflatten_fn([map_tensors(function, child) for child in children], context)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, child) for child in tree))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        twin = copy.copy(tree)
        for field in dataclasses.fields(tree):
            value = map_tensors(function, getattr(tree, field.name))
            object.__setattr__(twin, field.name, value)
        return twin
    if _holds_tensors(tree, set()):
        other = copy.copy(tree)
        vars(other).update({n: map_tensors(function, value) for n, value in vars(tree).items()})
        return other
    return tree


def _holds_tensors(value: object, seen: set[int]) -> bool:
    """Whether it is an object of a plain class with tensors in it, as caches of keys and values."""
    if isinstance(value, torch.Tensor):
        return True
    if id(value) in seen or isinstance(value, (nn.Module, type)) or callable(value):
        return False
    seen.add(id(value))
    if isinstance(value, (list, tuple)):
        return any(_holds_tensors(part, seen) for part in value)
    if isinstance(value, dict):
        return any(_holds_tensors(part, seen) for part in value.values())
    is_plain = type(value).__new__ is object.__new__ and hasattr(value, "__dict__")
    return is_plain and any(_holds_tensors(part, seen) for part in vars(value).values())


def tensors(tree: object) -> list[torch.Tensor]:
    """The tensors of a tree, from left to right."""
    found: list[torch.Tensor] = []
    map_tensors(found.append, tree)
    return found


def without_history(model: nn.Module) -> nn.Module:
    """A copy, in which tensors that a forward has left have no history.

    `copy.deepcopy` refuses those with one: also the weights of `torch.nn.utils.weight_norm`, which
    are computed again in every forward.
    """
    held = (t for m in model.modules() for t in vars(m).values() if isinstance(t, torch.Tensor))
    with torch.no_grad():
        return copy.deepcopy(model, {id(t): t.clone() for t in held if t.grad_fn is not None})


def _as_leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def _part(gradient: torch.Tensor, dim: int | None, start: int, length: int) -> torch.Tensor:
    return gradient if dim is None else gradient.narrow(dim, start, length)


def _without_autocast() -> AbstractContextManager[Any]:
    """Backwards run outside of an autocast region, as PyTorch recommends."""
    stack = ExitStack()
    for device in _autocasting():
        stack.enter_context(torch.autocast(device, enabled=False))
    return stack


def _autocasting() -> Iterator[str]:
    return (device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device))
