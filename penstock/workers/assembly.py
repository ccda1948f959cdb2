"""The stages that one process runs, bound to links and schedules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from threading import Lock
from typing import Any, Literal, NamedTuple

import torch

from penstock.board.activity import LOSS, SENDING, code
from penstock.board.memory import Log, Record
from penstock.board.phases import title_of
from penstock.capture.blame import lone_row
from penstock.capture.calls import ROWS, Ambient
from penstock.devices.kinds import kind_of
from penstock.devices.memory import in_use
from penstock.devices.timing import DeviceLog
from penstock.engine.compile import Run, compile_actions
from penstock.engine.dealing import Dealer, is_one_by_one
from penstock.engine.ends import Endings, Feed, LossFailed, Outlet
from penstock.engine.orders import Order, Outcome, PassKind
from penstock.engine.replicas import ONLY, Replica
from penstock.engine.residents import Residents
from penstock.engine.stage import Held, Stage
from penstock.errors import WorkerError, WorkerTimeout
from penstock.interrupts import is_interrupt
from penstock.links.casting import Cast
from penstock.links.link import Sink, Source
from penstock.links.local import Aborted
from penstock.links.once import OnceSink, OnceSource
from penstock.plan import Plan
from penstock.plan.passes import schedule_of_pass
from penstock.schedule import Action, Kind, Schedule, check
from penstock.workers.gate import Gate
from penstock.workers.ways import NewWay, modules_of


class _Compiled(NamedTuple):
    """A worker's part of a pass: two callables for each action, and a code for each of them."""

    actions: list[Action]
    runs: list[Run]
    codes: list[int]


