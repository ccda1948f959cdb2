"""The overhead of a pass of a session: its time beyond the work of its stages.

The work is measured with the modules and arguments of the workers themselves: a pipeline of threads
runs some passes while every call of a stage is recorded. Then passes take turns with the same
calls, run one after the other in one thread. The difference is the overhead. With one session, a
pass begins when the one before has ended, as in generation with one group. With two sessions, every
stage has a pass to run, so the time of a pass without overhead is half of its work.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

import penstock as ps
from penstock.bench.turns import Tick, Timed, middle, take_turns
from penstock.bench.uniform import uniform_plan
from penstock.bench.writers import gpt2
from penstock.capture.lowering import StageModule
from penstock.engine.span import Span
from penstock.links.link import Values
from penstock.workers.backend import WorkerKind

DEVICES = ("cpu", "cpu")
KINDS: tuple[WorkerKind, ...] = ("threads", "processes")
IN_FLIGHT = 2
_PROMPT = 4  # tokens

Call = tuple[StageModule, tuple[Any, ...]]
"""A stage and its arguments."""


class Cells(nn.Module):
    """Two recurrent cells of one small linear layer each: passes with almost no work."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, states: Any = None) -> Any:
        """Run both cells once.

        Args:
            x: (rows, 4).
            states: the states of both cells, each (rows, 4); zeros if there are none yet.

        Returns:
            the result (rows, 4), and the new states.
        """
        one, other = states if states is not None else (torch.zeros_like(x), torch.zeros_like(x))
        one = self.first(x) + one
        other = self.second(one) + other
        return other, (one, other)


@dataclass(frozen=True)
class Decoder:
    """A model whose sessions are measured.

    Attributes:
        name: the name of the model.
        build: makes the model.
        first: keyword arguments of the first pass, which are also the example for the capture.
        states: positions of parts of the result that are states, as in `Pipeline.session`.
        then: makes the keyword arguments of a pass from the result of the one before.
    """

    name: str
    build: Callable[[], nn.Module]
    first: dict[str, Any]
    states: Sequence[int]
    then: Callable[[Any], dict[str, Any]]


def cells() -> Decoder:
    """The decoder of `Cells`."""
    x = torch.ones(1, 4)

    def then(result: Any) -> dict[str, Any]:
        return {"x": x, "states": result[1]}

    return Decoder("two linear layers, width 4", _cells, {"x": x}, [1], then)


def _cells() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Cells().eval()


def small_gpt2(layers: int = 4, width: int = 64) -> Decoder:
    """A GPT-2 of which a pass takes about a millisecond."""
    token = torch.ones(1, 1, dtype=torch.int64)

    def then(result: Any) -> dict[str, Any]:
        return {"input_ids": token, "past_key_values": result.past_key_values}

    prompt = {"input_ids": torch.ones(1, _PROMPT, dtype=torch.int64)}
    build = partial(gpt2, layers, width, 256, 1024)
    return Decoder(f"GPT-2, {layers} layers, width {width}", build, prompt, (), then)


class Passes:
    """A pipeline whose steps are passes of sessions.

    Args:
        decoder: the model and its passes.
        workers: the kind of workers.
        count: the number of passes of a session in a step, after its first.
        stack: closes the pipeline.
        plan: the plan of the pipeline; by default two stages with equally many calls.

    Attributes:
        name: the kind of workers.
        plan: the plan of the pipeline.
        result: the result of the last pass of the last `step`.
    """

    def __init__(
        self,
        decoder: Decoder,
        workers: WorkerKind,
        count: int,
        stack: ExitStack,
        plan: ps.Plan | None = None,
    ) -> None:
        model = decoder.build()
        program = ps.capture(model, (), decoder.first)
        self.plan = plan or uniform_plan(program, len(DEVICES), 1)
        self._decoder, self._count = decoder, count
        self._pipe = ps.Pipeline(
            *(model, (), decoder.first),
            plan=self.plan,
            program=program,
            workers=workers,
            devices=DEVICES,
            threads_per_worker=1,
            progress=None,
        )
        stack.callback(self._pipe.close)
        self.name: str = workers
        self.result: Any = None

    def step(self) -> float:
        """Run the passes of one session; returns the mean seconds of a pass."""
        session, result = self._begun()
        start = time.perf_counter()
        for _ in range(self._count):
            result = session(**self._decoder.then(result))
        seconds = time.perf_counter() - start
        self.result = result
        return seconds / self._count

    def step_in_flight(self) -> float:
        """Run `IN_FLIGHT` sessions at a time, each with one pass under way.

        Returns:
            the whole time divided by the number of passes of all sessions, in seconds.
        """
        sessions = self._pipe._sessions
        under_way: deque[Any] = deque()
        begun = [self._begun() for _ in range(IN_FLIGHT)]
        start = time.perf_counter()
        for session, result in begun:
            under_way.append(sessions.start(session, (), self._decoder.then(result)))
        for k in range(IN_FLIGHT * self._count):
            done = under_way.popleft()
            result = sessions.finish(done)
            if k < IN_FLIGHT * (self._count - 1):
                then = self._decoder.then(result)
                under_way.append(sessions.start(done.session, (), then))
        return (time.perf_counter() - start) / (IN_FLIGHT * self._count)

    def _begun(self) -> tuple[Any, Any]:
        """Open a session; returns it with the result of its first pass."""
        session = self._pipe.session(states=self._decoder.states)
        return session, session(**self._decoder.first)


