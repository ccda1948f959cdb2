"""Timing one micro-batch of a program: the whole, and every call on its own."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from penstock.capture import Program, Sizes
from penstock.capture.calls import ambient
from penstock.capture.halves import run_pending
from penstock.capture.history import any_nests
from penstock.capture.meta import is_on_meta
from penstock.capture.preserve import untouched, without_gradients
from penstock.devices.allocator import HEAP, start_on_main_heap
from penstock.devices.cores import end_idle_threads, use_threads
from penstock.devices.kinds import kind_of
from penstock.devices.streams import on
from penstock.profile.sampling import Sampler
from penstock.profile.shadow import shadow
from penstock.profile.stepping import KEY, Steps, trace_of_forwards
from penstock.profile.timing import Stopwatch, Timing, launching, spread, timed_backward

SECONDS = 1.0
"""After which no further pass over a size begins, if nobody says otherwise."""

_FEWEST_PASSES, _MOST_PASSES = 3, 9  # in that time
_STEADY = 0.02  # spread at which it is enough
_MOST_WARM_UPS, _NO_FASTER = 5, 0.97
_WARMING_UP = 1.0  # seconds after which no further one begins, but two
_WHOLES = 2  # in each pass
_LAUNCHES = 3
_UNSETTLED, _MOST_HALVINGS = 2, 12
_MOST_CONTENTIONS = 3

T = TypeVar("T")


class Team:
    """Threads that measure the same thing on one kind of device at the same time.

    Args:
        program: what is measured.
        device: the device that they use.
        count: how many threads; one if the model has no weights.
        threads: intra-op threads of each.
        seconds: after which no further pass over a size begins.
        inference: whether forwards alone are measured, in evaluation mode.
    """

    def __init__(
        self,
        program: Program,
        device: torch.device,
        count: int,
        threads: int,
        seconds: float = SECONDS,
        inference: bool = False,
    ) -> None:
        self.program = program
        self.threads = threads
        self._seconds = seconds
        self._inference = inference
        count = 1 if is_on_meta(program.model) else count  # made-up weights are large
        self.members = [_member(program, device, inference) for _ in range(count)]

    def measure(self, leaves: Sequence[Any], sizes: Sizes, brief: bool = False) -> list[Timing]:
        """The passes of all members over one micro-batch.

        Args:
            leaves: the inputs.
            sizes: how large they are.
            brief: whether only the whole program is timed, and once, if it has weights.
        """
        results: list[list[Timing]] = [[] for _ in self.members]
        pace = _Pace(results, self._seconds, 1 if brief else _MOST_PASSES, _is_steady)
        self._together(sizes, results, lambda member: member.passes(leaves, sizes, brief), pace)
        return [timing for result in results for timing in result]

    def halving(self, leaves: Sequence[Any], sizes: Sizes, seconds: float) -> float:
        """The seconds that a micro-batch takes longer with every backward in halves that can be.

        Whole and halved passes take turns, after some in halves in which memory settles.

        Args:
            leaves: the inputs.
            sizes: how large they are.
            seconds: after which nothing further begins, but one turn.

        Returns:
            the median of the turns, less than 0 if they were disturbed; 0 with made-up weights.
        """
        if not all(isinstance(member, _Member) for member in self.members):
            return 0.0
        results: list[list[float]] = [[] for _ in self.members]
        pace = _Pace(results, seconds, _MOST_HALVINGS)
        self._together(sizes, results, lambda member: member.halvings(leaves, sizes, seconds), pace)
        return statistics.median(more for result in results for more in result)

    def contention(self, leaves: Sequence[Any], sizes: Sizes, seconds: float) -> list[float]:
        """How many times as long a micro-batch takes beside those of all members as alone.

        All members and the first one alone take turns, as the speed of a machine changes.

        Args:
            leaves: the inputs.
            sizes: how large they are.
            seconds: after which nothing further begins, but one turn.

        Returns:
            the ratio of every turn; none if there is one member.
        """
        if len(self.members) < 2:
            return []
        first = self.members[0]
        results: list[list[float]] = [[] for _ in self.members]
        pace = _Pace(results, seconds, 2 * _MOST_CONTENTIONS, fewest=2)
        self._together(sizes, results, lambda m: m.alternate(leaves, sizes, m is first), pace)
        rounds = list(zip(*results, strict=True))
        turns = zip(rounds[::2], rounds[1::2], strict=False)
        return [statistics.median(together) / alone[0] for together, alone in turns]

    def _together(
        self,
        sizes: Sizes,
        results: Sequence[list[T]],
        start: Callable[[Any], Generator[T]],
        pace: _Pace,
    ) -> None:
        """Let every member give one result after the other, all at the same time.

        Afterwards, what forwards have changed in the members' modules is restored: a model that
        counts its forwards, for example, may refuse as many as a profile needs. What they have
        changed in the user's model is restored as well, as a forward may be a closure over it.
        """
        end_idle_threads(self.threads)
        with ExitStack() as stack:
            stack.enter_context(_left_alone(self.program.model))
            for member in self.members:
                stack.enter_context(untouched(member.model))
            self._run_together(self._is_large(sizes), results, start, pace)

    def _is_large(self, sizes: Sizes) -> bool:
        """Whether there are tensors that only the main heap keeps the memory of."""
        if self.members[0].device.type != "cpu":
            return False
        trace = trace_of_forwards(self.program) if self._inference else self.program.train
        weights = [] if self._inference else self.program.model.parameters()  # for gradients
        return max([trace.largest(sizes), *(p.nbytes for p in weights)]) >= HEAP

    def _run_together(
        self,
        is_large: bool,
        results: Sequence[list[T]],
        start: Callable[[Any], Generator[T]],
        pace: _Pace,
    ) -> None:
        errors: list[BaseException] = []
        barrier = threading.Barrier(len(self.members), action=pace.next)
        modes = ambient()  # a pipeline may be built under autocast, and then is trained under it

        def work(index: int) -> None:
            use_threads(self.threads)
            given = start(self.members[index])
            try:
                with on(self.members[index].device), modes.autocasting():
                    while barrier.wait() >= 0 and pace.goes_on:
                        results[index].append(next(given))
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                errors.append(error)
                barrier.abort()
            finally:
                given.close()

        workers: list[threading.Thread] = []
        try:
            for index in range(len(self.members)):
                workers.append(_started(work, index, is_large))
            for worker in workers:
                worker.join()
        except BaseException:  # Ctrl-C: the workers stop after the pass that they are in
            barrier.abort()
            raise
        try:
            if errors:
                raise errors[0]
        finally:
            errors.clear()  # or an error would hold itself, by way of frames, and all they hold

    def nests(self, leaves: Sequence[Any], sizes: Sizes) -> bool:
        """Whether the backward runs another one in it; not known with made-up weights."""
        member = self.members[0]
        with _left_alone(self.program.model):
            return isinstance(member, _Member) and member.nests(leaves, sizes)

    def saved_bytes(self, leaves: Sequence[Any], sizes: Sizes) -> list[int]:
        """The bytes that every call is the first to hold for its backward."""
        with _left_alone(self.program.model):
            return self.members[0].saved_bytes(leaves, sizes)


def _started(work: Callable[[int], None], index: int, is_large: bool) -> threading.Thread:
    """Start the thread of a member.

    If tensors are large, it uses the main heap at once, as the threads of workers do after a few
    passes.
    """
    name = f"penstock-profile-{index}"
    thread = start_on_main_heap(work, index, name=name) if is_large else None
    if thread is None:
        thread = threading.Thread(target=work, args=(index,), name=name, daemon=True)
        thread.start()
    return thread


@contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Whatever runs inside, the user's model stays as it came, with its gradients."""
    with without_gradients(model.parameters()), untouched(model):
        yield


