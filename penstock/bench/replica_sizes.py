"""The experiment of the `nn.DataParallel` tutorial: how many rows each replica sees of a batch.

A model of one linear layer, a hundred random rows in batches of 30, and a last batch that is
smaller; and one of fewer rows than there are replicas. The layer itself notes in its forward what
it is given and by whom it is run, so what is reported has been seen, and is then checked.
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
"""The process and the thread that run a forward, by the numbers that the system gives them."""


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
    """What became of a batch.

    Attributes:
        inputs: its shape.
        outputs: the shape of its result.
        seen: the forwards that the replicas ran of it, by replica.
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
        """Raise unless every row was seen once, by as many replicas as there can be.

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
    """What became of all batches, with so many replicas.

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

    What a layer keeps in its attributes is the model's state, which replicas take turns for; a
    file is outside of that.

    Args:
        inputs: features.
        outputs: features.
        notes: the file, which several processes append lines to.
    """

    def __init__(self, inputs: int, outputs: int, notes: str) -> None:
        super().__init__(inputs, outputs)
        self.notes = notes

    def forward(self, x: Tensor) -> Tensor:
        """Rows (n, inputs) as rows (n, outputs)."""
        result = super().forward(x)
        shapes = [",".join(map(str, tensor.shape)) for tensor in (x, result)]
        with open(self.notes, "a") as file:  # one short write at the end of it is never torn apart
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
        notes: where that notes its forwards.
        replicas: how many.
    """

    def __init__(self, pipe: Pipeline, notes: Path, replicas: int) -> None:
        self._pipe, self._notes, self._replicas = pipe, notes, replicas
        self._known: list[Runner] = []

    def run(self, inputs: Tensor) -> Batch:
        """Call the pipeline, go backward, and compare both with one device."""
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
        """What the workers have noted. This thread's own forwards are those of the recording."""
        here = os.getpid(), threading.get_native_id()
        forwards = [note for note in noted(self._notes) if note[0] != here]
        new = {runner for runner, _, _ in forwards} - set(self._known)
        self._known += sorted(new)  # workers are started in the order of their numbers
        found = [Seen(self._known.index(runner), i, o) for runner, i, o in forwards]
        return sorted(found, key=lambda each: each.replica)

    def _one_device(self, inputs: Tensor, target: Tensor) -> tuple[Tensor, Sequence[Tensor | None]]:
        """The result and the gradients of the same micro-batches, one after the other."""
        twin = copy.deepcopy(self._pipe.model)
        twin.zero_grad()
        oracle = Oracle(twin, (inputs,), {}, self._replicas)

        def work() -> Tensor:
            result: Tensor = oracle.call_and_backward(0, F.mse_loss, target)
            return result

        result = run_with_threads(work, self._pipe.threads_per_worker)
        return result, list(oracle.gradients.values())
