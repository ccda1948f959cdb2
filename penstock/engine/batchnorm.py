"""BatchNorm whose running statistics are those of the whole batch.

However a batch is fed, each micro-batch is normalised by its own mean and variance. What BatchNorm
keeps for evaluation is another matter: by itself it moves `running_mean` and `running_var` once per
micro-batch, each time towards the statistics of a few rows. Here they wait for the end of the pass
and are moved once, towards those of all rows, as in torchgpipe's DeferredBatchNorm. Those of
the micro-batches are combined pairwise exactly (Chan, Golub and LeVeque 1979).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils.hooks import RemovableHandle

from penstock.capture.watching import is_compiled
from penstock.errors import InputError

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
    """

    number: float
    mean: torch.Tensor
    variance: torch.Tensor


class _Lent(NamedTuple):
    """What a module had before a forward that is watched."""

    number: int
    momentum: float | None
    buffers: dict[str, torch.Tensor | None]


class Current(threading.local):
    """Of one thread.

    Attributes:
        microbatch: whose forward runs; `None` between two, and where one is run again.
    """

    microbatch: int | None = None


class Norms:
    """The BatchNorm modules of a stage. They are only watched between `begin` and `fold`.

    While one runs, it has other buffers for its running statistics, and a momentum of 1: it leaves
    there what it has computed anyway. Where a backward runs a forward again, whether by Penstock or
    by a `torch.utils.checkpoint` of the model's own, that is forgotten.

    Several threads may run forwards, if no two of them run the same module at once.

    Attributes:
        current: what this thread runs.
    """

    def __init__(self) -> None:
        self.current = Current()
        self._modules: dict[_BatchNorm, None] = {}
        self._handles: dict[_BatchNorm, list[RemovableHandle]] = {}
        self._lent: dict[_BatchNorm, _Lent] = {}
        self._seen: dict[_BatchNorm, dict[int, list[Statistics]]] = {}

    def add(self, modules: Iterable[nn.Module]) -> None:
        """Watch those of these modules that are BatchNorms, too."""
        self._modules |= {m: None for m in modules if isinstance(m, _BatchNorm)}

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

    def fold(self) -> None:
        """The pass is over: move the running statistics."""
        if seen := self._seen:
            self.clear()
            move(seen)

    def take(self, microbatches: range) -> dict[_BatchNorm, dict[int, list[Statistics]]]:
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
        self._handles, self._seen, self.current.microbatch = {}, {}, None

    def _before(self, module: _BatchNorm, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Called with the arguments of a forward: lend the module other buffers."""
        buffers = {name: module._buffers.get(name) for name in _RUNNING}
        mean, variance = buffers["running_mean"], buffers["running_var"]
        if not module.training or mean is None or variance is None:
            return
        values = args[0] if args else kwargs["input"]
        count = values.numel() // max(1, values.shape[1])
        self._lent[module] = _Lent(count, module.momentum, buffers)
        fresh = torch.zeros_like(mean), torch.zeros_like(variance), None
        module._buffers.update(zip(_RUNNING, fresh, strict=True))
        module.momentum = 1.0

    def _after(self, module: _BatchNorm, args: object, result: object) -> None:
        """Called when the forward is over: note what it has left there."""
        if module not in self._lent:
            return
        mean, variance = (module._buffers[name] for name in _RUNNING[:2])
        number = self.current.microbatch
        if number is not None and mean is not None and variance is not None:
            statistics = Statistics(self._lent[module].number, mean, variance)
            self._seen.setdefault(module, {}).setdefault(number, []).append(statistics)
        self._give_back(module)

    def _give_back(self, module: _BatchNorm) -> None:
        _, module.momentum, buffers = self._lent.pop(module)
        module._buffers.update(buffers)


@torch.no_grad()
def move(seen: Mapping[_BatchNorm, Mapping[int, Sequence[Statistics]]]) -> None:
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


def _move(module: _BatchNorm, statistics: Statistics) -> None:
    """What `_BatchNorm.forward` does with the statistics of its input."""
    share = 0.0 if module.momentum is None else module.momentum
    if module.num_batches_tracked is not None:
        module.num_batches_tracked.add_(1)
        if module.momentum is None:
            share = 1.0 / float(module.num_batches_tracked)
    running = module.running_mean, module.running_var
    for buffer, found in zip(running, statistics[1:], strict=True):
        assert buffer is not None
        buffer.copy_(share * found + (1 - share) * buffer.double())


def running_statistics(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    """What normalising modules may change, also those that are in evaluation mode for now."""
    norms = [module for module in modules if isinstance(module, _NormBase)]
    return [buffer for module in norms for buffer in module.buffers(recurse=False)]


# -- what is possible -------------------------------------------------------------------------


def closed_norms(model: object, mode: str, keep_closed: Iterable[str]) -> Iterable[str]:
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
    if mode == "microbatch" or isinstance(keep_closed, str):  # so is that
        return keep_closed
    for name, module in model.named_modules():
        compiled = isinstance(module, torch.jit.ScriptModule) or is_compiled(module)
        if compiled and any(map(_is_norm, module.modules())):
            raise InputError(
                f"{name or 'the model'!r} is compiled, so the BatchNorms in it cannot be "
                'observed; compile only modules without any, or use batchnorm="microbatch"'
            )
    norms = [name for name, m in model.named_modules() if isinstance(m, _BatchNorm) and name]
    return [*keep_closed, *norms]  # also one that is called twice, or has modules of its own


def _is_norm(module: nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule):
        return "BatchNorm" in str(module.original_name)
    return isinstance(module, _BatchNorm)


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
        if isinstance(module, _BatchNorm) and module not in watched:
            raise InputError(
                f"the program has opened {path!r}, a BatchNorm that has modules or is called "
                "twice, so its statistics cannot be deferred; capture it with "
                f'keep_closed=["{path}"]'
            )
