"""Counts the passes of a pipeline on its board, keeps what a few did, and calls hooks for each."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager
from time import monotonic_ns
from typing import Any, NamedTuple, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from penstock.account.attribution import DATA
from penstock.account.doing import Doing
from penstock.account.keeping import Kept
from penstock.account.record import CALL, EVALUATION, PASS, Interval, StepRecord
from penstock.board.memory import Board, Log
from penstock.cadence import is_power_of_two
from penstock.capture.calls import ROWS, Sizes
from penstock.engine.orders import Order
from penstock.errors import InputError
from penstock.plan.plan import Plan
from penstock.training.optimizer import PipelineOptimizer
from penstock.workers.backend import Workers
from penstock.workers.optimizer_parts import parameters_of, warn_of_no_gradients

StepHook = Callable[[dict[str, Any]], Any]
"""Called after every step with a dictionary of plain data, see `Pipeline.on_step`."""

OPTIMIZER = "optimizer"

T = TypeVar("T")

_FIRST, _LAST = 2, 5  # the earliest steps that are recorded, from 0; before them caches are cold
_SECOND = 10**9  # nanoseconds
_OFTEN = 64  # steps, of which one is recorded
_TRIES = 16  # steps that are recorded until there is one without an audit


def _is_sampled(number: int) -> bool:
    """Whether the passes of a step are recorded without a request for it; few are."""
    return _is_kept(number) or (number > 0 and number % _OFTEN == 0)


def _is_kept(number: int) -> bool:
    """Whether the record of a step goes to the folder of the run; later steps ever more rarely."""
    return _FIRST <= number <= _LAST or (number > _LAST and is_power_of_two(number))


class _Ran(NamedTuple):
    """A pass of the step that is under way.

    Attributes:
        number: of its batch.
        interval: when it was.
        logs: what workers have noted in it, if that was kept.
    """

    number: int
    interval: Interval
    logs: Mapping[int, Log]


class _Used(NamedTuple):
    """When an optimizer last used the gradients of its parameters.

    Attributes:
        trained: how many passes had left gradients by then.
        counts: how many parameters each of its groups had then; more may have been added since.
    """

    trained: int
    counts: Sequence[int]

    def of(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """The parameters whose gradients it has used."""
        groups = zip(optimizer.param_groups, self.counts, strict=False)
        return [p for group, count in groups for p in group["params"][:count]]


class Steps:
    """The passes of a pipeline, as its board counts them.

    Args:
        sizes: how large everything that varies was in the batch for which the plan was made.

    Attributes:
        kept: what is known of the run.
        is_asked: whether the next step is to be recorded whatever its number; may be set in any
            thread.
        has_trained: whether a pass has left gradients since an optimizer's last step.
    """

    _board: Board
    _plan: Plan
    _num_workers: int
    _workers: weakref.ref[Workers]

    def __init__(self, sizes: Sizes) -> None:
        self._sizes = sizes
        self.kept = Kept()
        self.is_asked = self.has_trained = False
        self._hooks: OrderedDict[int, StepHook] = OrderedDict()
        self._open: list[int] = []  # when the passes began that are under way
        self._is_awaited, self._asked_last = False, -_SECOND  # by another process
        self._forwards: dict[int, int] = {}  # how long calls took whose backward may come
        self._dropped: deque[int] = deque()  # numbers of batches whose backward will not come
        self._ended = 0  # when the step before ended
        self._records: list[dict[str, Any]] = []
        self._thread = 0  # that runs passes
        self._doing: dict[int, Doing] = {}  # what every thread does
        self._ran: list[_Ran] = []  # since the step before
        self._number = 0  # of the step that comes, from 0 on by this plan
        self._tries = 0  # how many more steps are recorded until there is one without an audit
        self._trained = 0  # passes that have left gradients
        self._before_optimizer = 0  # what that was then
        self._used: WeakKeyDictionary[Optimizer, _Used] = WeakKeyDictionary()

    def use(self, workers: Workers, plan: Plan) -> None:
        """Count on these workers' board from now on, and go on where the one before has ended.

        Args:
            workers: that run the passes; they are not kept alive.
            plan: by which they run.
        """
        board = workers.board
        if hasattr(self, "_board"):
            board.go_on(self._board)
        self._workers = weakref.ref(workers)
        self._board, self._plan, self._num_workers = board, plan, len(workers.devices)
        board.note_begun(self._open[0] if self._open else 0)
        self._ran, self._number, self._tries = [], 0, 0

    @property
    def awaits_backward(self) -> bool:
        """Whether there are results whose backward may come."""
        return bool(self._forwards)

    @property
    def is_amid_step(self) -> bool:
        """Whether a backward is still to come, or an optimizer has run its closure and goes on."""
        has_run = self._script.is_within(OPTIMIZER) and self._trained > self._before_optimizer
        return self.awaits_backward or has_run

    def hook(self, function: StepHook) -> RemovableHandle:
        """Call a function after every step, until the handle is removed."""
        if not callable(function):
            raise InputError(f"on_step({function!r}): give a function of one dictionary")
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = function
        return handle

    # -- what the script does ---------------------------------------------------------------------

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """While open, this thread of the script does this, which has a name."""
        self.enter(what)
        try:
            yield
        finally:
            self.exit(what)

    def enter(self, what: str) -> None:
        """This thread of the script begins something that has a name."""
        thread = threading.get_ident()
        if what == CALL:
            self._thread = thread
        self._doing_in(thread).enter(what)

    def exit(self, what: str) -> None:
        """It has ended what it last began under this name, with all that it began since then."""
        doing = self._doing_in(threading.get_ident())
        doing.exit(what)
        doing.shorten([ran.interval for ran in self._ran])

    def forget_doing(self, what: str) -> None:
        """What this thread has begun under this name was left by an error, and is forgotten."""
        self._doing_in(threading.get_ident()).forget(what)

    def _doing_in(self, thread: int) -> Doing:
        return self._doing.setdefault(thread, Doing())

    @property
    def _script(self) -> Doing:
        """What the thread does that runs passes; others may load data meanwhile, say."""
        return self._doing_in(self._thread or threading.get_ident())

    @property
    def is_here(self) -> bool:
        """Whether this is the thread that runs passes, and it does no worker's job just now."""
        if self._thread not in (0, threading.get_ident()):
            return False
        workers = self._workers()
        return workers is None or not workers.runs_here

    @contextmanager
    def failing(self) -> Iterator[None]:
        """While open, an error is something that has happened in the run."""
        try:
            yield
        except Exception as error:
            self.kept.happened(f"{type(error).__name__}: {error}")
            raise

    # -- passes -----------------------------------------------------------------------------------

    @property
    def is_recorded(self) -> bool:
        """Whether the passes of a batch that is about to be run are to be recorded."""
        is_asked = self.is_asked or self._is_due
        return is_asked or self._tries > 0 or _is_sampled(self._number)

    def ask(self) -> None:
        """Have a step recorded for another process: soon, but not more often than every second."""
        self._is_awaited = True

    @property
    def _is_due(self) -> bool:
        return self._is_awaited and monotonic_ns() - self._asked_last >= _SECOND

    def begin(self) -> int:
        """Note that a pass begins; returns when, in nanoseconds of `time.monotonic_ns()`."""
        begun = monotonic_ns()
        self._open.append(begun)
        self._board.note_begun(self._open[0])
        return begun

    def leave(self, begun: int) -> None:
        """The pass that began then is not under way any more, however it ended."""
        if begun in self._open:
            self._open.remove(begun)
        self._board.note_begun(self._open[0] if self._open else 0)

    def drop(self) -> None:
        """Take it that no pass is under way: all were given up."""
        self._open.clear()
        self._board.note_begun(0)

    def forget(self, number: int) -> None:
        """No backward of this batch will come; may be called in any thread, at any time."""
        self._forwards.pop(number, None)
        self._dropped.append(number)

    def count(self, order: Order, begun: int, logs: Mapping[int, Log]) -> None:
        """A pass that began then has ended well.

        Args:
            order: the pass.
            begun: what `begin` returned.
            logs: what workers have noted in it, if that was kept.
        """
        if order.trial:
            return
        now = monotonic_ns()
        self._sort_out()
        if order.what == "infer":
            self._board.count_other()
            self._script.note(Interval(EVALUATION, begun, now))
            return
        self._ran.append(_Ran(order.number, Interval(PASS, begun, now), logs))
        duration = now - begun
        if order.what == "forward":
            self._forwards[order.number] = duration
        elif order.number in self._forwards or order.what == "train":
            self._end(order, now, duration + self._forwards.pop(order.number, 0))
        else:  # one more backward of a step that has ended
            self._trained += 1
            self.has_trained = True

    def _sort_out(self) -> None:
        """Forwards whose results were dropped are no passes of a step."""
        dropped = set()
        while self._dropped:
            dropped.add(self._dropped.popleft())
        every, self._ran = self._ran, []
        for ran in every:
            if ran.number in dropped:
                self._script.note(ran.interval._replace(what=EVALUATION))
            else:
                self._ran.append(ran)

    def _end(self, order: Order, now: int, duration: int) -> None:
        """A step has ended.

        Args:
            order: its last pass.
            now: when.
            duration: of its passes.
        """
        rows, as_planned = sum(m.sizes[ROWS] for m in order.microbatches), self._is_planned(order)
        self._board.count(duration, rows, order.tokens, as_planned)
        step = self._board.steps
        driver = (*self._script.until(now), *(ran.interval for ran in self._ran))
        since = self._ended or min(interval.begin for interval in driver)
        self.kept.step(step, (now - since) / 1e9, duration / 1e9, rows)
        if all(any(ran.logs.values()) for ran in self._ran):
            logs: dict[int, Log] = {}
            for ran in self._ran:
                for worker, log in ran.logs.items():
                    logs.setdefault(worker, []).extend(log)
            self._keep(
                StepRecord(
                    step=step,
                    begin=since,
                    end=now,
                    rows=rows,
                    num_workers=self._num_workers,
                    driver=driver,
                    logs=logs,
                    as_planned=as_planned,
                )
            )
        if self._hooks:
            self._note(now, duration, rows, order.tokens)
        self._number += 1
        self._trained += 1
        self.has_trained = True
        self._begin_anew(now)

    def _begin_anew(self, now: int) -> None:
        """Forget what was done in the step that has ended."""
        self._ended, self._ran = now, []
        for thread, doing in list(self._doing.items()):
            doing.clear(now)
            if doing.is_idle and thread != self._thread:
                self._doing.pop(thread, None)

    def note_optimizer_begins(self) -> None:
        """An optimizer's step begins in this thread, which may run passes in a closure."""
        self.forget_doing(OPTIMIZER)  # torch calls no hook for steps that raise
        self.enter(OPTIMIZER)
        self._before_optimizer = self._trained

    def note_used(self, optimizer: Optimizer) -> None:
        """An optimizer has used the gradients of its parameters."""
        self._used[optimizer] = _Used(
            self._trained, [len(group["params"]) for group in optimizer.param_groups]
        )

    def is_accumulating(self, model: nn.Module, optimizers: Iterable[Optimizer]) -> bool:
        """Whether there are gradients that an optimizer has still to use.

        Those that it has used may be there as well, if the script clears them just before its next
        backward, and so may those of parameters that no optimizer has.

        Args:
            model: whose gradients.
            optimizers: that may use them, besides those that have already used some.
        """
        known = {*optimizers, *self._used}
        has_optimizer = {id(p) for optimizer in known for p in parameters_of(optimizer)}
        latest = [(own, used) for own, used in self._used.items() if used.trained == self._trained]
        used_now = {id(p) for optimizer, used in latest for p in used.of(optimizer)}
        for parameter in model.parameters():
            if parameter.grad is None or id(parameter) in used_now:
                continue
            may_be_used = not has_optimizer or id(parameter) in has_optimizer
            if may_be_used and bool(parameter.grad.any()):
                return True
        return False

    def _is_planned(self, order: Order) -> bool:
        """Whether a batch has the size for which the plan was made."""
        every, plan = [m.sizes for m in order.microbatches], self._plan
        if (len(every), sum(s[ROWS] for s in every)) != (plan.num_microbatches, plan.batch_size):
            return False
        others = {name: size for name, size in self._sizes.items() if name != ROWS}
        return all(sizes.get(name) == size for sizes in every for name, size in others.items())

    def _keep(self, record: StepRecord) -> None:
        """Keep a record; if it has an audit, record more steps until one has none.

        Of these extra records only the one without an audit is kept, so that audited steps do not
        displace representative ones.
        """
        is_sampled, is_due = _is_sampled(self._number), self._is_due
        is_asked = self.is_asked or is_due
        if not record.is_audited:
            self._tries = 0
        else:
            self._tries = _TRIES if is_sampled else max(0, self._tries - 1)
        if is_asked or is_sampled or not record.is_audited:
            is_kept = not (is_asked or is_sampled) or _is_kept(self._number)
            self.kept.record(record, is_kept)
        if is_due:
            self._is_awaited, self._asked_last = False, monotonic_ns()
        self.is_asked = False

    def _note(self, now: int, duration: int, rows: int, tokens: int) -> None:
        """Keep what the hooks are called with."""
        since = now - self._ended if self._ended else duration
        record = {
            "step": self._board.steps,
            "step_seconds": duration / 1e9,
            "predicted_seconds": self._plan.predicted_step_seconds,
            "samples": rows,
            "samples_per_second": 1e9 * rows / since,
        }
        if tokens:
            record |= {"tokens": tokens, "tokens_per_second": 1e9 * tokens / since}
        self._records.append(record)

    def call_hooks(self, loss: torch.Tensor | None = None) -> None:
        """Call the hooks, all of them, for every step for which they have not been called.

        Args:
            loss: of the latest step's batch, if it is known here.

        Raises:
            Exception: what the first hook has raised that failed.
        """
        every, self._records = self._records, []
        if every and loss is not None and self._hooks:
            every[-1]["loss"] = float(loss)
        failed: list[Exception] = []
        with torch.enable_grad():  # backwards run without, and a hook is the script's own code
            for record in every:
                for function in list(self._hooks.values()):
                    try:
                        function(dict(record))
                    except Exception as error:  # the others are called nevertheless
                        failed.append(error)
        for other in failed[1:]:
            failed[0].add_note(f"Another on_step hook failed: {type(other).__name__}: {other}")
        if failed:
            raise failed[0]


