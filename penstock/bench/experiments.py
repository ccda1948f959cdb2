"""The experiments of PyTorch's model-parallel tutorial, on any model and any devices.

A1  a toy model on two devices, trained in the plain style
A2  one device, and two devices without pipelining
A3  two devices with pipelined inputs
A4  the sweep of micro-batch sizes, beside the one that Penstock chooses by itself
"""

from __future__ import annotations

import copy
import json
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from penstock.bench.figures import save_bars, save_sweep
from penstock.bench.measure import Contestant, machine, take_turns
from penstock.capture import Program, capture
from penstock.capture.sizes import num_rows
from penstock.capture.trees import flatten, unflatten
from penstock.engine.allocator import keep_freed_memory
from penstock.engine.ends import to_device
from penstock.engine.microbatch import split, split_rows
from penstock.loading import load_model
from penstock.pipeline import Pipeline
from penstock.plan import Plan, plan
from penstock.profile.data import Profile
from penstock.profile.measure import profile
from penstock.verification import mean_square, run_with_threads
from penstock.workers.devices import threads_per_worker

Report = Callable[[int, int, str], None]
LossFn = Callable[..., torch.Tensor]

_RATE = 0.001
_SIZES = (1, 3, 5, 8, 10, 12, 20, 40, 60)  # of 120 rows, as in the tutorial
_QUICK_SIZES = (1, 2, 3, 4, 6, 8, 12)  # of 24


@dataclass(frozen=True)
class BenchSettings:
    """What to run.

    Attributes:
        model: `package.module:callable`; ResNet-50 gets the tutorial's images and labels.
        given: a module with its arguments, for any other model.
        loss_fn: `loss_fn(output)`; the mean of the output's squares by default.
        devices: of the pipelines.
        quick: small batches and few repeats.
        output: where figures and `bench.json` go; `None` for nowhere.
    """

    model: str = "torchvision.models:resnet50"
    given: tuple[nn.Module, tuple[Any, ...], dict[str, Any]] | None = None
    loss_fn: LossFn | None = None
    devices: tuple[str, ...] = ("cpu", "cpu")
    quick: bool = False
    output: Path | None = Path("out/bench")

    @property
    def repeats(self) -> int:
        """Measured rounds."""
        return 3 if self.quick else 10

    @property
    def batches(self) -> int:
        """Batches in each."""
        return 1 if self.quick else 3


