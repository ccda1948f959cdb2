"""A batch on its way, from the arguments of a call or a step to what it returns."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from penstock.account.record import CALL
from penstock.audit.auditor import Auditor
from penstock.autograd import Passage, backward_into_inputs, check_context, deliver
from penstock.capture import ROWS, Program
from penstock.capture.attributes import owner_of
from penstock.capture.calls import ambient
from penstock.capture.trees import map_leaves, tree_leaves, without_history
from penstock.capture.watching import with_owners
from penstock.engine.batch import Batch, ByHand, Whole, arguments
from penstock.engine.ends import Loss, UnavailableParameters
from penstock.engine.hooks import Opened
from penstock.engine.microbatch import Merge, merge
from penstock.engine.objective import Mixing, Objective
from penstock.engine.orders import Order, Outcome, PassKind
from penstock.engine.span import MicroBatch
from penstock.engine.state import Backup
from penstock.engine.user_functions import LeftAttributes, check_reads
from penstock.engine.whole_batch import WholeBatch, WholeObjective, stand_in
from penstock.errors import InputError, PenstockError
from penstock.plan import Plan
from penstock.runner import Runner, Started
from penstock.units import show_bytes
from penstock.workers.ways import Ways

_LOSSES = 64  # whose functions are kept


def _left_elsewhere(
    names: Collection[str], program: Program, plan: Plan, calls_loss: bool
) -> LeftAttributes:
    """The attributes that a forward writes and that the loss cannot read afterwards.

    The loss can read an attribute if the module that has it runs right before the loss, in the last
    stage of the only replica, and is not recomputed.

    Args:
        names: the qualified names of the attributes that the forward writes.
        program: the captured program.
        plan: how the program is cut.
        calls_loss: whether the loss is called in the process where the user's own modules run.
    """
    start, end, recomputed = plan.stages[-1].spans[-1]
    is_near = calls_loss and not recomputed and plan.replicas == 1
    calls = program.train.calls[start:end] if is_near else ()
    near = {call.target for call in calls if isinstance(call.target, str)}
    places = sorted({owner_of(program.model, name) for name in names})
    return LeftAttributes(program.model, [p for p in places if near.isdisjoint(with_owners(p[0]))])


class StepResult(NamedTuple):
    """The loss of a step, with its outputs and metrics.

    Attributes:
        loss: the loss of the batch, a detached scalar on the device of the last stage.
        outputs: the model's detached result for the batch, as `pipe(x)` returns it; a list with one
            per micro-batch for `outputs="list"` and `train_microbatches`. `None` without
            `outputs=`.
        metrics: the detached results of the metrics function, in the order of the micro-batches.
            `None` without `metrics=`.
    """

    loss: torch.Tensor
    outputs: Any = None
    metrics: list[Any] | None = None


class Passes:
    """Turns the user's batches into passes: splits, routes, orders, audits and runs them.

    It then puts the results together. docs/design.md describes the path of a batch.

    Args:
        runner: routes batches, makes orders and runs them.
        auditor: runs a micro-batch of some passes by the model itself as well.
        program: the captured program.
        merge: how the results of micro-batches become that of the batch, see `Pipeline`.
    """

    def __init__(self, runner: Runner, auditor: Auditor, program: Program, merge: Merge) -> None:
        self._runner = runner
        self._auditor = auditor
        self._program = program
        self._model = program.model
        self._merge = merge
        self._mixing = Mixing()
        self._opened = Opened(program)
        self._losses: dict[tuple[Any, ...], Any] = {}  # by identity, the latest last
        self.begin()

    def begin(self) -> None:
        """Find out where losses are called, and what they cannot read, under the present plan."""
        program, plan, workers = self._program, self._runner.plan, self._runner.workers
        calls_loss = workers.role.calls_loss
        self._left = _left_elsewhere(program.left, program, plan, calls_loss)
        self._changed = _left_elsewhere(program.train.changed, program, plan, calls_loss)
        # A loss of the whole batch is called when the forwards of all micro-batches are done.
        self._left_by_all = _left_elsewhere(program.left, program, plan, calls_loss=False)
        self._reads_no_buffers: set[tuple[Any, ...]] = set()  # identities of losses
        apart = UnavailableParameters(program.model, workers.ownership.apart, plan.splits_backward)
        self._apart = apart if calls_loss else None

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """See `Pipeline.__call__`."""
        graph = torch.is_grad_enabled()
        name = "a call" if graph else "a call without gradients"
        return self._call(name, Whole(args, kwargs), graph and self._model.training).output

    def _call(self, name: str, inputs: Whole, trains: bool) -> _Called:
        """The forwards of a batch; a backward may come from its result if gradients are enabled.

        Args:
            name: of the operation.
            inputs: the batch.
            trains: whether it counts as a step of training.
        """
        graph = torch.is_grad_enabled()
        with self._operation(name):
            check_context(inputs.given, self._model.parameters())
            batch = self._batch(inputs, trains)
            order = self._order("forward" if graph else "infer", batch)
            result = self._result_of(order, self._merge, graph)
            with self._runner.reserved(order), self._auditor.around(order, batch):
                outcome = self._runner.run(order)
        if not graph:
            return _Called(result(outcome.parts), order, None)
        passage = Passage(self._runner, order, outcome.differentiable, inputs.given)
        self._runner.forget_with(passage, order)
        unfed = () if self._runner.workers.role.has_inputs else _differentiable(inputs.given)
        parameters = self._runner.workers.parameters
        parts = deliver(passage, order.values, outcome.parts, parameters, unfed)
        return _Called(result(parts), order, passage)

    def map(self, batches: Iterable[Any], ahead: int | None) -> Iterator[Any]:
        """See `Pipeline.map`.

        Raises:
            InputError: `ahead` is less than 1.
        """
        plan = self._runner.plan
        most = plan.batches_under_way if ahead is None else ahead
        if most < 1:
            raise InputError(f"ahead={ahead} must be at least 1")
        return self._results(batches, most)

    def _results(self, batches: Iterable[Any], most: int) -> Iterator[Any]:
        """The results of batches in order, of which at most `most` are under way at a time.

        Only one is under way if forwards change buffers, as those of BatchNorm in training mode do:
        before a batch is started, the model is checked, and perhaps recorded, as the batch before
        it left the model. If forwards draw from the generators of this process, no batch is under
        way while the script runs: the two would draw each other's random numbers.
        """
        started: deque[_MapBatch] = deque()
        with self._runner.given_up():
            try:
                for inputs in batches:
                    while len(started) >= (1 if self._runner.changes_buffers() else most):
                        yield self._result(started.popleft())
                    started.append(self._start(inputs))
                    while started and self._runner.draws_here():
                        yield self._result(started.popleft())
                while started:
                    yield self._result(started.popleft())
            finally:  # whoever left the loop wants none of these
                for batch in started:
                    with suppress(PenstockError):  # if one failed, it has said so
                        self._runner.finish(batch.started)

    def _start(self, inputs: Any) -> _MapBatch:
        """Start a batch of `map`, which is not waited for."""
        with self._operation("a batch of map"), torch.no_grad():
            check_context(inputs, self._model.parameters())
            order = self._order("infer", self._batch(Whole(*arguments(inputs)), trains=False))
            result = self._result_of(order, self._merge)
            return _MapBatch(self._runner.start(order), result)

    def _result(self, batch: _MapBatch) -> Any:
        """Wait for a batch of `map`, and put its result together."""
        with self._runner.steps.failing():
            return batch.result(self._runner.finish(batch.started).parts)

    def step(self, what: PassKind, name: str, inputs: Whole | ByHand, objective: Objective) -> Any:
        """A pass of a batch that ends in a loss, see `Pipeline.train_step`.

        Args:
            what: `"train"`, or `"infer"` for the loss alone.
            name: of the method that is called.
            inputs: the batch.
            objective: the loss, and what else is made of the outputs.
        """
        if isinstance(objective.loss_fn, WholeBatch):
            whole = WholeObjective(objective, objective.loss_fn)
            return self._step_of_whole(what, name, inputs, whole)
        self._keep(objective)
        with self._operation(name):
            given = (inputs.given, objective.given)
            check_context(given, self._model.parameters())
            batch = self._batch(inputs, trains=what == "train")
            order = self._order(what, batch, self._loss(objective, batch))
            result = None
            if objective.outputs:
                in_list = inputs.by_hand or objective.outputs == "list"
                result = self._result_of(order, "list" if in_list else self._merge)
            self._note_joins(order)
            reserved, audited = self._runner.reserved(order), self._auditor.around(order, batch)
            with reserved, audited, objective.undone():
                before = self._backup(order)
                outcome = self._runner.run(order)
        try:
            backward_into_inputs(order.values, outcome.gradients)
        except BaseException:  # of the script's own graph
            before.restore()
            raise
        if order.loss is not None and len(order.microbatches) > 1:
            self._look_at_loss(objective, outcome)
        found = step_result(objective, outcome, result)
        if what == "train":
            self._runner.steps.call_hooks(outcome.loss if outcome.losses else None)
        return found

    def _step_of_whole(
        self, what: PassKind, name: str, inputs: Whole | ByHand, whole: WholeObjective
    ) -> Any:
        """A step with one loss of all micro-batches: their forwards, the loss, their backwards."""
        if isinstance(inputs, ByHand):
            raise InputError(
                "whole_batch needs one batch, which Penstock splits, and these micro-batches were "
                "made by hand: call train_step(x, target=y, loss_fn=whole_batch(fn))"
            )
        objective, trains = whole.objective, what == "train"
        if trains:
            self._check_room()
        self._check_reads(objective, self._left_by_all)
        check_context(objective.given, self._model.parameters())
        with torch.set_grad_enabled(trains), objective.undone():
            called = self._call(f"{name} with a loss of the whole batch", inputs, trains)
            loss, found = self._made_of(whole, called)
            if called.passage is not None:
                called.passage.loss = found.loss
                with ambient().without_autocast().autocasting():
                    loss.backward(whole.start(loss))
        if not objective.wants_more:
            return found.loss
        if objective.metrics is not None and not found.metrics:
            raise InputError(_missing("metrics"))
        outputs = map_leaves(without_history, called.output) if objective.outputs else None
        return found._replace(outputs=outputs)

    def _made_of(self, whole: WholeObjective, called: _Called) -> tuple[torch.Tensor, StepResult]:
        """The loss of a batch, to be differentiated, and what of it is broadcast."""
        workers, device = self._runner.workers, self._runner.loss_device
        what, key = "the loss of a whole batch", called.order.microbatches[0].key
        with workers.operation(what):
            loss = own = None
            if workers.role.has_loss:
                loss = whole.loss(key, called.output, device)
                own = StepResult(loss.detach(), None, whole.measured(key, called.output, device))
            gathered = workers.all_gather(what, own)
        found = own or next(each for each in gathered if each is not None)
        return stand_in(called.output) if loss is None else loss, found

    def _check_room(self) -> None:
        """Raise if the activations of all micro-batches are more than workers may hold."""
        plan = self._runner.plan
        if plan.memory_limit is None or plan.schedule == "gpipe":
            return
        held = plan.memory_with([plan.largest_share] * len(plan.stages))
        if held > plan.memory_limit:
            raise InputError(
                f"whole_batch holds the activations of all {plan.num_microbatches} micro-batches "
                f"at once, which takes {show_bytes(held)} on one worker, and memory_limit is "
                f'{show_bytes(plan.memory_limit)}: build the pipeline with schedule="gpipe", '
                'whose plan counts them, and recompute="all" if they do not fit'
            )

    def _loss(self, objective: Objective, batch: Batch) -> Loss | None:
        """The loss for the last stage; `None` in a process that does not have it."""
        if not self._runner.workers.role.has_loss:
            return None
        self._check_reads(objective, self._left)
        if objective.identity not in self._reads_no_buffers and self._runner.changes_buffers():
            self._check_reads(objective, self._changed)
            self._reads_no_buffers.add(objective.identity)
        is_new = self._mixing.is_new(objective.identity)
        return objective.loss(batch.rows, self._runner.loss_device, is_new, self._apart)

    def _backup(self, order: Order) -> Backup:
        """The gradients as they are before a pass whose inputs have a graph of the script's."""
        inputs = (value for part in order.values for value in part)
        has_graph = any(isinstance(v, torch.Tensor) and v.requires_grad for v in inputs)
        workers = self._runner.workers
        is_here = has_graph and order.what == "train" and workers.has_gradients
        return Backup(workers.parameters if is_here else (), ())

    def _keep(self, objective: Objective) -> None:
        """Keep the functions of the latest losses, as what is known of them goes by identity."""
        self._losses.pop(objective.identity, None)
        self._losses[objective.identity] = objective.given_functions
        if len(self._losses) > _LOSSES:
            oldest = next(iter(self._losses))
            del self._losses[oldest]
            self._reads_no_buffers.discard(oldest)
            self._mixing.forget(oldest)

    def _look_at_loss(self, objective: Objective, outcome: Outcome) -> None:
        """Warn if the loss of rows does not add up to that of a batch, when it is new."""
        if self._mixing.is_new(objective.identity):
            values = [outcome.losses[k] for k, weight in enumerate(outcome.weights) if weight]
            mismatch, weight = outcome.mismatch, objective.weight
            self._mixing.of_loss(objective.identity, values, mismatch, weight)

    def _check_reads(self, objective: Objective, left: LeftAttributes) -> None:
        """Raise if the loss or the metrics read what is out of their reach."""
        check_reads("loss", objective.loss_fn, left)
        check_reads("metrics function", objective.metrics, left)

    def _note_joins(self, order: Order) -> None:
        """Warn once if results of the model depend on which rows are together."""
        ways = self._runner.ways(order.training)
        taken = {m.way for m in order.microbatches} if len(order.microbatches) > 1 else ()
        self._mixing.of_model([join for way in taken for join in ways[way].trace.joins])

    # -- the parts of a pass ------------------------------------------------------------------

    @contextmanager
    def _operation(self, what: str) -> Iterator[None]:
        """Open an operation of all processes that run the script, named by `what` and the mode."""
        name = what if self._model.training else f"{what} in evaluation mode"
        steps = self._runner.steps
        with steps.during(CALL), steps.failing(), self._runner.workers.operation(name):
            yield

    def _batch(self, inputs: Whole | ByHand, trains: bool) -> Batch:
        """A batch, where its inputs are; elsewhere, what there is to know of it.

        Args:
            inputs: what the user has given.
            trains: whether it counts as a step of training.
        """
        self._opened.check()
        training, role = self._model.training, self._runner.workers.role
        if not role.has_inputs:
            return self._runner.share(None, training)
        try:
            batch = inputs.batch(self._program, self._runner.plan.num_microbatches)
            if role.routes:
                routed = partial(self._runner.route, batch, training, trains)
                batch = self._runner.surviving(routed)
        except InputError as error:
            if role.name:
                error.add_note(f"{role.name} has the first stage, so this rank needs the inputs.")
            raise
        return self._runner.share(batch, training)

    def _order(self, what: PassKind, batch: Batch, loss: Loss | None = None) -> Order:
        return self._runner.order(what, batch, self._model.training, loss)

    def _result_of(self, order: Order, merge: Merge, graph: bool = False) -> ResultBuilder:
        """A function that makes the model's result from the values of the last stage in a pass.

        Args:
            order: the pass.
            merge: how results of micro-batches become one, see `Pipeline`.
            graph: whether a backward may come from the result.

        Raises:
            InputError: the results of the micro-batches cannot be put together.
        """
        ways = self._runner.ways(self._model.training)
        if merge in ("auto", "rows"):
            ways.common(order.microbatches, anyway=merge == "rows")
        elif graph:
            ways.alike(order.microbatches)
        return ResultBuilder(ways, order.microbatches, merge)


