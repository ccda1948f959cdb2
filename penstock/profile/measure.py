"""Measuring what every call of a program costs, forward and backward, on every kind of device."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from penstock.capture import Program, Ref
from penstock.capture.explain import weight_bytes
from penstock.capture.lowering import lower
from penstock.capture.randomness import Key
from penstock.capture.sizes import num_rows, with_rows
from penstock.profile.data import DeviceProfile, Profile
from penstock.profile.shadow import shadow

Progress = Callable[[int, int, str], None]
"""Called with how much is done, of how much, and what is being done."""

_REPEATS = 2  # by every worker of a kind
_SIZES = (1, 2, 4, 8, 16)  # rows; beyond, calls are taken to grow as they did up to there


def profile(
    program: Program,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    devices: Sequence[str],
    threads: int = 1,
    progress: Progress | None = None,
) -> Profile:
    """Measure every call of `program` at several micro-batch sizes.

    Every call is timed on its own to see how the work is divided; the whole forward and backward
    are timed as they will run, and the calls are scaled to add up to that. All CPU workers are
    measured at the same time, because they share memory and caches when they train as well.
    Parameters, buffers, gradients, hooks and random generators of the user's model are untouched.
    Sizes that are too small for the model are left out, and so are plans that would need them.

    Args:
        program: what to measure.
        args: positional arguments of a batch; the captured example if neither is given.
        kwargs: keyword arguments of a batch.
        devices: the devices to plan for, in order; one may be listed several times.
        threads: intra-op threads of each CPU worker.
        progress: called as the measurement goes on.

    Returns:
        seconds per call, on every kind of device.
    """
    leaves = list(program.example)
    if args or kwargs:
        leaves = program.flatten_inputs(args, kwargs or {})
    batch_size = num_rows(leaves, program.batch_dims)
    sizes = _sizes(batch_size, len(devices))
    kinds = dict.fromkeys(devices)
    steps = len(kinds) * len(sizes)
    measured: dict[str, DeviceProfile] = {}
    for number, kind in enumerate(kinds):
        copies = list(devices).count(kind) if torch.device(kind).type == "cpu" else 1
        team = _Team(program, torch.device(kind), copies, threads)
        timings: dict[int, list[_Timing]] = {}
        for k, rows in enumerate(sizes):
            if progress:
                progress(number * len(sizes) + k, steps, f"profiling {kind}, {rows} rows")
            try:
                timings[rows] = team.measure(with_rows(leaves, program.batch_dims, rows), rows)
            except Exception:  # BatchNorm, for one, refuses a single value per channel
                if timings or rows == sizes[-1]:
                    raise
        measured[kind] = _device_profile(kind, timings)
    if progress:
        progress(steps, steps, "profiled")
    return Profile(
        fingerprint=program.fingerprint,
        batch_size=batch_size,
        devices=tuple(devices),
        kinds=measured,
        labels=tuple(call.label for call in program.train.calls),
        weights=weight_bytes(program),
        boundary=_boundary(program),
        forbidden={
            k: reason
            for k in range(1, len(program))
            if (reason := program.cuts.forbidden(k)) is not None
        },
    )


@dataclass(frozen=True)
class _Timing:
    """Seconds of one pass: every call on its own, and the whole."""

    forward: list[float]
    backward: list[float]
    whole_forward: float
    whole_backward: float


def _sizes(batch_size: int, num_devices: int) -> list[int]:
    """The micro-batch sizes to measure; at least two, for the model may refuse one row."""
    largest = max(2, batch_size // max(2, num_devices))
    return [rows for rows in _SIZES if rows <= min(largest, batch_size)]


def _device_profile(kind: str, timings: Mapping[int, Sequence[_Timing]]) -> DeviceProfile:
    forward, backward, spreads = [], [], []
    for passes in timings.values():
        whole_forward = statistics.median(t.whole_forward for t in passes)
        whole_backward = statistics.median(t.whole_backward for t in passes)
        forward.append(_scaled([t.forward for t in passes], whole_forward))
        backward.append(_scaled([t.backward for t in passes], whole_backward))
        wholes = sorted(t.whole_forward + t.whole_backward for t in passes)
        spreads.append((wholes[-1] - wholes[0]) / (whole_forward + whole_backward))
    return DeviceProfile(
        kind=kind,
        rows=tuple(timings),
        forward=tuple(forward),
        backward=tuple(backward),
        spread=statistics.median(spreads),
    )


def _scaled(passes: Sequence[Sequence[float]], total: float) -> tuple[float, ...]:
    medians = [statistics.median(call) for call in zip(*passes, strict=True)]
    scale = total / sum(medians) if sum(medians) > 0 else 1.0
    return tuple(seconds * scale for seconds in medians)


class _Team:
    """As many threads as the device is listed, measuring the same thing at the same time."""

    def __init__(self, program: Program, device: torch.device, copies: int, threads: int) -> None:
        self.program = program
        self.threads = threads
        self.members = [
            _Member(program, shadow(program.model, device), device) for _ in range(copies)
        ]

    def measure(self, leaves: Sequence[Any], rows: int) -> list[_Timing]:
        """The passes of all members over one micro-batch."""
        barrier = threading.Barrier(len(self.members))
        results: list[list[_Timing]] = [[] for _ in self.members]
        errors: list[BaseException] = []

        def work(index: int) -> None:
            torch.set_num_threads(self.threads)
            try:
                passes = self.members[index].passes(leaves, rows)
                for _ in range(_REPEATS):
                    barrier.wait()
                    results[index].append(next(passes))
            except threading.BrokenBarrierError:
                pass
            except BaseException as error:
                errors.append(error)
                barrier.abort()

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
        self.mutating = {i for i, c in enumerate(program.train.calls) if c.mutates}

    def passes(self, leaves: Sequence[Any], rows: int) -> Iterator[_Timing]:
        """Time the whole, then every call, again and again; results are thrown away."""
        moved = [x.to(self.device) if isinstance(x, torch.Tensor) else x for x in leaves]
        values = [moved[ref.leaf] for ref in self.inputs if isinstance(ref, Ref)]
        try:
            with torch.enable_grad():
                self._whole(values, rows)  # warms up, and leaves gradients to add to
                while True:
                    whole = self._whole(values, rows)
                    calls = _Stepper(self, values, rows).run()
                    yield _Timing(*calls, *whole)
        finally:
            for parameter in self.module.parameters():
                parameter.grad = None

    def now(self) -> float:
        """The time in seconds, once the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def _whole(self, values: Sequence[Any], rows: int) -> tuple[float, float]:
        start = self.now()
        outputs = self.module(rows, Key(0, 0, 0), *values)
        middle = self.now()
        roots = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
        grads = [torch.ones_like(o) for o in roots]
        begin = self.now()
        if roots:
            torch.autograd.backward(roots, grads)
        return middle - start, self.now() - begin