def _member(program: Program, device: torch.device, inference: bool) -> _Member | Sampler:
    if is_on_meta(program.model):
        return Sampler(program, device, inference)
    return _Member(program, shadow(program.model, device, program.written), device, inference)


class _Pace:
    """Decides for all members whether they go on.

    Args:
        results: what every member has given so far.
        seconds: after which it is enough.
        most: of every member.
        steady: whether results agree so well that it is enough.
        fewest: of every member, however long they take.
    """

    def __init__(
        self,
        results: Sequence[list[Any]],
        seconds: float,
        most: int,
        steady: Callable[[Sequence[Sequence[Any]]], bool] = lambda _: False,
        fewest: int = 1,
    ) -> None:
        self.goes_on = True
        self._fewest = fewest
        self._results, self._seconds, self._most, self._steady = results, seconds, most, steady
        self._start = time.perf_counter()

    def next(self) -> None:
        """Called when all members are ready for it."""
        given = len(self._results[0])
        late = time.perf_counter() - self._start > self._seconds
        enough = late or given >= self._most or self._steady(self._results)
        self.goes_on = given < self._fewest or not enough


def _is_steady(results: Sequence[Sequence[Timing]]) -> bool:
    timings = [timing for result in results for timing in result]
    return len(results[0]) >= _FEWEST_PASSES and spread(timings) < _STEADY


