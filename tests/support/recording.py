"""CPUs whose work can be recorded, in place of a GPU's: operators are done again, one by one.

As on a GPU, what is recorded is not done, so that the values come with the first replay; a replay
reads and writes the memory of the recording; and Python runs only while something is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from penstock.capture.randomness import undisturbed
from penstock.devices.cpu import Cpu
from penstock.torch_internals import TorchDispatchMode, pytree


class _Noted(TorchDispatchMode):
    """Notes operators, and takes back what they change."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _READ_ON_THE_CPU:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func}")
        for tensor in _changed(func, args, kwargs):
            self.before.append((tensor, tensor.clone()))
        out = func(*args, **kwargs)
        self.calls.append((func, args, kwargs, out))
        return out


_READ_ON_THE_CPU = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.nonzero.default,
)


def _changed(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """What an operator writes; that of BatchNorm does not say so."""
    if func is torch.ops.aten.native_batch_norm.default:
        yield from (value for value in args[3:5] if value is not None)
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield from (v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor))
    for argument in func._schema.arguments:
        value = kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and value is not None:
            yield from (v for v in pytree.tree_leaves(value) if isinstance(v, torch.Tensor))


class _Recording:
    def __init__(self, noted: _Noted, generators: list[int]) -> None:
        self._noted, self._generators = noted, generators
        self.replays = 0

    @torch.no_grad()
    def replay(self, seeds: Sequence[int] = ()) -> None:
        self.replays += 1
        # There is one generator for all. What was recorded has been cast.
        with undisturbed(), torch.autocast("cpu", enabled=False):
            self._do_again(seeds)

    def _do_again(self, seeds: Sequence[int]) -> None:
        state = torch.get_rng_state()
        pairs = zip(self._generators, seeds, strict=True)
        starts = dict(pairs)
        for number, (func, args, kwargs, out) in enumerate(self._noted.calls):
            if number in starts:
                torch.manual_seed(starts[number])
            made = func(*args, **kwargs)
            written = {id(t) for t in _changed(func, args, kwargs)}
            for there, new in zip(pytree.tree_leaves(out), pytree.tree_leaves(made), strict=True):
                is_tensor = isinstance(there, torch.Tensor) and id(there) not in written
                if is_tensor and there.data_ptr() != new.data_ptr():
                    there.data.copy_(new)
        torch.set_rng_state(state)


class Recorder:
    """Records on a CPU. Attributes: the recordings, and how many failed."""

    made: list[_Recording]

    def __init__(self) -> None:
        self.made, self.failed = [], 0

    def record(
        self,
        work: Callable[[Sequence[AbstractContextManager[None]]], Any],
        generators: int = 0,
        after: Any = None,
        alone: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> tuple[Any, _Recording]:
        noted = _Noted()
        starts: list[int] = []

        @contextmanager
        def drawing() -> Iterator[None]:
            starts.append(len(noted.calls))
            yield

        try:
            with alone():
                pass
            with noted:
                made = work([drawing() for _ in range(generators)])
        except RuntimeError:
            self.failed += 1
            raise
        finally:
            for tensor, value in reversed(noted.before):
                with torch.no_grad():
                    tensor.data.copy_(value)
        self.made.append(_Recording(noted, starts))
        return made, self.made[-1]


@contextmanager
def recording_cpus() -> Iterator[Recorder]:
    """While open, work of CPUs can be recorded; gives what records all of it."""
    recorder = Recorder()
    with mock.patch.multiple(Cpu, can_record=True, recorder=lambda *_: recorder):
        yield recorder
