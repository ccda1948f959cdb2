"""The experiments of the `nn.DataParallel` tutorial, and replicas beside other data parallelism.

C1  how many rows each of 2, 3 and 8 replicas sees of every batch, the uneven last one included
C2  the memory of every process, beside a scheme that gathers on the first device
C3  the step time of 1, 2, … replicas, up to the number of cores
C4  the same training under torchrun, and by `DistributedDataParallel` with as many ranks: their
    times, and their bits
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.nn import functional as F

from penstock.bench.charts import save_bars, save_memory
from penstock.bench.data_parallel_report import DataParallelReport
from penstock.bench.peers.data_parallel import Buckets
from penstock.bench.peers.workload import Build, Data, Loss, Workload
from penstock.bench.record import origin
from penstock.bench.replica_memory import measure_memory
from penstock.bench.replica_sizes import replica_sizes
from penstock.bench.replica_training import train
from penstock.bench.subjects import (
    classifier,
    gpt2_logits,
    labelled,
    language_loss,
    numbers,
    square_mlp,
    tokens,
)
from penstock.bench.turns import AUDITED
from penstock.devices.allocator import keep_freed_memory
from penstock.devices.cores import cores
from penstock.display.figures import require_matplotlib
from penstock.display.terminal import Progress
from penstock.workers.backend import WorkerKind

_INPUTS, _LENGTH, _WIDTH = 256, 64, 1500


@dataclass(frozen=True)
class Trained:
    """A model, and how it is trained.

    Attributes:
        name: its name in tables and figures.
        file: its name in the names of figure files.
        build: makes the model, with the same weights every time.
        data: makes a batch of a given number of rows, and its target.
        loss: a mean over rows.
        rows: rows of a micro-batch where time is measured.
        rows_in_memory: rows of a micro-batch where memory is measured.
    """

    name: str
    file: str
    build: Build
    data: Callable[[int], Any]
    loss: Loss
    rows: int
    rows_in_memory: int

    def workload(self, num_microbatches: int, rows: int) -> Workload:
        """A training step on `num_microbatches` micro-batches of `rows` rows each."""
        data: Data = partial(self.data, rows * num_microbatches)
        return Workload(self.build, data, self.loss, num_microbatches)


def mlp() -> Trained:
    """Three linear layers, 2.3 million weights."""
    return Trained(
        "MLP",
        "mlp",
        partial(classifier, _INPUTS, 1024),
        partial(labelled, _INPUTS),
        F.cross_entropy,
        rows=64,
        rows_in_memory=1024,
    )


def deep_mlp() -> Trained:
    """Six linear layers, 13.5 million weights: gradients are large beside the work."""
    return Trained(
        "deep MLP",
        "deep-mlp",
        partial(square_mlp, 6, _WIDTH),
        partial(numbers, width=_WIDTH),
        F.mse_loss,
        rows=32,
        rows_in_memory=32,
    )


def gpt2() -> Trained:
    """A GPT-2 of `transformers` with four layers, 4.2 million weights."""
    return Trained(
        "GPT-2",
        "gpt2",
        partial(gpt2_logits, 4, 256, _LENGTH),
        partial(tokens, length=_LENGTH),
        language_loss,
        rows=2,
        rows_in_memory=8,
    )


def up_to(most: int) -> tuple[int, ...]:
    """The powers of two below this number, and the number."""
    powers = [1 << k for k in range(most.bit_length())]
    return (*(count for count in powers if count < most), most)


@dataclass(frozen=True)
class DataParallelSettings:
    """What to run.

    Attributes:
        models: the models of C2, C3 and C4.
        sizes: the numbers of replicas in C1.
        kinds: the kinds of workers in C1, C3 and C4; in C2 replicas are processes.
        in_memory: the number of replicas in C2.
        steps: the number of training steps before memory is measured.
        counts: the numbers of replicas in C3, in ascending order; the last is also that of C4.
            Numbers that do not divide that of the micro-batches are left out.
        per_replica: the number of micro-batches of each replica if there are `counts[-1]` replicas.
        buckets: the configurations of `DistributedDataParallel` that are tried.
        tries: the number of measured steps of the fastest of these.
        rounds: the number of measured rounds.
        output: where the figures and `data-parallel.json` go; `None` for nowhere.
    """

    models: tuple[Trained, ...]
    sizes: tuple[int, ...] = (2, 3, 8)
    kinds: tuple[WorkerKind, ...] = ("threads", "processes")
    in_memory: int = 4
    steps: int = 5
    counts: tuple[int, ...] = (1, 2)
    per_replica: int = 2
    buckets: tuple[Buckets, ...] = tuple(
        Buckets(size, view) for size in (1, 5, 25, 100) for view in (True, False)
    )
    tries: int = 5
    rounds: int = 15
    output: Path | None = Path("out/bench")

    @classmethod
    def full(cls, output: Path | None) -> DataParallelSettings:
        """All models: about a quarter of an hour on two cores."""
        return cls((mlp(), deep_mlp(), gpt2()), counts=up_to(max(2, cores())), output=output)

    @classmethod
    def quick(cls, output: Path | None) -> DataParallelSettings:
        """The MLP alone, with threads except in C2: within about two minutes on two cores."""
        return cls(
            (mlp(),),
            kinds=("threads",),
            in_memory=2,
            counts=up_to(max(2, cores())),
            buckets=(Buckets(as_view=True), Buckets(as_view=False)),
            tries=3,
            rounds=9,
            output=output,
        )

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain data."""
        return {
            "models": [model.name for model in self.models],
            "replicas_of_sizes": list(self.sizes),
            "workers": list(self.kinds),
            "replicas_of_memory": self.in_memory,
            "steps_before_memory": self.steps,
            "replicas_of_times": list(self.counts),
            "microbatches_per_replica": self.per_replica,
            "tried": [str(each) for each in self.buckets],
            "steps_of_each_try": self.tries,
            "rounds": self.rounds,
            "rounds_before": AUDITED,
            "threads": "one for each replica, device and rank",
        }


