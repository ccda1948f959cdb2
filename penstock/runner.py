"""Runs a plan: batches as passes of its stages, and what comes of them."""

from __future__ import annotations

import operator
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import nn

from penstock.board.phases import timeline_of
from penstock.capture import Key, Program, Ref, Sizes, Trace
from penstock.capture.blame import lone_row
from penstock.capture.calls import ambient
from penstock.capture.cuts import NOTHING, KeptInStages
from penstock.capture.one_replica import why_no_recomputing
from penstock.capture.randomness import user_seed
from penstock.capture.signatures import Inputs
from penstock.engine.batch import Batch, digest, tokens_of
from penstock.engine.compiled import Compile
from penstock.engine.ends import Loss
from penstock.engine.orders import Order, Outcome, PassKind
from penstock.engine.residents import GONE, States
from penstock.engine.span import MicroBatch
from penstock.errors import (
    ClosedError,
    InputError,
    PenstockError,
    StatesLost,
    WorkerDied,
    WorkerError,
    closed,
)
from penstock.observe.profiled import of_worker, profiled
from penstock.observe.trace import RecordedTimeline
from penstock.plan import Plan
from penstock.steps import Steps
from penstock.workers.backend import Ticket, Workers
from penstock.workers.ownership import Ownership
from penstock.workers.redo import Work
from penstock.workers.ways import Ways

T = TypeVar("T")


@dataclass
class Counts:
    """Counts of passes, on which random numbers depend besides the seed.

    Training passes are counted apart from others, so that an evaluation in between does not change
    the random numbers of training: they are steps 0, 1, 2, ... Other passes are steps -1, -2, -3,
    ..., so that these, too, draw different numbers in each pass.

    Attributes:
        trained: the number of training passes: those of `train_step` with gradients, and calls in
            training mode with gradients.
        others: the number of all other passes.
        completed: the number of training passes up to the latest one that succeeded. It is the same
            on all ranks; `trained` may not be, as a rank may count a pass that failed on another.
    """

    trained: int = 0
    others: int = 0
    completed: int = 0

    def next(self, trains: bool) -> int:
        """The step of the next pass: from 0 upward if it trains, from -1 downward if not."""
        return self.trained if trains else -1 - self.others

    def count(self, step: int) -> None:
        """Count a pass.

        Args:
            step: the step of the pass, as the rank that routed it counts. After a failure the
                counts of ranks may differ, so it is not always what `next` gives here.
        """
        if step >= 0:
            self.trained = step + 1
        else:
            self.others = max(self.others, -step)


@dataclass
class _Recording:
    """A context in which timelines are recorded; it may go on with other workers.

    Attributes:
        is_profiled: whether torch.profiler looks on.
        timelines: of the passes in it.
    """

    is_profiled: bool
    timelines: list[RecordedTimeline] = field(default_factory=list)


_CHANGED = (
    "a worker has died that had a batch of pipe(x) or map(), and parameters have changed since "
    "that batch began, so that it cannot be run again as it was: call backward(), or take all "
    "results of map(), before you change the model"
)


_CHANGED_SINCE = (
    "parameters have changed since the backward before this one, which is of the same call of the "
    "pipeline: with retain_graph=True the forward is run again for the next backward, and would be "
    "another one. Run all backwards of a call before the optimizer's step"
)

_MOST_DEATHS = 3
"""How often workers may end at a pass of a session before it is given up."""


def _given_up(death: WorkerDied) -> WorkerError:
    """The error of a pass that nobody runs any more."""
    cause = RuntimeError(
        f"{death.what}; a worker has ended each of the {_MOST_DEATHS} times that this pass was "
        "run, so it is probably the pass that ends them, by the memory that it needs, say. It was "
        "given up, and the pipeline goes on"
    )
    where = death.stage, death.microbatch, death.action or "forward"
    return WorkerError(*where, cause, death.worker)


@dataclass(eq=False)
class Started:
    """A pass that is under way.

    Attributes:
        order: the pass.
        begun: when it began, in nanoseconds of `time.monotonic_ns()`.
        ticket: what waits for the workers; `None` until the pass is sent to them.
        is_lost: whether the pass reads states of workers that are gone, so that it cannot run.
        before: the state of the model when the pass began, if it may have to run again later.
        end: its outcome or error, if known before `finish` is called.
        is_again: whether the pass was begun by workers that are gone.
        is_retained: whether a backward has come from this forward, and another one may.
    """

    order: Order
    begun: int
    ticket: Ticket | None = None
    is_lost: bool = False
    before: _Before | None = None
    end: Outcome | Exception | None = None
    is_again: bool = False
    is_retained: bool = False

    @property
    def is_of_session(self) -> bool:
        """Whether it is a pass of a session, which can be given up without others."""
        return any(microbatch.states is not None for microbatch in self.order.microbatches)

    def again(self, workers: Workers, puts_back: bool) -> AbstractContextManager[None]:
        """While open, a pass that was begun before is started as it was then, see `_Before`."""
        if self.before is None or not self.is_again:
            return nullcontext()
        return self.before.again(workers, puts_back)


