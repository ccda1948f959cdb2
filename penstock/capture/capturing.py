"""`capture`: records a model's forward, opening what can be opened, closing what must be closed."""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from penstock.capture.applying import bound_applies
from penstock.capture.attributes import attributes_of_all, left_behind
from penstock.capture.blame import hint, where
from penstock.capture.calls import (
    ROWS,
    Assigned,
    Join,
    Sizes,
    Trace,
    Unrecordable,
)
from penstock.capture.closed_functions import Unclosable
from penstock.capture.dims import BatchDim, Dynamic, Varying, positional_names, varying_of_some
from penstock.capture.equality import same
from penstock.capture.forward import KEY, Forward
from penstock.capture.generalising import by_shapes, sized_by_values, traced, traced_evaluation
from penstock.capture.meta import META, completed, held_on_meta, is_on_meta
from penstock.capture.numbers import Given, Numeric, Where, found
from penstock.capture.objects import Objects, remembering, shared, uncompiled
from penstock.capture.opening import Opening, check_example
from penstock.capture.passing import passing_in
from penstock.capture.places import Place
from penstock.capture.preserve import Parameters, untouched
from penstock.capture.program import Program
from penstock.capture.results import joined
from penstock.capture.signatures import Inputs
from penstock.capture.sizes import SizedByValues, Undecided, describe, differs_from
from penstock.capture.trees import flatten, leaves_of, without_history
from penstock.errors import CaptureError, InputError, PenstockError

_MISSING = object()


def capture(
    model: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    batch_dim: BatchDim = 0,
    dynamic: Dynamic | None = None,
    keep_closed: Iterable[str] = (),
) -> Program:
    """Record the calls of `model(*args, **kwargs)`, for any batch size, in both modes.

    The model's own forward runs on small batches made of the example's rows, some of them twice.
    Parameters, buffers, attributes, training flags and random generators do not change.

    Args:
        model: any module; it is not modified.
        args: example positional arguments: tensors, and containers of tensors and plain data.
        kwargs: example keyword arguments.
        batch_dim: the dimension that counts the rows of every tensor input. Or a mapping from the
            positions or names of arguments to their dimensions: `None` for an argument that every
            micro-batch gets whole, `(0, 16)` for one with 16 entries in dimension 0 for each row,
            like the patches of equal images. Other arguments are split along 0.
        dynamic: other dimensions that vary from batch to batch: for each argument (by position or
            name) its dimensions with their names. Dimensions of the same name have the same size:
            `{"input_ids": {1: "length"}, "attention_mask": {1: "length"}}`. Like `batch_dim`, it
            may name arguments that only later calls have.
        keep_closed: qualified names of submodules that are kept as one call.

    Returns:
        the program. Where something cannot be recorded, the plain function that does it is kept as
        one call if it takes tensors and plain data and returns tensors; otherwise the module
        around it is, in the worst case the whole model. `program.closed` and
        `program.closed_functions` say why.

    Raises:
        CaptureError: the forward raises, does something else every time, or cannot be recorded even
            as one call; or `keep_closed` names no submodule.
        InputError: the example has no batch dimension, or its inputs disagree on it; `dynamic`
            names something that does not exist; or `model` or `args` have a wrong type.
    """
    check_example(model, args, kwargs, dynamic)
    args, kwargs = tuple(args), dict(kwargs or {})
    leaves, structure = flatten((args, kwargs))
    taken = inspect.signature(model.forward).parameters
    names = positional_names(model)
    dims = varying_of_some(args, kwargs, batch_dim, dynamic or {}, names, optional=taken)
    sizes = dims.sizes(leaves)
    if not sizes[ROWS]:
        raise InputError("the example has no rows; give one of the size that is usual")
    attempts = dims.attempts(sizes)
    forward = Forward(model, leaves, structure, dims, Opening(model, keep_closed))
    forward.parameters = Parameters(model)
    capturer = _Capturer(forward, batch_dim, dynamic or {})
    bound_applies.cache_clear()  # a notebook may have bound more without importing anything
    try:
        with _leaving_old_objects(), untouched(model), torch.enable_grad():
            program = capturer.first_that_works(attempts)
    finally:
        forward.parameters.restore(thoroughly=True)
        forward.parameters = None  # the program holds on to the capturer
    program.recordings.rebind()
    return program


