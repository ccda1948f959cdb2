"""`pipe(x)` and `pipe.map(batches)`: batches that go forward, and may come back later."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.audit.auditor import Auditor
from penstock.autograd import Passage, check_untransformed, deliver
from penstock.capture import ROWS, Program
from penstock.capture.attributes import owner_of
from penstock.capture.calls import ambient
from penstock.capture.trees import flatten
from penstock.capture.watching import with_owners
from penstock.engine.batch import Batch, arguments
from penstock.engine.ends import Loss
from penstock.engine.hooks import Opened
from penstock.engine.microbatch import Merge, merge
from penstock.engine.objective import Objective
from penstock.engine.orders import Order, Outcome, Pass
from penstock.engine.reading import Left
from penstock.engine.span import Gradients
from penstock.engine.stage import MicroBatch
from penstock.errors import InputError, PenstockError
from penstock.plan import Plan
from penstock.runner import Runner
from penstock.streaming import stream
from penstock.training.module_like import ModelLike
from penstock.training.result import StepResult
from penstock.workers.ways import Ownership, Ways


def left_elsewhere(program: Program, plan: Plan, shares_modules: bool) -> Left:
    """What a forward leaves in attributes and the loss cannot read.

    It can where the module runs right before it, in the last stage, and is not cut off from it by
    being recomputed.

    Args:
        program: the captured program.
        plan: how it is cut.
        shares_modules: whether the loss is called where the user's own modules run.
    """
    start, end, recomputed = plan.stages[-1].spans[-1]
    calls = program.train.calls[start:end] if shares_modules and not recomputed else ()
    near = {call.target for call in calls if isinstance(call.target, str)}
    places = sorted({owner_of(program.model, name) for name in program.left})
    return Left(program.model, [p for p in places if near.isdisjoint(with_owners(p[0]))])


@dataclass(frozen=True)
class Apart:
    """The parameters that a loss may not use, as their gradients are made apart from its own.

    Attributes:
        model: whose.
        holdings: what stages use of it.
        halves: whether gradients of weights are made apart from all others.
    """

    model: nn.Module
    holdings: Ownership
    halves: bool

    def __call__(self, parameter: torch.Tensor) -> str | None:
        """Its name, if it is one of them."""
        if id(parameter) not in self.ownership.apart and not self.halves:
            return None
        named = self.model.named_parameters()
        return next((name for name, own in named if own is parameter), None)


class Forwarding(ModelLike):
    """A pipeline as a function of batches.

    Attributes:
        program: the captured program.
        plan: the plan in use.
    """

    program: Program
    plan: Plan
    _runner: Runner
    _merge: Merge
    _opened: Opened
    _auditor: Auditor

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result for a batch, in its own structure.

        With gradients enabled, `backward()` on a loss of it runs the pipeline's backward; without
        (`torch.no_grad()`), nothing is kept.

        Raises:
            InputError: the batch does not fit, or a result cannot be put together from
                micro-batches.
            AuditError: the stages no longer do what the model's own forward does.
            WorkerError: a stage failed; the original error is its cause.
            ClosedError: the pipeline is closed.
        """
        graph = torch.is_grad_enabled()
        with self._together("a call" if graph else "a call without gradients"):
            trains = graph and self.model.training
            check_untransformed((args, kwargs), self.model.parameters())
            batch = self._batch(partial(self._split, args, kwargs), trains)
            order = self._order("forward" if graph else "infer", batch)
            result = self._result_of(order, self._merge, graph)
            with self._auditor.around(order, batch):
                outcome = self._runner.run(order)
        if not graph:
            return result(outcome.parts)
        passage = Passage(partial(self._back, order), outcome.differentiable)
        self._runner.forget_with(passage, order)
        parameters = self._runner.workers.parameters
        unfed = () if self._runner.workers.has_inputs else _differentiable((args, kwargs))
        return result(deliver(passage, order.values, outcome.parts, parameters, unfed))

    def map(self, batches: Iterable[Any], *, ahead: int | None = None) -> Iterator[Any]:
        """The model's results for many batches, in order, without gradients.

        The next batches enter while the one before is still on its way, so the pipeline never
        drains in between. To stop early, leave the loop: what is under way is waited for.

        Args:
            batches: for each a tuple of the model's positional arguments, or a dict of its keyword
                arguments, or the only argument.
            ahead: how many batches are under way at most; by default as many as keep all stages
                busy.

        Raises:
            InputError, WorkerError, ClosedError: as a call does. Results that came before are
                given out first.
        """
        most = 1 + -(-len(self.plan.stages) // self.plan.num_microbatches)
        most = most if ahead is None else ahead
        if most < 1:
            raise InputError(f"ahead={ahead} batches cannot be under way; 1 at least")
        return self._streamed(batches, most)

    def _streamed(self, batches: Iterable[Any], most: int) -> Iterator[Any]:
        with self._runner.given_up():
            yield from stream(batches, most, self._enter, self._result, self._abandon)

    def _enter(self, inputs: Any) -> tuple[Any, Result]:
        """Start a batch, without gradients."""
        with self._together("a batch of map"), torch.no_grad():
            split = partial(self._split, *arguments(inputs))
            check_untransformed(inputs, self.model.parameters())
            batch = self._batch(split, trains=False)
            order = self._order("infer", batch)
            result = self._result_of(order, self._merge)
            return self._runner.start(order), result

    def _result(self, started: tuple[Any, Result]) -> Any:
        """What has become of it."""
        ticket, result = started
        return result(self._runner.finish(ticket).parts)

    def _abandon(self, started: tuple[Any, Result]) -> None:
        """Wait for a batch whose result nobody wants."""
        with suppress(PenstockError):  # if it failed, the one that failed first has said so
            self._runner.finish(started[0])

    def _together(self, what: str) -> AbstractContextManager[None]:
        """An operation of all workers; ranks whose models are in different modes disagree on it."""
        name = what if self.model.training else f"{what} in evaluation mode"
        return self._runner.workers.together(name)

    def _batch(self, make: Callable[[], Batch], trains: bool) -> Batch:
        """A batch, where its inputs are; elsewhere, what there is to know of it.

        Args:
            make: makes it.
            trains: whether it counts as a step of training.
        """
        self._opened.check()
        return self._runner.batch(make, self.model.training, trains)

    def _order(self, what: Pass, batch: Batch, loss: Loss | None = None) -> Order:
        """The order for a batch."""
        return self._runner.order(what, batch, self.model.training, loss)

    def _result_of(self, order: Order, merge: Merge, graph: bool = False) -> Result:
        """What makes the model's result of what the last stage gives in a pass.

        Args:
            order: the pass.
            merge: how results of micro-batches become one, see `Pipeline`.
            graph: whether a backward is to come of it.

        Raises:
            InputError: they cannot be put together.
        """
        ways = self._runner.ways(self.model.training)
        if merge in ("auto", "rows"):
            ways.common(order.microbatches, anyway=merge == "rows")
        elif graph:
            ways.alike(order.microbatches)
        return Result(ways, order.microbatches, merge)

    def _back(
        self,
        order: Order,
        gradients: dict[int, Gradients],
        wanted: Sequence[nn.Parameter] | None,
    ) -> dict[int, Gradients]:
        """The backward of a batch that has gone forward."""
        return self._runner.run(order.back(gradients, ambient(), wanted)).gradients

    def _split(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Batch:
        leaves = self.program.flatten_inputs(args, kwargs)
        return Batch.split(leaves, self.plan.num_microbatches)


def _differentiable(given: Any) -> list[torch.Tensor]:
    """The tensors in containers that ask for a gradient."""
    leaves = flatten(given)[0]
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def step_result(
    objective: Objective, outcome: Outcome, result: Result | None
) -> torch.Tensor | StepResult:
    """What a training step returns.

    Args:
        objective: what was asked for.
        outcome: what has come of the pass.
        result: makes the model's result, if it is wanted.

    Raises:
        InputError: the rank that has the last stage was not asked for it.
    """
    if not objective.wants_more:
        return outcome.loss
    there = {"outputs": outcome.results, "metrics": outcome.metrics}
    wanted = {"outputs": bool(objective.outputs), "metrics": objective.metrics is not None}
    for name, found in there.items():
        if wanted[name] and not found:
            raise InputError(
                f"{name}= was given on this rank, and not on the one with the last stage, which "
                "alone can make them: give it there, too"
            )
    metrics = [outcome.metrics[k] for k in sorted(outcome.metrics)]
    return StepResult(
        outcome.loss,
        result(outcome.parts) if result else None,
        metrics if wanted["metrics"] else None,
    )


@dataclass(frozen=True)
class Result:
    """Makes the model's result of what the last stage gives.

    Attributes:
        ways: through the model.
        microbatches: of the batch.
        merge: how their results become one, see `Pipeline`.
    """

    ways: Ways
    microbatches: Sequence[MicroBatch]
    merge: Merge

    def __call__(self, parts: Sequence[Sequence[Any]]) -> Any:
        """The result, in the model's own structure.

        Args:
            parts: for every micro-batch the values that the last stage returned.
        """
        first = self.microbatches[0]
        if self.merge in ("auto", "rows"):
            way = self.ways[first.way]
            rows = sum(m.sizes[ROWS] for m in self.microbatches)
            return way.assemble(merge(way.joins, parts), {**first.sizes, ROWS: rows})
        each = [
            self.ways[m.way].assemble(part, m.sizes)
            for m, part in zip(self.microbatches, parts, strict=True)
        ]
        return self.merge(each) if callable(self.merge) else each
