"""Every schedule's measured step against its formula, with stages that only sleep.

    python -m benchmarks.sleeping [--workers 8] [--microbatches 32] [--rounds 3] [--quick]
                                  [--json FILE]

Sleeping needs no core, so as many worker processes as one likes run at full speed on any machine:
what a step takes longer than its formula is what Penstock itself costs. Every half of an action
sleeps for 5 ms: a forward for one, a backward for two, of which a schedule that halves backwards
puts one off. That is possible because a weight half ends in the gradient of a parameter, so a hook
on that sleeps in whichever action computes it; what sleeps in an `autograd.Function` without
parameters is part of the input half. All schedules can be represented like that. What the tiny
layer itself computes counts as sleep.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import penstock as ps
from benchmarks.flat import uniform_plan
from benchmarks.sleeps import SLEEP, WIDTH, Sleeper, wake_in_time
from penstock.bench.turns import machine
from penstock.display.tables import aligned
from penstock.schedule import SCHEDULES, StagesPerWorker
from penstock.units import show_seconds

WARM_UPS = 2


def formula(name: str, workers: int, per_worker: int, count: int) -> float:
    """Seconds of a step, as the docstrings and tests of `penstock.schedule` have it.

    With every forward and every half of a backward as long as all others, and links that cost
    nothing.

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
    """Seconds of the steps of one schedule, with a process for every worker."""
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
    """The table."""
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


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and return everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--quick", action="store_true", help="two workers, six micro-batches")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    if options.quick:
        options.workers, options.microbatches, options.rounds = 2, 6, 2
    results = []
    for name in options.schedules.split(","):
        results.append(measure(name, options.workers, options.microbatches, options.rounds))
        print(*show(results[-1:])[1 if len(results) > 1 else 0 :], sep="\n", flush=True)
    overslept = _overslept()
    print(f"time.sleep alone oversleeps by {100 * overslept / SLEEP:.1f} %", machine(), sep="\n")
    report = {"results": results, "oversleeps_seconds": overslept, "machine": machine()}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return report


def _overslept() -> float:
    """By how many seconds a sleep is too long, on this machine."""
    wake_in_time()
    taken = []
    for _ in range(50):
        start = time.perf_counter()
        time.sleep(SLEEP)
        taken.append(time.perf_counter() - start - SLEEP)
    return statistics.median(taken)


if __name__ == "__main__":
    main(sys.argv[1:])
