"""Counts the passes of a pipeline on its board, and tells whoever wants to know of every step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
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
        self._under_way = 0
        self._forward = (-1, 0, 0, 0)  # of the latest call: its number, duration, rows and tokens
        self._ended = 0  # when the step before ended
        self._news: dict[str, Any] | None = None

    def hook(self, function: StepHook) -> RemovableHandle:
        """Call a function after every step, until the handle is removed."""
        handle = RemovableHandle(self._hooks)
        self._hooks[handle.id] = function
        return handle

    def begin(self) -> int:
        """A pass begins; returns when."""
        if not self._under_way:
            self._board.begin()
        self._under_way += 1
        return monotonic_ns()

    def leave(self) -> None:
        """A pass is not under way any more, however it ended."""
        self._under_way = max(0, self._under_way - 1)
        if not self._under_way:
            self._board.end()

    def drop(self) -> None:
        """No pass is under way any more."""
        self._under_way = 0
        self._board.end()

    def count(self, order: Order, begun: int) -> None:
        """A pass that began then has ended well."""
        if order.trial:
            return
        now = monotonic_ns()
        duration = now - begun
        if order.what == "infer":
            self._board.count_other()
            return
        rows = sum(m.sizes[ROWS] for m in order.microbatches)
        tokens = _tokens(order.values)
        if order.what == "forward":
            self._forward = order.number, duration, rows, tokens
            return
        if order.what == "backward":
            number, before, rows, tokens = self._forward
            if number == order.number:
                duration += before
            else:  # a later call came in between
                rows, tokens = sum(m.sizes[ROWS] for m in order.microbatches), 0
        self._board.count(duration, rows, tokens)
        if self._hooks:
            self._note(now, duration, rows, tokens)
        self._ended = now

    def _note(self, now: int, duration: int, rows: int, tokens: int) -> None:
        """Keep what the hooks are told."""
        since = now - self._ended if self._ended else duration
        self._news = {
            "step": self._board.counted().steps,
            "step_seconds": duration / 1e9,
            "predicted_seconds": self._predicted,
            "samples": rows,
            "samples_per_second": 1e9 * rows / since,
        }
        if tokens:
            self._news |= {"tokens": tokens, "tokens_per_second": 1e9 * tokens / since}

    def tell(self, loss: torch.Tensor | None = None) -> None:
        """Call the hooks, if there was a step that they have not been told of.

        Args:
            loss: of its batch, if it is known here.
        """
        news, self._news = self._news, None
        if news is None or not self._hooks:
            return
        if loss is not None:
            news["loss"] = float(loss)
        for function in list(self._hooks.values()):
            function(dict(news))


def _tokens(values: Sequence[Sequence[Any]]) -> int:
    """Elements of the first integer input of at least two dimensions, in all micro-batches."""
    for k, value in enumerate(values[0] if values else ()):
        if isinstance(value, torch.Tensor) and value.ndim > 1 and not value.is_floating_point():
            return sum(part[k].numel() for part in values)
    return 0