class _Stepper:
    """One pass over the program, call by call, each cut off from the others."""

    def __init__(self, member: _Member, values: Sequence[Any], rows: int) -> None:
        self.member = member
        self.results: dict[fx.Node, Any] = {}
        placeholders = [n for n in member.module.graph.nodes if n.op == "placeholder"]
        self.results.update(zip(placeholders, [rows, Key(0, 0, 0), *values], strict=True))

    def run(self) -> tuple[list[float], list[float]]:
        """Forward and backward seconds of every call."""
        forward, backward = [], []
        for index, nodes in enumerate(self.member.calls):
            seconds = self._call(nodes, clone=index in self.member.mutating)
            forward.append(seconds[0])
            backward.append(seconds[1])
        return forward, backward

    def _call(self, nodes: Sequence[fx.Node], clone: bool) -> tuple[float, float]:
        own = set(nodes)
        entering = {a for n in nodes for a in n.all_input_nodes if a not in own}
        scope = {node: _severed(self.results[node], clone) for node in entering}
        start = self.member.now()
        for node in nodes:
            scope[node] = _run(self.member.module, node, scope)
        middle = self.member.now()
        made = [scope[n] for n in nodes]
        roots = [t for t in made if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        roots = list({id(t): t for t in roots}.values())
        grads = [torch.ones_like(t) for t in roots]
        begin = self.member.now()
        if roots:
            torch.autograd.backward(roots, grads)
        end = self.member.now()
        self.results.update({n: scope[n] for n in nodes})
        return middle - start, end - begin


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


def _boundary(program: Program) -> tuple[float, ...]:
    """Bytes per row across every cut, at a batch large enough for constants not to matter."""
    rows = 64
    return tuple(program.cuts.num_bytes(k, rows) / rows for k in range(len(program) + 1))