class _Before(NamedTuple):
    """The state of a model before a pass: what the pass depends on and may change.

    Attributes:
        modules: all modules of the model.
        modes: for each module whether it is in training mode.
        parameters: the model's parameters.
        versions: for each parameter its version counter and the address of its memory.
        updates: how many optimizer steps there were.
        buffers: the model's buffers and copies of their contents; empty if passes do not change
            buffers.
    """

    modules: Sequence[nn.Module]
    modes: Sequence[bool]
    parameters: Sequence[torch.Tensor]
    versions: Sequence[tuple[int, int]]
    updates: int
    buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]

    def parameters_changed(self, updates: int) -> bool:
        """Whether parameters have changed since, given the present count of optimizer steps."""
        changed = any(map(operator.ne, map(_version, self.parameters), self.versions))
        return changed or updates != self.updates

    def renewed(self) -> _Before:
        """A copy with the present versions, as workers that took over wrote into parameters."""
        return self._replace(versions=[_version(parameter) for parameter in self.parameters])

    @contextmanager
    def again(self, workers: Workers, puts_back: bool) -> Iterator[None]:
        """While open, passes that are started find the model as it was.

        Args:
            workers: who run them.
            puts_back: whether buffers are afterwards as they are now, as the pass has already moved
                them once, and comes to its end while this is open.
        """
        modes = [
            (module, module.training)
            for module, was in zip(self.modules, self.modes, strict=True)
            if module.training != was
        ]
        try:
            for module, training in modes:
                module.training = not training
            with workers.holding(self.buffers, puts_back):
                yield
        finally:
            for module, training in modes:
                module.training = training


def weak_surviving(runner: Runner) -> Callable[..., Any]:
    """The method `between_passes` of a runner, which this does not keep alive."""
    known = weakref.WeakMethod(runner.between_passes)

    def surviving(work: Callable[[], T], updates: bool = False) -> T:
        between_passes = known()
        if between_passes is None:
            raise closed("nobody has it any more")
        return between_passes(work, updates)

    return surviving


def _version(tensor: torch.Tensor) -> tuple[int, int]:
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()


class Recovery(Protocol):
    """Replaces workers that die or leave, and calls `Runner.use` with the new ones."""

    def recover(self, death: WorkerDied, deaths: int) -> None:
        """Replace workers that have died, at whatever work that was.

        Args:
            death: says which worker died, and at what.
            deaths: how often workers have died at the same work, including this time.

        Raises:
            WorkerDied: nobody takes over.
        """

    def hand_over(self) -> None:
        """Replace workers that are about to leave; no pass is under way.

        Raises:
            WorkerDied: others have died.
        """