def _differentiable(given: Any) -> list[torch.Tensor]:
    """The tensors in containers that ask for a gradient."""
    leaves = tree_leaves(given)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]


def step_result(
    objective: Objective, outcome: Outcome, result: ResultBuilder | None
) -> torch.Tensor | StepResult:
    """What a training step returns.

    Args:
        objective: the loss, and whether outputs and metrics are wanted.
        outcome: the outcome of the pass.
        result: makes the model's result, if it is wanted.

    Raises:
        InputError: outputs or metrics are wanted here, but not on the rank with the last stage.
    """
    if not objective.wants_more:
        return outcome.loss
    if objective.outputs and not outcome.results:
        raise InputError(_missing("outputs"))
    metrics = None
    if objective.metrics is not None:
        if not outcome.metrics:
            raise InputError(_missing("metrics"))
        metrics = [outcome.metrics[k] for k in sorted(outcome.metrics)]
    return StepResult(outcome.loss, result(outcome.parts) if result else None, metrics)


def _missing(name: str) -> str:
    return (
        f"{name}= was given on this rank, but not on the rank with the last stage, which "
        "computes them: give it there, too"
    )


@dataclass(frozen=True)
class ResultBuilder:
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


class _MapBatch(NamedTuple):
    """A batch of `map` that is under way.

    Attributes:
        started: its pass.
        result: makes its result.
    """

    started: Started
    result: ResultBuilder


class _Called(NamedTuple):
    """A batch that has gone forward.

    Attributes:
        output: the model's result.
        order: the pass.
        passage: runs the backward; `None` without gradients.
    """

    output: Any
    order: Order
    passage: Passage | None
