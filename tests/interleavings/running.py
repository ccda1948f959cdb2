"""A few steps of a pipeline on simulated devices, compared with one device bit by bit."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

import penstock as ps
from penstock.capture import Program
from penstock.checkpoint.saver import Save
from penstock.comparison.reference import one_device
from penstock.devices.kinds import kind_of
from penstock.plan.decisions import StagePlan
from penstock.plan.plan import Plan
from penstock.schedule import placement_of
from penstock.workers.backend import WorkerKind
from tests.interleavings.cases import CASES, MICROBATCHES, ROWS, Case
from tests.support.simulated.apart import ApartLink, sharing
from tests.support.simulated.detector import Detector, without_stacks
from tests.support.simulated.hosts import Hosts
from tests.support.simulated.machine import Machine
from tests.support.simulated.module import install, simulated

_LOSS = nn.functional.mse_loss
_LEARNING_RATE = 0.05
_MAPPED = 4  # batches


@dataclass
class Outcome:
    """What became of one interleaving.

    Attributes:
        wrong: what has other bits than on one device.
        error: what was raised instead.
        races: what the detector has found, if it was asked.
        order: the work of the devices, in the order in which it was done.
    """

    wrong: list[str] = field(default_factory=list)
    error: str = ""
    races: list[str] = field(default_factory=list)
    order: list[tuple[int, str]] = field(default_factory=list)

    @property
    def is_right(self) -> bool:
        """Whether all bits are those of one device."""
        return not self.wrong and not self.error


def interleaving(
    name: str, seed: int, detect: bool = False, is_late: bool = True, stacks: bool = False
) -> Outcome:
    """Run a case in an order that the seed decides.

    Args:
        name: of the case.
        seed: the seed.
        detect: whether the race detector is told.
        is_late: as of `Machine`.
        stacks: whether the detector says in which lines of Python races are.
    """
    case, detector = CASES[name], Detector()
    outcome = Outcome()
    hosts = Hosts(seed)
    machine = Machine(4, seed, is_late, detector if detect else None)
    quiet = nullcontext() if stacks else without_stacks()
    as_linked = _linked(case)
    with simulated(machine), _one_at_a_time(hosts), as_linked, one_core(), quiet:
        try:
            turns = hosts.in_turns(len(case.devices))
            outcome.wrong = differences(run(case, turns), expected(name))
        except Exception as error:
            outcome.error = f"{type(error).__name__}: {error}"
    outcome.races = [str(race) for race in detector.races]
    outcome.order = machine.order
    return outcome


@contextmanager
def one_core() -> Iterator[None]:
    """While open, operators have one intra-op thread, on which bits depend."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def expected(name: str) -> dict[str, Tensor]:
    """What one CPU computes, in plain PyTorch."""
    with one_core():
        return computed(CASES[name])


def computed(case: Case, device: str = "cpu") -> dict[str, Tensor]:
    """What one device computes, in plain PyTorch."""
    model = case.model()
    _move(model, torch.device(device))
    found: dict[str, Tensor] = {}
    program = ps.capture(model, (_on(device, case, 0)[0],))
    torch.manual_seed(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE, momentum=0.9)
    deferred = case.options.get("batchnorm") == "deferred"
    for step in range(3):
        x, y = _on(device, case, step)
        oracle = one_device(model, program, MICROBATCHES, (x,), {}, deferred=deferred)
        if step == 1:
            model.eval()
            with torch.no_grad():
                found["evaluation"] = oracle.merged(oracle.forwards(0))
                _scale(model)
            model.train()
        _begin(case, step, model, optimizer)
        found[f"loss {step}"] = oracle.train_step(step, _LOSS, y)
        found.update(_state(model, step))
        optimizer.step()
        if step == 0:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    found.update(_state(model, 3))
    if case.more:
        model.eval()
        with torch.no_grad():
            for k in range(_MAPPED):
                x, y = _on(device, case, k)
                oracle = one_device(model, program, MICROBATCHES, (x,), {}, deferred=deferred)
                parts = oracle.forwards(0)
                found[f"mapped {k}"] = oracle.merged(parts)
                if k == 0:
                    found["evaluated"] = _weighed(parts, y)
        model.train()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        x, y = _on(device, case, 1)
        oracle = one_device(model, program, MICROBATCHES, (x,), {}, deferred=deferred)
        optimizer.zero_grad()
        found["loss again"] = oracle.train_step(1, _LOSS, y)
        found.update(_state(model, 4))
        optimizer.step()
        found.update(_state(model, 5))
        optimizer.zero_grad()
        oracle.call_and_backward(2, _LOSS, y)
        found.update(_state(model, 6))
    return {name: value.cpu() for name, value in found.items()}


