"""The program: the ordered calls that reproduce a model's forward, and where it can be cut."""

from __future__ import annotations

import difflib
import hashlib
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn

from penstock.capture.attributes import alike, named_tensors
from penstock.capture.calls import ROWS, Attribute, Sizes, TensorInfo, Trace, Value, input_leaves
from penstock.capture.closed_functions import ClosedFunctions
from penstock.capture.cuts import NOTHING, Cuts, KeptInStages
from penstock.capture.dims import Varying
from penstock.capture.explain import Explanation, explain
from penstock.capture.halves import Deferral
from penstock.capture.lowering import assemble, lower
from penstock.capture.meta import META, is_on_meta
from penstock.capture.randomness import Key
from penstock.capture.recordings import Recordings, TraceSource
from penstock.capture.signatures import Inputs, Signature, Signatures
from penstock.errors import PlanError


def _uses(trace: Trace) -> dict[str, range]:
    """For every parameter and buffer, by name, the calls from its first use to its last."""
    uses: dict[str, range] = {}
    for number, call in enumerate(trace.calls):
        read = (value.name for value in call.reads() if isinstance(value, Attribute))
        for name in (*call.hidden, *read):
            uses[name] = range(uses.get(name, range(number, 0)).start, number + 1)
    return uses


def _nearest(numbers: Sequence[int], to: int, default: int) -> int:
    return min(numbers, key=lambda number: abs(number - to), default=default)


@dataclass(frozen=True)
class StageProgram:
    """A stretch of the program as a module, and the values that enter and leave it.

    Attributes:
        module: runs it, see `penstock.capture.lowering`.
        inputs: the values that the module takes, in order.
        outputs: the values that it returns, in order.
        overwritten: the positions of inputs that are changed in place, here or later.
        taken: the leaves of the program's inputs that the module takes after `inputs`, and that
            stay with the stage.
        kept: the leaves of the program's result that the module returns after `outputs`, and that
            stay with the stage.
        keeps_states: whether it makes calls that ask for states of generators, and may set them in
            their backward.
    """

    module: fx.GraphModule
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    overwritten: tuple[int, ...] = ()
    taken: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    keeps_states: bool = False


