"""What a ported script sees of a `Pipeline`, on one device in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import penstock as ps
from penstock.comparison.reference import Seeds, copied
from penstock.engine.whole_batch import WholeBatch
from penstock.oracle import Oracle, map_tensors, split, tensors


class OneDevice:
    """Stands in for `Pipeline` in a script: the model itself runs the micro-batches, in order.

    Args:
        model: the model.
        args, kwargs, dynamic: as in `Pipeline`. They are needed to know which calls draw.
        num_microbatches: of every batch.
        **_: options that say where and how a pipeline runs.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        num_microbatches: int,
        dynamic: Any = None,
        **_: Any,
    ) -> None:
        self.model = model
        self._count = num_microbatches
        self._seeds = Seeds(ps.capture(copied(model), args, kwargs, dynamic=dynamic), model)
        self._trained = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["model"], name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The result of a batch, of which a backward may start.

        With gradients, there is one tensor in it, whose dimension 0 counts the rows.
        """
        oracle = self._oracle(args, kwargs)
        if not (self.model.training and torch.is_grad_enabled()):
            return oracle.call(0)
        oracle.microbatches = [map_tensors(_leaf, part) for part in oracle.microbatches]
        parts = [tensors(part) for part in oracle.microbatches]
        results = oracle.forwards(self._next())
        outputs = [output for result in results for output in tensors(result)]
        anchor = next(p for p in self.model.parameters() if p.requires_grad)
        joined = _Joined.apply(outputs, parts, anchor, *tensors((args, kwargs)))
        return map_tensors(lambda _: joined, results[0])

    def train_step(
        self,
        *args: Any,
        loss_fn: Callable[..., torch.Tensor],
        target: Any = None,
        weight: Any = "rows",
        loss_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Forwards and backwards of a batch; its loss."""
        oracle, step = self._oracle(args, kwargs), self._next()
        if isinstance(loss_fn, WholeBatch):
            whole = partial(loss_fn.function, **(loss_kwargs or {}))
            return oracle.whole_step(step, whole, target)
        return oracle.train_step(step, partial(loss_fn, **(loss_kwargs or {})), target, weight)

    def eval_step(
        self,
        *args: Any,
        loss_fn: Callable[..., torch.Tensor],
        target: Any = None,
        weight: Any = "rows",
        **kwargs: Any,
    ) -> torch.Tensor:
        """The loss of a batch in evaluation mode."""
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        with torch.no_grad():
            oracle = self._oracle(args, kwargs)
            targets = split(target, oracle.rows, 0)
            counts = [float(weight(t)) for t in targets] if callable(weight) else oracle.rows
            losses = [
                loss_fn(output) if target is None else loss_fn(output, part)
                for output, part in zip(oracle.forwards(0), targets, strict=True)
            ]
        for module, training in modes.items():
            module.training = training
        total = sum(loss * (n / sum(counts)) for loss, n in zip(losses, counts, strict=True))
        assert isinstance(total, torch.Tensor)
        return total

    def _oracle(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Oracle:
        return Oracle(self.model, args, kwargs, self._count, around=self._seeds)

    def _next(self) -> int:
        self._trained += 1
        return self._trained - 1


class _Joined(torch.autograd.Function):
    """The results of micro-batches as one; their backwards run in their order."""

    @staticmethod
    def forward(ctx: Any, outputs: Any, parts: Any, *_: torch.Tensor) -> Any:
        ctx.outputs, ctx.parts = outputs, parts
        return torch.cat([output.detach() for output in outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        rows = [len(output) for output in ctx.outputs]
        for output, gradient in zip(ctx.outputs, gradients[0].split(rows), strict=True):
            torch.autograd.backward(output, gradient)
        inputs = (
            torch.cat([part.grad for part in parts]) if parts[0].requires_grad else None
            for parts in zip(*ctx.parts, strict=True)
        )
        return None, None, None, *inputs


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
