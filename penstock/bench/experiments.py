"""The experiments of PyTorch's model-parallel tutorial, on any model and any devices.

A1  a toy model on two devices, trained in the plain style
A2  one device, and several devices without pipelining
A3  the same devices with pipelined inputs
A4  the sweep of micro-batch sizes, beside the one that Penstock chooses by itself
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from penstock.bench.charts import save_bars, save_sweep
from penstock.bench.contestants import RESNET50, Field, LossFn, Task
from penstock.bench.footprint import keep_memory
from penstock.bench.record import machine
from penstock.bench.report import BenchReport
from penstock.bench.toy import run_toy
from penstock.bench.turns import Contestant, Ticker, measure, warm_up
from penstock.display.figures import require_matplotlib
from penstock.display.terminal import Progress
from penstock.errors import InputError
from penstock.units import show_seconds

_TUTORIAL_ROWS, _QUICK_ROWS = 120, 24
_SIZES = (1, 3, 5, 8, 10, 12, 20, 40, 60)  # of 120 rows, as in the tutorial
_QUICK_SIZES = (1, 2, 3, 4, 6, 8, 12)  # of 24
_PIECES = 6  # the tutorial's pieces of 20 of 120
_QUICK_SECONDS = 100.0  # of two minutes; the rest is a reserve
_FEWEST_REPEATS, _MOST_REPEATS = 3, 10
_FEWEST_SIZES = 3
_COST_OF_BARS, _COST_OF_A_SIZE = 4.5, 0.7  # about, in steps of one device


@dataclass(frozen=True)
class BenchSettings:
    """What to run.

    Attributes:
        model: `package.module:callable`, for the report.
        given: a module with its arguments; `None` for ResNet-50 with the tutorial's images.
        loss_fn: `loss_fn(output)`; the mean of the output's squares by default. ResNet-50 without
            `given` has the tutorial's loss.
        devices: of the pipelines, two at least.
        quick: whether to run a small batch of images, fewer batches per repeat, and only as many
            repeats, three at least, as two minutes allow.
        output: where figures and `bench.json` go; `None` for nowhere.
    """

    model: str = RESNET50
    given: tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None = None
    loss_fn: LossFn | None = None
    devices: tuple[str, ...] = ("cpu", "cpu")
    quick: bool = False
    output: Path | None = Path("out/bench")

    @property
    def batches(self) -> int:
        """How many batches each repeat times: 1 in a quick run, else 3."""
        return 1 if self.quick else 3


def run_bench(
    settings: BenchSettings,
    progress: Progress | None = None,
    talk: Callable[[str], None] | None = None,
) -> BenchReport:
    """Run all experiments, draw them, and return what was measured.

    All contestants of a figure take turns in one run, on the same model. All of them, the unsplit
    model too, run in this process, which is made to keep freed memory.

    Args:
        settings: what to run.
        progress: called with the progress.
        talk: called with messages for the user, such as how long the measurement will take.

    Raises:
        InputError: fewer than two devices.
        PenstockError: matplotlib is missing, or the model cannot be split over the devices.
    """
    if len(settings.devices) < 2:
        raise InputError(f"a pipeline needs two devices at least, not {settings.devices}")
    if settings.output is not None:
        require_matplotlib()
        settings.output.mkdir(parents=True, exist_ok=True)
    end = time.perf_counter() + _QUICK_SECONDS
    progress, talk = progress or (lambda *_: None), talk or (lambda _: None)
    allocator = keep_memory(len(settings.devices))
    talk(f"allocator: {allocator}")
    progress(0, 1, "capturing")
    with ExitStack() as stack:
        field = Field(_task(settings), settings.devices, stack, progress)
        toy = run_toy(settings.devices[:2])
        bars, sweep = _contestants(field, settings, progress, lambda: end - time.perf_counter())
        repeats = _repeats(settings, [*bars, *sweep], end - time.perf_counter(), talk)
        tick = Ticker(repeats * (len(bars) + len(sweep)), progress)
        measure(bars, repeats, settings.batches, tick)
        measure(sweep, repeats, settings.batches, tick)
    description = {**_described(settings, field), "repeats": repeats, "allocator": allocator}
    notes = _notes(field, allocator)
    report = BenchReport(description, machine(), toy, bars, sweep, notes)
    if settings.output is not None:
        _save(report, settings.output, _title(settings, field))
    return report


def _task(settings: BenchSettings) -> Task:
    if settings.given is not None:
        return Task.given(*settings.given, settings.loss_fn)
    return Task.tutorial(_QUICK_ROWS if settings.quick else _TUTORIAL_ROWS)


def _contestants(
    field: Field, settings: BenchSettings, progress: Progress, seconds_left: Callable[[], float]
) -> tuple[list[Contestant], list[Contestant]]:
    """The contestants of both figures, warmed up."""
    alone = field.one_device("one device")
    for _ in range(2):  # the first step is slower
        warm_up([alone], lambda name: progress(0, 1, f"warming up: {name}"))
    counts = _sweep_counts(field, settings.quick)
    if settings.quick:
        counts = thinned(counts, alone.warm_up, seconds_left())
    bars, sweep = [alone, *_bars(field)], _sweep(field, counts)
    others = [*bars[1:], *sweep]
    tick = Ticker(len(others), progress, "warming up: ")
    warm_up(others, tick)
    return bars, sweep


def _bars(field: Field) -> list[Contestant]:
    """The contestants of the bar chart after the first one, which is one device."""
    auto, pieces = field.plan(), min(_PIECES, field.rows // field.fewest_rows)
    size = -(-field.rows // pieces)
    number = len(field.devices)
    unsplit = [field.one_device("one device, micro-batches", auto.num_microbatches)]
    if field.on_cpu:
        unsplit.append(field.all_cores("one process, all cores"))
    return [
        *unsplit,
        field.pipeline(f"{number} devices, in turn", field.plan_in_turn()),
        field.pipeline(f"{number} devices, pieces of {size}", field.plan(pieces)),
        field.pipeline(f"{number} devices, Penstock's choice", auto),
    ]


def _sweep(field: Field, counts: Sequence[int]) -> list[Contestant]:
    """A pipeline for every number of micro-batches, and the one that Penstock chooses."""
    plans = [field.plan(count) for count in counts]
    swept = [field.pipeline(f"micro-batches of {p.microbatch_size}", p) for p in plans]
    return [*swept, field.pipeline("Penstock's choice", field.plan())]


def _sweep_counts(field: Field, quick: bool) -> list[int]:
    """The numbers of micro-batches to sweep: the tutorial's sizes, scaled to the batch."""
    sizes, of = (_QUICK_SIZES, _QUICK_ROWS) if quick else (_SIZES, _TUTORIAL_ROWS)
    scaled = [max(1, round(size * field.rows / of)) for size in sizes]
    counts = dict.fromkeys(-(-field.rows // size) for size in scaled)
    return [count for count in counts if field.rows // count >= field.fewest_rows] or [1]


def thinned(counts: Sequence[int], step_seconds: float, seconds_left: float) -> list[int]:
    """As many of the counts, evenly spread, as there is time for; three at least.

    Args:
        counts: the numbers of micro-batches to choose from.
        step_seconds: what a step of one device takes.
        seconds_left: for warming up and the fewest repeats of all contestants.
    """
    one_round = seconds_left / (step_seconds * (_FEWEST_REPEATS + 1))  # in steps of one device
    affordable = int((one_round - _COST_OF_BARS) / _COST_OF_A_SIZE) - 1  # Penstock's choice is one
    number = min(len(counts), max(_FEWEST_SIZES, affordable))
    if number == len(counts):
        return list(counts)
    return [counts[round(k * (len(counts) - 1) / (number - 1))] for k in range(number)]


def _repeats(
    settings: BenchSettings,
    contestants: Sequence[Contestant],
    seconds_left: float,
    talk: Callable[[str], None],
) -> int:
    """How many rounds to measure; says how long they will take."""
    one_round = settings.batches * sum(c.warm_up for c in contestants)
    repeats = _MOST_REPEATS
    if settings.quick:
        repeats = max(_FEWEST_REPEATS, min(_MOST_REPEATS, int(seconds_left / one_round)))
    talk(
        f"{len(contestants)} contestants, {repeats} rounds of about {show_seconds(one_round)}: "
        f"{show_seconds(repeats * one_round)} to go"
    )
    return repeats


def _notes(field: Field, allocator: str) -> list[str]:
    """What a reader of the tables should know."""
    notes = [
        f"allocator: {allocator}",
        "pipelines are not audited (audit=None): audits are most frequent in the first steps, and "
        "only few steps are measured here",
    ]
    if not field.plan().is_worth_it:
        notes.append("the plan predicts that one device is faster than any split of the model")
    return notes


def _described(settings: BenchSettings, field: Field) -> dict[str, Any]:
    return {
        "model": settings.model,
        "batch_size": field.rows,
        "batches_per_repeat": settings.batches,
        "devices": list(settings.devices),
        "threads_per_worker": field.threads,
        "optimizer": "SGD, lr 0.001",
    }


def _title(settings: BenchSettings, field: Field) -> str:
    many = f"{settings.batches} batches" if settings.batches > 1 else "one batch"
    return f"{field.task.title}: {many} of {field.rows} on {', '.join(settings.devices)}"


def _save(report: BenchReport, output: Path, title: str) -> None:
    (output / "bench.json").write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    save_bars(report.bars, output / "bars.png", title)
    save_sweep(report.sweep, output / "sweep.png", title)