class Program:
    """A captured model; `program(*args, **kwargs)` replays the model's forward.

    If the model's Python reads a boolean from its inputs ("is anything masked?"), other inputs may
    take another way. Each way has its own trace, recorded when inputs first take it; `train` and
    `eval` are the traces of the example. Each autocast setting has its own ways as well, because a
    model may read dtypes or disable autocast in places.

    Attributes:
        model: the user's module; its submodules are the leaves of every stage.
        train: the trace of the forward in training mode.
        eval: the trace in evaluation mode; the same object if nothing differs.
        varying: which dimensions of the inputs vary.
        example: the leaves of the example inputs.
        closed: for every closed module, by qualified name, why it is one call.
        closed_functions: for every closed plain function why it is one call, by the name of its
            Python module and its own.
        is_open: a function of a module's name: whether the module is open.
        functions: which plain functions are closed.
        was_on_meta: whether the model was captured without weights.
        written: names of parameters that a forward changes, as `nn.Embedding(max_norm=...)` does.
        signatures: the signatures of the calls so far.
        recordings: the recordings of all ways taken so far.
        left: qualified names of attributes in which a forward leaves tensors or floats.
        remembering: names of modules whose attributes differ after a forward, or lead to objects
            that do.
    """

    def __init__(
        self,
        model: nn.Module,
        train: Trace,
        evaluation: Trace,
        varying: Varying,
        example: Sequence[Any],
        closed: Mapping[str, str],
        is_open: Callable[[str], bool],
        functions: ClosedFunctions,
        source: TraceSource,
        points: Sequence[Sizes],
        written: frozenset[str] = frozenset(),
    ) -> None:
        self.model = model
        self.train = train
        self.eval = evaluation
        self.varying = varying
        self.example = tuple(example)
        self.closed = dict(closed)
        self.is_open = is_open
        self.functions = functions
        self.closed_functions = functions.reasons((*train.calls, *evaluation.calls))
        self.written = written
        self.left: frozenset[str] = frozenset()
        self.remembering: frozenset[str] = frozenset()
        self.was_on_meta = is_on_meta(model)
        self._whole: dict[int, StageProgram] = {}
        first = Signature(train.input_structure, train.inputs, varying)
        self.signatures = Signatures(first, source.varying_of)
        self.recordings = Recordings(model, train, evaluation, self.signatures, source, points)

    def __len__(self) -> int:
        return len(self.train.calls)

    def __repr__(self) -> str:
        return f"Program({type(self.model).__name__}, {len(self)} calls)"

    @property
    def labels(self) -> tuple[str, ...]:
        """A readable name for every call in training."""
        return tuple(call.label for call in self.train.calls)

    @property
    def same_in_eval(self) -> bool:
        """Whether evaluation always runs the same program as training."""
        return self.eval is self.train and self.train.questions is None

    @property
    def random(self) -> dict[int, bool]:
        """The identities of seeded calls, and whether Python or numpy generators give numbers."""
        calls = (call for trace in self.recordings.traces() for call in trace.calls)
        return {call.identity: call.draws_in_python for call in calls if call.is_seeded}

    def trace(self, training: bool) -> Trace:
        """The trace that the example takes in this mode."""
        return self.train if training else self.eval

    def trace_for(self, leaves: Sequence[Any], training: bool) -> Trace:
        """The trace that these inputs take in this mode; recorded if they are the first to.

        Raises:
            CaptureError: it cannot be recorded with the modules that are open; or at this size
                the model does something else than at those that it was captured at.
        """
        return self.recordings.trace_for(leaves, training)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Replay the forward in the model's present mode, like `model(*args, **kwargs)`.

        Raises:
            InputError: see `flatten_inputs`; or the model does not take such arguments.
        """
        return self.replay(args, kwargs, key=None)

    def replay(self, args: Sequence[Any], kwargs: Mapping[str, Any], key: Key | None) -> Any:
        """Replay the forward, with random calls seeded by `key` (or as they come)."""
        leaves = self.flatten_inputs(args, kwargs)
        trace = self.trace_for(leaves, self.model.training)
        if id(trace) not in self._whole:
            self._whole[id(trace)] = self.stages_of(trace, ())[0]
        return self._run(self._whole[id(trace)], trace, leaves, leaves.signature.varying, key)

    def fresh(
        self, trace: Trace, key: Key, model: nn.Module, varying: Varying
    ) -> Callable[[Sequence[Any]], Any]:
        """Return a function that replays a trace on leaves of inputs, always with the same key.

        Args:
            trace: the trace.
            key: the random key.
            model: the program's model or a copy of it, whose tensors are used.
            varying: which dimensions of the inputs vary.
        """
        crossing = Cuts(trace)
        inputs, outputs = crossing.boundary(0), crossing.results
        device = META if is_on_meta(model) else None
        module = lower(model, trace, range(len(trace.calls)), inputs, outputs, device)
        whole = StageProgram(module, inputs, outputs)
        return lambda leaves: self._run(whole, trace, leaves, varying, key, model)

    def _run(
        self,
        whole: StageProgram,
        trace: Trace,
        leaves: Sequence[Any],
        varying: Varying,
        key: Key | None,
        model: nn.Module | None = None,
    ) -> Any:
        sizes = {**varying.sizes(leaves), **trace.reads.passed_in(model or self.model, leaves)}
        results = whole.module(sizes, key, *input_leaves(whole.inputs, leaves))
        values = dict(zip(whole.outputs, results, strict=True))
        return assemble(trace, values, sizes)

    def flatten_inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inputs:
        """The leaves of a batch, and what signature they have: the example's, or another.

        Raises:
            InputError: another rank, dtype or feature size; or too many signatures.
        """
        return self.signatures.flatten(args, kwargs)

    @cached_property
    def example_sizes(self) -> Sizes:
        """The rows of the example, and its other dimensions that vary."""
        return self.varying.sizes(self.example)

    def sizes(self, rows: int) -> Sizes:
        """The example's sizes with this many rows instead."""
        return {**self.example_sizes, ROWS: rows}

    def explain(self, seconds: Sequence[float] | None = None) -> Explanation:
        """What the program does, call by call, where it can be cut, and why modules stayed closed.

        Args:
            seconds: the seconds of every call, to be shown as well: `profile.call_seconds()`.
        """
        closed = self.closed, self.closed_functions
        return explain(self.model, self.cuts, self.eval, self.example_sizes, *closed, seconds)

    # -- cutting --------------------------------------------------------------------------

    @cached_property
    def cuts(self) -> Cuts:
        """Where the training program can be cut, and what crosses."""
        return Cuts(self.train, alike=self._alike_in(self.train), remembering=self.remembering)

    def _alike_in(self, trace: Trace) -> dict[str, str]:
        """For the names of all tensors the name of one that shares their memory.

        It is empty if the forward changes no tensor.
        """
        if not trace.changed and not any(call.mutates for call in trace.calls):
            return {}
        return alike(named_tensors(self.model))

    def check_cuts(self, cuts: Sequence[int]) -> None:
        """Raise unless the program can be cut before each of these calls.

        Raises:
            PlanError: it cannot, and why.
        """
        for cut in cuts:
            reason = self.cuts.forbidden(cut)
            if reason is not None:
                raise PlanError(f"the plan cuts before call {cut}, which is not possible: {reason}")

    def check_stages(self, count: int) -> None:
        """Raise unless the program has places for that many stages.

        Raises:
            PlanError: it has not; the message says what keeps it whole.
        """
        possible = 1 + sum(k not in self.cuts.reasons for k in range(1, len(self)))
        if count <= possible:
            return
        closed = (self.closed | self.closed_functions).items()
        why = "".join(f"\n  {path or 'the model itself'}: {reason}" for path, reason in closed)
        raise PlanError(
            f"{count} stages were asked for, one per device, but the program of "
            f"{type(self.model).__name__} can be cut into {possible} at most: it has "
            f"{len(self)} call{'s' * (len(self) != 1)}. Use at most {possible} "
            f"device{'s' * (possible != 1)}; or, on CPUs and under torchrun, more replicas, each "
            "with a part of the devices (replicas=)."
            + (f" These had to stay whole:{why}" if why else "")
        )

    def stages(
        self,
        cuts: Sequence[int],
        training: bool,
        devices: Sequence[torch.device] | None = None,
    ) -> list[StageProgram]:
        """The program cut before these calls (of the training trace), each stage as a module.

        `devices` says where each stage will run, if not where the program was captured.
        """
        return self.stages_of(self.trace(training), cuts, devices)

    def stages_of(
        self,
        trace: Trace,
        cuts: Sequence[int],
        devices: Sequence[torch.device] | None = None,
        deferrals: Sequence[Deferral | None] | None = None,
        apart: KeptInStages = NOTHING,
    ) -> list[StageProgram]:
        """Like `stages`, for any way through the model.

        Args:
            trace: the trace of the way.
            cuts: before which calls of the training trace the program is cut.
            devices: where each stage will run.
            deferrals: for every stage what collects the weight halves of its backwards; `None` if
                it does not defer them.
            apart: the inputs and results that stay with their stages.
        """
        is_plain = trace is self.train and apart == NOTHING
        cuts, crossing = (cuts, self.cuts) if is_plain else self._alike(trace, cuts, apart)
        edges = [0, *cuts, len(trace.calls)]
        result = []
        for index, (start, stop) in enumerate(pairwise(edges)):
            inputs = crossing.boundary(start)
            outputs = crossing.boundary(stop) if index < len(cuts) else crossing.results
            device = devices[index] if devices else self._home()
            calls, deferral = range(start, stop), deferrals[index] if deferrals else None
            taken, kept = crossing.taken(calls), crossing.kept(calls)
            entering, leaving = (*inputs, *taken), (*outputs, *kept.values())
            module = lower(self.model, trace, calls, entering, leaving, device, deferral)
            own = tuple(ref.leaf for ref in taken), tuple(kept)
            overwritten = crossing.overwritten(start)
            keeps = bool(self.random) and any(trace.calls[k].keeps_states for k in calls)
            result.append(StageProgram(module, inputs, outputs, overwritten, *own, keeps))
        return result

    def _home(self) -> torch.device | None:
        """Where a model runs that was captured without its weights, and has them now."""
        if not self.was_on_meta or is_on_meta(self.model):
            return None
        return next(self.model.parameters()).device

    def _alike(
        self, trace: Trace, cuts: Sequence[int], apart: KeptInStages = NOTHING
    ) -> tuple[list[int], Cuts]:
        """Return the cuts of a trace that correspond to cuts of the training trace, and its `Cuts`.

        They are next to the same calls, unless a weight would get into an earlier stage than in
        training. A weight that is first used in a later stage is still read in the stage that has
        it in training, and passed on.

        Args:
            trace: the other trace.
            cuts: before which calls of the training trace the program is cut.
            apart: the inputs and results that stay with their stages.
        """
        ours, theirs = ([(c.path, c.label) for c in t.calls] for t in (self.train, trace))
        blocks = difflib.SequenceMatcher(None, ours, theirs, autojunk=False).get_matching_blocks()
        known = self._alike_in(trace), apart, self.remembering
        crossing = Cuts(trace, {}, *known)
        mine, others = _uses(self.train), _uses(trace)
        hidden = {name for call in trace.calls for name in call.hidden}
        both = mine.keys() & others.keys()
        found: list[int] = []
        for cut in cuts:
            block = next(b for b in blocks if b.a + b.size >= cut or b.size == 0)
            nearest = block.b + max(0, cut - block.a)
            own = [others[n].stop for n in both & hidden if mine[n].stop <= cut]
            later = [others[n].start + 1 for n in both if mine[n].start >= cut]
            fitting = range(max([1, *found, *own]), min([len(theirs), *later]))
            places = [k for k in fitting if not crossing.forbidden(k)]
            places = places or [k for k in range(nearest, len(theirs)) if not crossing.forbidden(k)]
            position = _nearest(places, nearest, len(theirs))
            found.append(max([position, *found]))
        births: dict[Attribute, int] = {}
        for attribute in trace.attributes:
            name = attribute.name
            stage = bisect_right(cuts, mine[name].start) if name in both else len(found)
            if stage < len(found) and 0 < found[stage] <= others[name].start:
                births[attribute] = found[stage] - 1
        travelling = Cuts(trace, births, apart=apart)
        return found, crossing if any(map(travelling.forbidden, found)) else travelling

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of the program's structure: a plan fits the model that has the same."""
        digest = hashlib.sha256()
        for call in self.train.calls:
            outputs = [str(o) for o in call.outputs if isinstance(o, TensorInfo)]
            digest.update(f"{call.path}|{call.label}|{outputs}\n".encode())
        return digest.hexdigest()[:16]
