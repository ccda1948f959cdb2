"""BatchNorm whose running statistics are updated after the pass.

However a batch is fed, each micro-batch is normalised by its own mean and variance. What BatchNorm
keeps for evaluation is another matter: by itself it moves `running_mean` and `running_var` once per
micro-batch, each time towards the statistics of a few rows. `BatchNorms` collects these statistics
instead, and at the end of the pass they are used in one of two ways:

- `move`: once, towards the statistics of all rows, as in torchgpipe's DeferredBatchNorm. They are
  combined from those of all micro-batches at once, in double precision (see Chan, Golub and LeVeque
  1979).
- `replay`: once per micro-batch, in order, with the arithmetic and so the bits of PyTorch's kernel.
  This is for replicas with a copy of the module each, none of which sees all micro-batches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.hooks import RemovableHandle

from penstock.capture.watching import is_compiled
from penstock.errors import InputError
from penstock.torch_internals import BatchNorm, NormBase, without_subclass_functions

BatchNormMode = Literal["microbatch", "deferred"]
"""When running statistics are updated: with every micro-batch, or with the batch that they make."""

_MODES = ("microbatch", "deferred")
_RUNNING = ("running_mean", "running_var", "num_batches_tracked")


class Statistics(NamedTuple):
    """Of some rows.

    Attributes:
        number: how many values of each channel.
        mean: (channels,)
        variance: (channels,); unbiased, as BatchNorm keeps it.
        dtype: of the rows, in which kernels choose the dtype of their sums.
    """

    number: float
    mean: torch.Tensor
    variance: torch.Tensor
    dtype: torch.dtype = torch.float32


Seen = Mapping[BatchNorm, Mapping[int, Sequence[Statistics]]]
"""What BatchNorms have seen: for each, by micro-batch, the statistics of its calls in order."""


class _Lent(NamedTuple):
    """What a module had before a forward that is watched, and what it is called with."""

    number: int
    dtype: torch.dtype
    momentum: float | None
    buffers: dict[str, torch.Tensor | None]


class _Watched(torch.Tensor):
    """A buffer that only `batch_norm` in training may use: its values are not those to be read."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called with every function of PyTorch that gets one.

        Raises:
            InputError: it would read or change the values.
        """
        kwargs = kwargs or {}
        if func in (F.batch_norm, torch.batch_norm):
            may = kwargs.get("training", args[5] if len(args) > 5 else False)
        else:
            may = func in _METADATA
        if not may:
            raise InputError(
                "a forward or a hook reads or changes the running statistics of a BatchNorm in "
                "training, which replicas with a model each only update at the end of a pass. Use "
                'workers="threads", or replicas=1'
            )
        with without_subclass_functions():
            return func(*args, **kwargs)

    def plain(self) -> torch.Tensor:
        """The buffer as a plain tensor, in the same memory."""
        with without_subclass_functions():
            return self.as_subclass(torch.Tensor)


_METADATA = {
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel),
    *(getattr(torch.Tensor, n).__get__ for n in ("shape", "dtype", "device", "ndim", "is_cuda")),
}


class Current(threading.local):
    """Of one thread.

    Attributes:
        microbatch: whose forward runs; `None` between two, and where one is run again.
    """

    microbatch: int | None = None


class BatchNorms:
    """The BatchNorm modules of a stage. They are only watched between `begin` and `fold`.

    While one runs, it has other buffers for its running statistics, and a momentum of 1: it leaves
    there what it has computed anyway. Where a backward runs a forward again, whether by Penstock or
    by a `torch.utils.checkpoint` of the model's own, that is forgotten.

    Several threads may run forwards, if no two of them run the same module at once.

    Attributes:
        current: what this thread runs.
        replayed: whether the statistics are for `replay`. Then nothing but `batch_norm` may use the
            buffers during a pass.
    """

    def __init__(self) -> None:
        self.current = Current()
        self.replayed = False
        self._modules: dict[BatchNorm, None] = {}
        self._handles: dict[BatchNorm, list[RemovableHandle]] = {}
        self._lent: dict[BatchNorm, _Lent] = {}
        self._hidden: dict[BatchNorm, dict[str, torch.Tensor]] = {}
        self._seen: dict[BatchNorm, dict[int, list[Statistics]]] = {}

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Watch those of these modules that are BatchNorms, too."""
        self._modules |= {m: None for m in modules if isinstance(m, BatchNorm)}

    def __iter__(self) -> Iterator[BatchNorm]:
        return iter(self._modules)

    def are_training(self) -> bool:
        """Whether any of them would collect statistics in a forward."""
        return any(module.training for module in self._modules)

    @contextmanager
    def during_a_pass(self) -> Iterator[None]:
        """A pass of one device: watch, and move the running statistics at its end."""
        self.begin()
        try:
            yield
            self.fold()
        finally:
            self.clear()

    @contextmanager
    def during(self, microbatch: int) -> Iterator[None]:
        """While open, what is watched belongs to this micro-batch."""
        self.current.microbatch = microbatch
        try:
            yield
        finally:
            self.current.microbatch = None

    def begin(self) -> None:
        """Install the hooks that collect statistics during a pass, where there are none yet."""
        for module in self._modules.keys() - self._handles.keys():
            before = module.register_forward_pre_hook(self._before, with_kwargs=True)
            after = module.register_forward_hook(self._after, prepend=True, always_call=True)
            self._handles[module] = [before, after]
            if self.replayed and module.training:
                self._hidden[module] = own = {
                    name: buffer
                    for name in _RUNNING
                    if (buffer := module._buffers.get(name)) is not None
                }
                module._buffers |= {k: buffer.as_subclass(_Watched) for k, buffer in own.items()}

    def fold(self) -> None:
        """The pass is over: move the running statistics."""
        if seen := self._seen:
            self.clear()
            move(seen)

    def take(self, microbatches: range) -> dict[BatchNorm, dict[int, list[Statistics]]]:
        """What was seen of these, whose pass is over, while others may be under way."""
        mine = {
            module: {number: found.pop(number) for number in microbatches if number in found}
            for module, found in self._seen.items()
        }
        return {module: found for module, found in mine.items() if found}

    def clear(self) -> None:
        """Forget the pass, and leave the modules as they were."""
        for handle in chain.from_iterable(self._handles.values()):
            handle.remove()
        for module in list(self._lent):
            self._give_back(module)
        for module, buffers in self._hidden.items():
            module._buffers |= buffers
        self._hidden = {}
        self._handles, self._seen, self.current.microbatch = {}, {}, None

    def _before(self, module: BatchNorm, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Called with the arguments of a forward: lend the module other buffers."""
        if module not in self._modules:  # it stands for one of them where a forward runs again
            return
        buffers = {name: module._buffers.get(name) for name in _RUNNING}
        own = {**buffers, **self._hidden.get(module, {})}
        mean, variance = own["running_mean"], own["running_var"]
        if not module.training or mean is None or variance is None:
            return
        values = args[0] if args else kwargs["input"]
        count = values.numel() // max(1, values.shape[1])
        if self.replayed:
            self._check_replay(module, mean.dtype, values)
        self._lent[module] = _Lent(count, values.dtype, module.momentum, buffers)
        fresh = [torch.zeros_like(mean), torch.zeros_like(variance)]
        if self.replayed:
            fresh = [buffer.as_subclass(_Watched) for buffer in fresh]
        module._buffers.update(zip(_RUNNING, [*fresh, None], strict=True))
        module.momentum = 1.0

    def _after(self, module: BatchNorm, args: object, result: object) -> None:
        """Called when the forward is over: note what it has left there."""
        if module not in self._lent:
            return
        mean, variance = (
            buffer.plain() if isinstance(buffer := module._buffers[name], _Watched) else buffer
            for name in _RUNNING[:2]
        )
        number = self.current.microbatch
        if number is not None and mean is not None and variance is not None:
            lent = self._lent[module]
            statistics = Statistics(lent.number, mean, variance, lent.dtype)
            self._seen.setdefault(module, {}).setdefault(number, []).append(statistics)
        self._give_back(module)

    def _give_back(self, module: BatchNorm) -> None:
        *_, module.momentum, buffers = self._lent.pop(module)
        module._buffers.update(buffers)

    def _check_replay(self, module: BatchNorm, mean: torch.dtype, values: torch.Tensor) -> None:
        """Raise if what this forward does to the running statistics cannot be done again later.

        Raises:
            InputError: it runs in a backward, or the kernel for such inputs computes otherwise.
        """
        if self.current.microbatch is None:
            raise InputError(
                f"a {module} runs again in a backward, as under torch.utils.checkpoint, and "
                "updates its running statistics there once more, in an order that replicas with a "
                'model each do not see. Use batchnorm="deferred", workers="threads", or replicas=1'
            )
        dtype = values.dtype
        if not _is_replayed_exactly(values.device.type, dtype, mean, values.dim(), _layout(values)):
            raise InputError(
                f"a {module} gets {_layout(values)} inputs of {dtype} with statistics of {mean} on "
                f"{values.device.type}; how PyTorch updates running statistics there cannot be "
                "repeated bit for bit on other replicas. Pass contiguous float32 inputs, or use "
                'batchnorm="deferred", workers="threads", or replicas=1'
            )


@torch.no_grad()
def move(seen: Seen) -> None:
    """Move the running statistics of modules towards those that were seen, by micro-batch.

    A module that a forward calls several times moves them as often, as it would for the whole
    batch: each time towards the statistics of the same call of all micro-batches.
    """
    for module, found in seen.items():
        for call in range(max(map(len, found.values()))):
            _move(module, combined([s[call] for _, s in sorted(found.items()) if call < len(s)]))


def combined(parts: Sequence[Statistics]) -> Statistics:
    """The statistics of all rows, from those of some each; in double precision."""
    means = torch.stack([part.mean for part in parts]).double()
    variances = torch.stack([part.variance for part in parts]).double()
    counts = torch.tensor([[part.number] for part in parts], dtype=torch.double).to(means.device)
    total = float(sum(part.number for part in parts))
    mean = (counts * means).sum(0) / total
    squares = (counts - 1) * variances + counts * (means - mean).square()
    return Statistics(total, mean, squares.sum(0) / (total - 1))


def _move(module: BatchNorm, statistics: Statistics) -> None:
    """What `_BatchNorm.forward` does with the statistics of its input; in double precision."""
    share = _next_share(module)
    for buffer, found in zip(_running(module), statistics[1:3], strict=True):
        buffer.copy_(share * found + (1 - share) * buffer.double())


@torch.no_grad()
def replay(seen: Seen) -> None:
    """Update running statistics as the modules' own forwards do, micro-batch after micro-batch."""
    for module, found in seen.items():
        for statistics in chain.from_iterable(calls for _, calls in sorted(found.items())):
            _update(*_running(module), statistics, _next_share(module))


def _next_share(module: BatchNorm) -> float:
    """Count one more batch; how much of it goes into the running statistics."""
    share = 0.0 if module.momentum is None else module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            share = 1.0 / float(module.num_batches_tracked)
    return share


def _running(module: BatchNorm) -> tuple[torch.Tensor, torch.Tensor]:
    assert module.running_mean is not None
    assert module.running_var is not None
    return module.running_mean, module.running_var


def _update(mean: torch.Tensor, variance: torch.Tensor, seen: Statistics, share: float) -> None:
    """What the kernel of `batch_norm` does with the statistics of its input.

    (ATen/native/Normalization.cpp: the mean in the statistics' own precision, the variance in that
    in which the kernel sums.)
    """
    sums = torch.double if seen.dtype in (torch.float, torch.double) else torch.float
    part = torch.tensor(share, dtype=mean.dtype, device=mean.device)
    rest = 1 - part
    mean.copy_(part * seen.mean + rest * mean)
    variance.copy_(part.to(sums) * seen.variance.to(sums) + (rest * variance).to(sums))


def _layout(values: torch.Tensor) -> str:
    """How the input of a BatchNorm lies in memory, as far as its kernels distinguish it."""
    if values.is_contiguous():
        return "contiguous"
    if values.dim() == 4 and values.is_contiguous(memory_format=torch.channels_last):
        return "channels-last"
    return "strided"


@cache
def _is_replayed_exactly(
    device: str, dtype: torch.dtype, statistics: torch.dtype, dims: int, layout: str
) -> bool:
    """Whether `_update` has the bits of this machine's kernel, tried on random numbers."""
    numbers = torch.Generator().manual_seed(0)
    channels, shape = 256, [8, 256, *([3] * (dims - 2))]
    rows = torch.randn(shape, generator=numbers).to(device, dtype)
    if layout == "channels-last":
        rows = rows.contiguous(memory_format=torch.channels_last)
    elif layout == "strided":
        rows = rows.transpose(0, -1).contiguous().transpose(0, -1)
    mean, variance = (
        torch.rand(channels, generator=numbers).to(device, statistics) for _ in range(2)
    )
    seen = Statistics(0, torch.zeros_like(mean), torch.zeros_like(variance), dtype)
    with torch.no_grad(), torch.autocast(device, enabled=False):
        torch.batch_norm(rows, None, None, *seen[1:3], True, 1.0, 1e-5, False)
        for share in (0.1, 0.25, 1 / 3):
            expected = mean.clone(), variance.clone()
            torch.batch_norm(rows, None, None, *expected, True, share, 1e-5, False)
            _update(mean, variance, seen, share)
            if not (torch.equal(mean, expected[0]) and torch.equal(variance, expected[1])):
                return False
    return True


def running_statistics(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """What normalising modules may change, also those that are in evaluation mode for now."""
    norms = [module for module in modules if isinstance(module, NormBase)]
    return [buffer for module in norms for buffer in module.buffers(recurse=False)]


# -- what is possible -------------------------------------------------------------------------


def closed_batchnorms(model: object, mode: str, keep_closed: Iterable[str]) -> Iterable[str]:
    """The modules that a program must not look inside: those, and BatchNorms that are watched.

    Args:
        model: the program's.
        mode: a `BatchNormMode`.
        keep_closed: what the user wants closed.

    Raises:
        InputError: there is no such mode, or a module of the model does not go with it.
    """
    if mode not in _MODES:
        raise InputError(f'batchnorm={mode!r} is unknown; choose "microbatch" or "deferred"')
    if not isinstance(model, nn.Module):  # which is found out later
        return keep_closed
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm):
            raise InputError(
                f"{name!r} is a SyncBatchNorm, which sums statistics over the replicas of data "
                "parallelism; the workers of a pipeline have different stages instead. Use a "
                'plain BatchNorm; with batchnorm="deferred" its running statistics are those of '
                "the whole batch"
            )
    if mode == "microbatch" or isinstance(keep_closed, str):  # a str is rejected later
        return keep_closed
    for name, module in model.named_modules():
        compiled = isinstance(module, torch.jit.ScriptModule) or is_compiled(module)
        if compiled and any(map(_is_norm, module.modules())):
            raise InputError(
                f"{name or 'the model'!r} is compiled, so the BatchNorms in it cannot be "
                'observed; compile only modules without any, or use batchnorm="microbatch"'
            )
    norms = [name for name, m in model.named_modules() if isinstance(m, BatchNorm) and name]
    return [*keep_closed, *norms]  # also one that is called twice, or has modules of its own


def _is_norm(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return "BatchNorm" in str(module.original_name)
    return isinstance(module, BatchNorm)


def check_closed(model: nn.Module, changed: Iterable[str], watched: Collection[nn.Module]) -> None:
    """Raise if a program has looked inside a BatchNorm.

    Args:
        model: the program's.
        changed: the names of the buffers that it changes.
        watched: the modules that it calls.

    Raises:
        InputError: it has, so that nobody can watch it.
    """
    modules = dict(model.named_modules())
    for buffer in changed:
        path = buffer.rpartition(".")[0]
        module = modules.get(path)
        if isinstance(module, BatchNorm) and module not in watched:
            raise InputError(
                f"the program has opened {path!r}, a BatchNorm that has modules or is called "
                "twice, so its statistics cannot be deferred; capture it with "
                f'keep_closed=["{path}"]'
            )