class Assembly:
    """The stages of one mode (training or evaluation) that run in this process.

    Args:
        plan: the plan whose stages they are.
        devices: the devices of the workers, by their places in the replica.
        links: by `k`, the link from stage `k` to the next: its sink if stage `k` is here, its
            source if the next one is, or one object that is both.
        workers: the places of the workers of this process.
        replica: the replica whose stages they are.
        residents: for each of these workers the values that it keeps between passes.
        gate: the gate through which workers go to run the user's modules.

    Attributes:
        stages: by number.
    """

    def __init__(
        self,
        plan: Plan,
        devices: Sequence[torch.device],
        links: Mapping[int, Any],
        workers: Sequence[int],
        replica: Replica = ONLY,
        residents: Mapping[int, Residents] | None = None,
        gate: Gate | None = None,
    ) -> None:
        self._gate = gate or Gate()
        self._plan = plan
        self._devices = devices
        self._replica = replica
        self._residents = residents or {worker: Residents() for worker in workers}
        self._placement = plan.placement
        self._last = len(plan.stages) - 1
        self.feed = Feed(devices[self._placement[0]])
        self._endings = Endings()
        self.outlet = Outlet(self._endings, devices[self._placement[self._last]])
        self.stages: dict[int, Stage] = {}
        self._once: dict[int, dict[int, OnceSource | OnceSink]] = {}  # by stage: by the one after
        for index, worker in enumerate(self._placement):
            if worker in workers:
                source: Source = self.feed
                sink: Sink = self.outlet
                once = self._once[index] = {}
                if index > 0:
                    source = once[index] = OnceSource(_as_planned(links[index - 1], plan))
                if index < self._last:
                    sink = once[index + 1] = OnceSink(_as_planned(links[index], plan))
                self.stages[index] = replica.stage(index, source, sink)
                self.stages[index].giving = LOSS if index == self._last else SENDING
                self.stages[index].residents = self._residents[worker]
        self._compiled: dict[tuple[int, PassKind, tuple[int, ...], int], _Compiled] = {}
        self._schedules: dict[tuple[str, int], Schedule] = {}
        self._ordering = Lock()  # so that only one of several threads makes them
        self._waiting: dict[tuple[int, int], dict[int, Held]] = {}

    def add(self, way: NewWay) -> None:
        """Let the stages know one more way through the model."""
        for index, stage in self.stages.items():
            spans, stage.deferral = way.stages[index].spans, way.stages[index].deferral
            stage.ways.append(spans)
            if way.deferred:
                stage.norms.add(modules_of(spans))
            for after, each in self._once[index].items():
                each.add(way.crossing.get(after, {}))
        self._endings.ways.append(way.ending)

    def run(
        self, worker: int, order: Order, record: Record, dealer: Dealer | None = None
    ) -> Outcome:
        """Run a worker's part of a pass; called by the worker.

        Args:
            worker: its place in the replica.
            order: the pass.
            record: where the worker notes what it does.
            dealer: gives out the micro-batches one by one, where the schedule allows that;
                without it, the worker runs those of its replica's share.

        Raises:
            WorkerError: an action failed.
            Aborted: another worker has failed.
        """
        torch.set_flush_denormal(order.flushes_denormal)
        residents = self._residents[worker]
        residents.drop([n for m in order.microbatches if m.states for n in m.states.dropped])
        count = len(order.microbatches)
        own_share, most = self._replica.part_of(order.replica, count)
        if dealer is not None:
            whole = self._compile(worker, order.what, range(count), count)
            if is_one_by_one(whole.actions):
                own_share = range(count)
            else:
                dealer = None
        own = [stage for stage in self.stages.values() if self._placement[stage.index] == worker]
        if not own_share:
            for stage in own:  # the others need not wait for this replica
                stage.begin(order.microbatches, order.wanted, order.before, own_share)
                stage.clear()
            return Outcome()
        compiled = whole if dealer else self._compile(worker, order.what, own_share, most)
        outcome = Outcome()
        if order.what == "train" and order.modes.casting:
            compiled = _backwards_outside(compiled, order.modes)
        if order.profiled:
            compiled = _named(compiled)
        number = self._replica.first + worker
        record.log = log = _log_of(self._devices[worker]) if order.recorded else None
        self._begin(own, order, record, own_share)
        _run(number, compiled, order, record, self._gate, dealer)
        if log is not None:  # it goes on until the next pass: with what comes after this one
            outcome.logs[number] = record.log = log.times() if isinstance(log, DeviceLog) else log
        self._end(own, order, outcome, own_share[0])
        if any(m.states is not None for m in order.microbatches):
            outcome.kept, residents.shapes = residents.shapes, {}
        if not order.trial:
            record.count()
        if any(memory := in_use(self._devices[worker])):
            record.hold(*memory)
        return outcome

    def _compile(self, worker: int, what: PassKind, share: Sequence[int], most: int) -> _Compiled:
        """A worker's actions and callables.

        Args:
            worker: its place in the replica.
            what: which actions there are.
            share: the micro-batches that the replica runs.
            most: the largest number of micro-batches of any replica. All replicas use the order of
                that many, as they could wait for each other otherwise.
        """
        count = len(share)
        key = worker, what, tuple(share), most
        if key not in self._compiled:
            actions = [
                action._replace(microbatch=share[action.microbatch])
                for action in self._schedule(what, most).workers[worker]
                if action.microbatch < count
            ]
            runs = compile_actions(actions, self.stages, what != "infer")
            codes = [code(action, waits) for action in actions for waits in (True, False)]
            self._compiled[key] = _Compiled(actions, runs, codes)
        return self._compiled[key]

    def _schedule(self, what: PassKind, count: int) -> Schedule:
        """What all workers run in a pass of so many micro-batches; it is sound.

        It depends on the times in the plan, so that all workers need the same plan with the same
        predictions.
        """
        part: Literal["train", "forward", "backward"] = "forward" if what == "infer" else what
        with self._ordering:
            if (part, count) not in self._schedules:
                if part == "train":
                    found = self._plan.schedule_for(count)
                    check(found)
                else:
                    found = schedule_of_pass(self._plan, count, part)
                self._schedules[part, count] = found
            return self._schedules[part, count]

    def _begin(
        self, own: Sequence[Stage], order: Order, record: Record, share: Sequence[int]
    ) -> None:
        """Give a worker's stages what they need."""
        for stage in own:
            stage.record = record
            stage.begin(order.microbatches, order.wanted, order.before, share)
            if order.what != "backward":
                for each in self._once[stage.index].values():
                    each.begin([m.way for m in order.microbatches], order.weights_since)
            if stage.index == 0:
                self.feed.begin(order.values, share, order.made)
            if stage.index == self._last:
                keys = [m.key for m in order.microbatches]
                self._endings.taken = [(m.sizes, m.way) for m in order.microbatches]
                self.outlet.begin(order.loss, order.gradients, keys, share, order.made)
            if order.what == "backward":
                stage.held = self._waiting.pop((order.number, stage.index))

    def _end(self, own: Sequence[Stage], order: Order, outcome: Outcome, first: int) -> None:
        """Take a pass's results from a worker's stages; `first` is one of its micro-batches."""
        for stage in own:
            stage.end()
            if order.weights_since < 0:  # weights may have changed before the next pass
                self._let_go(stage)
            if stage.index == 0:
                outcome.gradients = self.feed.gradients
                self.feed.end()
            if stage.index == self._last:
                outcome.results, outcome.losses = self.outlet.results, self.outlet.losses
                outcome.weights = order.loss.weights if order.loss else ()
                outcome.metrics, outcome.mismatch = self.outlet.metrics, self.outlet.mismatch
                if order.what == "forward":
                    end = stage.held[first].end
                    outcome.differentiable = [root is not None for root in end.roots]
                self.outlet.end()
            if order.what == "forward":
                self._waiting[order.number, stage.index] = stage.held
            stage.clear()

    def forget(self, number: int) -> None:
        """Let go of what is held of a batch for a backward that will not come."""
        for index in self.stages:
            self._waiting.pop((number, index), None)

    def clear(self) -> None:
        """Let go of whatever a pass that failed has left."""
        self.feed.clear()
        self.outlet.clear()
        for stage in self.stages.values():
            stage.clear()
            stage.residents.shapes = {}
            self._let_go(stage)

    def let_go_of_weights(self) -> None:
        """Let go of weights that came from other stages: they may change before the next pass."""
        for stage in self.stages.values():
            self._let_go(stage)

    def _let_go(self, stage: Stage) -> None:
        for each in self._once[stage.index].values():
            each.clear()


