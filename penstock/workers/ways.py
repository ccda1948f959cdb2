"""The ways through a model, cut into spans of the stages of a plan: what workers run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn

from penstock.capture import Attribute, Join, Program, Ref, Sizes, Trace, Value
from penstock.capture.attributes import find, named_tensors
from penstock.capture.calls import Size
from penstock.capture.cuts import NOTHING, KeptInStages
from penstock.capture.halves import Deferral
from penstock.capture.lowering import assemble
from penstock.capture.numbers import PASSED, Number
from penstock.capture.preserve import own_generators
from penstock.devices.kinds import kind_of
from penstock.engine.batchnorm import check_closed, running_statistics
from penstock.engine.compiled import Compile
from penstock.engine.ends import Ending
from penstock.engine.microbatch import check_mergeable
from penstock.engine.recordable import why_not
from penstock.engine.span import MicroBatch, Span
from penstock.errors import InputError
from penstock.links.once import Crossing
from penstock.plan import Plan


@dataclass(frozen=True)
class StageSpans:
    """What a stage runs on one way through the model.

    Attributes:
        spans: in order, one at least.
        deferral: where the modules leave the weight halves of backwards; the same object for all
            ways of the stage.
    """

    spans: list[Span]
    deferral: Deferral


@dataclass(frozen=True)
class NewWay:
    """One more way through the model, for the workers.

    Attributes:
        training: whether it is for training mode, or for evaluation.
        stages: what each stage runs, by its number.
        ending: how its results are put together.
        deferred: whether running statistics of BatchNorms are updated once per batch.
        crossing: by stage, the weights among the values that come from the stage before: their
            names in the model, by their positions among these values.
    """

    training: bool
    stages: dict[int, StageSpans]
    ending: Ending
    deferred: bool = False
    crossing: Mapping[int, Crossing] = field(default_factory=dict)


class Origins(NamedTuple):
    """Where the leaves of a session's result come from; `k` is the number of a leaf.

    Attributes:
        leaves: all of them; constants are in place, the others are replaced after a pass.
        kept: `(k, stage, sizes)`: the stage that keeps the value, and how its sizes depend on
            those of the inputs.
        passed: `(k, leaf)`: the leaf of the inputs that it is.
        brought: `(k, position)`: its position among the last stage's values.
        sized: `(k, size)`: computes it from the sizes of the inputs.
    """

    leaves: list[Any]
    kept: list[tuple[int, int, Any]]
    passed: list[tuple[int, int]]
    brought: list[tuple[int, int]]
    sized: list[tuple[int, Size | Number]]


@dataclass(frozen=True)
class Way:
    """One way through the model.

    Attributes:
        trace: the recording of this way.
        inputs: the values that enter the first stage, in order.
        outputs: the values that leave the last one, in order.
        apart: the inputs and results that stay with their stages.
        taken: for every such input, by its leaf, the stage that takes it.
        kept: for every such result, by its leaf, the stage that keeps it; not for inputs that are
            passed on.
        crossing: the names of the weights that go from one stage to another.
    """

    trace: Trace
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    apart: KeptInStages = NOTHING
    taken: Mapping[int, int] = field(default_factory=dict)
    kept: Mapping[int, int] = field(default_factory=dict)
    crossing: frozenset[str] = frozenset()

    @cached_property
    def casts(self) -> int:
        """How often an autocast region of the model's own uses a weight; 2 for any more."""
        return max((call.casts for call in self.trace.calls), default=0)

    @cached_property
    def origins(self) -> Origins:
        """Where the leaves of the result come from, in a session."""
        found = Origins(list(self.trace.outputs), [], [], [], [])
        for k, leaf in enumerate(self.trace.outputs):
            if k in self.kept:
                found.kept.append((k, self.kept[k], self.trace.info(leaf).shape))
            elif k in self.apart.outputs:
                found.passed.append((k, leaf.leaf))
            elif isinstance(leaf, (Ref, Attribute)):
                found.brought.append((k, self.outputs.index(leaf)))
            elif isinstance(leaf, (Size, Number)):
                found.sized.append((k, leaf))
        return found

    @property
    def joins(self) -> list[Join]:
        """For each of the last stage's values how it is put together from micro-batches."""
        return [self.trace.join(value) for value in self.outputs]

    @property
    def ending(self) -> Ending:
        """How the last stage's values are put together."""
        return Ending(self.outputs, self.trace.outputs, self.trace.output_structure, self.joins)

    def assemble(self, results: Sequence[Any], sizes: Sizes) -> Any:
        """The model's result in its own structure, from the last stage's values."""
        return assemble(self.trace, dict(zip(self.outputs, results, strict=True)), sizes)

    def gives_the_same(self, other: Way) -> bool:
        """Whether results of both have the same structure, and are merged along the same dims."""
        if self is other:
            return True
        mine, theirs = (
            (w.trace.output_structure, [_place(v, w.outputs) for v in w.trace.outputs])
            for w in (self, other)
        )
        dims = [[join.dim for join in w.joins] for w in (self, other)]
        return mine == theirs and dims[0] == dims[1]