class Loading(Iterable[T]):
    """Iterates over a data loader, and notes how long the script waits for each batch.

    Args:
        batches: any iterable; each `for` over this object iterates over `batches` anew.
        waiting: given a name, returns a context manager that is open while the script waits.
    """

    def __init__(
        self, batches: Iterable[T], waiting: Callable[[str], AbstractContextManager[None]]
    ) -> None:
        self._batches = batches
        self._waiting = waiting

    def __len__(self) -> int:
        return len(cast(Sized, self._batches))

    def __iter__(self) -> Iterator[T]:
        with self._waiting(DATA):
            source = iter(self._batches)
        while True:
            with self._waiting(DATA):
                try:
                    batch = next(source)
                except StopIteration:
                    return
            yield batch


class _kept_here:  # noqa: N801 - a decorator
    """A hook of this process. In the pickle of a class, whose `step` holds it, it does nothing."""

    def __init__(self, hook: Callable[..., None]) -> None:
        self._hook = hook

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._hook(*args, **kwargs)

    def __reduce__(self) -> Any:
        return _kept_here, (_nothing,)


def _nothing(*_: Any) -> None:
    """The hook elsewhere."""


def note_optimizers(steps: Steps, model: nn.Module) -> Callable[[], None]:
    """Have the steps of optimizers noted, of any class, in the thread that runs passes.

    A plain one over the model's parameters is warned if their gradients were cleared between a
    training step and its own. A `PipelineOptimizer` sees to that itself.

    Args:
        steps: where they are noted; it is not kept alive.
        model: whose parameters are trained; it is not kept alive either.

    Returns:
        a function that ends this.
    """
    known, trained = weakref.ref(steps), weakref.ref(model)
    verdicts: WeakKeyDictionary[Optimizer, tuple[list[int], bool]]
    verdicts = WeakKeyDictionary()

    def trains(own: nn.Module, optimizer: Optimizer) -> bool:
        """Whether it steps a parameter of the model; looked up again if its own are others."""
        stepped = [id(parameter) for parameter in parameters_of(optimizer)]
        stepped.append(id(next(own.parameters(), None)))
        before, verdict = verdicts.get(optimizer, ([], False))
        if before != stepped:
            verdict = _steps_parameters_of(own, optimizer)
            verdicts[optimizer] = stepped, verdict
        return verdict

    @_kept_here
    def begins(optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        found, own = known(), trained()
        if found is None or own is None or not found.is_here:
            return
        found.note_optimizer_begins()
        has_closure = len(args) > 1 or "closure" in kwargs
        if not found.has_trained or has_closure or isinstance(optimizer, PipelineOptimizer):
            return
        if trains(own, optimizer):
            warn_of_no_gradients([{"params": own.parameters()}])

    @_kept_here
    def ends(optimizer: Optimizer, *_: Any) -> None:
        found, own = known(), trained()
        if found is None or own is None or not found.is_here:
            return
        found.exit(OPTIMIZER)
        if trains(own, optimizer):
            found.has_trained = False
            found.note_used(optimizer)

    handles = [
        register_optimizer_step_pre_hook(begins),
        register_optimizer_step_post_hook(ends),
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def _steps_parameters_of(model: nn.Module, optimizer: Optimizer) -> bool:
    """Whether the optimizer steps a parameter of the model."""
    first, stepped = next(model.parameters(), None), parameters_of(optimizer)
    if any(p is first for p in stepped):  # usually the first is the first
        return True
    others = {id(parameter) for parameter in stepped}
    return any(id(p) in others for p in model.parameters())