_FROZEN_BY_PYTHON = 1000  # objects at most; 3.12 begins with some hundred, others with none


@contextmanager
def _leaving_old_objects() -> Iterator[None]:
    """While open, the garbage collector does not look at the objects that existed before.

    Recording makes so many objects that a full collection would start, which takes a tenth of a
    second or more for everything that was imported. If more objects are frozen already than Python
    itself freezes, nothing is done: unfreezing would release the user's as well.
    """
    if gc.get_freeze_count() > _FROZEN_BY_PYTHON:
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass(frozen=True)
class CaptureOptions:
    """How a forward is recorded, see `penstock.capture`.

    Attributes:
        batch_dim: the dimension that counts the rows.
        dynamic: other dimensions that vary from batch to batch.
        keep_closed: qualified names of modules that must stay whole.
    """

    batch_dim: BatchDim
    dynamic: Dynamic | None
    keep_closed: Iterable[str]

    def capture(
        self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Program:
        """The program of a model, from an example of its arguments.

        Raises:
            CaptureError, InputError: as `penstock.capture` does.
        """
        return capture(
            model,
            args,
            kwargs,
            batch_dim=self.batch_dim,
            dynamic=self.dynamic,
            keep_closed=self.keep_closed,
        )


class _Capturer:
    """Records until nothing more needs to be opened or closed; the `TraceSource` of later ways.

    Attributes:
        program: the program, as soon as the example's forward has been recorded in both modes.
    """

    program: Program

    def __init__(self, forward: Forward, batch_dim: BatchDim, dynamic: Dynamic) -> None:
        self.forward, self.opening = forward, forward.opening
        self.model, self.leaves = forward.model, forward.leaves
        self.batch_dim, self.dynamic = batch_dim, dynamic

    def first_that_works(self, attempts: Sequence[list[Sizes]]) -> Program:
        """The program, recorded at the first of these choices of sizes that the model takes.

        Raises:
            CaptureError: the model takes none of them.
        """
        for points in attempts[:-1]:
            try:
                return self.run(points, last=False)
            except PenstockError:
                raise
            except Exception:
                continue  # a size that the model cannot have, or answers that depend on the rows
        try:
            return self.run(attempts[-1], last=True)
        except PenstockError:
            raise
        except Exception as error:
            place, why = where(error, self.model), hint(error, self.model, self.leaves)
            raise CaptureError(
                f"the forward of {type(self.model).__name__} raised {type(error).__name__} "
                f"when it was run on the example, with {describe(attempts[-1][0])}: {error}"
                f"{f' ({place})' if place else ''}{why}"
            ) from error

    def run(self, points: Sequence[Sizes], last: bool) -> Program:
        """The program, generalised from recordings of inputs of these sizes.

        Args:
            points: the sizes.
            last: whether there are no other sizes to try.

        Raises:
            CaptureError: it cannot be recorded, even with the module that is the reason closed.
            Undecided: its Python decides otherwise at some of the sizes, and there are others.
        """
        while True:
            try:
                train, trained = traced(self.forward, points, training=True)
                evaluation, evaluated = traced_evaluation(self.forward, points, train)
                train, evaluation = train.pruned(), evaluation.pruned()
                if self.opening.force(train) or self.opening.force(evaluation):
                    continue
                modes = ((train, True), (evaluation, False))
                sized = [sized_by_values(self.forward, t, points[0], mode) for t, mode in modes]
                if self.opening.note_sizes(set().union(*sized)):
                    continue
                program = self.program = self._program(train, evaluation, points)
                self._check(program.train, points[0], trained, training=True)
                self._check(program.eval, points[0], evaluated, training=False)
                program.train.shared = program.eval.shared = (
                    *program.train.shared,
                    *program.eval.shared,
                )
                self._join(program.eval, points, evaluated, training=False)
                if program.train is not program.eval:
                    self._join(program.train, points, trained, training=True)
                return program
            except Unrecordable as problem:
                if isinstance(problem, Undecided) and not last:
                    raise
                if isinstance(problem, SizedByValues) and self.opening.note_sizes({problem.path}):
                    continue
                if isinstance(problem, Assigned) and self.forward.first_forward(points[0]):
                    continue
                if isinstance(problem, Unclosable):
                    self.opening.functions.reopen(problem.function)
                    continue
                if problem.within is not None:
                    self.opening.functions.close(problem.within, problem.why)
                    continue
                if problem.path in self.opening.closed:
                    raise CaptureError(f"the forward cannot be recorded: {problem}") from problem
                self.opening.close(problem.path, problem.why)

    def _program(self, train: Trace, evaluation: Trace, points: Sequence[Sizes]) -> Program:
        parameters = self.forward.parameters
        if parameters is not None:
            parameters.compare()
        return Program(
            self.model,
            train,
            train if train == evaluation else evaluation,
            self.forward.varying,
            self.leaves,
            self.opening.closed,
            self.opening.is_open,
            self.opening.functions,
            self,
            points,
            frozenset(parameters.written) if parameters is not None else frozenset(),
        )

    def varying_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Varying:
        """What varies in the arguments of another signature."""
        names = positional_names(self.model)
        return varying_of_some(args, kwargs, self.batch_dim, self.dynamic, names)

    def way(self, leaves: Sequence[Any], training: bool, numbers: Mapping[Place, Numeric]) -> Trace:
        """The trace of another way, recorded from inputs that take it.

        It is recorded with gradients enabled. If the model's Python reads whether they are, and
        they are disabled now, it is recorded once more without them.

        Args:
            leaves: the leaves of the inputs.
            training: whether in training mode.
            numbers: the numbers in attributes that change, with another value of each; they are
                passed in where that is possible.

        Raises:
            CaptureError: the way cannot be recorded with the modules that are open already.
        """
        with torch.enable_grad():
            trace = self._way(leaves, training, numbers)
        differs = trace.reads.grad is not None and not torch.is_grad_enabled()
        return self._way(leaves, training, numbers) if differs else trace

    def _way(
        self, leaves: Sequence[Any], training: bool, numbers: Mapping[Place, Numeric]
    ) -> Trace:
        like = self.program.signatures.of(leaves)
        model, leaves = self._at_home(leaves)
        forward = Forward(
            *(model, leaves, like.structure, like.varying, self.opening),
            as_it_is=True,
            open_leaves=list(like.numbers),
        )
        other = _Capturer(forward, self.batch_dim, self.dynamic)
        other.program = self.program
        changing: dict[Where, Numeric] = dict(numbers.items())
        changing |= {Given(k): like.other_number(k, leaves[k]) for k in like.numbers}
        sizes = like.varying.sizes(leaves)
        with untouched(model):
            if self.forward.first_helped:
                forward.first_forward(sizes)
            problems = []
            attempts = like.varying.attempts(sizes)[1:]
            if like.in_session:
                attempts = like.varying.attempts_in_session(sizes)
            for points in attempts:
                try:
                    return other._passing_in(changing, points, training)
                except Exception as problem:
                    problems.append(problem)
            if like.in_session and (trace := other._at_some(changing, sizes, training)):
                return trace
        if not isinstance(problems[0], Unrecordable):
            raise problems[0]
        raise CaptureError(
            "with this batch, autocast setting or attributes, the model takes another way than "
            f"with the example, and this way cannot be recorded: {problems[0]}. Capture with this "
            "batch as example, or with keep_closed= for the module that decides"
        ) from problems[0]

    def _at_some(
        self, numbers: Mapping[Where, Numeric], sizes: Sizes, training: bool
    ) -> Trace | None:
        """A trace that holds only for some sizes, see `Trace.only_at`.

        One of several lengths is fixed, or all of them, or at last the rows as well. `None` if not
        even that can be recorded.
        """
        varying, lengths = self.forward.varying, self.forward.varying.lengths
        choices = [(name,) for name in lengths] if len(lengths) > 1 else []
        for fixed in [*choices, lengths, varying.names]:
            self.forward.varying = varying if ROWS in fixed else varying.without(fixed)
            attempts = (
                [[sizes]] if ROWS in fixed else self.forward.varying.attempts_in_session(sizes)
            )
            for points in attempts:
                try:
                    trace = self._passing_in(numbers, points, training)
                except Exception:
                    continue
                trace.only_at = {name: sizes[name] for name in fixed}
                return trace
        return None

    def _passing_in(
        self,
        numbers: Mapping[Where, Numeric],
        points: Sequence[Sizes],
        training: bool,
    ) -> Trace:
        """The trace of one way, with changing numbers passed in as values where possible."""

        def recorded(now: Mapping[Where, Numeric]) -> Trace:
            self.forward.numbers = now
            return self._one_way(points, training)

        def again() -> Trace:
            self.forward.numbers = {}
            return self.forward.record(points[0], training)[0].pruned()

        return passing_in(self.model, self.leaves, numbers, recorded, again, points[0])

    def _one_way(self, points: Sequence[Sizes], training: bool) -> Trace:
        trace, expected = traced(self.forward, points, training)
        trace = trace.pruned()
        self._check(trace, points[0], expected, training)
        self._join(trace, points, expected, training)
        return trace

    def check_at(self, trace: Trace, leaves: Sequence[Any], training: bool) -> None:
        """Record the forward at the size of these inputs, and compare it with the trace.

        If shapes alone show that they are alike, nothing is computed. A model that was captured
        without weights is not compared, as the devices in the recordings would differ.

        Raises:
            CaptureError: the model does something else than the trace says.
        """
        if self.program.was_on_meta:
            return
        sizes = self.program.signatures.of(leaves).varying.sizes(leaves)
        differing = self._differing(trace, leaves, training, sizes)
        try:
            if by_shapes(self.opening, trace, sizes, lambda: differing(True) is None):
                return
            path = differing(False)
        except Unrecordable as problem:
            raise CaptureError(
                f"with {describe(sizes)} the forward cannot be recorded again: {problem}. If "
                "another thread draws from torch's default generator meanwhile, that looks as if "
                "the forward did: give it a generator of its own"
            ) from problem
        if path is not None:
            raise CaptureError(
                f"with {describe(sizes)} the model does something else than at the captured "
                f"sizes: {path or 'its own forward'} branches on sizes. Capture with an example "
                "of this size" + (f", or with keep_closed=[{path!r}]" if path else "")
            )

    def holds_at(self, trace: Trace, leaves: Sequence[Any], training: bool, sizes: Sizes) -> bool:
        """Whether a recording of shapes alone at these sizes shows that the trace holds there."""
        differing = self._differing(trace, leaves, training, sizes)
        if self.program.was_on_meta:
            return False
        return bool(by_shapes(self.opening, trace, sizes, lambda: differing(True) is None))

    def _differing(
        self, trace: Trace, leaves: Sequence[Any], training: bool, sizes: Sizes
    ) -> Callable[[bool], str | None]:
        """A function that records the forward again at these sizes, and compares.

        Its argument says whether to record shapes alone. It returns the path of the module that
        does something else than the trace says; `None` if none does.
        """
        like = self.program.signatures.of(leaves)
        model, leaves = self._at_home(leaves)
        other = Forward(model, leaves, like.structure, like.varying, self.opening, as_it_is=True)
        other.parameters = Parameters(model) if self.program.written else None
        passed: list[Where] = [*trace.reads.numbers, *map(Given, trace.reads.given)]
        other.numbers = {where: found(model, leaves, where) for where in passed}

        def differing(shapes: bool) -> str | None:
            grad = torch.enable_grad() if trace.reads.grad is None else nullcontext()
            with untouched(model), grad:
                recorded = other.record(sizes, training, strict=False, shapes=shapes)[0].pruned()
            again = completed(recorded, trace) if shapes else recorded
            return differs_from(again, trace, sizes)

        return differing

    def _at_home(self, leaves: Sequence[Any]) -> tuple[nn.Module, list[Any]]:
        """The model and the inputs on one device; a copy of a model placed on several devices."""
        if isinstance(leaves, Inputs):
            leaves = leaves.with_values(leaves)
        devices = {p.device for p in self.model.parameters()}
        if not devices or META in devices:
            return self.model, list(leaves)
        if len(devices) == 1:
            model, (there,) = self.model, devices
        else:
            model, there = copy.deepcopy(self.model).cpu(), torch.device("cpu")
        return model, [x.to(there) if isinstance(x, torch.Tensor) else x for x in leaves]

    def _check(self, trace: Trace, sizes: Sizes, expected: list[Any], training: bool) -> None:
        """Replay and compare with what the model itself gave, bit for bit."""

        def replayed() -> list[Any]:
            self.forward.set_mode(training)
            leaves = self.forward.varying.resized(self.leaves, sizes)
            with ExitStack() as stack:
                if is_on_meta(self.model):
                    leaves = [x.to(META) if isinstance(x, torch.Tensor) else x for x in leaves]
                    stack.enter_context(held_on_meta(self.model))
                    stack.enter_context(META)
                objects = Objects(uncompiled(self.model), classes=True)
                before = attributes_of_all(self.model)
                result = self._replaying(trace)(leaves)
                trace.shared = (*self.program.train.shared, *shared(self.model, objects))
                self.program.left |= left_behind(self.model, before)
                self.program.remembering |= remembering(self.model, before, objects)
                leaves = leaves_of(result, trace.output_structure)
                return [without_history(leaf) for leaf in leaves]

        wrong = _different(expected, self.forward.without_saving(replayed))
        if not wrong:
            return
        again = _different(expected, self.forward.record(sizes, training)[1])
        if not wrong <= again:  # what the model itself does not repeat proves nothing
            mode = "training" if training else "evaluation"
            raise Unrecordable(
                "", f"replaying its calls in {mode} mode gives another result than it does itself"
            )

    def _join(
        self, trace: Trace, points: Sequence[Sizes], known: Sequence[Any], training: bool
    ) -> None:
        """Note in `trace.joins` how its results are put together from those of micro-batches.

        The example's trace in evaluation mode helps where random numbers or BatchNorm keep results
        from being compared.
        """
        other = self.program.eval if trace is not self.program.eval else None

        def found() -> tuple[Join, ...]:
            self.forward.set_mode(training)
            make = None if is_on_meta(self.model) else lambda: self._replaying(trace)
            varying = self.forward.varying
            return joined(self.model, trace, varying, self.leaves, points, make, known, other)

        trace.joins = self.forward.without_saving(found)

    def _replaying(self, trace: Trace) -> Callable[[Sequence[Any]], Any]:
        """A function that replays a trace on inputs' leaves, with the same random numbers again."""
        return self.program.fresh(trace, KEY, self.model, self.forward.varying)


def _different(left: Sequence[Any], right: Sequence[Any]) -> set[int]:
    """The places at which two lists of results differ."""
    pairs = zip_longest(left, right, fillvalue=_MISSING)
    return {k for k, (one, other) in enumerate(pairs) if not same(one, other)}