def _on(device: str, case: Case, step: int) -> tuple[Tensor, Tensor]:
    """A batch on a device."""
    x, y = case.batch(step)
    return x.to(device), y.to(device)


def _weighed(parts: Sequence[Tensor], y: Tensor) -> Tensor:
    """The loss of a batch, of the results of its micro-batches."""
    pairs = zip(parts, y.tensor_split(len(parts)), strict=True)
    losses = [_LOSS(part, target) * (len(target) / len(y)) for part, target in pairs]
    return sum(losses[1:], losses[0])


def run(
    case: Case, turns: AbstractContextManager[None], workers: WorkerKind = "threads"
) -> dict[str, Tensor]:
    """Two training steps, an evaluation, weights changed by hand, another training step.

    Args:
        case: what is run, and on which devices.
        turns: open while workers are at work.
        workers: their kind.
    """
    model = case.model()
    found: dict[str, Tensor] = {}
    _move(model, _home(case))
    program = ps.capture(model, (case.batch(0)[0].to(_home(case)),))
    last = torch.device(case.devices[plan_of(case, program).placement[-1]])
    torch.manual_seed(5)
    with (
        TemporaryDirectory() as folder,
        ps.Pipeline(
            model,
            (case.batch(0)[0].to(_home(case)),),
            devices=case.devices,
            plan=plan_of(case, program),
            program=program,
            workers=workers,
            threads_per_worker=1,
            audit=None,
            progress=None,
            **case.options,
        ) as pipe,
        turns,
        _own_streams(case),
    ):
        optimizer = pipe.optimizer(torch.optim.SGD, lr=_LEARNING_RATE, momentum=0.9)
        for step in range(3):
            x, y = _given(case, step, last)
            if step == 1:
                pipe.eval()
                with torch.no_grad():
                    found["evaluation"] = pipe(x)
                    _scale(pipe.model)
                pipe.train()
            _begin(case, step, pipe.model, optimizer)
            with pipe.recording() if case.more else nullcontext([]) as timelines:
                found[f"loss {step}"] = pipe.train_step(x, target=y, loss_fn=_LOSS)
            for value in (x, y) if case.given else ():
                value.fill_(0)
            if any(not timeline.events for timeline in timelines):
                raise RuntimeError("a timeline is empty")
            found.update(_state(pipe.model, step))
            optimizer.step()
            if step == 0 and case.more:
                saved = pipe.save(folder, background=True, optimizer=optimizer)
        found.update(_state(pipe.model, 3))
        if case.more:
            found.update(_more(case, pipe, optimizer, saved, folder))
        return {name: value.cpu() for name, value in found.items()}


def _given(case: Case, step: int, last: torch.device) -> tuple[Tensor, Tensor]:
    """A batch, where the case has it."""
    x, y = case.batch(step)
    if case.given:
        kind = kind_of(_home(case))
        return (kind.pinned(x), kind.pinned(y)) if case.given == "pinned" else (x, y)
    return x.to(_home(case)), y.to(last)


def _more(
    case: Case, pipe: ps.Pipeline, optimizer: Any, saved: Save, folder: str
) -> dict[str, Tensor]:
    """Batches mapped and evaluated; and a step after the one that was saved."""
    found: dict[str, Tensor] = {}
    last = torch.device(case.devices[pipe.plan.placement[-1]])
    pipe.eval()
    batches = (_given(case, k, last)[0] for k in range(_MAPPED))
    for k, result in enumerate(pipe.map(batches)):
        found[f"mapped {k}"] = result
    x, y = _given(case, 0, last)
    found["evaluated"] = pipe.eval_step(x, target=y, loss_fn=_LOSS)
    pipe.train()
    saved.wait()
    ps.load(folder).restore(pipe, optimizer=optimizer)
    x, y = _given(case, 1, last)
    found["loss again"] = pipe.train_step(x, target=y, loss_fn=_LOSS)
    found.update(_state(pipe.model, 4))
    optimizer.step()
    found.update(_state(pipe.model, 5))
    optimizer.zero_grad()
    x, y = _given(case, 1, last)
    _LOSS(pipe(x), y.to(last)).backward()
    return {**found, **_state(pipe.model, 6)}


