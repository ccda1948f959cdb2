"""The stages of one process, joined by links and bound to schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from penstock.capture import Attribute, Program, Ref, Sizes, Trace, Value
from penstock.capture.calls import Ambient
from penstock.capture.lowering import assemble
from penstock.engine.compile import Run, compile_actions, recorded
from penstock.engine.ends import Feed, LossFailed, Outlet
from penstock.engine.microbatch import check_mergeable, merge_dim
from penstock.engine.span import Span
from penstock.engine.stage import Held, MicroBatch, Sink, Source, Stage
from penstock.errors import InputError, WorkerError
from penstock.links.local import Aborted, LocalLink
from penstock.plan import Plan
from penstock.schedule import Action, Event, Kind, check

Pass = Literal["train", "forward", "backward", "infer"]
"""What a run does: both directions interleaved, or one of them, or forwards without gradients."""


@dataclass(frozen=True)
class Way:
    """One way through the model.

    Attributes:
        trace: the recording that it is.
        inputs: the values that the feed must give, in order.
        outputs: the values that the outlet gets, in order.
    """

    trace: Trace
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    def assemble(self, results: Sequence[Any], sizes: Sizes) -> Any:
        """The model's result in its own structure, from the last stage's values."""
        return assemble(self.trace, dict(zip(self.outputs, results, strict=True)), sizes)

    def gives_the_same(self, other: Way) -> bool:
        """Whether both have the same results, apart from what is in them."""
        if self is other:
            return True
        mine, theirs = (
            (w.trace.output_structure, [_place(v, w.outputs) for v in w.trace.outputs])
            for w in (self, other)
        )
        dims = [[merge_dim(w.trace, v) for v in w.outputs] for w in (self, other)]
        return mine == theirs and dims[0] == dims[1]


def _place(leaf: Any, outputs: Sequence[Value]) -> Any:
    """Which of the results a leaf of the model's result is, or the constant that it is."""
    return ("result", outputs.index(leaf)) if isinstance(leaf, (Ref, Attribute)) else leaf


T = TypeVar("T", bound=torch.Tensor)


def _extend(tensors: list[T], more: Iterable[T]) -> None:
    """Add those that are not there yet."""
    known = {id(tensor) for tensor in tensors}
    tensors += [tensor for tensor in more if id(tensor) not in known]


