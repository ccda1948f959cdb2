"""`capture`: records a model's forward, opening what can be opened, closing what must be closed."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

import torch
from torch import nn

from penstock.capture.attributes import attributes_of_all, left_behind
from penstock.capture.blame import hint, where
from penstock.capture.calls import (
    ROWS,
    Assigned,
    Call,
    Changed,
    Join,
    Reads,
    Sizes,
    TensorInfo,
    Trace,
    Unrecordable,
)
from penstock.capture.dims import BatchDim, Dynamic, Varying, positional_names, varying_of_some
from penstock.capture.equality import same
from penstock.capture.meta import META, NoSavedTensors, completed, held_on_meta, is_on_meta
from penstock.capture.numbers import Given, Numeric, Where, found
from penstock.capture.objects import Objects, remembering, shared, uncompiled
from penstock.capture.opening import Opening, check_example
from penstock.capture.passing import passing_in
from penstock.capture.places import MISSING, Place
from penstock.capture.preserve import Parameters, first_forward, untouched
from penstock.capture.program import Program
from penstock.capture.randomness import Key
from penstock.capture.reads import input_property
from penstock.capture.recorder import record
from penstock.capture.results import joined
from penstock.capture.signatures import Inputs
from penstock.capture.sizes import Undecided, adapted, describe, differs_from, generalise
from penstock.capture.trees import Structure, flatten, leaves_of, unflatten
from penstock.errors import CaptureError, InputError, PenstockError

_KEY = Key(0, 0, 0)
T = TypeVar("T")

_MISSING = object()
_LARGE = 32 << 20  # bytes of results; smaller models are run sooner than their shapes are known
_MORE = 32  # recordings where random numbers may decide


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
        the program. Where something cannot be recorded, the module around it is kept as one call,
        in the worst case the whole model; `program.closed` says why.

    Raises:
        CaptureError: the forward itself raises, or `keep_closed` names no submodule.
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
    capturer = _Capturer(model, leaves, structure, dims, Opening(model, keep_closed))
    capturer.batch_dim, capturer.dynamic = batch_dim, dynamic or {}
    capturer.parameters = Parameters(model)
    try:
        with untouched(model), torch.enable_grad():
            program = capturer.first_that_works(attempts)
    finally:
        if capturer.parameters is not None:
            capturer.parameters.restore(thoroughly=True)
        capturer.parameters = None  # the program holds on to the capturer
    program.recordings.rebind()
    return program


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
    """Records until nothing more needs to be opened or closed; the `Source` of what comes later.

    Attributes:
        program: what was made of the recordings, once they are there.
    """

    program: Program

    def __init__(
        self,
        model: nn.Module,
        leaves: list[Any],
        structure: Structure | None,
        varying: Varying,
        opening: Opening,
    ) -> None:
        self.model = model
        self.leaves = leaves
        self.structure = structure
        self.varying = varying
        self.opening = opening
        self.parameters: Parameters | None = None
        self.numbers: Mapping[Where, Numeric] = {}  # that are passed in
        self.open: Sequence[int] = ()  # numbers among the leaves, of which others will come
        self.as_it_is = False  # whether training flags and inputs stay as they are
        self.batch_dim: BatchDim = 0
        self.dynamic: Dynamic = {}
        self._first_helped: bool | None = None
        self._marks: set[Place] = set()  # which that leaves, and which are not there later
        self._settled: dict[Place, tuple[Any, Any]] = {}  # before and after the first forward
        self._read_first: list[Reads] = []  # what those have read

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

        Raises:
            CaptureError: even the model as one closed call does not repeat itself.
            Undecided: its Python decides otherwise at some of them, and they are not the last.
        """
        while True:
            try:
                train, trained = self._trace(points, training=True)
                evaluation, evaluated = self._evaluation(points, train)
                train, evaluation = train.pruned(), evaluation.pruned()
                if self.opening.force(train) or self.opening.force(evaluation):
                    continue
                program = self.program = self._program(train, evaluation, points)
                self._check(program.train, points[0], trained, training=True)
                self._check(program.eval, points[0], evaluated, training=False)
                program.train.shared = program.eval.shared = (
                    *program.train.shared,
                    *program.eval.shared,
                )
                self._join(program.eval, points, training=False)
                if program.train is not program.eval:
                    self._join(program.train, points, training=True)
                return program
            except Unrecordable as problem:
                if isinstance(problem, Undecided) and not last:
                    raise
                if isinstance(problem, Assigned) and self.first_forward(points[0]):
                    continue
                if problem.path in self.opening.closed:
                    raise CaptureError(f"the forward cannot be recorded: {problem}") from problem
                self.opening.close(problem.path, problem.why)

    def first_forward(self, sizes: Sizes) -> bool:
        """Run the forward a first time, if that makes the next ones assign to nothing."""
        if self._first_helped is None:
            args, kwargs = self._batch(sizes)
            flags = [module.training for module in self.model.modules()]
            self.model.eval()
            before = {path: dict(vars(m)) for path, m in self.model.named_modules()}
            self._first_helped = first_forward(self.model, lambda: self.model(*args, **kwargs))
            self._marks = {
                Place(path, (name,))
                for path, module in self.model.named_modules()
                for name, value in vars(module).items()
                if path in before and value is not before[path].get(name, MISSING)
            }
            for module, flag in zip(self.model.modules(), flags, strict=True):
                module.training = flag
            return self._first_helped
        return False

    def _program(self, train: Trace, evaluation: Trace, points: Sequence[Sizes]) -> Program:
        if self.parameters is not None:
            self.parameters.compare()
        return Program(
            self.model,
            train,
            train if train == evaluation else evaluation,
            self.varying,
            self.leaves,
            self.opening.closed,
            self.opening.is_open,
            self,
            points,
            frozenset(self.parameters.written) if self.parameters is not None else frozenset(),
        )

    def varying_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Varying:
        """What varies in the arguments of another signature."""
        names = positional_names(self.model)
        return varying_of_some(args, kwargs, self.batch_dim, self.dynamic, names)

    def way(self, leaves: Sequence[Any], training: bool, numbers: Mapping[Place, Numeric]) -> Trace:
        """The trace that inputs take which decide otherwise than the example.

        Where gradients make a difference to it, it is recorded as they are now.

        Raises:
            CaptureError: it cannot be recorded with the modules that are open already.
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
        other = _Capturer(model, leaves, like.structure, like.varying, self.opening)
        other.program = self.program
        other.as_it_is = True
        other.open = list(like.numbers)
        changing: dict[Where, Numeric] = dict(numbers.items())
        changing |= {Given(k): like.other_number(k, leaves[k]) for k in like.numbers}
        sizes = like.varying.sizes(leaves)
        with untouched(model):
            if self._first_helped:
                other.first_forward(sizes)
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
        """One way that holds for some lengths as they are: one of them, all, or the rows as well.

        `None` if not even that can be recorded.
        """
        varying, lengths = self.varying, self.varying.lengths
        choices = [(name,) for name in lengths] if len(lengths) > 1 else []
        for fixed in [*choices, lengths, varying.names]:
            self.varying = varying if ROWS in fixed else varying.without(fixed)
            attempts = [[sizes]] if ROWS in fixed else self.varying.attempts_in_session(sizes)
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
        """One way, with numbers that change as values that are passed in, if that is possible."""

        def recorded(now: Mapping[Where, Numeric]) -> Trace:
            self.numbers = now
            return self._one_way(points, training)

        def again() -> Trace:
            self.numbers = {}
            return self._record(points[0], training)[0].pruned()

        return passing_in(self.model, self.leaves, numbers, recorded, again, points[0])

    def _one_way(self, points: Sequence[Sizes], training: bool) -> Trace:
        trace, expected = self._trace(points, training)
        trace = trace.pruned()
        self._check(trace, points[0], expected, training)
        self._join(trace, points, training)
        return trace

    def check_at(self, trace: Trace, leaves: Sequence[Any], training: bool) -> None:
        """Record the forward at the size of these inputs, and compare.

        Nothing is computed for that, if shapes do. What was captured without weights is not
        compared: the devices would differ.

        Raises:
            CaptureError: the model does something else than the trace says.
        """
        if self.program.was_on_meta:
            return
        sizes = self.program.signatures.of(leaves).varying.sizes(leaves)
        differing = self._differing(trace, leaves, training, sizes)
        if self._by_shapes(trace, sizes, lambda: differing(True) is None):
            return
        path = differing(False)
        if path is not None:
            raise CaptureError(
                f"with {describe(sizes)} the model does something else than at the captured "
                f"sizes: {path or 'its own forward'} branches on sizes. Capture with an example "
                "of this size" + (f", or with keep_closed=[{path!r}]" if path else "")
            )

    def holds_at(self, trace: Trace, leaves: Sequence[Any], training: bool, sizes: Sizes) -> bool:
        """Whether shapes say that the model does what the trace says on inputs of these sizes."""
        differing = self._differing(trace, leaves, training, sizes)
        if self.program.was_on_meta:
            return False
        return bool(self._by_shapes(trace, sizes, lambda: differing(True) is None))

    def _differing(
        self, trace: Trace, leaves: Sequence[Any], training: bool, sizes: Sizes
    ) -> Callable[[bool], str | None]:
        """Records, of shapes alone or not, and says which module does not what the trace says."""
        like = self.program.signatures.of(leaves)
        model, leaves = self._at_home(leaves)
        other = _Capturer(model, leaves, like.structure, like.varying, self.opening)
        other.parameters = Parameters(model) if self.program.written else None
        other.as_it_is = True
        passed: list[Where] = [*trace.reads.numbers, *map(Given, trace.reads.given)]
        other.numbers = {where: found(model, leaves, where) for where in passed}

        def differing(shapes: bool) -> str | None:
            grad = torch.enable_grad() if trace.reads.grad is None else nullcontext()
            with untouched(model), grad:
                recorded = other._record(sizes, training, strict=False, shapes=shapes)[0].pruned()
            again = completed(recorded, trace) if shapes else recorded
            return differs_from(again, trace, sizes)

        return differing

    def _at_home(self, leaves: Sequence[Any]) -> tuple[nn.Module, list[Any]]:
        """The model and the inputs, on one device: copies if it is placed on several."""
        if isinstance(leaves, Inputs):
            leaves = leaves.with_values(leaves)
        if len({p.device for p in self.model.parameters()}) <= 1:
            return self.model, list(leaves)
        model = copy.deepcopy(self.model).cpu()
        return model, [x.cpu() if isinstance(x, torch.Tensor) else x for x in leaves]

    def _trace(self, points: Sequence[Sizes], training: bool) -> tuple[Trace, list[Any]]:
        """The forward in this mode, generalised; and the leaves of its result at the first."""
        first = self._record(points[0], training)
        while self.opening.force(first[0].pruned()):
            first = self._record(points[0], training)
        try:
            trace = self._generalised(first[0], points, training)
        except Unrecordable:
            self._check_repeats(first[0], points[0], training)
            raise
        if any(self._may_vary(call) for call in trace.calls):
            self._check_more(first[0], points[0], training)
        return trace, first[1]

    def _generalised(self, first: Trace, points: Sequence[Sizes], training: bool) -> Trace:
        """A recording at the first point, generalised by others: of shapes alone, if these do."""

        def at(k: int, without: bool) -> Trace:  # what random numbers decide may show
            key = _KEY._replace(microbatch=k)
            trace = self._record(points[k], training, key, shapes=without)[0]
            return completed(trace, first) if without else trace

        others = range(1, len(points))
        trace = self._by_shapes(
            first, points[0], lambda: generalise([first, *(at(k, True) for k in others)], points)
        )
        return trace or generalise([first, *(at(k, False) for k in others)], points)

    def _by_shapes(self, trace: Trace, sizes: Sizes, shown_by: Callable[[], T | None]) -> T | None:
        """What recordings of shapes alone give; `None` if they fail, and values are needed.

        So it is where a forward is small, as the trace of one says.
        """
        if not self.opening.without_values or _num_bytes(trace, sizes) < _LARGE:
            return None
        try:
            return shown_by()
        except Unrecordable:  # perhaps for want of values
            return None
        except Exception:
            self.opening.without_values = False
            return None

    def _may_vary(self, call: Call) -> bool:
        """Whether random numbers may decide what a closed module gives: layers that are dropped."""
        return call.random and call.result is not None and call.target in self.opening.closed

    def _check_more(self, first: Trace, sizes: Sizes, training: bool) -> None:
        """Raise for a module that does something else with other random numbers."""
        for k in range(_MORE):
            other = self._record(sizes, training, _KEY._replace(step=1, microbatch=k))[0]
            path = differs_from(other, first, sizes)
            if path is not None:
                raise Unrecordable(path, "what it is given depends on random numbers")

    def _check_repeats(self, first: Trace, sizes: Sizes, training: bool) -> None:
        """Raise for the module that does not do the same every time, if that is the reason.

        Raises:
            CaptureError: it is.
        """
        again = self._record(sizes, training)[0]
        path = differs_from(again, first, sizes)
        if path is not None:
            kind = type(self.model.get_submodule(path)).__name__
            raise CaptureError(
                f"the forward of {path or 'the model'} ({kind}) does something else every time it "
                "is called with the same inputs. It may depend only on its inputs, its weights, "
                "and the random numbers of torch, numpy and Python; keep_closed="
                f"[{path!r}] keeps it as one call, whose results are then not reproducible"
            )

    def _evaluation(self, points: Sequence[Sizes], train: Trace) -> tuple[Trace, list[Any]]:
        """The same for evaluation, and the leaves of its result at the first point.

        Two recordings are enough where it does what training does: no number that grows with the
        inputs is the same as a constant at both.
        """
        first, expected = self._record(points[0], training=False)
        trace = adapted(train, first, points[0])
        if trace is not None:

            def agrees(without: bool) -> bool:
                last = self._record(points[-1], training=False, shapes=without)[0]
                last = completed(last, first) if without else last
                return adapted(train, last, points[-1]) == trace

            if self._by_shapes(first, points[0], lambda: agrees(True)) or agrees(False):
                return trace, expected
        return self._generalised(first, points, training=False), expected

    def _record(
        self,
        sizes: Sizes,
        training: bool,
        key: Key = _KEY,
        strict: bool = True,
        shapes: bool = False,
    ) -> tuple[Trace, list[Any]]:
        """A recording at these sizes, and the leaves of its result.

        With `shapes` nothing that weights enter is computed: what is drawn or written does not
        show.

        Where the forward sets plain data of an object once and for all, and does nothing else the
        first time, the recording is one of a later time. (transformers' classifiers note in their
        configuration what kind of labels they get, when they get the first.)
        """
        try:
            found = self._recorded(sizes, training, key, strict, shapes)
        except Changed as problem:
            place, before = problem.place, problem.before
            can_settle = problem.is_plain and place.can_be_put(self.model)
            if not can_settle or place in self._settled or self.numbers:
                raise
            first = self._recorded(sizes, training, key, False, shapes)
            place.put(self.model, problem.after)
            self._settled[place] = before, problem.after
            try:
                found = self._record(sizes, training, key, strict, shapes)
                if not _do_the_same(first, found):
                    raise problem
            except BaseException:
                place.put(self.model, before)
                del self._settled[place]
                raise
            self._read_first.append(first[0].reads)
        for reads in self._read_first:  # what it has set may depend on them
            found[0].reads = found[0].reads.with_all_of(reads)
        settled = {p: v for p, v in self._settled.items() if p in found[0].reads.seen}
        found[0].reads.settled = settled
        return found

    def _recorded(
        self, sizes: Sizes, training: bool, key: Key, strict: bool, shapes: bool
    ) -> tuple[Trace, list[Any]]:
        """The same of the model as it is now, whatever its forward sets."""

        def recorded() -> tuple[Trace, list[Any]]:
            args, kwargs = self._batch(sizes)
            self._set_mode(training)
            with held_on_meta(self.model) if shapes else nullcontext():
                trace, result = record(
                    *(self.model, self.opening.is_open, args, kwargs, key),
                    strict=strict,
                    numbers=self.numbers,
                    like=self.structure,
                )
                trace.reads.resting = _resting(self.model, trace)
            leaves = leaves_of(result, trace.output_structure)
            return trace, [_without_history(leaf) for leaf in leaves]

        trace, results = self._without_saving(recorded)
        for mark in self._marks:
            trace.reads.seen.pop(mark, None)
        for k in set(self.open).difference(trace.reads.given):
            trace.reads.inputs[k, "value"] = input_property(self.leaves[k], "value")
        if strict and (place := trace.reads.changed(self.model)) is not None:
            raise Unrecordable(trace.reads.readers[place], f"the forward changes {place}, it reads")
        return trace, results

    def _without_saving(self, forward: Callable[[], T]) -> T:
        """Run a forward that saves nothing for a backward, unless it computes gradients itself."""
        if not self.opening.saves:
            hooks = NoSavedTensors()
            try:
                with untouched(self.model, self.parameters), hooks:
                    result = forward()
                if not hooks.was_needed:
                    return result
            except Exception:
                if not hooks.was_needed:
                    raise
            self.opening.saves = True
        with untouched(self.model, self.parameters):
            return forward()

    def _check(self, trace: Trace, sizes: Sizes, expected: list[Any], training: bool) -> None:
        """Replay and compare with what the model itself gave, bit for bit."""

        def replayed() -> list[Any]:
            self._set_mode(training)
            leaves = self.varying.resized(self.leaves, sizes)
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
                return [_without_history(leaf) for leaf in leaves]

        wrong = _different(expected, self._without_saving(replayed))
        if not wrong:
            return
        again = _different(expected, self._record(sizes, training)[1])
        if not wrong <= again:  # what the model itself does not repeat proves nothing
            mode = "training" if training else "evaluation"
            raise Unrecordable(
                "", f"replaying its calls in {mode} mode gives another result than it does itself"
            )

    def _join(self, trace: Trace, points: Sequence[Sizes], training: bool) -> None:
        """Note how results are put together; the example's evaluation helps where chance plays."""
        other = self.program.eval if trace is not self.program.eval else None

        def found() -> tuple[Join, ...]:
            self._set_mode(training)
            make = None if is_on_meta(self.model) else lambda: self._replaying(trace)
            return joined(self.model, trace, self.varying, self.leaves, points, make, other)

        trace.joins = self._without_saving(found)

    def _replaying(self, trace: Trace) -> Callable[[Sequence[Any]], Any]:
        """What replays a trace on leaves of inputs, with the same random numbers every time."""
        return self.program.fresh(trace, _KEY, self.model, self.varying)

    def _set_mode(self, training: bool) -> None:
        """Training keeps what the user froze, if the model is in training mode at all."""
        if self.as_it_is:
            return
        if not training or not self.model.training:
            self.model.train(training)

    def _batch(self, sizes: Sizes) -> tuple[tuple[Any, ...], dict[str, Any]]:
        batch: tuple[tuple[Any, ...], dict[str, Any]] = unflatten(
            self.structure, self._inputs(sizes)
        )
        return batch

    def _inputs(self, sizes: Sizes) -> list[Any]:
        """The leaves of inputs that are this large, which require gradients as those given do."""
        leaves = self.varying.resized(self.leaves, sizes)
        for leaf, given in zip(leaves, self.leaves, strict=True):
            if self.as_it_is and isinstance(given, torch.Tensor) and given.requires_grad:
                leaf.requires_grad_()
        return leaves