class Runner:
    """The stages of a plan, run by workers. The model's weights are where the plan wants them.

    Args:
        program: what is run.
        plan: how it is run.
        workers: the workers that run it.
        deferred: whether the running statistics of BatchNorms are updated once per batch.
        compile: arguments of `torch.compile`, if forwards without gradients are compiled.
        graphs: whether stages are run as CUDA graphs where they can.

    Attributes:
        compile: as given.
        recovery: a weak reference to what replaces workers that die or leave; `None` if nothing
            does.
        plan: the plan that is run.
        homes: the device of every stage.
        loss_device: the device of the last stage.
        workers: the workers that run the plan.
        counts: the numbers of passes so far.
        steps: counts passes on the board.
    """

    plan: Plan
    workers: Workers
    homes: list[torch.device]
    loss_device: torch.device

    def __init__(
        self,
        program: Program,
        plan: Plan,
        workers: Workers,
        deferred: bool = False,
        compile: Compile | None = None,
        graphs: bool = False,
    ) -> None:
        self._program = program
        self._deferred = deferred
        self.compile = compile
        self._graphs = graphs
        self._ways: dict[bool, Ways] = {}
        self.counts = Counts()
        self._passes = 0
        self._seed: tuple[int, int] | None = None  # the one in use, and what it stands for
        self._recordings: list[_Recording] = []  # that are open
        self.recovery: weakref.ref[Recovery] | None = None
        self.steps = Steps(program.example_sizes)
        self._user = _User(workers.ownership)
        self._under_way: list[Started] = []
        self._awaiting_backward: dict[int, Started] = {}  # forwards, by number
        self._updates = 0  # steps of optimizers
        self._lost: set[int] = set()  # numbers of those that the workers have lost
        self.use(plan, workers)

    def use(self, plan: Plan, workers: Workers) -> None:
        """Have these workers run this plan from now on; all counts go on.

        Args:
            plan: how the program is run.
            workers: who does it, and knows no way through the model yet.

        Raises:
            InputError: the workers cannot run it.
        """
        training = evaluation = self._ways_of(plan, workers, True)
        if not self._program.same_in_eval:
            evaluation = self._ways_of(plan, workers, False)
        before = self.workers if self._ways else workers
        self._ways = {True: training, False: evaluation}
        self.plan, self.workers = plan, workers
        if before.is_stopping:
            workers.request_stop()
        self.homes = [workers.devices[worker] for worker in plan.placement]
        self.loss_device = self.homes[-1]
        self.steps.use(workers, plan)
        self._user.ownership = workers.ownership
        self._lost = set(self._awaiting_backward)
        self._modules = tuple(self._program.model.modules())
        self._parameters = tuple(self._program.model.parameters())
        for started in self._under_way:
            started.ticket, started.is_again = None, True
            states = [m.states for m in started.order.microbatches if m.states is not None]
            started.is_lost = any(each.taken for each in states)

    def _ways_of(self, plan: Plan, workers: Workers, training: bool) -> Ways:
        before, devices = self._ways.get(training), workers.devices
        return Ways(
            self._program,
            plan,
            devices,
            training,
            workers.add,
            self._deferred,
            before=before,
            compile=self.compile,
            graphs=self._graphs,
        )

    @property
    def not_recorded(self) -> Mapping[int, str]:
        """Why stages do not run as graphs, by number, in the mode of now."""
        return self._ways[self._program.model.training].not_recorded

    @property
    def under_way(self) -> Sequence[Started]:
        """The passes that were started, and neither finished nor given up."""
        return self._under_way

    def changes_buffers(self) -> bool:
        """Whether forwards of the model in its mode of now change buffers, as far as is known."""
        ways = self._ways[self._program.model.training]
        changed = [bool(trace.changed) for trace in ways.traces]
        return any(changed)  # of a list: a Ctrl-C as a generator is closed would be lost

    def draws_here(self) -> bool:
        """Whether forwards of the model in its mode of now draw from this process's generators."""
        ways = self._ways[self._program.model.training]
        draws = [call.is_seeded for trace in ways.traces for call in trace.calls]
        return self.workers.role.calls_loss and any(draws)

    def ways(self, training: bool) -> Ways:
        """The ways through the model in this mode."""
        return self._ways[training]

    def route(
        self,
        batch: Batch,
        training: bool,
        trains: bool,
        apart_of: Callable[[Trace], KeptInStages] | None = None,
    ) -> Batch:
        """A batch with the ways that its micro-batches take; where the first stage is fed.

        At a new size, or if the model has changed, its own forward runs here.

        Args:
            batch: split into micro-batches.
            training: in which mode of the model it is run.
            trains: whether it counts as a step of training.
            apart_of: which inputs and results of a way stay with its stages.

        Raises:
            InputError: the model does not take it, or workers do not see how the model has changed.
            CaptureError: its forward cannot be recorded.
        """
        ways = self._ways_now(training)
        known = len(ways)
        try:
            with self._program.recordings.looking(self.workers.modules_idle):
                taken = [ways.taken(part, apart_of) for part in batch.parts]
        except Exception as error:
            self.workers.check()
            if (clearer := lone_row(error, batch.rows)) is not None:
                raise clearer from error
            raise
        new = {w: part for w, part in zip(taken, batch.parts, strict=True) if w >= known}
        sizes: list[Sizes] = [
            {**sizes, **ways.numbers(way, part)}
            for sizes, way, part in zip(batch.sizes, taken, batch.parts, strict=True)
        ]
        step = self.counts.next(trains)
        found = replace(batch, ways=taken, sizes=sizes, new_ways=new, seed=self.seed)
        number = self._passes
        recorded, tokens = self.steps.is_recorded, tokens_of(batch.parts)
        return replace(found, step=step, number=number, tokens=tokens, recorded=recorded)

    def routed_like(self, leaves: Inputs, sizes: Sizes, way: int, training: bool) -> Batch:
        """A batch of one micro-batch that is known to take this way; cheaper than `route`."""
        sizes = {**sizes, **self._ways[training].numbers(way, leaves)}
        step, seed = self.counts.next(False), self.seed
        return Batch([leaves], [sizes], [way], {}, seed, step, self._passes)

    def share(self, batch: Batch | None, training: bool) -> Batch:
        """A routed batch for all processes that run the script; those without inputs get no parts.

        Args:
            batch: the batch, where a first stage gets its inputs; `None` in other processes. It has
                been routed where `Role.routes` is set.
            training: whether the model is in training mode.

        Raises:
            InputError: the model or the inputs here differ from those in the process that routes.
        """
        routed = batch if self.workers.role.routes else None
        description = None
        if routed is not None:
            has_replicas = self.plan.replicas > 1
            checksum = digest(list(map(list, routed.parts))) if has_replicas else 0
            description = replace(routed, parts=[], digest=checksum)
        received = self.workers.broadcast(description, "inputs")
        if routed is not None:
            return routed
        self.follow(received, training, {})
        if batch is None:
            return received
        if received.digest != digest(list(map(list, batch.parts))):
            raise InputError(
                f"{self.workers.role.name} has other inputs than the rank with the first stage of "
                "the first replica. Give every rank the whole batch, the same on all: Penstock "
                "deals its micro-batches to the replicas (no DistributedSampler, and the same "
                "random augmentation everywhere)"
            )
        return replace(received, parts=batch.parts)

    def follow(self, batch: Batch, training: bool, apart: Mapping[int, KeptInStages]) -> None:
        """Add here the ways of a batch that another process has routed.

        Args:
            batch: the description of the batch that the other process has sent.
            training: whether the model is in training mode.
            apart: by the number of a new way, which inputs and results stay with their stages.

        Raises:
            InputError: the model here would take other ways.
        """
        ways = self._ways_now(training)
        with self._program.recordings.looking(self.workers.modules_idle):
            for way in sorted(batch.new_ways):  # recorded here as well, under the same number
                ways.follow(way, batch.new_ways[way], apart.get(way, NOTHING))
        with self._program.recordings.looking(self.workers.modules_idle):
            for way, sizes in zip(batch.ways, batch.sizes, strict=True):
                ways.check(way, sizes)

    def _ways_now(self, training: bool) -> Ways:
        """The ways of this mode; those of a pass that failed may be unknown to other processes."""
        ways = self._ways[training]
        if not self.workers.role.has_all_weights and not self._user.is_busy:
            ways.forget_others()
        return ways

    def order(
        self,
        what: PassKind,
        batch: Batch,
        training: bool,
        loss: Loss | None = None,
        states: States | None = None,
        replica: int | None = None,
        assumed: bool = False,
    ) -> Order:
        """The order for a pass of this batch.

        Args:
            what: what the pass does.
            batch: the batch that it runs.
            training: whether the model is in training mode.
            loss: the loss of the results, for `"train"`.
            states: the resident values of the only micro-batch, in a session.
            replica: the replica that runs the pass; `None` if its micro-batches are dealt to all.
            assumed: whether to begin before it is known that the model is as in the pass before.
        """
        ways = self._ways[training]
        taken = batch.ways or [ways.taken(part) for part in batch.parts]
        values = [
            tuple(part[value.leaf] for value in ways[way].inputs if isinstance(value, Ref))
            for part, way in zip(batch.parts, taken, strict=False)  # none where it is not fed
        ]
        # Of the batch, not this process's own: after a failure ranks may have counted differently.
        number, self._passes = batch.number, batch.number + 1
        self._seed = batch.seed, user_seed()
        microbatches = [
            MicroBatch(sizes, Key(batch.seed, batch.step, k), way, states)
            for k, (sizes, way) in enumerate(zip(batch.sizes, taken, strict=True))
        ]
        modes = ambient()._replace(grad=what != "infer")
        if not modes.casting and {ways[way].casts for way in taken} - {0} == {1}:
            modes = modes._replace(cache=False)
        recorded = bool(self._recordings) or (batch.recorded and what != "infer")
        return Order(
            what=what,
            training=ways.training,
            microbatches=microbatches,
            modes=modes,
            number=number,
            values=values,
            loss=loss,
            recorded=recorded,
            profiled=any(recording.is_profiled for recording in self._recordings),
            tokens=batch.tokens,
            replica=replica,
            assumed=assumed,
        )

    @property
    def seed(self) -> int:
        """The seed of random numbers: `torch.initial_seed()`, unless a state was loaded since."""
        current = user_seed()
        return self._seed[0] if self._seed and self._seed[1] == current else current

    def random_state(self) -> dict[str, int]:
        """All that random numbers of the next passes depend on."""
        counts = {"trained": self.counts.trained, "others": self.counts.others}
        return {"seed": self.seed, **counts}

    def load_random_state(self, state: Mapping[str, int]) -> None:
        """Go on from a state of `random_state`, until `torch.manual_seed` gives another seed.

        Raises:
            InputError: it is none.
        """
        wrong = not isinstance(state, Mapping) or "trained" not in state
        if wrong or any(type(value) is not int or value < 0 for value in state.values()):
            raise InputError(
                f"{state!r} is not a state of random numbers: give what random_state() returned, "
                "a dictionary of the integers 'seed', 'trained' and 'others'"
            )
        trained = state["trained"]
        self.counts = Counts(trained, state.get("others", 0), trained)
        current = user_seed()
        self._seed = state.get("seed", current), current

    def run(self, order: Order) -> Outcome:
        """Run one pass on all workers; if it fails, gradients and buffers are put back."""
        with self.given_up(), self.workers.operation(order.name):
            self._finish_under_way()
            at_once = not self._under_way
            return self.finish(self.start(order.changed(at_once=at_once)))

    @contextmanager
    def reserved(self, order: Order) -> Iterator[None]:
        """While open, no other pipeline may run a pass that would disturb this pass or its audit.

        Raises:
            InputError: one runs such a pass, another thread uses this pipeline, or this thread is
                amid a pass of it.
        """
        self._check_outside()
        self._user.enter(*self._effects(order))
        try:
            yield
        finally:
            self._user.leave()

    def _check_outside(self) -> None:
        """Raise if the calling thread is amid a pass.

        Raises:
            InputError: it is.
        """
        if self.workers.runs_here:
            raise InputError(
                "a module, a hook, the loss or the handler of a signal uses the pipeline amid its "
                "own pass; call the model itself there, or use the pipeline between its steps"
            )

    def _effects(self, order: Order) -> tuple[bool, bool]:
        """Whether a pass adds to gradients, and whether it changes buffers.

        A forward from which a backward may come counts as adding to gradients. A backward counts as
        changing buffers if forwards do, as it may run them again, though it puts buffers back.
        """
        return order.what != "infer", self.changes_buffers()

    @contextmanager
    def given_up(self) -> Iterator[None]:
        """If it is left by a Ctrl-C, no pass of this thread is under way any more.

        The interrupt may come when a pass has been started and nobody yet waits for it.
        """
        try:
            yield
        except (Exception, GeneratorExit):
            raise
        except BaseException as interruption:
            if self._user.is_here():
                self.give_up(interruption)
            raise

    def give_up(self, why: BaseException) -> None:
        """Give up all passes that are under way; nobody waits for them any more."""
        self.workers.give_up(why)
        self._under_way.clear()
        self._user.drop()
        self.steps.drop()

    def start(self, order: Order) -> Started:
        """Send all workers a pass; returns what `finish` needs.

        Raises:
            InputError: another thread has started passes that are not finished, or this thread is
                amid a pass.
        """
        self._check_outside()
        self._user.enter(*self._effects(order))
        try:
            if self.workers.are_leaving and not self._under_way:
                self.surviving(self._hand_over)
            if order.number >= 0 and order.what != "backward":  # what is refused does not count
                self.counts.count(order.microbatches[0].key.step)
            started = Started(order, self.steps.begin())
        except BaseException:
            self._user.leave()
            raise
        try:
            if order.what in ("forward", "infer") and self.recovery is not None:
                started.before = self.surviving(lambda: self._before(order))
        except BaseException:
            self._user.leave()
            self.steps.leave(started.begun)
            raise
        self._under_way.append(started)
        try:
            self.surviving(self._submit)
        except BaseException:
            self._left(started)
            raise
        return started

    def _before(self, order: Order) -> _Before:
        """What the model is like before a pass that may have to be run again later."""
        changed = [trace.changed for ways in self._ways.values() for trace in ways.traces]
        keeps = order.what == "forward" and any(changed)
        buffers = list(self._program.model.buffers()) if keeps else []
        self.workers.bring_values(buffers)
        return _Before(
            modules=self._modules,
            modes=[module.training for module in self._modules],
            parameters=self._parameters,
            versions=[_version(tensor) for tensor in self._parameters],
            updates=self._updates,
            buffers=[(buffer, buffer.detach().clone()) for buffer in buffers],
        )

    def _submit(self, last: Started | None = None) -> None:
        """Send the workers, in order, the passes under way that they have not been sent.

        Args:
            last: the last pass to send; by default all are sent.
        """
        end = None if last is None else self._under_way.index(last) + 1
        unknown = [
            started
            for started in self._under_way[:end]
            if started.ticket is None and not started.is_lost and started.end is None
        ]
        for started in unknown:  # before the first begins: if that fails, workers wait for more
            self._introduce(started.order)
        for started in unknown:
            if self._lost:
                self._run_again(started.order.number)
            with started.again(self.workers, puts_back=False):
                started.ticket = self.workers.start(started.order)

    def _introduce(self, order: Order) -> None:
        """Let the workers know the ways of an order; those that took over may know fewer."""
        ways = self._ways[order.training]
        for microbatch in order.microbatches:
            ways.announce(microbatch.way)

    def _run_again(self, number: int) -> None:
        """Run a forward once more whose backward is to come, if the workers have lost it."""
        if number in self._lost:
            held = self._awaiting_backward[number]
            if not self._can_run_again(held):
                raise InputError(_CHANGED_SINCE if held.is_retained else _CHANGED)
            held.is_again = True
            order = held.order.changed(again=True, recorded=False)
            self._introduce(order)
            with held.again(self.workers, puts_back=True):
                self.workers.start(order).finish()
            self._lost.discard(number)

    def awaiting_backward(self, order: Order) -> Started | None:
        """The forward of a batch whose backward has still to come."""
        return self._awaiting_backward.get(order.number)

    def retain(self, forward: Started) -> str:
        """Keep a forward for one more backward, before which it will be run again.

        Args:
            forward: a forward whose backward has ended.

        Returns:
            why running it again would give something else, so that no other backward is possible;
            empty if one is.
        """
        remembering = sorted(self._program.remembering)
        if remembering:
            return f"a forward changes attributes of {remembering[0] or 'the model'!r}"
        if why := why_no_recomputing(self._program):
            return why
        forward.is_retained = True
        if forward.before is None:
            forward.before = self.surviving(lambda: self._before(forward.order))
        self._awaiting_backward[forward.order.number] = forward
        self._lost.add(forward.order.number)
        return ""

    def _left(self, started: Started) -> None:
        """A pass is not under way any more, however it ended, unless it was given up before."""
        if started in self._under_way:
            self._under_way.remove(started)
            self._user.leave()
            self.steps.leave(started.begun)

    def between_passes(self, work: Callable[[], T], updates: bool = False) -> T:
        """Wait for the passes under way, then do the work as `surviving` does.

        The passes come first, as they would give other results if they were run again after it.

        Args:
            work: has the workers do something, and returns the result.
            updates: whether the work updates parameters.

        Raises:
            WorkerDied: nobody takes over.
            InputError: another thread is using the pipeline.
        """
        self._check_outside()
        with self._user.working():
            self._finish_under_way()
            self._updates += updates
            return self.surviving(work)

    def _finish_under_way(self) -> None:
        """Wait for the passes under way if they are run again where a worker dies.

        Raises:
            WorkerDied, ClosedError: nobody takes over for workers that have died.
        """
        if self.recovery is None or not self._user.is_here():
            return
        for started in tuple(self._under_way):
            if started.end is None:
                try:
                    started.end = self._outcome_of(started)
                except Exception as error:
                    started.end = error  # for who waits for this pass
                    if isinstance(error, WorkerDied) or not self.workers.all_alive():
                        raise

    def surviving(self, work: Callable[[], T], awaited: Started | None = None) -> T:
        """Return what `work` returns; call it again whenever other workers have taken over.

        Args:
            work: has the workers do something, and returns the result.
            awaited: the pass that the work waits for, if there is one.

        Raises:
            WorkerDied: nobody takes over.
            WorkerError: a pass of a session was given up, as workers died each time it was run.
        """
        deaths = 0
        while True:
            try:
                return work()
            except WorkerDied as death:
                deaths += 1
                self._note_what_cannot_run_again()
                if deaths == _MOST_DEATHS and awaited is not None and awaited.is_of_session:
                    awaited.end = _given_up(death)
                if (recovery := self._who_recovers()) is None:
                    raise
                with self._changing_workers():
                    recovery.recover(death, deaths)

    def _hand_over(self) -> None:
        """Replace workers that are about to leave, if some still are."""
        recovery = self._who_recovers()
        if recovery is not None and self.workers.are_leaving:
            with self._changing_workers():
                recovery.hand_over()

    @contextmanager
    def _changing_workers(self) -> Iterator[None]:
        """While open, others take over. What could be run again before, can be after it."""
        begun = *self._under_way, *self._awaiting_backward.values()
        repeatable = [started for started in begun if self._can_run_again(started)]
        yield
        for started in repeatable:
            if started.before is not None:
                started.before = started.before.renewed()

    def _who_recovers(self) -> Recovery | None:
        return None if self.recovery is None else self.recovery()

    def redo(self, works: Sequence[Work]) -> None:
        """Have the workers do again what those before them have done.

        Raises:
            WorkerDied: one has died.
        """
        passes = [work.order for work in works if work.order is not None]
        awaited = {order.number for order in passes if order.what == "backward"}
        for work in works:
            order = work.order
            if order is not None:
                self._introduce(order)
            work.redo(self.workers)
            if order is None or order.what != "forward" or order.number in awaited:
                continue
            if order.number in self._awaiting_backward:
                self._lost.discard(order.number)
            else:
                self.workers.forget(order.training, order.number)

    def finish(self, started: Started) -> Outcome:
        """Wait for a pass that `start` has begun; returns its outcome and records its timeline.

        Raises:
            WorkerError: a stage failed; gradients and buffers are put back.
            InputError: the loss did not fit.
            ClosedError: the pass was given up with another one.
        """
        if started not in self._under_way:
            raise ClosedError(
                "this pass was given up as another one was interrupted; call map(), or the "
                "pipeline, again"
            )
        order, begun = started.order, started.begun
        try:
            outcome = self._end_of(started)
        except WorkerError as error:
            if isinstance(error.__cause__, (InputError, StatesLost)):
                raise error.__cause__ from None  # the user's loss, not the pipeline, is at fault
            raise
        finally:
            self._left(started)
        if order.what == "forward":
            self._awaiting_backward[order.number] = started
        elif order.what == "backward":
            self._awaiting_backward.pop(order.number, None)
        self.counts.completed = max(self.counts.completed, order.microbatches[0].key.step + 1)
        self.steps.count(order, begun, outcome.logs)
        self._ways[order.training].confirm([m.way for m in order.microbatches])
        if self._recordings and any(outcome.logs.values()):
            found = timeline_of(outcome.logs, len(self.workers.devices))
            timeline = RecordedTimeline(
                found.num_workers, found.events, found.phases, plan=self.plan
            )
            for recording in self._recordings:
                recording.timelines.append(timeline)
        return outcome

    def _note_what_cannot_run_again(self) -> None:
        """Let passes under way fail if the script has changed parameters since they began."""
        for started in self._under_way:
            if started.end is None and not self._can_run_again(started):
                started.end = InputError(_CHANGED)

    def _can_run_again(self, started: Started) -> bool:
        """Whether a pass would find the parameters that it found when it began."""
        return started.before is None or not started.before.parameters_changed(self._updates)

    def _end_of(self, started: Started) -> Outcome:
        if isinstance(started.end, Exception):
            raise started.end
        if started.end is not None:
            return started.end
        return self._outcome_of(started)

    def _outcome_of(self, started: Started) -> Outcome:
        """Wait for a pass, which is run again if others take over meanwhile."""
        return self.surviving(lambda: self._finished(started), started)

    def _finished(self, started: Started) -> Outcome:
        if started.end is None:  # alone after a death, to see whether it was this one
            self._submit(started if started.is_again and started.is_of_session else None)
        if isinstance(started.end, Exception):
            raise started.end
        if started.ticket is None:  # it is lost, so it was not sent
            raise StatesLost(GONE)
        outcome = started.ticket.finish()
        started.ticket = None  # which holds the workers
        return outcome

    def forget_with(self, holder: object, order: Order) -> None:
        """Let the stages go of a batch as soon as `holder` is gone."""
        weakref.finalize(holder, self._forget, order.training, order.number).atexit = False

    def _forget(self, training: bool, number: int) -> None:
        self._awaiting_backward.pop(number, None)
        self._lost.discard(number)
        self.workers.forget(training, number)
        self.steps.forget(number)

    @contextmanager
    def recording(
        self, profile: str | os.PathLike[str] | None = None
    ) -> Iterator[list[RecordedTimeline]]:
        """While open, every pass appends its measured timeline to the list that this gives.

        Args:
            profile: where torch.profiler's trace of all that is written, if it is wanted.

        Raises:
            InputError: torch.profiler cannot see the workers, or is running already; or its trace
                cannot be written.
        """
        recording = _Recording(profile is not None)
        with self._profiler(profile):
            self._recordings.append(recording)
            try:
                yield recording.timelines
            finally:
                self._recordings[:] = [own for own in self._recordings if own is not recording]

    def _profiler(self, path: str | os.PathLike[str] | None) -> AbstractContextManager[None]:
        if path is None:
            return nullcontext()
        if why := self.workers.why_not_profiled:
            raise InputError(why)
        role = self.workers.role
        return profiled(of_worker(path, role.index) if role.name else path)

    @property
    def is_busy(self) -> bool:
        """Whether passes are under way, or results there whose backward may come."""
        return self._user.is_busy or self.steps.awaits_backward

    def close(self) -> None:
        """Close the workers; nothing runs after that.

        If a worker has died since the last pass, others first do again the work that would be lost.

        Raises:
            InputError: one of the workers' own passes is calling.
        """
        self._check_outside()
        try:
            if self.workers.has_log and self._user.may_work():
                with self._user.working():
                    self.surviving(lambda: self.workers.fetch_states(()))
        except PenstockError as error:
            warnings.warn(
                f"some of what was trained is lost as the pipeline is closed: {error}", stacklevel=2
            )
        finally:
            try:
                self.workers.close()
            finally:
                self._user.drop()


