"""The oracle with a pipeline's random numbers, in a thread like a worker's."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import nn

from penstock.capture import Key, Program
from penstock.capture.calls import Ambient, ambient
from penstock.capture.randomness import LOSS, seeding
from penstock.capture.replay import seeded
from penstock.devices.cores import end_idle_threads, use_threads
from penstock.engine.batchnorm import BatchNorms
from penstock.errors import WorkerTimeout
from penstock.interrupts import interrupts_wait
from penstock.oracle import Around, BatchDim, Oracle, without_history

_GRACE = 5.0  # seconds that work which is given up may go on for

T = TypeVar("T")


class Seeds(Around):
    """Gives one device that runs a pipeline's micro-batches the pipeline's random numbers.

    Args:
        program: captured from a copy of the model; says which calls are random.
        model: the model that runs.
        deferred: whether the running statistics of BatchNorms are updated once per batch, as with
            `batchnorm="deferred"`.
    """

    def __init__(self, program: Program, model: nn.Module, deferred: bool = False) -> None:
        self._program = program
        self._model = model
        self._batchnorms = BatchNorms()
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        if deferred:
            self._batchnorms.add(model.modules())

    def batch(self, step: int) -> AbstractContextManager[None]:
        """Updates running statistics of BatchNorms at the end, if these are deferred."""
        return self._batchnorms.during_a_pass()

    @contextmanager
    def forward(self, step: int, microbatch: int) -> Iterator[None]:
        """Seeds every call that draws, if any does."""
        key = Key(torch.initial_seed(), step, microbatch)
        with self._batchnorms.during(microbatch), seeded(self._program, key, self._model):
            yield

    def loss(self, step: int, microbatch: int) -> AbstractContextManager[None]:
        """Seeds the generator for the loss."""
        key = Key(torch.initial_seed(), step, microbatch)
        return seeding(key, LOSS, self._device)


def one_device(
    model: nn.Module,
    program: Program,
    num_microbatches: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    batch_dim: BatchDim = 0,
    deferred: bool = False,
) -> Oracle:
    """One device that runs the micro-batches of a batch, with a pipeline's random numbers.

    Args:
        model: the model, unsplit; gradients add up in its `.grad`.
        program: captured from a copy of it.
        num_microbatches: the number of micro-batches.
        args: positional arguments of the batch.
        kwargs: keyword arguments of the batch.
        batch_dim: the dimension of the rows, as in `Pipeline`.
        deferred: whether the running statistics of BatchNorms are updated once per batch, as with
            `batchnorm="deferred"`.
    """
    around = Seeds(program, model, deferred)
    return Oracle(model, args, kwargs, num_microbatches, batch_dim=batch_dim, around=around)


def copied(model: nn.Module) -> nn.Module:
    """A copy of its own; without gradients, for what torch.jit compiled would pass them on."""
    twin = without_history(model)
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        ours.requires_grad_(theirs.requires_grad)
    return twin


@contextmanager
def deterministic_algorithms() -> Iterator[None]:
    """While open, torch takes kernels that give the same bits in every run, where it has them."""
    before = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* does not have a deterministic implementation")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before, warn_only=warns)


def is_deterministic(devices: Sequence[str], threads: int) -> bool:
    """Whether torch's kernels give the same bits in every run.

    Several threads may add to one entry in whatever order they come, as in the backward of an index
    that has one entry twice.

    Args:
        devices: that run them.
        threads: intra-op threads of each CPU worker.
    """
    alone = threads == 1 and all(torch.device(name).type == "cpu" for name in devices)
    return alone or torch.are_deterministic_algorithms_enabled()


def run_with_threads(function: Callable[[], T], threads: int, timeout: float | None = None) -> T:
    """Run `function` in a thread of its own with this many intra-op threads; its result.

    Args:
        function: what to run, under the caller's modes.
        threads: how many.
        timeout: seconds that it may take.

    Raises:
        WorkerTimeout: it takes longer. The thread ends when the function does.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        use_threads(threads)
        try:
            results.append(function())
        except BaseException as error:
            errors.append(error)

    end_idle_threads(threads)
    modes = ambient()
    thread = threading.Thread(target=lambda: _under(modes, work), daemon=True)
    try:
        with interrupts_wait():  # until it is known that it runs
            thread.start()
        thread.join(timeout)
    except BaseException:  # Ctrl-C: let the thread end first, as it uses the model
        if thread.ident is not None:
            thread.join(_GRACE)
        raise
    if thread.is_alive():
        raise WorkerTimeout(
            f"the model's own forward and backward did not finish on one device within {timeout} s"
        )
    if errors:
        raise errors[0]
    return results[0]


def _under(modes: Ambient, work: Callable[[], None]) -> None:
    casting = modes.autocasting() if modes.casting else nullcontext()  # a model's own is outermost
    with torch.set_grad_enabled(modes.grad), casting:
        work()


def call_loss(loss_fn: Callable[..., torch.Tensor], output: Any, target: Any) -> torch.Tensor:
    """The loss; a function of the output alone if there is no target."""
    return loss_fn(output) if target is None else loss_fn(output, target)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradients of all parameters, by name."""
    return {name: parameter.grad for name, parameter in model.named_parameters()}