def _place(leaf: Any, outputs: Sequence[Value]) -> Any:
    """The position of a leaf of the model's result among `outputs`; a constant stays itself."""
    return ("result", outputs.index(leaf)) if isinstance(leaf, (Ref, Attribute)) else leaf


class Ways:
    """The ways through the model that batches of one mode have taken so far.

    The workers get to know each before it is first taken.

    Args:
        program: the captured program.
        plan: the plan that cuts it, and says where its stages run.
        devices: of the workers.
        training: whether these are the ways of training mode, or of evaluation.
        announce: sends the workers a way.
        deferred: whether running statistics of BatchNorms are updated once per batch.
        before: the ways of earlier workers, if there were some; they keep their numbers.
        compile: arguments of `torch.compile`, if forwards without gradients are compiled.
        graphs: whether stages are run as graphs where they can.

    Attributes:
        not_recorded: by stage, the last reason found why something in it is not run as graphs;
            empty without `graphs`.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        devices: Sequence[torch.device],
        training: bool,
        announce: Callable[[NewWay], None],
        deferred: bool = False,
        before: Ways | None = None,
        compile: Compile | None = None,
        graphs: bool = False,
    ) -> None:
        self.training = training
        self._program = program
        self._plan = plan
        self._homes = [devices[worker] for worker in plan.placement]
        self._announce = announce
        self._deferred = deferred
        self._compile = compile
        self._graphs = graphs
        self.not_recorded: dict[int, str] = {}
        self._deferrals = [Deferral() for _ in plan.stages]
        self.traces: list[Trace] = [] if before is None else list(before.traces)
        self._apart: list[KeptInStages] = [] if before is None else list(before._apart)
        self._ways: list[Way] = []  # as many of them as the workers know
        self._confirmed = 0
        self._void: set[int] = set() if before is None else set(before._void)
        if before is None:
            self._add(program.trace(training))
        else:
            self.announce(0)

    def __getitem__(self, number: int) -> Way:
        self.announce(number)
        return self._ways[number]

    def __len__(self) -> int:
        return len(self.traces)

    def taken(
        self, leaves: Sequence[Any], apart_of: Callable[[Trace], KeptInStages] | None = None
    ) -> int:
        """The number of the way that a micro-batch with these input leaves takes.

        Args:
            leaves: of its inputs.
            apart_of: which inputs and results stay with their stages.
        """
        trace = self._program.trace_for(leaves, self._program.model.training)
        apart = apart_of(trace) if apart_of else NOTHING
        for number, known in enumerate(self.traces):
            is_it = known is trace and self._apart[number] == apart
            if is_it and number not in self._void:
                self.announce(number)
                return number
        return self._add(trace, apart)

    def follow(self, number: int, leaves: Sequence[Any], apart: KeptInStages = NOTHING) -> None:
        """Give the way that another process takes with these input leaves the same number here.

        Numbers of ways that this process has missed, or for which its model takes another way, are
        void.
        """
        while len(self) < number:
            self._add_void()
        if number == len(self) and self.taken(leaves, lambda trace: apart) != number:
            self._add_void()

    def confirm(self, taken: Iterable[int]) -> None:
        """A pass that has taken these went well, so all processes have them, and those before."""
        self._confirmed = max(self._confirmed, 1 + max(taken))

    def forget_others(self) -> None:
        """Void the ways that were new in a pass that failed: other processes may not have them."""
        self._void.update(range(self._confirmed, len(self)))

    def _add_void(self) -> None:
        self._void.add(self._add(self._program.trace(self.training)))

    def numbers(self, number: int, leaves: Sequence[Any] = ()) -> dict[str, Any]:
        """The present values of the numbers that a way takes as arguments.

        Args:
            number: of the way.
            leaves: of the inputs, from which some of the numbers come; others are in attributes.
        """
        reads = self.traces[number].reads
        asked = reads.numbers or reads.given
        return reads.passed_in(self._program.model, leaves) if asked else {}

    def check(self, number: int, sizes: Sizes) -> None:
        """Raise unless the model here would also take the way that another process has chosen.

        Args:
            number: of the way.
            sizes: of the micro-batch, with the numbers that the other process passes to the way.

        Raises:
            InputError: it would not.
        """
        if number >= len(self) or number in self._void:
            raise InputError(
                "the model differs between this rank and the rank with the first stage: its "
                "forward reads attributes that have other values here; change models on all ranks "
                "in the same way"
            )
        self._program.recordings.check_holds(self.traces[number], self._program.model.training)
        for name, here in self.numbers(number).items():
            if here != sizes[name]:
                raise InputError(
                    f"{name.removeprefix(PASSED)} is {here} on this rank, and {sizes[name]} on the "
                    "rank with the first stage; change models on all ranks in the same way"
                )

    def common(self, microbatches: Sequence[MicroBatch], anyway: bool = False) -> Way:
        """The way of the first micro-batch, after a check that the results of all can be merged.

        Args:
            microbatches: of a batch.
            anyway: see `penstock.engine.microbatch.check_mergeable`.

        Raises:
            InputError: their results cannot be put together.
        """
        first = self.alike(microbatches)
        if len(microbatches) > 1:
            for way in {m.way for m in microbatches}:
                check_mergeable(self.traces[way].joins, anyway)
        return first

    def alike(self, microbatches: Sequence[MicroBatch]) -> Way:
        """The way of the first micro-batch, after a check that all results have one structure.

        Raises:
            InputError: they have different ones.
        """
        first, *others = (self[way] for way in dict.fromkeys(m.way for m in microbatches))
        if not all(first.gives_the_same(other) for other in others):
            raise InputError(
                "the micro-batches of this batch take different ways through the model, and their "
                "results have different structures. Use train_step, or num_microbatches=1"
            )
        return first

    def _add(self, trace: Trace, apart: KeptInStages = NOTHING) -> int:
        """Have one more way; returns its number."""
        number = len(self)
        self.announce(number - 1)
        self._cut(trace, apart)
        self.traces.append(trace)
        self._apart.append(apart)
        return number

    def announce(self, number: int) -> None:
        """Let the workers know this way, and those before it, in order.

        An earlier way that they cannot run becomes void; a batch that takes it gets the error.
        """
        while len(self._ways) <= number:
            this = len(self._ways)
            try:
                self._cut(self.traces[this], self._apart[this])
            except InputError:
                if this == number:
                    raise
                self._void.add(this)
                self.traces[this], self._apart[this] = self.traces[0], NOTHING
                self._cut(self.traces[0])

    def _record(self, span: Span, number: int) -> None:
        """Have a span of this stage run as graphs, or note why not."""
        home = self._homes[number]
        why = why_not(span.module, span.recompute, span.memories)
        if number == 0 and span.overwritten:
            why = "it changes what it is given in place"
        if not kind_of(home).can_record:
            why = f"it is on {home}"
        if why:
            self.not_recorded[number] = why
        else:
            span.recorded_on = home

    def _cut(self, trace: Trace, apart: KeptInStages = NOTHING) -> None:
        """Cut a way into spans, and let the workers know it."""
        plan, program = self._plan, self._program
        splits = plan.splits_backward and not self._graphs  # what is recorded is one piece
        spans = [(number, *span) for number, s in enumerate(plan.stages) for span in s.spans]
        parts = program.stages_of(
            trace,
            [start for _, start, _, _ in spans[1:]],
            [self._homes[number] for number, *_ in spans],
            [self._deferrals[number] for number, *_ in spans] if splits else None,
            apart,
        )
        changed = {id(find(program.model, n)) for n in (*trace.changed, *program.written)}
        memories = _memories(program, trace)
        stages = {k: StageSpans([], deferral) for k, deferral in enumerate(self._deferrals)}
        for part, (number, _, _, recompute) in zip(parts, spans, strict=True):
            module = part.module
            known = running_statistics(module.modules()) if self.training else ()
            mine = changed.union(map(id, known))
            held = {id(tensor): tensor for _, tensor in named_tensors(module)}
            changing = [tensor for number, tensor in held.items() if number in mine]
            here = set(module.modules())
            mine_too = [memory for memory in memories if not memory.isdisjoint(here)]
            span = Span(module, recompute, changing, part.overwritten, mine_too)
            span.taken, span.kept = part.taken, part.kept
            span.compile = self._compile
            span.keeps_states = part.keeps_states
            if self._graphs:
                self._record(span, number)
            stages[number].spans.append(span)
        _check_generators(program.model, stages)
        _check_memories(program.model, memories, stages)
        if self._deferred:
            spans_of = (span for stage in stages.values() for span in stage.spans)
            check_closed(program.model, trace.changed, modules_of(spans_of))
        taken = {k: n for p, (n, *_) in zip(parts, spans, strict=True) for k in p.taken}
        kept = {k: n for p, (n, *_) in zip(parts, spans, strict=True) for k in p.kept}
        entering = {n: p.inputs for p, (n, *_) in reversed(list(zip(parts, spans, strict=True)))}
        never = {*trace.changed, *program.written}
        crossing = {
            number: {
                k: value.name
                for k, value in enumerate(values)
                if isinstance(value, Attribute) and value.name not in never
            }
            for number, values in entering.items()
            if number > 0
        }
        names = frozenset(name for own in crossing.values() for name in own.values())
        way = Way(trace, parts[0].inputs, parts[-1].outputs, apart, taken, kept, names)
        self._announce(NewWay(self.training, stages, way.ending, self._deferred, crossing))
        self._ways.append(way)


def _memories(program: Program, trace: Trace) -> list[frozenset[nn.Module]]:
    """What forwards remember in attributes, each by the modules that have it."""
    modules = dict(program.model.named_modules())
    alone = [frozenset([modules[path]]) for path in sorted(program.remembering) if path in modules]
    shared = [frozenset(modules[p] for p in paths if p in modules) for _, paths in trace.shared]
    return [*alone, *shared]


def _check_generators(model: nn.Module, stages: Mapping[int, StageSpans]) -> None:
    """Raise if modules of several stages draw from one generator, which is in no order then.

    Raises:
        InputError: they do.
    """
    users: dict[int, tuple[int, nn.Module]] = {}
    for number, stage in stages.items():
        for module in modules_of(stage.spans):
            for _, generator in own_generators(module):
                first, other = users.setdefault(id(generator), (number, module))
                if first != number:
                    names = {id(m): name for name, m in model.named_modules()}
                    both = " and ".join(repr(names.get(id(m), "a module")) for m in (other, module))
                    raise InputError(
                        f"{both} are in different stages and draw from the same "
                        f"{type(generator).__name__}: stages run at the same time, so the order "
                        "of the draws is undefined. Give each its own generator, let them draw "
                        "from torch's default generator, or choose cuts= that keep them together"
                    )


def _check_memories(
    model: nn.Module, memories: Sequence[frozenset[nn.Module]], stages: Mapping[int, StageSpans]
) -> None:
    """Raise if a module that changes its attributes is called in several stages.

    Raises:
        InputError: one is; what it finds there would depend on which stage is faster.
    """
    names = {module: name for name, module in model.named_modules()}
    for module in [module for memory in memories if len(memory) == 1 for module in memory]:
        users = [number for number, stage in stages.items() if module in modules_of(stage.spans)]
        if len(users) > 1:
            raise InputError(
                f"{names.get(module, 'a module')!r} is called in the stages {users}, and changes "
                "attributes of its own: stages run at the same time, so what it finds in them is "
                "undefined. Choose cuts= that keep its calls together"
            )


def modules_of(spans: Iterable[Span]) -> dict[nn.Module, None]:
    """All modules of these spans, each once."""
    stages = [span.module for span in spans if isinstance(span.module, nn.Module)]
    return dict.fromkeys(module for stage in stages for module in stage.modules())
