"""Counts the passes of a pipeline on its board, keeps what a few steps did, and tells of each."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic_ns
from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from penstock.account.history import About
from penstock.account.keeping import Kept
from penstock.account.record import PASS, Interval, StepRecord
from penstock.board.memory import Board, Log
from penstock.capture.calls import ROWS
from penstock.engine.orders import Order

StepHook = Callable[[dict[str, Any]], Any]
"""Called after every step with a dictionary of plain data, see `Pipeline.on_step`."""

OPTIMIZER = "optimizer"

_FIRST, _LAST = 2, 5  # the earliest batches that are recorded; before them caches are cold
_INTERVALS = 256  # of the script's thread, in one step


def _is_sampled(number: int) -> bool:
    """Whether the passes of a batch are recorded without being asked for: few, and ever fewer."""
    return _FIRST <= number <= _LAST or (number > _LAST and not number & (number - 1))


class Steps:
    """The passes of a pipeline, as its board counts them.

    Args:
        board: where.
        predicted_seconds: of a step, by the plan.
        num_workers: how many there are.

    Attributes:
        kept: what is known of the run.
        is_asked: whether the next step is to be recorded whatever its number; may be set in any
            thread.
    """

    def __init__(self, board: Board, predicted_seconds: float, num_workers: int) -> None:
        self._board = board
        self._num_workers = num_workers
        self.predicted_seconds = predicted_seconds
        self.kept = Kept()
        self.is_asked = False
        self._hooks: OrderedDict[int, StepHook] = OrderedDict()
        self._open: list[int] = []  # when the passes began that are under way
        self._forwards: dict[int, int] = {}  # how long calls took whose backward may come
        self._ended = 0  # when the step before ended
        self._news: list[dict[str, Any]] = []
        self._thread = 0  # that runs passes
        self._doing: list[tuple[str, int]] = []  # what it does now, and since when
        self._driver: deque[Interval] = deque(maxlen=_INTERVALS)  # since the step before
        self._logs: dict[int, Log] = {}  # likewise; without those of passes that are left out
        self._is_whole = True  # all passes of the step were recorded

    def go_on(self, before: Steps) -> None:
        """Go on where those of another plan have ended, with the same hooks."""
        self._board.go_on(before._board)
        self.kept, self._hooks, self._ended = before.kept, before._hooks, before._ended

    @property
    def awaits_backward(self) -> bool:
        """Whether there are results whose backward may come."""
        return bool(self._forwards)

    def hook(self, function: StepHook) -> RemovableHandle:
        """Call a function after every step, until the handle is removed."""
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = function
        return handle

    @contextmanager
    def during(self, what: str) -> Iterator[None]:
        """While open, the script's thread does this, which has a name."""
        self.enter(what)
        try:
            yield
        finally:
            self.exit(what)

    def enter(self, what: str) -> None:
        """The script's thread begins something that has a name."""
        self._thread = threading.get_ident()
        self._doing.append((what, monotonic_ns()))

    def exit(self, what: str) -> None:
        """It has ended what it last began under this name, with all that it began since then.

        Nothing happens if it did not: a Ctrl-C may have come as it began.
        """
        for place in reversed(range(len(self._doing))):
            if self._doing[place][0] == what:
                self._driver.append(Interval(*self._doing[place], monotonic_ns()))
                del self._doing[place:]
                return

    def forget_doing(self, what: str) -> None:
        """What it has begun under this name was left by an error, and is forgotten."""
        self._doing = [doing for doing in self._doing if doing[0] != what]

    def is_recorded(self, number: int) -> bool:
        """Whether the passes of the batch of this number are to be recorded."""
        return self.is_asked or _is_sampled(number)

    @property
    def is_here(self) -> bool:
        """Whether this is the thread that runs passes."""
        return self._thread in (0, threading.get_ident())

    def begin(self) -> int:
        """A pass begins; returns when."""
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
        """No pass is under way any more."""
        self._open.clear()
        self._board.note_begun(0)

    def forget(self, number: int) -> None:
        """No backward of this batch will come."""
        self._forwards.pop(number, None)

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
        duration = now - begun
        if order.what == "infer":
            self._board.count_other()
            self._driver.append(Interval("evaluation", begun, now))
            return
        self._driver.append(Interval(PASS, begun, now))
        self._is_whole = self._is_whole and any(logs.values())
        for worker, log in logs.items():
            self._logs.setdefault(worker, []).extend(log)
        if order.what == "forward":
            self._forwards[order.number] = duration
            return
        duration += self._forwards.pop(order.number, 0)
        rows = sum(m.sizes[ROWS] for m in order.microbatches)
        self._board.count(duration, rows, order.tokens)
        driver = [*self._driver, *(Interval(*doing, now) for doing in self._doing)]
        since = self._ended or min(interval.begin for interval in driver)
        number = self._board.counted().steps
        self.kept.step(number, (now - since) / 1e9, duration / 1e9, rows)
        if self._is_whole:
            record = StepRecord(
                step=number,
                begin=since,
                end=now,
                rows=rows,
                num_workers=self._num_workers,
                driver=tuple(driver),
                logs=self._logs,
            )
            self.is_asked = record.is_audited  # then the next one stands for others
            self.kept.record(record)
        if self._hooks:
            self._note(now, duration, rows, order.tokens)
        self._ended = now
        self._driver.clear()
        self._logs, self._is_whole = {}, True

    def _note(self, now: int, duration: int, rows: int, tokens: int) -> None:
        """Keep what the hooks are told."""
        since = now - self._ended if self._ended else duration
        news = {
            "step": self._board.counted().steps,
            "step_seconds": duration / 1e9,
            "predicted_seconds": self.predicted_seconds,
            "samples": rows,
            "samples_per_second": 1e9 * rows / since,
        }
        if tokens:
            news |= {"tokens": tokens, "tokens_per_second": 1e9 * tokens / since}
        self._news.append(news)

    def tell(self, loss: torch.Tensor | None = None) -> None:
        """Call the hooks, for every step that they have not been told of.

        Args:
            loss: of the latest step's batch, if it is known here.
        """
        every, self._news = self._news, []
        if every and loss is not None and self._hooks:
            every[-1]["loss"] = float(loss)
        with torch.enable_grad():  # backwards run without, and a hook is the script's own code
            for news in every:
                for function in list(self._hooks.values()):
                    function(dict(news))