def run_data_parallel(
    settings: DataParallelSettings,
    progress: Progress | None = None,
) -> DataParallelReport:
    """Run all experiments, draw them, and return what was measured.

    Args:
        settings: what to run.
        progress: called with the progress.

    Raises:
        PenstockError: matplotlib is missing; rows were lost or seen twice; or some bit is not that
            of one device.
        OSError: the kernel does not say how much memory processes have: this is not Linux.
        RuntimeError: a peer failed.
    """
    if settings.output is not None:
        require_matplotlib()
        settings.output.mkdir(parents=True, exist_ok=True)
    progress = progress or (lambda *_: None)
    kept = keep_freed_memory()
    sizes = []
    for kind in settings.kinds:
        for replicas in settings.sizes:
            progress(0, 1, f"sizes of {replicas} replicas, {kind}")
            sizes.append(replica_sizes(replicas, kind))
    memory, training = [], []
    for model in settings.models:
        progress(0, 1, f"{model.name}: memory of {settings.in_memory} replicas")
        work = model.workload(settings.in_memory, model.rows_in_memory)
        memory.append(measure_memory(model.name, work, settings.steps))
    for model in settings.models:
        work = model.workload(settings.per_replica * settings.counts[-1], model.rows)
        training.append(
            train(
                model.name,
                work,
                counts=[c for c in settings.counts if work.num_microbatches % c == 0],
                kinds=settings.kinds,
                buckets=settings.buckets,
                rounds=settings.rounds,
                steps=settings.tries,
                progress=progress,
            )
        )
    described = {**settings.to_dict(), "keeps_freed_memory": kept}
    report = DataParallelReport(described, origin(), sizes, memory, training)
    if settings.output is not None:
        _save(report, settings.models, settings.output)
    return report


def _save(report: DataParallelReport, models: Sequence[Trained], output: Path) -> None:
    """The data, and for every model a figure of its memory and one of its times."""
    path = output / "data-parallel.json"
    path.write_text(json.dumps(report.to_dict(), indent=2) + "\n")
    for model, memory, training in zip(models, report.memory, report.training, strict=True):
        title = f"{model.name}: memory of {memory.replicas} workers, beyond that at rest"
        save_memory(memory, output / f"memory-{model.file}.png", title)
        title = f"{model.name}: a step of {training.num_microbatches} micro-batches"
        contestants = [one.contestant for one in training.measured]
        save_bars(contestants, output / f"steps-{model.file}.png", title)