class Assembly:
    """The stages of one mode (training or evaluation) and everything between them.

    Attributes:
        ways: the ways through the model that batches have taken so far; every stage has spans for
            each.
        feed: the source of the first stage.
        outlet: the sink of the last one.
        stages: the stages, in order.
        parameters: of every worker.
        changing: of every worker the buffers that a forward changes.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        devices: Sequence[torch.device],
        training: bool,
    ) -> None:
        self._program = program
        self._plan = plan
        self._training = training
        homes = [devices[worker] for worker in plan.placement]
        self.feed = Feed(homes[0])
        self.outlet = Outlet(self._assemble)
        links = [LocalLink(a, b) for a, b in pairwise(homes)]
        self._links = links
        sources: list[Source] = [self.feed, *links]
        sinks: list[Sink] = [*links, self.outlet]
        self.stages = [
            Stage(index, (), source, sink)
            for index, (source, sink) in enumerate(zip(sources, sinks, strict=True))
        ]
        self._homes = homes
        self.parameters: list[list[nn.Parameter]] = [[] for _ in devices]
        self.changing: list[list[torch.Tensor]] = [[] for _ in devices]
        self.ways: list[Way] = []
        self._add(program.trace(training))
        self._compiled: dict[tuple[Pass, int], list[tuple[list[Action], list[Run]]]] = {}

    def way_of(self, leaves: Sequence[Any]) -> int:
        """The number of the way that a micro-batch with these input leaves takes."""
        trace = self._program.trace_for(leaves, self._training)
        for number, way in enumerate(self.ways):
            if way.trace is trace:
                return number
        return self._add(trace)

    def common_way(self, microbatches: Sequence[MicroBatch]) -> Way:
        """The way of all micro-batches, as far as putting their results together is concerned.

        Raises:
            InputError: their results cannot be put together.
        """
        first, *others = (self.ways[way] for way in dict.fromkeys(m.way for m in microbatches))
        check_mergeable(first.trace, first.outputs, len(microbatches))
        if not all(first.gives_the_same(other) for other in others):
            raise InputError(
                "the micro-batches of this batch take different ways through the model, and their "
                "results have different structures. Use train_step, or num_microbatches=1"
            )
        return first

    def _add(self, trace: Trace) -> int:
        """Let the stages know one more way."""
        spans = [(number, *span) for number, s in enumerate(self._plan.stages) for span in s.spans]
        deferrals = [self.stages[number].deferral for number, *_ in spans]
        parts = self._program.stages_of(
            trace,
            [start for _, start, _, _ in spans[1:]],
            [self._homes[number] for number, *_ in spans],
            deferrals if self._plan.splits_backward else None,
        )
        buffers = dict(self._program.model.named_buffers())
        changed = {id(buffers[name]) for name in trace.changed}
        for stage in self.stages:
            stage.ways.append([])
        for part, (number, _, _, recompute) in zip(parts, spans, strict=True):
            module, worker = part.module, self._plan.placement[number]
            changing = [b for b in module.buffers() if id(b) in changed]
            self.stages[number].ways[-1].append(Span(module, recompute, changing, part.overwritten))
            _extend(self.parameters[worker], module.parameters())
            _extend(self.changing[worker], changing)
        self.ways.append(Way(trace, parts[0].inputs, parts[-1].outputs))
        return len(self.ways) - 1

    def _assemble(self, microbatch: int, results: Sequence[Any]) -> Any:
        sizes, _, way = self.stages[-1].microbatches[microbatch]
        return self.ways[way].assemble(results, sizes)

    def jobs(
        self,
        what: Pass,
        microbatches: Sequence[MicroBatch],
        ambient: Ambient,
        events: list[Event] | None = None,
    ) -> list[Callable[[], None]]:
        """What each worker has to run for one step."""
        count = len(microbatches)
        if (what, count) not in self._compiled:
            self._compiled[what, count] = self._compile(what, count)
        for stage in self.stages:
            stage.microbatches = microbatches
        modes = ambient._replace(grad=what != "infer")
        jobs: list[Callable[[], None]] = []
        for worker, (actions, runs) in enumerate(self._compiled[what, count]):
            if events is not None:
                runs = recorded(runs, actions, worker, events)
            jobs.append(partial(_run, runs, actions, modes))
        return jobs

    def _compile(self, what: Pass, count: int) -> list[tuple[list[Action], list[Run]]]:
        """Every worker's actions and callables; the schedule is proven first."""
        schedule = self._plan.schedule_for(count)
        check(schedule)
        wanted = set(Kind)
        if what != "train":
            wanted = wanted - {Kind.FORWARD} if what == "backward" else {Kind.FORWARD}
        lists = [[a for a in actions if a.kind in wanted] for actions in schedule.workers]
        return [(a, compile_actions(a, self.stages, what != "infer")) for a in lists]

    def take_held(self) -> list[dict[int, Held]]:
        """Everything that the stages hold, which they then no longer do."""
        held = [stage.held for stage in self.stages]
        for stage in self.stages:
            stage.held = {}
        return held

    def give_held(self, held: Sequence[dict[int, Held]]) -> None:
        """Let the stages hold what `take_held` took."""
        for stage, holding in zip(self.stages, held, strict=True):
            stage.held = holding

    def clear(self) -> None:
        """Let go of the batch, and of whatever a step that failed has left."""
        self.feed.clear()
        self.outlet.clear()
        for stage in self.stages:
            stage.clear()

    def abort(self) -> None:
        """Wake every worker that waits at a link."""
        for link in self._links:
            link.abort()

    def reset(self) -> None:
        """Empty the links after an abort."""
        for link in self._links:
            link.reset()


def _run(runs: Sequence[Run], actions: Sequence[Action], modes: Ambient) -> None:
    """A worker's part of a step."""
    contexts = [torch.autocast(d, enabled=on, dtype=t) for d, on, t in modes.autocast if on]
    at = 0
    try:
        with torch.set_grad_enabled(modes.grad):
            for context in contexts:
                context.__enter__()
            for at, run in enumerate(runs):  # noqa: B007 - where it failed, if it does
                run()
    except Aborted:
        raise
    except Exception as error:
        action = actions[at // 2]
        if isinstance(error, LossFailed):
            cause = error.__cause__ or error
            raise WorkerError(action.stage, action.microbatch, "loss", cause) from cause
        what = "forward" if action.kind is Kind.FORWARD else "backward"
        raise WorkerError(action.stage, action.microbatch, what, error) from error
    finally:
        for context in reversed(contexts):
            context.__exit__(None, None, None)
