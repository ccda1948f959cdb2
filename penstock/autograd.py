"""`loss.backward()` through a pipeline: two autograd nodes between the results and the inputs.

The results hang on `_Deliver`, which only notes their gradients and hands an empty tensor on to
`_Drive`, and that one runs the workers' backward. The empty tensor lives on the CPU, so `_Drive`
runs in the thread that called `backward()`. A node of a CUDA tensor would run in, and block, the
one thread that autograd has per CUDA device, which the workers' own backwards need.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from penstock.engine.span import Gradients
from penstock.errors import PenstockError


class Passage:
    """A batch that has gone forward and may come back.

    Args:
        run: runs the backward pass on the workers, from these gradients of the results; returns
            those of the inputs.
        differentiable: which results of a micro-batch a backward can start from.
    """

    def __init__(
        self,
        run: Callable[[dict[int, Gradients]], dict[int, Gradients]],
        differentiable: Sequence[bool],
    ) -> None:
        self._run: Callable[[dict[int, Gradients]], dict[int, Gradients]] | None = run
        self.differentiable = differentiable
        self.gradients: list[list[torch.Tensor | None]] = []

    def chosen(self, values: Sequence[Any]) -> list[Any]:
        """Those of a micro-batch's results that a backward can start from."""
        return [v for v, d in zip(values, self.differentiable, strict=True) if d]

    def backward(self) -> dict[int, Gradients]:
        """Run the backward; returns the gradients of the inputs of every micro-batch."""
        if self._run is None:
            raise PenstockError(
                "backward ran a second time through the same pipeline call, whose activations "
                "are gone; call the pipeline again (retain_graph=True has no effect on it)"
            )
        run, self._run = self._run, None
        return run(dict(enumerate(self.gradients)))


def deliver(
    passage: Passage, slices: Sequence[Sequence[Any]], results: Sequence[Sequence[Any]]
) -> list[list[Any]]:
    """The results, so that a backward from them runs the passage's.

    Args:
        passage: what to run.
        slices: the first stage's values, of every micro-batch; gradients flow on through them.
        results: the last stage's, of every micro-batch.
    """
    if not any(passage.differentiable):
        return [list(part) for part in results]
    places = [
        (microbatch, k)
        for microbatch, part in enumerate(slices)
        for k, value in enumerate(part)
        if isinstance(value, torch.Tensor) and value.requires_grad
    ]
    anchor = torch.empty(0, requires_grad=True)
    inputs = [slices[microbatch][k] for microbatch, k in places]
    token = _Drive.apply(passage, places, anchor, *inputs)
    chosen = [r for part in results for r in passage.chosen(part)]
    delivered = iter(_Deliver.apply(passage, token, *chosen))
    return [
        [next(delivered) if d else r for r, d in zip(part, passage.differentiable, strict=True)]
        for part in results
    ]


class _Drive(torch.autograd.Function):
    """From the inputs to the token; its backward is the pipeline's."""

    @staticmethod
    def forward(
        ctx: Any,
        passage: Passage,
        places: Sequence[tuple[int, int]],
        anchor: torch.Tensor,
        *inputs: torch.Tensor,
    ) -> torch.Tensor:
        ctx.passage, ctx.places = passage, places
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        gradients = ctx.passage.backward()
        found = [gradients[m][k] if m in gradients else None for m, k in ctx.places]
        return (None, None, None, *found)


class _Deliver(torch.autograd.Function):
    """From the token to the results; its backward notes their gradients."""

    @staticmethod
    def forward(
        ctx: Any, passage: Passage, token: torch.Tensor, *results: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.passage = passage
        ctx.set_materialize_grads(False)
        return tuple(result.detach() for result in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        passage = ctx.passage
        remaining = iter(gradients)
        passage.gradients = [
            [next(remaining) if d else None for d in passage.differentiable]
            for _ in range(len(gradients) // sum(passage.differentiable))
        ]
        return (None, torch.empty(0), *(None for _ in gradients))


def backward_into_inputs(
    slices: Sequence[Sequence[Any]], gradients: Mapping[int, Gradients]
) -> None:
    """Pass what the first stage's values got on to inputs that require a gradient."""
    order = sorted(gradients)
    for microbatch in order:
        pairs = [
            (value, gradient)
            for value, gradient in zip(slices[microbatch], gradients[microbatch], strict=True)
            if gradient is not None
        ]
        torch.autograd.backward(
            [v for v, _ in pairs],
            [g for _, g in pairs],
            retain_graph=microbatch != order[-1],  # they may come from one graph
        )
