"""A model whose stages fail when they are told to; workers import it."""

from __future__ import annotations

import ctypes
import os
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

FORWARD, BACKWARD = range(2)
driver: int | None = None  # the process in which no trap springs: it may look at a forward, too

for _name in ("zero_grad", "add_param_group", "load_state_dict", "state_dict"):
    _plain = getattr(torch.optim.Optimizer, _name).__wrapped__
    _plain.__dynamo_disable = _plain  # or every worker imports torch's compiler, for seconds


class UnsendableError(Exception):
    """It holds what cannot be pickled."""

    def __init__(self) -> None:
        super().__init__("with a lock")
        self.lock = threading.Lock()


class OddError(Exception):
    """It can be pickled, but not unpickled."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(one + other)


def _raise() -> None:
    raise ZeroDivisionError("sprung")  # the line that tracebacks must show


def _unsendable() -> None:
    raise UnsendableError


def _odd() -> None:
    raise OddError("two ", "arguments")


def _limited(allocate: Callable[[], Any]) -> None:
    """Allocate until the process has no more memory."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    hoard = []
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), hard))
        while True:
            hoard.append(allocate())
    finally:
        hoard.clear()
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _orphan() -> None:
    if os.fork() == 0:
        time.sleep(100)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def _chatter() -> None:
    for _ in range(1000):
        print("x" * 999)


SPRINGS: dict[str, Callable[[], Any]] = {
    "raise": _raise,
    "unsendable": _unsendable,
    "odd": _odd,
    "sys.exit": lambda: sys.exit(3),
    "os._exit": lambda: os._exit(7),
    "segfault": lambda: ctypes.string_at(0),
    "memory": lambda: _limited(lambda: bytearray(16 << 20)),
    "tensor memory": lambda: _limited(lambda: torch.zeros(4 << 20)),
    "orphan": _orphan,
    "hang": lambda: time.sleep(100),
    "hang in C": lambda: re.match("(a+)+$", "a" * 60 + "b"),  # with the interpreter's lock
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "nap": lambda: time.sleep(0.2),
    "chatter": _chatter,
}
_CODES = dict(zip(SPRINGS, range(1, 100), strict=False))
_COUNTS: dict[int, list[int]] = {}


class Trap(nn.Module):
    """The identity, until it is armed: in memory that driver and worker share."""

    spec: torch.Tensor

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.register_buffer("spec", torch.zeros(4, dtype=torch.int64), persistent=False)

    def arm(self, spring: str, where: int, microbatch: int) -> None:
        """Let it spring in the forward or backward of a micro-batch of the next pass."""
        new = [_CODES[spring], where, microbatch, int(self.spec[3]) + 1]
        self.spec.copy_(torch.tensor(new))

    def disarm(self) -> None:
        """Let it be the identity again."""
        self.spec[0] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = _Spring.apply(x, self.spec, self.number)
        return found


class _Spring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, spec: torch.Tensor, number: int) -> torch.Tensor:
        ctx.spec, ctx.number = spec, number
        _spring(spec, FORWARD, number)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _spring(ctx.spec, BACKWARD, ctx.number)
        return gradient, None, None


def _spring(spec: torch.Tensor, where: int, number: int) -> None:
    code, wanted, microbatch, generation = spec.tolist()
    if not code or where != wanted or os.getpid() == driver:
        return
    counts = _COUNTS.setdefault(number, [0, 0])
    if counts[0] != generation:
        counts[:] = generation, 0
    counts[1] += 1
    if counts[1] == microbatch + 1:
        list(SPRINGS.values())[code - 1]()


def build() -> nn.Sequential:
    """Four blocks of three calls, the last of which is a trap."""
    layers: list[nn.Module] = []
    for number in range(4):
        layers += [nn.Linear(5 if number == 0 else 6, 6), nn.BatchNorm1d(6), Trap(number)]
    return nn.Sequential(*layers)


class Loss:
    """Mean squared error, which springs at a micro-batch."""

    def __init__(self, spring: str = "", microbatch: int = 0) -> None:
        self.spring = spring
        self.left = microbatch

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if self.spring:  # else it stays as it is, as replicas want it
            if self.left == 0:
                SPRINGS[self.spring]()
            self.left -= 1
        return F.mse_loss(output, target)


class Touchy(torch.optim.Optimizer):
    """Momentum, whose part on one worker springs: groups say what, and where."""

    def __init__(self, params: Any, lr: float = 0.1, **_: Any) -> None:
        super().__init__(params, {"lr": lr, "spring": "", "victim": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        for parameter in group["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["speed"] = 0.9 * state.get("speed", 0.0) + parameter.grad
                parameter.sub_(group["lr"] * state["speed"])
        own = 0 if any(p.shape[-1:] == (5,) for p in group["params"]) else 1
        if group["spring"] and group["victim"] == own:
            SPRINGS[group["spring"]]()
