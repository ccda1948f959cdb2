"""Every schedule's measured step against its formula, with stages that only sleep.

    python -m penstock.bench sleeping [--workers 8] [--microbatches 32] [--rounds 3]
        [--schedules NAME,NAME] [--quick] [--json FILE] [--record]

Sleeping needs no core, so any number of worker processes run at full speed on any machine: what a
step takes longer than its formula is what Penstock itself costs. A forward sleeps once for 5 ms. A
backward sleeps twice: once in its input half, by an `autograd.Function` without parameters, and
once in its weight half, by a hook on the gradient of a parameter. The hook runs in whichever action
computes that gradient, so a schedule that halves backwards runs this sleep later. The time that the
tiny layer computes is part of the sleep.
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import penstock as ps
from penstock.bench import record
from penstock.bench.uniform import uniform_plan
from penstock.display.tables import aligned
from penstock.schedule import SCHEDULES, StagesPerWorker
from penstock.units import show_seconds

WARM_UPS = 2
SLEEP = 5e-3  # seconds of every half of an action
WIDTH = 4
_PR_SET_TIMERSLACK = 29


class Clock:
    """Notes when threads begin actions, as the time that they compute is part of their sleep."""

    def __init__(self) -> None:
        self._began: dict[int, float] = {}  # of every thread

    def begin(self) -> None:
        """Note that this thread begins an action."""
        thread = threading.get_ident()
        if thread not in self._began:
            wake_in_time()
        self._began[thread] = time.perf_counter()

    def sleep(self, sleeps: int) -> None:
        """Sleep until this many sleeps of 5 ms have passed since the action began.

        It is one whole sleep from now if that time has passed, or is more than one sleep ahead.
        """
        now = time.perf_counter()
        stop = self._began[threading.get_ident()] + sleeps * SLEEP
        if not now < stop <= now + SLEEP:
            stop = now + SLEEP
        time.sleep(max(0.0, stop - now))


def wake_in_time() -> None:
    """Have Linux wake this thread on time, and not up to 50 us later together with others."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, ctypes.c_ulong(1), 0, 0, 0)


CLOCK = Clock()


class Begin(nn.Module):
    """The identity, where a stage begins."""

    def forward(self, x: Tensor) -> Tensor:
        """Note that an action begins; returns `x`."""
        CLOCK.begin()
        return x.view_as(x)


class Sleep(torch.autograd.Function):
    """The identity, that sleeps in its forward, and in the input half of its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Sleep for the forward; returns `x`."""
        CLOCK.sleep(1)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Sleep for the input half; the backward of a stage begins here."""
        CLOCK.begin()
        CLOCK.sleep(1)
        return gradients[0]


class End(nn.Module):
    """`Sleep` as a module, where a stage ends."""

    def forward(self, x: Tensor) -> Tensor:
        """Sleep; returns `x`."""
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
        """The linear layer's result for rows (n, WIDTH), of the same shape, after a sleep."""
        result: Tensor = self.end(self.linear(self.begin(x)))
        return result


def _sleep(gradient: Tensor) -> None:
    """Sleep for the weight half: the second sleep of a whole backward, or one of its own."""
    CLOCK.sleep(2)


def formula(name: str, workers: int, per_worker: int, count: int) -> float:
    """The seconds of a step in theory, as in the docstrings and tests of `penstock.schedule`.

    Every forward and every half of a backward takes one sleep, and links cost nothing.

    Args:
        name: of the schedule.
        workers: how many.
        per_worker: stages of each.
        count: of micro-batches.
    """
    whole, p, m, v = 3 * SLEEP, workers, count, per_worker
    if name == "naive":
        return m * p * whole
    if name in ("interleaved", "breadth-first"):
        return ((v - 1) * max(m, p) + m + p - 1) * whole
    if name == "zero-bubble":
        return m * whole + (p - 1) * SLEEP
    if name == "zero-bubble-v":
        return 2 * m * whole + (p - 1) * SLEEP
    return (m + p - 1) * whole  # gpipe, 1f1b, eager-1f1b, fitted