def _move(model: nn.Module, device: torch.device) -> None:
    """As `model.to(device)`, which makes two of a parameter that is tied, as of any new class."""
    moved: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in moved:
                moved[parameter] = nn.Parameter(parameter.detach().to(device))
            setattr(module, name, moved[parameter])
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


@contextmanager
def _own_streams(case: Case) -> Iterator[None]:
    """While open, the thread works on streams of its own, if the case says so."""
    module = torch.get_device_module(_home(case).type)
    with ExitStack() as stack:
        for name in sorted({*case.devices} - {"cpu"}) if case.own_streams else ():
            stream = module.Stream(name)
            stream.wait_stream(module.current_stream(name))
            stack.enter_context(module.stream(stream))
        yield


def _begin(case: Case, step: int, model: nn.Module, optimizer: Any) -> None:
    """Before a step: no gradients, or half of those of the step before."""
    if not case.adds_up or step == 0:
        optimizer.zero_grad()
        return
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5)


def _scale(model: nn.Module) -> None:
    """Change weights in place, as soon as an evaluation has been asked for."""
    for parameter in model.parameters():
        parameter.mul_(0.9)


def _state(model: nn.Module, step: int) -> dict[str, Tensor]:
    """Copies of gradients, weights and buffers."""
    found = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[f"{name} at {step}"] = tensor.detach().clone()
        if tensor.grad is not None:
            found[f"gradient of {name} at {step}"] = tensor.grad.detach().clone()
    return found


def _home(case: Case) -> torch.device:
    return torch.device(next(name for name in case.devices if name != "cpu"))


def plan_of(case: Case, program: Program, num_microbatches: int = MICROBATCHES) -> Plan:
    """A plan that nobody has measured."""
    edges = (0, *case.cuts, len(program))
    each = len(case.devices) // case.replicas
    placement = placement_of(case.schedule, len(edges) - 1, each)
    stages = tuple(
        StagePlan(
            worker=worker,
            device=case.devices[worker],
            calls=calls,
            first="",
            last="",
            weight_bytes=0,
            input_bytes=0,
            forward_seconds=1e-3,
            backward_seconds=1e-3,
            recompute=(calls,) if case.recompute else (),
        )
        for worker, calls in zip(placement, pairwise(edges), strict=True)
    )
    return Plan(
        fingerprint=program.fingerprint,
        batch_size=ROWS,
        num_microbatches=num_microbatches,
        schedule=case.schedule,
        stages=stages,
        predicted_step_seconds=1e-3,
        other_replicas=tuple(
            case.devices[each * k : each * (k + 1)] for k in range(1, case.replicas)
        ),
        shares=case.shares,
        bound_seconds=1e-3,
        one_device_seconds=None,
    )


def differences(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """The names of what has other bits, or is in one of them only."""
    missing = sorted(found.keys() ^ wanted.keys())
    same = (name for name in wanted if name in found)
    return missing + [name for name in same if not torch.equal(found[name], wanted[name])]


@contextmanager
def _one_at_a_time(hosts: Hosts) -> Iterator[None]:
    """While open, workers wait in queues of these hosts, and nothing is freed at random."""
    gc.disable()
    try:
        with (
            mock.patch(
                "penstock.engine.turns.threading",
                SimpleNamespace(Condition=hosts.condition, get_ident=threading.get_ident),
            ),
            mock.patch("penstock.devices.streams._PAGEABLE", 0),
            mock.patch("penstock.engine.gathered.BUCKET", 100),
            mock.patch("penstock.links.local.SimpleQueue", hosts.queue),
            mock.patch("penstock.workers.thread_pool.SimpleQueue", hosts.queue),
        ):
            yield
    finally:
        gc.enable()


@contextmanager
def _linked(case: Case) -> Iterator[None]:
    """While open, values travel between stages in the way of the case."""
    if not case.apart:
        yield
        return
    with sharing(), mock.patch("penstock.workers.threads.workers.LocalLink", ApartLink):
        yield


def names(count: int) -> Sequence[str]:
    """The case of each of so many seeds."""
    known = list(CASES)
    return [known[seed % len(known)] for seed in range(count)]


if not torch.cuda.is_available():  # whose tests run here as well
    install()
