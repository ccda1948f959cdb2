"""What a pass takes besides its actions, measured with passes that have hardly any work.

A batch is looked at, split and handed to the workers; they wake up; a loss is computed for every
micro-batch; and what comes back is put together. That does not depend on how the model is cut, and
hardly on the model, but on the machine and on how many workers there are. A step of 20 ms is a
tenth longer by it. In a steady flow of forwards these things are done for one batch while the
workers have others, so there it is the least time from one batch to the next.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache

import torch
from torch import nn

from penstock.audit.auditor import Auditor
from penstock.capture.capturing import CaptureOptions
from penstock.capture.randomness import generators_kept
from penstock.engine.batch import Whole
from penstock.engine.objective import Objective
from penstock.passes import Passes
from penstock.plan.decisions import StagePlan
from penstock.plan.plan import Plan
from penstock.runner import Runner
from penstock.workers.kinds import WorkerOptions

_CPU = "cpu"
_TIMEOUT = 60.0
_WARM_UPS, _PASSES = 3, 11
_FLOWS, _BATCHES = 5, 20
_PAUSE = 0.01  # seconds between two passes; the caches then lack what a pass needs, as in training


def _ones(*shape: int) -> torch.Tensor:
    """Of this device and type, whatever the script's defaults are."""
    return torch.ones(shape, device=_CPU, dtype=torch.float32)


class _Scaled(nn.Module):
    """One call, with one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(_ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows (n, 1), of the same size as those that enter."""
        return x * self.scale


@cache
def pass_overhead(workers: int) -> float:
    """The seconds of a training pass besides its actions, measured once in a process.

    Args:
        workers: threads that take part, each as a replica with one micro-batch.
    """
    with _passes(workers) as passes:
        objective = Objective(None, _mean, "rows", None, None, False)
        inputs = Whole((_ones(workers, 1),), {})
        taken = []
        for _ in range(_WARM_UPS + _PASSES):
            time.sleep(_PAUSE)
            start = time.perf_counter()
            passes.step("train", "a pass without work", inputs, objective)
            taken.append(time.perf_counter() - start)
    return statistics.median(taken[_WARM_UPS:])


@cache
def flow_overhead(workers: int) -> float:
    """The seconds from one batch of `map` to the next without work, measured once in a process.

    Args:
        workers: as of `pass_overhead`.
    """
    with _passes(workers) as passes:
        batches = [(_ones(workers, 1),)] * _BATCHES
        taken = []
        for _ in range(_WARM_UPS + _FLOWS):
            start = time.perf_counter()
            for _ in passes.map(batches, None):
                pass
            taken.append((time.perf_counter() - start) / _BATCHES)
    return statistics.median(taken[_WARM_UPS:])


def _mean(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


@contextmanager
def _passes(workers: int) -> Iterator[Passes]:
    """Passes of so many replicas, in threads; the state of random generators is kept."""
    with generators_kept([torch.device(_CPU)]), ExitStack() as stack:
        model = _Scaled()
        options = CaptureOptions(0, None, ())
        program = options.capture(model, (_ones(workers, 1),), {})
        backend = WorkerOptions("threads", [_CPU] * workers, _TIMEOUT, "system").backend(False)
        stack.callback(backend.close)
        whole = StagePlan(
            worker=0,
            device=_CPU,
            calls=(0, len(program)),
            first=program.labels[0],
            last=program.labels[-1],
            weight_bytes=0,
            input_bytes=0,
            forward_seconds=0.0,
            backward_seconds=0.0,
        )
        plan = Plan(
            fingerprint=program.fingerprint,
            batch_size=workers,
            num_microbatches=workers,
            schedule="1f1b",
            stages=(whole,),
            predicted_step_seconds=_TIMEOUT,
            bound_seconds=_TIMEOUT,
            one_device_seconds=None,
            other_replicas=((_CPU,),) * (workers - 1),
            threads=backend.threads,
        )
        running = backend.start(plan, model, _TIMEOUT)
        stack.callback(running.close)
        runner = Runner(program, plan, running, deferred=False)
        auditor = Auditor(None, program, runner, backend.threads)
        yield Passes(runner, auditor, program, "auto")