def _log_of(device: torch.device) -> Log | DeviceLog:
    """What keeps what a worker of this device notes in a pass."""
    return DeviceLog(device) if kind_of(device).has_streams else []


def _as_planned(link: Any, plan: Plan) -> Any:
    """The end of a link, in the precision that the plan has for boundaries."""
    return Cast(link, getattr(torch, plan.boundary_dtype)) if plan.boundary_dtype else link


def _run(
    worker: int,
    compiled: _Compiled,
    order: Order,
    record: Record,
    gate: Gate,
    dealer: Dealer | None,
) -> None:
    """Run a worker's callables, or those of the micro-batches it is dealt; note each as it runs."""
    actions, runs, codes = compiled
    at, note = 0, record.note
    chosen: Iterable[int] = range(len(runs))
    if dealer is not None:
        each = len(runs) // len(order.microbatches)
        chosen = (each * number + k for number in dealer for k in range(each))
    try:
        with torch.set_grad_enabled(order.modes.grad), _autocasting(order.modes):
            for at in chosen:
                note(codes[at])
                if at % 2:
                    with gate:
                        runs[at]()
                else:  # what is waited for may not come before others have run
                    runs[at]()
    except (Aborted, WorkerTimeout):
        raise
    except BaseException as error:  # a sys.exit() in a module must not end the caller
        action = actions[at // 2]
        cause: BaseException = error
        what = "forward" if action.kind is Kind.FORWARD else "backward"
        if isinstance(error, LossFailed):
            cause, what = error.__cause__ or error, error.what
        else:
            cause = lone_row(cause, [m.sizes[ROWS] for m in order.microbatches]) or cause
        if is_interrupt(cause):
            raise cause from cause.__cause__
        raise WorkerError(action.stage, action.microbatch, what, cause, worker) from cause
    finally:
        note(0)


@contextmanager
def own_casts() -> Iterator[None]:
    """Clear autocast's cache of cast weights, before and after.

    For a process that has one worker: threads share the cache.
    """
    torch.clear_autocast_cache()  # the script may be in a region that spans several steps
    try:
        yield
    finally:
        torch.clear_autocast_cache()  # of weights that change with the next step


@contextmanager
def _autocasting(modes: Ambient) -> Iterator[None]:
    """While open, autocast is as in these modes.

    PyTorch caches the weights that it has cast in one place for all threads, and clears this cache
    when any thread leaves its outermost autocast region. Other workers may be amid a forward then,
    so the regions here are never the outermost. Instead the cache is cleared before a pass and
    after it. Regions of the model's own do without the cache if each uses a weight once: that gives
    the bits of a cache which is cleared at the end of each of them.
    """
    torch.autocast_increment_nesting()
    cache = torch.is_autocast_cache_enabled()
    try:
        if modes.casting:
            with modes.autocasting():
                yield
        else:
            torch.set_autocast_cache_enabled(modes.cache)
            yield
    finally:
        torch.set_autocast_cache_enabled(cache)
        torch.autocast_decrement_nesting()


def _backwards_outside(compiled: _Compiled, modes: Ambient) -> _Compiled:
    """The same, with backwards outside of the autocast region, as PyTorch wants them."""
    plain = modes.without_autocast()

    def outside(run: Run) -> None:
        with plain.autocasting():
            run()

    runs = list(compiled.runs)
    for k, action in enumerate(compiled.actions):
        if action.kind is not Kind.FORWARD:
            runs[2 * k + 1] = partial(outside, runs[2 * k + 1])
    return compiled._replace(runs=runs)


def _named(compiled: _Compiled) -> _Compiled:
    """The same, and torch.profiler sees what belongs to which action."""

    def named(title: str, run: Run) -> None:
        with torch.profiler.record_function(title):
            run()

    runs = list(compiled.runs)
    for k, action in enumerate(compiled.actions):
        runs[2 * k + 1] = partial(named, title_of(action), runs[2 * k + 1])
    return compiled._replace(runs=runs)