@dataclass
class BenchReport:
    """What came out.

    Attributes:
        settings: what was run, in words.
        machine: on what.
        toy: experiment A1.
        bars: experiments A2 and A3.
        sweep: experiment A4; the last one is Penstock's own choice.
        notes: what a reader should know.
    """

    settings: dict[str, Any]
    machine: dict[str, Any]
    toy: dict[str, Any]
    bars: list[Contestant]
    sweep: list[Contestant]
    notes: list[str] = field(default_factory=list)

    @property
    def best(self) -> Contestant:
        """The fastest of the sweep's sizes."""
        return min(self.sweep[:-1], key=lambda c: c.median)

    @property
    def auto_excess(self) -> float:
        """How much slower Penstock's choice is than the best of the sweep, as a share."""
        return self.sweep[-1].median / self.best.median - 1

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain data."""
        return {
            "settings": self.settings,
            "machine": self.machine,
            "A1": self.toy,
            "A2_A3": [c.to_dict() for c in self.bars],
            "A4": [c.to_dict() for c in self.sweep],
            "best_microbatch_size": self.best.facts["microbatch_size"],
            "auto_microbatch_size": self.sweep[-1].facts["microbatch_size"],
            "auto_excess_over_best": self.auto_excess,
            "notes": self.notes,
        }

    def __str__(self) -> str:
        toy = self.toy
        same = "the same bits as" if toy["exact"] else "NOT the same bits as"
        lines = [
            f"A1  toy on {toy['devices']}: {1e3 * toy['seconds']:.2f} ms a step, {same} one device",
            "",
            *_table(self.bars, "A2, A3"),
            "",
            *_table(self.sweep, "A4"),
            "",
            f"best micro-batch size {self.best.facts['microbatch_size']}; Penstock chose "
            f"{self.sweep[-1].facts['microbatch_size']}, which takes {self.auto_excess:+.1%}",
            *self.notes,
            ", ".join(f"{k} {v}" for k, v in self.machine.items() if v),
        ]
        return "\n".join(lines)


def _table(contestants: Sequence[Contestant], title: str) -> list[str]:
    base = contestants[0].median
    rows = [(title, "mean", "std", "median", "speed-up", "of bound", "a step predicted")]
    for c in contestants:
        bound, predicted = c.facts.get("percent_of_bound"), c.facts.get("predicted_seconds")
        rows.append(
            (
                c.name,
                f"{c.mean:.3f} s",
                f"{c.deviation:.3f}",
                f"{c.median:.3f} s",
                f"{base / c.median:.2f}x",
                f"{bound:.0f} %" if bound else "",
                f"{predicted:.3f} s" if predicted else "",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(x.ljust(w) for x, w in zip(r, widths, strict=True)).rstrip() for r in rows]


def run_bench(settings: BenchSettings, progress: Report | None = None) -> BenchReport:
    """Run all experiments, draw them, and return what was measured.

    All contestants of a figure take turns in one run. Every one of them, also the plain model,
    runs in a process that keeps freed memory.

    Raises:
        PenstockError: the model cannot be split over the devices.
    """
    kept = keep_freed_memory()
    task = _Task(settings)
    if progress is not None:
        progress(0, 1, "capturing and profiling")
    task.prepare()
    toy = run_toy(settings.devices[:2])
    with ExitStack() as stack:
        bars, sweep = task.bars(stack), task.sweep(stack)
        tick = _Ticker((settings.repeats + 1) * (len(bars) + len(sweep)), progress)
        take_turns(bars, settings.repeats, settings.batches, tick)
        take_turns(sweep, settings.repeats, settings.batches, tick)
    task.note_bounds([*bars, *sweep])
    notes = ["every contestant ran in a process that keeps freed memory"] if kept else []
    report = BenchReport(task.description(), machine(), toy, bars, sweep, notes)
    if settings.output is not None:
        settings.output.mkdir(parents=True, exist_ok=True)
        save_bars(bars, settings.output / "bars.png", task.title)
        save_sweep(sweep, settings.output / "sweep.png", task.title)
        text = json.dumps(report.to_dict(), indent=2)
        (settings.output / "bench.json").write_text(text + "\n")
    return report


class _Ticker:
    """Counts what has been done, for the progress bar."""

    def __init__(self, total: int, report: Report | None) -> None:
        self._total, self._report, self._done = total, report, 0

    def __call__(self, what: str) -> None:
        if self._report is not None:
            self._report(self._done, self._total, what)
        self._done += 1


class _Task:
    """A model, a batch and a loss; makes the contestants."""

    def __init__(self, settings: BenchSettings) -> None:
        self.settings = settings
        self.target: Any = None
        if settings.given is not None:
            self.model, self.args, self.kwargs = settings.given
            self.loss_fn: LossFn = settings.loss_fn or mean_square
        else:
            self.model = load_model(settings.model)
            rows = 24 if settings.quick else 120
            self.args, self.kwargs = (torch.randn(rows, 3, 128, 128),), {}
            labels = torch.randint(1000, (rows,))
            self.target, self.loss_fn = F.one_hot(labels, 1000).float(), F.mse_loss
        self.model.train()
        self.program: Program
        self.costs: Profile
        self.rows = 0

    @property
    def title(self) -> str:
        """For the figures."""
        name = type(self.model).__name__ if self.settings.given else "ResNet-50, 128x128 images"
        batches = f"{self.settings.batches} x " if self.settings.batches > 1 else ""
        return f"{name}, {batches}{self.rows} rows a time"

    def description(self) -> dict[str, Any]:
        """What was run, as plain data."""
        return {
            "model": self.settings.model,
            "batch_size": self.rows,
            "batches_per_repeat": self.settings.batches,
            "repeats": self.settings.repeats,
            "devices": list(self.settings.devices),
            "threads_per_worker": self.threads,
            "allocator": "keeps freed memory",
        }

    def prepare(self) -> None:
        """Capture and profile, once for all."""
        self.threads = threads_per_worker(self.settings.devices)
        self.program = capture(self.model, self.args, self.kwargs)
        self.rows = num_rows(self.program.example, self.program.batch_dims)
        self.costs = profile(self.program, devices=self.settings.devices, threads=self.threads)

    # -- contestants ------------------------------------------------------------------------

    def bars(self, stack: ExitStack) -> list[Contestant]:
        """One device in several ways, two devices in turn, and pipelines."""
        auto = plan(self.costs)
        pieces = min(6, self.rows)
        name = f"pipelined, pieces of {-(-self.rows // pieces)}"
        cores = self.threads * len(self.settings.devices)
        naive = plan(self.costs, num_microbatches=1, schedule="naive", cuts=self._tutorial_cut())
        return [
            self._plain("one device", 1, self.threads),
            self._plain("one device, micro-batches", auto.num_microbatches, self.threads),
            self._plain("one process, all cores", 1, cores),
            self._pipeline("devices in turn", naive, stack),
            self._pipeline(name, plan(self.costs, num_microbatches=pieces), stack),
            self._pipeline("Penstock", auto, stack),
        ]

    def sweep(self, stack: ExitStack) -> list[Contestant]:
        """A pipeline for every micro-batch size, and the one that Penstock chooses."""
        sizes = [s for s in (_QUICK_SIZES if self.rows < 60 else _SIZES) if s <= self.rows]
        counts = dict.fromkeys(-(-self.rows // size) for size in sizes)
        contestants = []
        for count in counts:
            chosen = plan(self.costs, num_microbatches=count)
            name = f"micro-batches of {chosen.microbatch_size}"
            contestants.append(self._pipeline(name, chosen, stack))
        return [*contestants, self._pipeline("Penstock's choice", plan(self.costs), stack)]

    def _own_program(self) -> Program:
        """The program; on GPUs one of a copy, since every contestant places it differently."""
        if all(torch.device(device).type == "cpu" for device in self.settings.devices):
            return self.program
        return capture(copy.deepcopy(self.model), self.args, self.kwargs)

    def _tutorial_cut(self) -> tuple[int, ...] | None:
        """Before ResNet's `layer3`, if that is what there is to cut, and two devices."""
        starts = [k for k, label in enumerate(self.costs.labels) if label.startswith("layer3")]
        return (starts[0],) if starts and len(self.settings.devices) == 2 else None

    def _pipeline(self, name: str, chosen: Plan, stack: ExitStack) -> Contestant:
        program = self._own_program()
        pipe = Pipeline(program.model, devices=self.settings.devices, program=program, plan=chosen)
        stack.callback(pipe.close)
        optimizer = pipe.optimizer(torch.optim.SGD, lr=_RATE)
        train_seconds: list[float] = []

        def step() -> None:
            optimizer.zero_grad()
            start = time.perf_counter()
            loss = pipe.train_step(
                *self.args, target=self.target, loss_fn=self.loss_fn, **self.kwargs
            )
            loss.item()  # a CUDA step is over when its loss is known
            train_seconds.append(time.perf_counter() - start)
            optimizer.step()

        facts = {
            "train_step_seconds": train_seconds,
            "num_microbatches": chosen.num_microbatches,
            "microbatch_size": chosen.microbatch_size,
            "schedule": chosen.schedule,
            "cuts": list(chosen.cuts),
            "bound_seconds": chosen.bound_seconds,
            "predicted_seconds": chosen.predicted_step_seconds,
        }
        return Contestant(name, step, facts)

    def _plain(self, name: str, count: int, threads: int) -> Contestant:
        device = torch.device(self.settings.devices[0])
        model = self._own_program().model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
        leaves, structure = flatten((self.args, self.kwargs))
        moved = [to_device(leaf, device) for leaf in leaves]
        parts = split(moved, self.program.batch_dims, count)
        batches = [unflatten(structure, part) for part in parts]
        labels = to_device(self.target, device)
        targets = [None] * count if labels is None else labels.tensor_split(count)
        shares = [n / self.rows for n in split_rows(self.rows, count)]

        def step() -> None:
            optimizer.zero_grad()
            for (args, kwargs), target, share in zip(batches, targets, shares, strict=True):
                output = model(*args, **kwargs)
                loss = self.loss_fn(output) if target is None else self.loss_fn(output, target)
                (loss * share).backward()
            loss.item()
            optimizer.step()

        return Contestant(name, partial(run_with_threads, step, threads), {"threads": threads})

    def note_bounds(self, contestants: Sequence[Contestant]) -> None:
        """Add to every pipeline what share of its bound `train_step` reached."""
        for contestant in contestants:
            bound = contestant.facts.get("bound_seconds")
            if bound is not None:
                warm = contestant.facts["train_step_seconds"][self.settings.batches :]
                contestant.facts["percent_of_bound"] = 100 * bound / statistics.median(warm)


def run_toy(devices: Sequence[str], steps: int = 50) -> dict[str, Any]:
    """A1: two linear layers on two devices, in the plain style; labels are moved for the user."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 5))
    twin = copy.deepcopy(model)
    inputs, labels = torch.randn(20, 10), torch.randn(20, 5)

    def train(forward: Callable[..., torch.Tensor], module: nn.Module) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=_RATE)
        for _ in range(steps):
            optimizer.zero_grad()
            output = forward(inputs)
            F.mse_loss(output, labels.to(output.device)).backward()
            optimizer.step()

    with Pipeline(model, (inputs,), devices=devices, num_microbatches=1) as pipe:
        contestant = Contestant("toy", partial(train, pipe, model))
        take_turns([contestant], 1, 1, lambda _: None)
    for _ in range(2):
        run_with_threads(partial(train, twin, twin), pipe.threads_per_worker)
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    return {
        "devices": ", ".join(devices),
        "steps": steps,
        "seconds": contestant.median / steps,
        "exact": all(torch.equal(a.cpu(), b) for a, b in pairs),
    }