def _do_the_same(one: tuple[Trace, Sequence[Any]], other: tuple[Trace, Sequence[Any]]) -> bool:
    """Whether two recordings have the same calls, and give and change the same."""
    (mine, results), (theirs, others) = one, other
    calls = mine.calls == theirs.calls and mine.changed == theirs.changed
    same_structure = mine.output_structure == theirs.output_structure
    alike = calls and same_structure and mine.outputs == theirs.outputs
    return alike and len(results) == len(others) and all(map(same, results, others))


def _resting(model: nn.Module, trace: Trace) -> frozenset[str]:
    """What is in evaluation mode of the modules that are called whole, see `Reads.resting`."""
    called = {str(call.target) for call in trace.calls if call.is_module}
    return frozenset(
        name
        for target in called
        for name, module in model.get_submodule(target).named_modules(prefix=target)
        if not module.training
    )


def _without_history(leaf: object) -> Any:
    return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf


def _num_bytes(trace: Trace, sizes: Sizes) -> int:
    """The bytes of what its calls give; views count again."""
    infos = (info for call in trace.calls for info in call.outputs)
    return sum(info.num_bytes(sizes) for info in infos if isinstance(info, TensorInfo))


def _different(left: Sequence[Any], right: Sequence[Any]) -> set[int]:
    """The places at which two lists of results differ."""
    pairs = zip_longest(left, right, fillvalue=_MISSING)
    return {k for k, (one, other) in enumerate(pairs) if not same(one, other)}
