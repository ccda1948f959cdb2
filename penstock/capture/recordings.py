"""The recordings of a program: one for every way through the model, and which of them is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import fx, nn

from penstock.cadence import is_power_of_two
from penstock.capture.calls import ROWS, Size, Sizes, Trace, Value, casting_now, input_leaves
from penstock.capture.cuts import Cuts
from penstock.capture.dims import Varying
from penstock.capture.guards import MOST_WAYS, Guards, check_stable
from penstock.capture.lowering import lower
from penstock.capture.meta import is_on_meta
from penstock.capture.numbers import Numeric, come_out
from penstock.capture.places import Place
from penstock.capture.reads import input_property
from penstock.capture.signatures import Signature, Signatures
from penstock.capture.trees import tree_leaves, unflatten
from penstock.errors import CaptureError, InputError, PenstockError

_FIRST = 4  # new sizes that are all compared with the model


Alone = Callable[[], AbstractContextManager[None]]
"""Opens a context in which nobody else runs the modules of a model."""


class TraceSource(Protocol):
    """Records more of a program, when inputs show that it is needed."""

    def varying_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Varying:
        """What varies in the arguments of another signature.

        Raises:
            InputError: they have no rows, or no dimension that was named.
        """

    def way(self, leaves: Sequence[Any], training: bool, numbers: Mapping[Place, Numeric]) -> Trace:
        """Record the way that these inputs take.

        Args:
            leaves: the leaves of the inputs.
            training: the mode.
            numbers: the numbers in attributes that have changed, each with an earlier value; they
                are passed in if that is possible.

        Raises:
            CaptureError: it cannot be recorded with the modules that are open already.
        """

    def check_at(self, trace: Trace, leaves: Sequence[Any], training: bool) -> None:
        """Raise unless the model does on these inputs what the trace says.

        Raises:
            CaptureError: it does something else.
        """

    def holds_at(self, trace: Trace, leaves: Sequence[Any], training: bool, sizes: Sizes) -> bool:
        """Whether it is certain, without running the model, that the trace holds at these sizes."""


class Recordings:
    """All recordings of a model, in both modes.

    Args:
        model: the recorded module.
        train: the trace that the example takes in training mode.
        evaluation: the trace that the example takes in evaluation mode.
        signatures: the signatures that the program was called with; the first is the example's.
        source: makes more recordings.
        points: the sizes at which the example's were compared with the model.
    """

    def __init__(
        self,
        model: nn.Module,
        train: Trace,
        evaluation: Trace,
        signatures: Signatures,
        source: TraceSource,
        points: Sequence[Sizes],
    ) -> None:
        self._model = model
        self._signatures = signatures
        self._source = source
        self._was_on_meta = is_on_meta(model)
        self._of = {
            training: [_Recording(model, trace, signatures.first, points)]
            for training, trace in ((True, train), (False, evaluation))
        }
        self._numbers: dict[Place, list[Numeric]] = {}  # that change, with some values of each
        self._looked: dict[int, bool] | None = None
        self._alone: Alone = nullcontext
        self._leave_out_replaced()

    def _leave_out_replaced(self) -> None:
        """Let no guard look at places that a forward replaces itself, perhaps only in training."""
        replaced = frozenset().union(*(trace.reads.replaced for trace in self.traces()))
        for each in (*self._of[True], *self._of[False]):
            each.guards.leave_out(replaced)

    def trace_for(self, leaves: Sequence[Any], training: bool) -> Trace:
        """See `Program.trace_for`."""
        known = self._of[training]
        signature = self._signatures.of(leaves)
        sizes = signature.varying.sizes(leaves)
        casting = None if self._was_on_meta else casting_now()
        for each in known:
            if each.signature is not signature:
                continue
            as_then = casting in (None, each.casting) and self._holds(each.guards)
            fits = as_then and each.fits(leaves, sizes)
            if fits and self._holds_at(each, leaves, training, sizes):
                return each.trace
        trace = self._way(signature, leaves, training)
        known.append(_Recording(self._model, trace, signature, [sizes]))
        self._leave_out_replaced()
        if known[-1].guards.apply_once():
            if self._looked is not None:
                self._looked.clear()
            for each in known[:-1]:  # one that was made with what is there now
                fits = each.signature is signature and casting in (None, each.casting)
                if fits and self._holds(each.guards) and each.fits(leaves, sizes):
                    known.pop()
                    return each.trace
        if (unlike := known[-1].unlike(leaves)) is not None:
            raise InputError(
                f"the forward asks input {unlike[0]} of the batch for {unlike[1]}, for which a "
                "copy has another value than the input itself, so the forward cannot be predicted"
            )
        alike = [each.guards for each in known if each.signature is signature]
        constant = [k for k, what in trace.reads.inputs if what == "value"]
        if constant and len(alike) > MOST_WAYS:
            known.pop()
            raise InputError(
                f"input {constant[0]} of the batch is a number that has changed {MOST_WAYS} times, "
                "and each time the forward was recorded again. A number that changes may be used "
                "in arithmetic and comparisons, and is then passed in; otherwise give it as a "
                "tensor, torch.tensor(t), or keep the module that reads it closed, with "
                "keep_closed="
            )
        check_stable(known[-1].guards, alike)
        return trace

    def _holds_at(
        self, each: _Recording, leaves: Sequence[Any], training: bool, sizes: Sizes
    ) -> bool:
        """Whether the model does at these sizes what was recorded; new sizes are compared.

        Raises:
            CaptureError: it does not. In a session, whose states may be full now, the recording
                ends instead.
        """
        if not each.has_seen(sizes):
            try:
                self._compare(each, leaves, training, sizes)
            except CaptureError:
                if not each.signature.in_session:
                    raise
                each.end()
                return False
        return True

    def may_take(self, trace: Trace, sizes: Sizes) -> bool:
        """Whether inputs of these sizes can take a trace without a comparison with the model.

        They do take it if it also `holds` and `fits`.

        Args:
            trace: a trace that inputs like these took.
            sizes: the sizes of these inputs.
        """
        each = self._recording_of(trace)
        return (
            each is not None
            and (self._was_on_meta or casting_now() == each.casting)
            and each.has_seen(sizes)
        )

    def holds(self, trace: Trace) -> bool:
        """Whether what the recording of a trace has read of the model is as it was.

        Raises:
            InputError: a tensor or a module of the model was replaced.
        """
        each = self._recording_of(trace)
        return each is not None and self._holds(each.guards)

    def fits(self, trace: Trace, leaves: Sequence[Any], sizes: Sizes) -> bool:
        """Whether the model's Python reads off these inputs what it read for a trace.

        Args:
            trace: a trace that inputs with the same signature took.
            leaves: the leaves of these inputs.
            sizes: the sizes of these inputs.
        """
        each = self._recording_of(trace)
        return each is not None and each.fits(leaves, sizes)

    def _recording_of(self, trace: Trace) -> _Recording | None:
        for each in self._of[self._model.training]:
            if each.trace is trace:
                return each
        return None

    def _compare(
        self, recording: _Recording, leaves: Sequence[Any], training: bool, sizes: Sizes
    ) -> None:
        """Compare a recording with the model, and also at twice these sizes, if they are new."""
        trace = recording.trace
        with self._alone():
            self._source.check_at(trace, leaves, training)
            ahead = recording.ahead_of(sizes)
            recording.see(sizes)
            if ahead and self._source.holds_at(trace, leaves, training, ahead):
                recording.foresee(ahead)

    def traces(self) -> Iterator[Trace]:
        """Every trace that was recorded, for training and for evaluation."""
        return (each.trace for known in self._of.values() for each in known)

    def _way(self, signature: Signature, leaves: Sequence[Any], training: bool) -> Trace:
        """One more recording.

        Raises:
            InputError: the model takes no such arguments.
        """
        with self._alone():
            return self._recorded(signature, leaves, training)

    def _recorded(self, signature: Signature, leaves: Sequence[Any], training: bool) -> Trace:
        numbers = self._changed_numbers(training)
        recorded = (each.signature for mode in (True, False) for each in self._of[mode])
        if any(known is signature for known in recorded):
            return self._source.way(leaves, training, numbers)
        try:
            return self._source.way(leaves, training, numbers)
        except Exception as error:
            self._signatures.forget(signature)
            if isinstance(error, PenstockError):
                raise
            args, kwargs = unflatten(signature.structure, leaves)
            raise InputError(
                f"{self._signatures.unlike(args, kwargs)}, and the forward does not take this "
                f"one: {type(error).__name__}: {error}"
            ) from error

    @contextmanager
    def looking(self, alone: Alone = nullcontext) -> Iterator[None]:
        """While open, what forwards read of the model must not change: guards are compared once.

        Args:
            alone: opens a context in which nobody else runs the model's modules; used while the
                model itself is run, perhaps with other tensors in its modules.
        """
        self._looked, self._alone = {}, alone
        try:
            yield
        finally:
            self._looked, self._alone = None, nullcontext

    def _holds(self, guards: Guards) -> bool:
        """Whether what a recording has read is as it was."""
        if self._looked is None:
            return guards.hold()
        if id(guards) not in self._looked:
            self._looked[id(guards)] = guards.hold()
        return self._looked[id(guards)]

    def check_holds(self, trace: Trace, training: bool) -> None:
        """Raise unless what this trace's recording has read is as it was.

        Raises:
            InputError: something is not, and what.
        """
        guards = next(each.guards for each in self._of[training] if each.trace is trace)
        if not self._holds(guards) and not guards.apply_once():
            raise InputError(
                f"the forward reads {guards.different()}, which differs between this rank and the "
                "rank with the first stage; change models on all ranks in the same way"
            )

    def _changed_numbers(self, training: bool) -> Mapping[Place, Numeric]:
        """The numbers in attributes that have ever changed, with some other value of each."""
        for each in self._of[training]:
            each.guards.check_replaced()
            for place, was in each.guards.other_numbers().items():
                self._numbers.setdefault(place, []).append(was)
        found: dict[Place, Numeric] = {}
        for place, values in self._numbers.items():
            now = place.find(self._model)
            others = [was for was in values if type(was) is type(now) and was != now]
            found |= {place: others[-1]} if others else {}
            values[:] = [*values[-2:], now]
        return found

    def rebind(self) -> None:
        """Take the tensors and modules that are in the model now for those that were recorded."""
        for each in (*self._of[True], *self._of[False]):
            each.guards.rebind()


class _Recording:
    """A trace, whether inputs take it, and at which sizes it was compared with the model.

    Numbers of rows between those seen are taken to be like them. In other dimensions, the first new
    sizes are all compared with the model, and of later ones only the 8th, 16th, 32nd, … As sizes
    often are padded to multiples of a power of two, new sizes are trusted only if the same powers
    of two divide some that were compared. Sizes beyond all that were compared are trusted only in
    sessions, whose inputs are longer at every call. If Python has a size as a float, which may have
    been whole by chance, all sizes are compared.

    Attributes:
        trace: the trace.
        signature: the signature of the inputs that it is for.
        casting: the autocast that it was recorded under.
        guards: what it has read of the model.
    """

    def __init__(
        self, model: nn.Module, trace: Trace, signature: Signature, points: Sequence[Sizes]
    ) -> None:
        self.trace = trace
        self.signature = signature
        varying = signature.varying
        self._has_floats = _has_floats(trace)
        self._names = varying.names if self._has_floats else varying.names[1:]
        self._rows = min(p[ROWS] for p in points), max(p[ROWS] for p in points)
        self._others = {self._named(p) for p in points}
        self._compared = set(self._others)
        self._new = 0
        self._has_ended = False
        self.casting = casting_now()
        self.guards = Guards(model, trace.reads)
        self._model = model
        self._questions: fx.GraphModule | None = None
        self._asked: Sequence[Value] = ()  # what its questions are about
        self._writes = False  # whether questions write into their inputs

    def _named(self, sizes: Sizes) -> tuple[int, ...]:
        return tuple([sizes[name] for name in self._names])

    def has_seen(self, sizes: Sizes) -> bool:
        """Whether the trace need not be compared with the model at these sizes.

        New sizes that are trusted are noted as seen.
        """
        least, most = self._rows
        if not least <= sizes[ROWS] <= most:
            return False
        named = self._named(sizes)
        if named not in self._others and self._is_trusted(named):
            self._new += 1
            self._others.add(named)
        return named in self._others

    def _is_trusted(self, named: tuple[int, ...]) -> bool:
        """Whether such sizes, which are new, need not be compared."""
        count = self._new + 1
        if self._has_floats or count <= _FIRST or is_power_of_two(count):
            return False
        ranges = zip(named, zip(*self._compared, strict=True), strict=True)
        between = all(min(known) <= n <= max(known) for n, known in ranges)
        is_alike = _divisors(named) in map(_divisors, self._compared)
        return (between or self.signature.in_session) and is_alike

    def see(self, sizes: Sizes) -> None:
        """Note that the model did at these sizes what the trace says."""
        self._rows = min(self._rows[0], sizes[ROWS]), max(self._rows[1], sizes[ROWS])
        named = self._named(sizes)
        self._new += named not in self._others
        self._others.add(named)
        self._compared.add(named)

    def unlike(self, leaves: Sequence[Any]) -> tuple[int, str] | None:
        """An input, by its number, and what Python read of it, if these leaves differ there."""
        for key, recorded in self.trace.reads.inputs.items():
            if input_property(leaves[key[0]], key[1]) != recorded:
                return key
        return None

    def fits(self, leaves: Sequence[Any], sizes: Sizes) -> bool:
        """Whether the model's Python reads off these inputs what it read in the recording."""
        if self.unlike(leaves) is not None:
            return False
        only_at = self.trace.only_at
        if only_at and any(sizes[name] != size for name, size in only_at.items()):
            return False
        if self._has_ended and self._named(sizes) not in self._others:
            return False
        reads = self.trace.reads
        if reads.given and not come_out(reads.outcomes, reads.passed_in(self._model, leaves)):
            return False
        questions = self.trace.questions
        if questions is None:
            return True
        if self._questions is None:
            inputs = self._asked = Cuts(questions).boundary(0)
            everything = range(len(questions.calls))
            device = next((x.device for x in leaves if isinstance(x, torch.Tensor)), None)
            outputs = questions.outputs
            self._questions = lower(self._model, questions, everything, inputs, outputs, device)
            self._writes = any(call.mutates for call in questions.calls)
        values = input_leaves(self._asked, leaves)
        if self._writes:
            values = [v.clone() if isinstance(v, torch.Tensor) else v for v in values]
        try:
            with torch.no_grad():
                answers = self._questions(sizes, None, *values)
        except Exception:  # a question that is only asked if those before it were answered so
            return False
        return tuple(answers) == self.trace.answers

    def end(self) -> None:
        """From now on, inputs of sizes that are not known yet do not take it."""
        self._has_ended = True

    def ahead_of(self, sizes: Sizes) -> Sizes | None:
        """These sizes, with those doubled that are larger than any that was compared.

        `None` if there are none, or if Python has sizes as floats.
        """
        largest = [max(known) for known in zip(*self._compared, strict=True)]
        larger = [n for n, most in zip(self._names, largest, strict=True) if sizes[n] > most]
        if self._has_floats or not larger:
            return None
        return {name: 2 * n if name in larger else n for name, n in sizes.items()}

    def foresee(self, sizes: Sizes) -> None:
        """Note that the trace would hold at these sizes, so that sizes in between are trusted."""
        self._compared.add(self._named(sizes))


def _divisors(sizes: Sequence[int]) -> tuple[int, ...]:
    """For every size the largest power of two, up to 64, that divides it."""
    return tuple(min(n & -n, 64) for n in sizes)


def _has_floats(trace: Trace) -> bool:
    """Whether Python has a size as a float, in an argument of a call or in the result."""
    arguments = [leaf for call in trace.calls for leaf in tree_leaves((call.args, call.kwargs))]
    leaves = (*arguments, *trace.outputs)
    return any(isinstance(leaf, Size) and leaf.kind is float for leaf in leaves)