class _Member:
    """Runs the whole program, and its calls one by one, on modules of its own."""

    def __init__(
        self, program: Program, model: nn.Module, device: torch.device, inference: bool
    ) -> None:
        is_evaluated = inference and trace_of_forwards(program) is program.eval
        if model.training is is_evaluated:
            model.train(not is_evaluated)
        self.device = device
        self.model = model
        self.inference = inference
        self.steps = Steps(program, model, device, inference)

    def passes(self, leaves: Sequence[Any], sizes: Sizes, brief: bool) -> Generator[Timing]:
        """Time the whole, then every call, again and again; results are thrown away.

        With `brief` there is one pass, without the calls.
        """
        values = self.steps.values(leaves)
        with torch.set_grad_enabled(not self.inference):
            if brief:
                self._whole(values, sizes)  # memory settles
                wholes = [self._whole(values, sizes)]
                yield Timing([], [], wholes)
                return
            wholes, launched = self._warmed_up(values, sizes), self._launching(values, sizes)
            yield replace(
                self.steps.timed(values, sizes, wholes, not self.inference), launching=launched
            )
            while True:
                wholes = [self._whole(values, sizes) for _ in range(_WHOLES)]
                yield self.steps.timed(values, sizes, wholes, halves=False)

    def halvings(self, leaves: Sequence[Any], sizes: Sizes, seconds: float) -> Generator[float]:
        """The seconds that a pass in halves takes longer than a whole one, again and again."""
        values, start = self.steps.values(leaves), time.perf_counter()
        with torch.enable_grad():
            for _ in range(_UNSETTLED):
                if time.perf_counter() - start < seconds:
                    self._halved(values, sizes)
            while True:
                yield self._halved(values, sizes) - sum(self._whole(values, sizes))

    def alternate(self, leaves: Sequence[Any], sizes: Sizes, is_first: bool) -> Generator[float]:
        """The seconds of a pass beside others, then of one alone if this is the first member."""
        values = self.steps.values(leaves)
        with torch.set_grad_enabled(not self.inference):
            self._whole(values, sizes)  # memory settles
            while True:
                yield sum(self._whole(values, sizes))
                yield sum(self._whole(values, sizes)) if is_first else 0.0

    def _warmed_up(self, values: Sequence[Any], sizes: Sizes) -> list[tuple[float, float]]:
        """The last passes of those that it takes to become no faster.

        Memory for a larger micro-batch comes from the kernel at first, which is slow, and the
        first gradients are not added to others.
        """
        start = time.perf_counter()
        self._whole(values, sizes)
        wholes = [self._whole(values, sizes)]
        while len(wholes) < _MOST_WARM_UPS and time.perf_counter() - start < _WARMING_UP:
            wholes.append(self._whole(values, sizes))
            if sum(wholes[-1]) > _NO_FASTER * sum(wholes[-2]):
                break
        return wholes[-_WHOLES:]

    def _whole(self, values: Sequence[Any], sizes: Sizes) -> tuple[float, float]:
        watch = Stopwatch(self.device)
        with watch:
            outputs = self.steps.module(sizes, KEY, *values)
        if not self.inference:
            timed_backward(outputs, watch)
        forward, backward = (*watch.seconds(), 0.0)[:2]
        return forward, backward

    def _launching(self, values: Sequence[Any], sizes: Sizes) -> float | None:
        """See `Timing`."""
        if not kind_of(self.device).has_streams:
            return None

        def whole() -> None:
            outputs = self.steps.module(sizes, KEY, *values)
            if not self.inference:
                timed_backward(outputs, watch)

        watch = Stopwatch(self.device)
        return statistics.median(launching(whole, self.device) for _ in range(_LAUNCHES))

    def _halved(self, values: Sequence[Any], sizes: Sizes) -> float:
        watch = Stopwatch(self.device)
        with watch:
            outputs = self.steps.halving(sizes, KEY, *values)
        timed_backward(outputs, watch)
        with watch:
            run_pending(self.steps.deferral.take())
        return sum(watch.seconds())

    def nests(self, leaves: Sequence[Any], sizes: Sizes) -> bool:
        """Whether the backward runs another one in it."""
        with torch.enable_grad():
            return any_nests(self.steps.module(sizes, KEY, *self.steps.values(leaves)))

    def saved_bytes(self, leaves: Sequence[Any], sizes: Sizes) -> list[int]:
        """The bytes that every call is the first to hold for its backward."""
        return self.steps.saved_bytes(leaves, sizes)
