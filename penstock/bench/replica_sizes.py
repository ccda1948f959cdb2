"""The experiment of the `nn.DataParallel` tutorial: how many rows each replica sees of a batch.

A model of one linear layer runs a hundred random rows in batches of 30, of which the last is
smaller, and then a batch of one row, which is fewer than there are replicas. The layer notes in its
forward the shape of its input and the thread that runs it. So the report says what really ran, and
that is checked.
"""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.bench.uniform import replicated_plan
from penstock.capture import capture
from penstock.comparison.reference import run_with_threads
from penstock.errors import PenstockError
from penstock.oracle import Oracle
from penstock.pipeline import Pipeline
from penstock.workers.backend import WorkerKind

ROWS, BATCH, FEW = 100, 30, 1
INPUTS, OUTPUTS = 5, 2

Runner = tuple[int, int]
"""The ids of the process and of the thread that run a forward, as the operating system has them."""


@dataclass(frozen=True)
class Seen:
    """One forward of a replica.

    Attributes:
        replica: its number, from 0.
        inputs: the shape of what it was given.
        outputs: the shape of its result.
    """

    replica: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """How one batch was run, and whether that was exact.

    Attributes:
        inputs: its shape.
        outputs: the shape of its result.
        seen: the forwards that replicas ran for it, in the order of the replicas.
        idle: the replicas that ran none.
        exact: whether the result and the gradients have the bits of one device that runs the same
            micro-batches.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    seen: tuple[Seen, ...]
    idle: tuple[int, ...]
    exact: bool

    def check(self, replicas: int) -> None:
        """Raise unless every row was run once, by as many replicas as there can be, and exactly.

        Raises:
            PenstockError: the replicas' rows do not add up to the batch's, or fewer replicas were
                at work than there are rows for, or some bit is not that of one device.
        """
        rows, parts = self.inputs[0], [each.inputs[0] for each in self.seen]
        if sum(parts) != rows:
            raise PenstockError(
                f"{replicas} replicas saw {' + '.join(map(str, parts)) or 'none'} of a batch of "
                f"{rows} rows: {sum(parts)} in all, so rows were lost or run twice"
            )
        working = len({each.replica for each in self.seen})
        if working != min(rows, replicas) or working + len(self.idle) != replicas:
            raise PenstockError(
                f"{working} replicas of {replicas} ran a batch of {rows} rows, and "
                f"{len(self.idle)} were idle: it should have been {min(rows, replicas)} that ran it"
            )
        if not self.exact:
            raise PenstockError(
                f"the result of {replicas} replicas for a batch of {rows} rows, or its gradients, "
                "do not have the bits of one device that runs the same micro-batches"
            )


@dataclass(frozen=True)
class Sizes:
    """How all batches were run, with one number of replicas.

    Attributes:
        replicas: how many.
        workers: `"threads"` or `"processes"`.
        batches: in the order in which they were run.
    """

    replicas: int
    workers: str
    batches: tuple[Batch, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return asdict(self)

    def lines(self) -> Iterator[str]:
        """The same as text, as the tutorial prints it."""
        yield f"{self.replicas} replicas, workers={self.workers}:"
        for batch in self.batches:
            for each in batch.seen:
                yield (
                    f"  In replica {each.replica}: input size {list(each.inputs)}, "
                    f"output size {list(each.outputs)}"
                )
            idle = f"; idle: {', '.join(map(str, batch.idle))}" if batch.idle else ""
            bits = "the bits of one device" if batch.exact else "NOT the bits of one device"
            yield (
                f"Outside: input size {list(batch.inputs)}, output size {list(batch.outputs)}: "
                f"{bits}{idle}"
            )


class NotedLinear(nn.Linear):
    """A linear layer that notes in a file the shapes of every forward, and who runs it.

    The notes are not kept in attributes: these would be state of the model, for which replicas have
    to take turns.

    Args:
        inputs: the number of input features.
        outputs: the number of output features.
        notes: the path of the file, to which several processes append lines.
    """

    def __init__(self, inputs: int, outputs: int, notes: str) -> None:
        super().__init__(inputs, outputs)
        self.notes = notes

    def forward(self, x: Tensor) -> Tensor:
        """Rows (n, inputs) as rows (n, outputs)."""
        result = super().forward(x)
        shapes = [",".join(map(str, tensor.shape)) for tensor in (x, result)]
        with open(self.notes, "a") as file:  # short appends do not interleave
            file.write(f"{os.getpid()} {threading.get_native_id()} {' '.join(shapes)}\n")
        return result


def noted(path: Path) -> list[tuple[Runner, tuple[int, ...], tuple[int, ...]]]:
    """Who ran a forward, and the shapes of its input and result, in the order of the notes."""
    found = []
    for line in path.read_text().splitlines() if path.exists() else ():
        process, thread, *shapes = line.split()
        inputs, outputs = (tuple(map(int, shape.split(","))) for shape in shapes)
        found.append(((int(process), int(thread)), inputs, outputs))
    return found


def replica_sizes(replicas: int, workers: WorkerKind) -> Sizes:
    """Run the tutorial's batches, and one of a single row, on so many CPU workers.

    Args:
        replicas: how many, a worker each.
        workers: threads or processes.

    Raises:
        PenstockError: something is not as it should be; see `Batch.check`.
    """
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(ROWS, INPUTS, generator=generator)
    batches = [*data.split(BATCH), data[:FEW]]
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        model = nn.Sequential(NotedLinear(INPUTS, OUTPUTS, str(notes)))
        program = capture(model, (batches[0],))
        pipe = Pipeline(
            model,
            devices=["cpu"] * replicas,
            program=program,
            plan=replicated_plan(program, replicas),
            workers=workers,
            audit=None,  # it runs forwards of its own
        )
        with pipe:
            watched = _Watched(pipe, notes, replicas)
            found = tuple(watched.run(batch) for batch in batches)
    for batch in found:
        batch.check(replicas)
    return Sizes(replicas, workers, found)


class _Watched:
    """A pipeline whose forwards are looked at, batch by batch.

    Args:
        pipe: of a model with one `NotedLinear`; a replica is one worker.
        notes: the path of the file to which that layer writes.
        replicas: how many.
    """

    def __init__(self, pipe: Pipeline, notes: Path, replicas: int) -> None:
        self._pipe, self._notes, self._replicas = pipe, notes, replicas
        self._known: list[Runner] = []

    def run(self, inputs: Tensor) -> Batch:
        """Run a batch forward and backward, and compare result and gradients with one device's."""
        model = self._pipe.model
        target = torch.zeros(len(inputs), OUTPUTS)
        self._notes.unlink(missing_ok=True)
        output = self._pipe(inputs)
        seen = self._seen()
        F.mse_loss(output, target).backward()
        expected, gradients = self._one_device(inputs, target)
        exact = torch.equal(output, expected) and all(
            own.grad is not None and other is not None and torch.equal(own.grad, other)
            for own, other in zip(model.parameters(), gradients, strict=True)
        )
        model.zero_grad()
        working = {each.replica for each in seen}
        idle = tuple(k for k in range(self._replicas) if k not in working)
        return Batch(tuple(inputs.shape), tuple(output.shape), tuple(seen), idle, exact)

    def _seen(self) -> list[Seen]:
        """The forwards that workers have noted; those of this thread belong to the recording."""
        here = os.getpid(), threading.get_native_id()
        forwards = [note for note in noted(self._notes) if note[0] != here]
        new = {runner for runner, _, _ in forwards} - set(self._known)
        self._known += sorted(new)  # workers are started in the order of their numbers
        found = [Seen(self._known.index(runner), i, o) for runner, i, o in forwards]
        return sorted(found, key=lambda each: each.replica)

    def _one_device(self, inputs: Tensor, target: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        """The result and the gradients of the same micro-batches, run in order on one device."""
        twin = copy.deepcopy(self._pipe.model)
        twin.zero_grad()
        oracle = Oracle(twin, (inputs,), {}, self._replicas)

        def work() -> Tensor:
            result: Tensor = oracle.call_and_backward(0, F.mse_loss, target)
            return result

        result = run_with_threads(work, self._pipe.threads_per_worker)
        return result, list(oracle.gradients.values())