def stages_each(name: str) -> int:
    """How many stages each worker gets."""
    return 1 if SCHEDULES[name].stages_per_worker is StagesPerWorker.ONE or name == "fitted" else 2


def measure(name: str, workers: int, count: int, rounds: int) -> dict[str, Any]:
    """Measure the steps of one schedule, with a process for every worker.

    Args:
        name: of the schedule.
        workers: how many.
        count: of micro-batches.
        rounds: steps that count, after `WARM_UPS` that do not.

    Returns:
        a row of the report: seconds by the formula, of every makespan and of every `train_step`,
        and by what share the medians of these two exceed the formula.
    """
    each = stages_each(name)
    model = nn.Sequential(*(Sleeper() for _ in range(each * workers)))
    x, y = torch.randn(count, WIDTH), torch.randn(count, WIDTH)
    program = ps.capture(model, (x,))
    cuts = [str(k) for k in range(1, each * workers)]
    plan = uniform_plan(program, workers, count, name, cuts)
    taken, spans = [], []
    devices = ["cpu"] * workers
    options: dict[str, Any] = {"program": program, "plan": plan, "workers": "processes"}
    with ps.Pipeline(model, devices=devices, audit=None, **options) as pipe:  # audits sleep, too
        for turn in range(WARM_UPS + rounds):
            pipe.zero_grad()
            with pipe.recording() as timelines:
                start = time.perf_counter()
                pipe.train_step(x, target=y, loss_fn=nn.functional.mse_loss)
                seconds = time.perf_counter() - start
            if turn >= WARM_UPS:
                taken.append(seconds)
                spans.append(timelines[0].seconds)
    expected = formula(name, workers, each, count)
    return {
        "schedule": name,
        "stages": each * workers,
        "formula_seconds": expected,
        "makespan_seconds": spans,
        "step_seconds": taken,
        "excess": statistics.median(spans) / expected - 1,
        "step_excess": statistics.median(taken) / expected - 1,
    }


def show(results: Sequence[dict[str, Any]]) -> list[str]:
    """The lines of a table with a row for each schedule."""
    cells = [("schedule", "stages", "formula", "makespan", "above it", "train_step", "above it")]
    for row in results:
        cells.append(
            (
                row["schedule"],
                str(row["stages"]),
                show_seconds(row["formula_seconds"]),
                show_seconds(statistics.median(row["makespan_seconds"])),
                f"{row['excess']:+.1%}",
                show_seconds(statistics.median(row["step_seconds"])),
                f"{row['step_excess']:+.1%}",
            )
        )
    return aligned(cells)


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    parser = record.parser("sleeping", __doc__)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--quick", action="store_true", help="two workers, six micro-batches")
    options = parser.parse_args(arguments)
    record.check_whole(parser, options, "workers", "schedules", "microbatches", "quick")
    if options.quick:
        options.workers, options.microbatches, options.rounds = 2, 6, 2
    results = []
    for name in options.schedules.split(","):
        results.append(measure(name, options.workers, options.microbatches, options.rounds))
        print(*show(results[-1:])[1 if len(results) > 1 else 0 :], sep="\n", flush=True)
    overslept = _overslept()
    print(f"time.sleep alone oversleeps by {100 * overslept / SLEEP:.1f} %")
    report = {"results": results, "oversleeps_seconds": overslept}
    print(record.save("sleeping", report, options)["machine"])
    return 0


def _overslept() -> float:
    """By how many seconds a sleep is too long, on this machine."""
    wake_in_time()
    taken = []
    for _ in range(50):
        start = time.perf_counter()
        time.sleep(SLEEP)
        taken.append(time.perf_counter() - start - SLEEP)
    return statistics.median(taken)
