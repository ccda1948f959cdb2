"""Timing one micro-batch of a program: the whole, and every call on its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn

from penstock.capture import Program, Ref, Sizes
from penstock.capture.lowering import lower
from penstock.capture.meta import is_on_meta
from penstock.capture.randomness import Key
from penstock.cores import use_threads
from penstock.profile.sampling import Sampler
from penstock.profile.shadow import shadow
from penstock.profile.timing import Timing, now, timed_backward

_SECONDS = 1.0  # after which no further pass begins
_MOST_PASSES = 3
_MOST_WARM_UPS, _NO_FASTER = 5, 0.97
_WHOLES = 2  # in each pass


class Team:
    """As many threads as the device is listed, measuring the same thing at the same time."""

    def __init__(self, program: Program, device: torch.device, copies: int, threads: int) -> None:
        self.program = program
        self.threads = threads
        copies = 1 if is_on_meta(program.model) else copies  # made-up weights are large
        self.members = [_member(program, device) for _ in range(copies)]

    def measure(self, leaves: Sequence[Any], sizes: Sizes) -> list[Timing]:
        """The passes of all members over one micro-batch, a second of them or the fewest."""
        results: list[list[Timing]] = [[] for _ in self.members]
        errors: list[BaseException] = []
        pace = _Pace()
        barrier = threading.Barrier(len(self.members), action=pace.next)

        def work(index: int) -> None:
            use_threads(self.threads)
            passes = self.members[index].passes(leaves, sizes)
            try:
                while barrier.wait() >= 0 and pace.goes_on:
                    results[index].append(next(passes))
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                errors.append(error)
                barrier.abort()
            finally:
                passes.close()

        workers = [
            threading.Thread(target=work, args=(i,), daemon=True) for i in range(len(self.members))
        ]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                worker.join()
        except BaseException:  # Ctrl-C: the workers stop after the pass that they are in
            barrier.abort()
            raise
        if errors:
            raise errors[0]
        return [timing for result in results for timing in result]


def _member(program: Program, device: torch.device) -> _Member | Sampler:
    if is_on_meta(program.model):
        return Sampler(program, device)
    return _Member(program, shadow(program.model, device, program.written), device)


class _Pace:
    """Decides for all members whether they make another pass."""

    def __init__(self) -> None:
        self.goes_on = True
        self._passes = 0
        self._start = time.perf_counter()

    def next(self) -> None:
        """Called when all members are ready for it."""
        late = time.perf_counter() - self._start > _SECONDS
        self.goes_on = self._passes < 1 or (self._passes < _MOST_PASSES and not late)
        self._passes += 1


class _Member:
    """Runs the whole program, and its calls one by one, on modules of its own."""

    def __init__(self, program: Program, model: nn.Module, device: torch.device) -> None:
        self.device = device
        self.num_calls = len(program)
        self.inputs = program.cuts.boundary(0)
        outputs = program.cuts.results
        if not model.training:
            model.train()
        everything = range(len(program))
        self.module = lower(model, program.train, everything, self.inputs, outputs, device)
        self.calls = _by_call(self.module, self.num_calls)
        self.last_used = _last_used(self.calls)
        self.mutating = {i for i, c in enumerate(program.train.calls) if c.mutates}

    def passes(self, leaves: Sequence[Any], sizes: Sizes) -> Generator[Timing]:
        """Time the whole, then every call, again and again; results are thrown away."""
        moved = [x.to(self.device) if isinstance(x, torch.Tensor) else x for x in leaves]
        values = [moved[ref.leaf] for ref in self.inputs if isinstance(ref, Ref)]
        with torch.enable_grad():
            wholes = self._settled(values, sizes)
            while True:
                yield Timing(*_Stepper(self, values, sizes).run(), wholes)
                wholes = [self._whole(values, sizes) for _ in range(_WHOLES)]

    def _settled(self, values: Sequence[Any], sizes: Sizes) -> list[tuple[float, float]]:
        """The last passes of those that it takes to become no faster.

        Memory for a larger micro-batch comes from the kernel at first, which is slow, and the
        first gradients are not added to others.
        """
        self._whole(values, sizes)
        wholes = [self._whole(values, sizes)]
        while len(wholes) < _MOST_WARM_UPS:
            wholes.append(self._whole(values, sizes))
            if sum(wholes[-1]) > _NO_FASTER * sum(wholes[-2]):
                break
        return wholes[-_WHOLES:]

    def _whole(self, values: Sequence[Any], sizes: Sizes) -> tuple[float, float]:
        start = now(self.device)
        outputs = self.module(sizes, Key(0, 0, 0), *values)
        return now(self.device) - start, timed_backward(outputs, self.device)


class _Stepper:
    """One pass over the program, call by call, each cut off from the others."""

    def __init__(self, member: _Member, values: Sequence[Any], sizes: Sizes) -> None:
        self.member = member
        self.results: dict[fx.Node, Any] = {}
        placeholders = [n for n in member.module.graph.nodes if n.op == "placeholder"]
        self.results.update(zip(placeholders, [sizes, Key(0, 0, 0), *values], strict=True))

    def run(self) -> tuple[list[float], list[float]]:
        """Forward and backward seconds of every call."""
        forward, backward = [], []
        for index, nodes in enumerate(self.member.calls):
            seconds = self._call(nodes, clone=index in self.member.mutating)
            for done in self.member.last_used[index]:  # memory fresh from the kernel is slow
                self.results.pop(done, None)
            forward.append(seconds[0])
            backward.append(seconds[1])
        return forward, backward

    def _call(self, nodes: Sequence[fx.Node], clone: bool) -> tuple[float, float]:
        own = set(nodes)
        entering = {a for n in nodes for a in n.all_input_nodes if a not in own}
        scope = {node: _severed(self.results[node], clone) for node in entering}
        device = self.member.device
        start = now(device)
        for node in nodes:
            scope[node] = _run(self.member.module, node, scope)
        forward = now(device) - start
        backward = timed_backward([scope[n] for n in nodes], device)
        self.results.update({n: scope[n] for n in nodes})
        if clone:  # later calls read what was changed
            self.results.update({n: scope[n] for n in entering})
        return forward, backward


def _severed(value: Any, clone: bool) -> Any:
    """The value without its history; a copy where the call will change it in place."""
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
        return value
    fresh = value.detach().requires_grad_(value.requires_grad)
    return fresh.clone() if clone else fresh


def _run(module: fx.GraphModule, node: fx.Node, scope: Mapping[fx.Node, Any]) -> Any:
    args = fx.map_arg(node.args, lambda n: scope[n])
    kwargs = fx.map_arg(node.kwargs, lambda n: scope[n])
    if node.op == "get_attr":
        return _lookup(module, str(node.target))
    if node.op == "call_module":
        return _lookup(module, str(node.target))(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def _lookup(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _by_call(module: fx.GraphModule, num_calls: int) -> list[list[fx.Node]]:
    calls: list[list[fx.Node]] = [[] for _ in range(num_calls)]
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "output"):
            calls[min(node.meta["call"], num_calls - 1)].append(node)
    return calls


def _last_used(calls: Sequence[Sequence[fx.Node]]) -> list[list[fx.Node]]:
    """For every call the values that no later call needs."""
    last: dict[fx.Node, int] = {}
    for index, nodes in enumerate(calls):
        for node in nodes:
            last.update(dict.fromkeys((node, *node.all_input_nodes), index))
    done: list[list[fx.Node]] = [[] for _ in calls]
    for node, index in last.items():
        done[index].append(node)
    return done
