"""Stages that sleep: modules of their own file, so that worker processes import the same."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from typing import Any

import torch
from torch import Tensor, nn

SLEEP = 5e-3  # seconds of every half of an action
WIDTH = 4
_PR_SET_TIMERSLACK = 29


class Clock:
    """When this thread's stage has begun its present action: what it computes counts as sleep."""

    def __init__(self) -> None:
        self._began: dict[int, float] = {}  # of every thread

    def begin(self) -> None:
        """An action has begun."""
        thread = threading.get_ident()
        if thread not in self._began:
            wake_in_time()
        self._began[thread] = time.perf_counter()

    def sleep(self, sleeps: int) -> None:
        """Sleep until the action has taken so many sleeps; or for one, if it began long ago."""
        now = time.perf_counter()
        stop = self._began[threading.get_ident()] + sleeps * SLEEP
        if not now < stop <= now + SLEEP:
            stop = now + SLEEP
        time.sleep(max(0.0, stop - now))


def wake_in_time() -> None:
    """Tell Linux not to put off this thread's wake-ups by 50 us, to do many of them at once."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


CLOCK = Clock()


class Begin(nn.Module):
    """The identity, where a stage begins."""

    def forward(self, x: Tensor) -> Tensor:
        """What it is given."""
        CLOCK.begin()
        return x.view_as(x)


class Sleep(torch.autograd.Function):
    """The identity, that sleeps in its forward, and in the input half of its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Sleep."""
        CLOCK.sleep(1)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Sleep; this is the first that a stage's backward does."""
        CLOCK.begin()
        CLOCK.sleep(1)
        return gradients[0]


class End(nn.Module):
    """`Sleep` as a module, where a stage ends."""

    def forward(self, x: Tensor) -> Tensor:
        """What it is given."""
        result: Tensor = Sleep.apply(x)
        return result


class Sleeper(nn.Module):
    """A linear layer that sleeps."""

    def __init__(self) -> None:
        super().__init__()
        self.begin, self.end = Begin(), End()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.linear.weight.register_hook(_sleep)

    def forward(self, x: Tensor) -> Tensor:
        """The layer's result, in its own time."""
        result: Tensor = self.end(self.linear(self.begin(x)))
        return result


def _sleep(gradient: Tensor) -> None:
    """Sleep for the weight half: the second sleep of a whole backward, or one of its own."""
    CLOCK.sleep(2)