class _User:
    """Lets only one thread of the script at a time have passes under way in a pipeline.

    Several pipelines may have the same model. Their passes must not add to the same gradients at
    the same time, nor may one change buffers that another one reads.

    Args:
        ownership: the tensors that the stages use.

    Attributes:
        ownership: the tensors that the stages of the present workers use.
    """

    _lock = threading.Lock()  # of all of them
    _busy: ClassVar[dict[_User, None]] = {}
    """Those in this process that have passes under way, whatever the pipeline."""

    def __init__(self, ownership: Ownership) -> None:
        self.ownership = ownership
        self._thread, self._passes = 0, 0
        self._works_in, self._works = 0, 0
        self._learns = self._changes = False

    def enter(self, learns: bool, changes: bool) -> None:
        """This thread begins a pass.

        Args:
            learns: whether it adds to gradients.
            changes: whether it changes buffers.

        Raises:
            InputError: another thread uses the pipeline, or another pipeline's pass would conflict.
        """
        with self._lock:
            self._check_thread()
            for other in self._busy:
                if other is not self:
                    self._check(other, learns, changes)
            self._thread = threading.get_ident()
            self._passes += 1
            self._learns, self._changes = self._learns or learns, self._changes or changes
            self._busy[self] = None

    @contextmanager
    def working(self) -> Iterator[None]:
        """While open, this thread has workers do something between passes.

        Raises:
            InputError: another one is in the midst of passes, or of such work.
        """
        with self._lock:
            self._check_thread()
            self._works += 1
            self._works_in = threading.get_ident()
        try:
            yield
        finally:
            with self._lock:
                self._works -= 1

    def may_work(self) -> bool:
        """Whether no other thread has the workers."""
        me = threading.get_ident()
        return not ((self._passes and self._thread != me) or (self._works and self._works_in != me))

    def _check_thread(self) -> None:
        """Raise if another thread has the workers."""
        if not self.may_work():
            raise InputError(
                "another thread is using this pipeline; use it from one thread only, or hold "
                "a lock around each step"
            )

    def _check(self, other: _User, learns: bool, changes: bool) -> None:
        """Raise if passes of the other one and a pass of this one disturb each other."""
        mine, theirs = self.ownership, other.ownership
        conflict = ""
        if learns and other._learns and _common(mine.parameters, theirs.parameters):
            conflict = "both add to the gradients of the same parameters"
        elif (changes and _common(mine.changing, theirs.buffers)) or (
            other._changes and _common(theirs.changing, mine.buffers)
        ):
            conflict = "one changes buffers that the other one reads"
        if not conflict:
            return
        is_here = other._thread == threading.get_ident()
        where = (
            "for results of its map() that were not taken yet" if is_here else "in another thread"
        )
        raise InputError(
            f"another pipeline of this model, or of a part of it, has passes under way, {where}: "
            f"{conflict}, so the results would depend on which is faster. Let it finish first "
            f"({'take all results of map()' if is_here else 'hold a lock around each step'}), or "
            "give this pipeline a copy of the model"
        )

    def leave(self) -> None:
        """Note that one pass of this thread has ended."""
        with self._lock:
            self._passes = max(0, self._passes - 1)
            if not self._passes:
                self._rest()

    def _rest(self) -> None:
        self._learns = self._changes = False
        self._busy.pop(self, None)

    @property
    def is_busy(self) -> bool:
        """Whether there are passes under way."""
        return self._passes > 0

    def is_here(self) -> bool:
        """Whether this thread was the last to begin a pass."""
        return self._thread == threading.get_ident()

    def drop(self) -> None:
        """Note that no pass is under way, whoever has begun some."""
        with self._lock:
            self._passes = 0
            self._rest()


def _common(
    some: Sequence[Sequence[torch.Tensor]], others: Sequence[Sequence[torch.Tensor]]
) -> bool:
    """Whether the two have a tensor in common; each has the tensors of every worker."""
    ids = {id(tensor) for tensors in some for tensor in tensors}
    return not ids.isdisjoint([id(tensor) for tensors in others for tensor in tensors])