def note_optimizers(steps: Steps) -> Callable[[], None]:
    """Have the steps of optimizers noted, of any class, in the thread that runs passes.

    Args:
        steps: where they are noted; it is not kept alive.

    Returns:
        a function that ends this.
    """
    known = weakref.ref(steps)

    def begins(*_: Any) -> None:
        found = known()
        if found is not None and found.is_here:
            found.forget_doing(OPTIMIZER)  # torch does not tell of steps that raise
            found.enter(OPTIMIZER)

    def ends(*_: Any) -> None:
        found = known()
        if found is not None and found.is_here:
            found.exit(OPTIMIZER)

    handles = [
        register_optimizer_step_pre_hook(begins),
        register_optimizer_step_post_hook(ends),
    ]

    def end() -> None:
        for handle in handles:
            handle.remove()

    return end


def answers(steps: Steps, about: About) -> dict[str, Callable[[], Any]]:
    """What other processes may ask for: the history of the run, and that a step is recorded.

    Args:
        steps: of a pipeline; it is not kept alive, as it has the board, which ends the answers.
        about: what it runs.
    """
    known = weakref.ref(steps)

    def here() -> Steps:
        found = known()
        if found is None:
            raise ValueError("the pipeline was closed")
        return found

    def record() -> int:
        own = here()
        own.is_asked = True
        return len(own.kept.records) and own.kept.records[-1].step

    return {"history": lambda: here().kept.history(about), "record": record}