@contextmanager
def noting() -> Iterator[list[Call]]:
    """While open, record every call of a stage's module in a pass, in order."""
    calls: list[Call] = []
    infer = Span.infer

    def noted(span: Span, *given: Any) -> Values:
        module, run = span.module, span.without_gradients

        def call(*args: Any) -> Values:
            if isinstance(module, StageModule):
                calls.append((module, args))
            return run(*args)

        twin = copy.copy(span)
        twin.without_gradients = call
        return infer(twin, *given)

    Span.infer = noted  # type: ignore[method-assign, assignment]
    try:
        yield calls
    finally:
        Span.infer = infer  # type: ignore[method-assign]


class Work:
    """The calls of stages that passes make, run in one thread.

    Args:
        passes: the passes of a pipeline of threads; one step is run to record its calls.
        count: the number of passes in a step.

    Attributes:
        name: its name in tables.
        calls: the calls in order, one of each stage for every pass.
        results: the results of the last call.

    Raises:
        RuntimeError: the number of calls is not that of the stages times that of the passes.
    """

    def __init__(self, passes: Passes, count: int) -> None:
        self.name = "the stages alone"
        with noting() as calls:
            passes.step()
        self.calls = calls[len(DEVICES) :]  # without those of the first pass
        self._count = count
        if len(self.calls) != len(DEVICES) * count:
            raise RuntimeError(
                f"{count} passes have called {len(self.calls)} stages, not {len(DEVICES)} each: "
                "some were run again"
            )
        self.results: Any = None

    @torch.no_grad()
    def step(self) -> float:
        """Run all calls once; returns the mean seconds of a pass."""
        start = time.perf_counter()
        for module, args in self.calls:
            self.results = module(*args)
        return (time.perf_counter() - start) / self._count


@dataclass(frozen=True)
class InFlight:
    """Passes of `IN_FLIGHT` sessions at a time, as a contestant."""

    passes: Passes

    @property
    def name(self) -> str:
        """What it is called."""
        return f"{self.passes.name}, {IN_FLIGHT} sessions"

    def step(self) -> float:
        """The mean seconds of a pass."""
        return self.passes.step_in_flight()


def costs(decoder: Decoder, rounds: int, count: int, tick: Tick) -> dict[str, Any]:
    """Measure the overhead of passes on each kind of workers, with one session and with several.

    Args:
        decoder: the model and its passes.
        rounds: the number of measured rounds.
        count: the number of passes of a session in a round.
        tick: called before every turn.

    Returns:
        the median seconds of a pass's work, and a row for every contestant with the median and the
        spread of the seconds of a pass beyond that work.
    """
    with ExitStack() as stack:
        passes = [Passes(decoder, KINDS[0], count, stack)]
        passes += [Passes(decoder, kind, count, stack, passes[0].plan) for kind in KINDS[1:]]
        for each in passes:
            each.step()  # the first passes of a new length take longer
        work = Work(passes[0], count)
        contestants: list[Timed] = [work, *passes, *map(InFlight, passes)]
        alone, *taken = take_turns(contestants, rounds, tick, warm_up=2)
        rows = []
        for contestant, seconds in zip(contestants[1:], taken, strict=True):
            share = IN_FLIGHT if isinstance(contestant, InFlight) else 1
            above = [each - own / share for each, own in zip(seconds, alone, strict=True)]
            median, spread = middle(above)
            row = {"name": contestant.name, "above": median, "spread": spread}
            rows.append({**row, "seconds": seconds})
    work_seconds = statistics.median(alone)
    return {"model": decoder.name, "work": work_seconds, "work_seconds": alone, "rows": rows}
