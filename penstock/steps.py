"""Counts the passes of a pipeline on its board, and tells whoever wants to know of every step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from penstock.board.memory import Board
from penstock.capture.calls import ROWS
from penstock.engine.orders import Order

StepHook = Callable[[dict[str, Any]], Any]
"""Called after every step with a dictionary of plain data, see `Pipeline.on_step`."""


class Steps:
    """The passes of a pipeline, as its board counts them.

    Args:
        board: where.
        predicted_seconds: of a step, by the plan.
    """

    def __init__(self, board: Board, predicted_seconds: float) -> None:
        self._board = board
        self._predicted = predicted_seconds
        self._hooks: OrderedDict[int, StepHook] = OrderedDict()
        self._open: list[int] = []  # when the passes began that are under way
        self._forwards: dict[int, int] = {}  # how long calls took whose backward may come
        self._ended = 0  # when the step before ended
        self._news: list[dict[str, Any]] = []

    def hook(self, function: StepHook) -> RemovableHandle:
        """Call a function after every step, until the handle is removed."""
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = function
        return handle

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

    def count(self, order: Order, begun: int) -> None:
        """A pass that began then has ended well."""
        if order.trial:
            return
        now = monotonic_ns()
        duration = now - begun
        if order.what == "infer":
            self._board.count_other()
        elif order.what == "forward":
            self._forwards[order.number] = duration
        else:
            duration += self._forwards.pop(order.number, 0)
            rows = sum(m.sizes[ROWS] for m in order.microbatches)
            self._board.count(duration, rows, order.tokens)
            if self._hooks:
                self._note(now, duration, rows, order.tokens)
            self._ended = now

    def _note(self, now: int, duration: int, rows: int, tokens: int) -> None:
        """Keep what the hooks are told."""
        since = now - self._ended if self._ended else duration
        news = {
            "step": self._board.counted().steps,
            "step_seconds": duration / 1e9,
            "predicted_seconds": self._predicted,
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
