"""Programs drawn at random, run on a pipeline and beside it in a plain loop over micro-batches."""

from __future__ import annotations

import hashlib
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import nn

import penstock as ps
from penstock.capture.trees import flatten, map_leaves
from tests.programs.drawing import HEADS, OPTIMIZERS, OUTSIDE, WIDTH, Drawn, Kind, Step, loss_of
from tests.support.delays import slow_stages
from tests.support.models import replicated, uniform_plan, workers_for

SEED = 1234

Verdict = Literal["right", "refused", "untrainable", "wrong", "crash"]
VERDICTS = get_args(Verdict)
NEVER = ("wrong", "crash")


@dataclass(frozen=True)
class Outcome:
    """What has become of a program.

    Attributes:
        verdict: whether it was right to the end, was refused, gave something wrong, or crashed;
            or that plain PyTorch cannot train it either.
        why: the message, or what differs.
        step: in which step.
        stages: into how many it was cut; 0 if it did not come to that.
    """

    verdict: Verdict
    why: str = ""
    step: int = -1
    stages: int = 0


class Plain:
    """One device, and a loop over the micro-batches; nothing of Penstock but its random keys.

    Args:
        model: trained here.
        microbatches: how many at most.
    """

    def __init__(self, model: nn.Module, microbatches: int) -> None:
        self.model, self._most, self._passes = model, microbatches, 0

    def train_step(self, x: torch.Tensor) -> torch.Tensor:
        """The loss; gradients add up."""
        total: Any = 0.0
        for k, part in enumerate(self._parts(x)):
            with _seeded(self.model, self._passes, k):
                result = self.model(part)
            loss = loss_of(result)
            (loss * (len(part) / len(x))).backward()
            total = total + loss.detach() * (len(part) / len(x))
        self._passes += 1
        return total

    def call(self, x: torch.Tensor, merge: Callable[[list[Any]], Any]) -> Any:
        """The result; if they are enabled, gradients of its loss add up by micro-batch."""
        found, cut, wants = [], [], torch.is_grad_enabled()
        for k, part in enumerate(self._parts(x)):
            with _seeded(self.model, self._passes, k):
                found.append(self.model(part))
            cut.append(map_leaves(_cut_off, found[-1]))
        result = merge(cut)
        if wants:
            leaves = [_differentiable(tree) for tree in cut]
            every = [v for part in leaves for v in part]
            given = torch.autograd.grad(loss_of(result), every, allow_unused=True)
            passed = dict(zip(map(id, every), given, strict=True))
            for whole, part in zip(found, leaves, strict=True):
                back = [passed[id(v)] for v in part]
                pairs = zip(_differentiable(whole), back, strict=True)
                used = [(w, g) for w, g in pairs if g is not None]
                torch.autograd.backward([w for w, _ in used], [g for _, g in used])
            self._passes += self.model.training
        return result

    def _parts(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.tensor_split(min(self._most, len(x)))


def _cut_off(leaf: Any) -> Any:
    """A tensor without its history, which gathers a gradient if it had one."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)


def _differentiable(tree: Any) -> list[torch.Tensor]:
    leaves = (v for v in flatten(tree)[0] if isinstance(v, torch.Tensor))
    return [v for v in leaves if v.requires_grad]


_MASK = (1 << 64) - 1


def _seed(step: int, microbatch: int, label: str) -> int:
    """The seed of a call, as docs/design.md describes it: splitmix64 of four numbers."""
    call = int.from_bytes(hashlib.blake2b(f"{label} 1".encode(), digest_size=8).digest(), "little")
    state = 0
    for part in (SEED, step, microbatch, call):
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state


@contextmanager
def _seeded(model: nn.Module, step: int, microbatch: int) -> Iterator[None]:
    """Dropout draws what it draws in the pipeline; the generator is put back."""

    def before(label: str) -> Callable[..., None]:
        return lambda *_: torch.manual_seed(_seed(step, microbatch, label)) and None

    with ExitStack() as stack:
        state = torch.get_rng_state()
        stack.callback(torch.set_rng_state, state)
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout):
                stack.callback(module.register_forward_pre_hook(before(name)).remove)
        yield


def outcome(program: Drawn, device: str = "cpu", **options: Any) -> Outcome:
    """Run a program on a pipeline and in a plain loop, and compare all bits.

    Args:
        program: which one.
        device: that stands for all there are.
        **options: of the pipeline.
    """
    threads = torch.get_num_threads()
    OUTSIDE["gain"] = 1.0
    try:
        return _outcome(program, device, options)
    finally:
        torch.set_num_threads(threads)
        OUTSIDE["gain"] = 1.0


def _outcome(program: Drawn, device: str, options: dict[str, Any]) -> Outcome:
    ours, theirs = program.model().to(device), program.model().to(device)
    rows = max(11, *(step.rows for step in program.steps))
    x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(program.number))
    x = x.to(device)
    torch.manual_seed(SEED)
    stages = 0
    with ExitStack() as stack:
        if program.delayed:
            stack.enter_context(slow_stages(program.number))
        try:
            pipe = stack.enter_context(_pipeline(program, ours, x[:8], device, options))
            stages = len(pipe.plan.stages)
            both = Both(program, pipe, theirs)
        except (ps.PenstockError, ValueError) as error:
            return Outcome("refused", f"{type(error).__name__}: {error}", stages=stages)
        except Exception as error:
            return Outcome("crash", f"{type(error).__name__}: {error}", stages=stages)
        torch.set_num_threads(pipe.threads_per_worker)
        for number, step in enumerate(program.steps):
            for block, change, seed in step.changes:
                for model in (ours, theirs):
                    ways = model.blocks[block].changes()
                    if ways:
                        ways[change % len(ways)](model.blocks[block], random.Random(seed))
                        model.to(device)  # what is new in it
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ended = both.step(step, x[: step.rows])
            if ended is not None:
                return Outcome(ended.verdict, ended.why, number, stages)
    return Outcome("right", stages=stages)


def _pipeline(
    program: Drawn, model: nn.Module, x: torch.Tensor, device: str, options: dict[str, Any]
) -> ps.Pipeline:
    captured = ps.capture(model, (x,))
    allowed = [k for k in range(1, len(captured)) if captured.cuts.forbidden(k) is None]
    cuts = sorted({allowed[int(cut * len(allowed))] for cut in program.cuts if allowed})
    stages = len(cuts) + 1
    workers = workers_for(program.schedule, stages) if cuts else None
    schedule = program.schedule if workers else "gpipe"
    plan = uniform_plan(
        captured, workers or stages, program.microbatches, schedule, cuts, program.recompute
    )
    plan = replicated(plan, program.replicas)
    devices = [device] * len(plan.devices)
    return ps.Pipeline(
        model,
        plan=plan,
        program=captured,
        devices=devices,
        workers=program.workers,
        **options,
    )


class Both:
    """A pipeline and the plain loop beside it, each with its optimizer.

    Args:
        program: what is done with them.
        pipe: the one.
        model: the other's.
    """

    def __init__(self, program: Drawn, pipe: ps.Pipeline, model: nn.Module) -> None:
        self._program, self._pipe = program, pipe
        self._plain = Plain(model, program.microbatches)
        self._models = (pipe.model, model)
        self._optimizers: list[Any] = []
        if program.optimizer is not None:
            kind, options = OPTIMIZERS[program.optimizer]
            self._optimizers.append(pipe.optimizer(kind, **options))
            self._optimizers.append(kind(model.parameters(), **options))

    def step(self, step: Step, x: torch.Tensor) -> Outcome | None:
        """Run one step on both; what it ends with, if it does not go on."""
        if step.kind == "evaluation":
            for model in self._models:
                model.eval()
        alone = min(self._program.microbatches, len(x)) == 1
        merge = (lambda parts: parts[0]) if alone else HEADS[self._program.head].merge
        try:
            expected = _expected(step, self._plain, x, merge)
        except (RuntimeError, ValueError) as error:
            return Outcome("untrainable", str(error))
        try:
            with gradients(step.kind):
                found = _run(step, self._pipe, x)
        except ps.PenstockError as error:
            if expected is not UNMERGEABLE or not isinstance(error, ps.InputError):
                return Outcome("refused", f"{type(error).__name__}: {error}")
            found = UNMERGEABLE
        except Exception as error:
            return Outcome("crash", f"{type(error).__name__}: {error}")
        difference = _difference(expected, found) or self._states_differ()
        if not difference:
            self._descend()
            difference = self._states_differ()
        if difference:
            return Outcome("wrong", difference)
        for model in self._models:
            model.zero_grad()
            if step.kind == "evaluation":
                model.train()
        return None

    def _descend(self) -> None:
        """Update the weights, if there are gradients."""
        plain = list(self._plain.model.parameters())
        if self._program.clips and any(p.grad is not None for p in plain):
            self._pipe.clip_grad_norm_(0.3)
            nn.utils.clip_grad_norm_(plain, 0.3)
        for optimizer in self._optimizers:
            optimizer.step()
        for model in self._models if not self._optimizers else ():
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad, alpha=0.05)

    def _states_differ(self) -> str:
        return _states_differ(self._plain.model, self._pipe.model)


UNMERGEABLE = "micro-batches' results that cannot be put together"


def _expected(
    step: Step, plain: Plain, x: torch.Tensor, merge: Callable[[list[Any]], Any] | None
) -> Any:
    """What the plain loop gives."""
    with gradients(step.kind):
        if step.kind == "train_step":
            return plain.train_step(x)
        return UNMERGEABLE if merge is None else plain.call(x, merge)


def gradients(kind: Kind) -> torch.autograd.grad_mode.set_grad_enabled:
    """The grad mode of a step."""
    return torch.set_grad_enabled(kind in ("train_step", "call"))


def _run(step: Step, pipe: ps.Pipeline, x: torch.Tensor) -> Any:
    if step.kind == "train_step":
        return pipe.train_step(x, loss_fn=loss_of)
    result = pipe(x)
    if step.kind == "call":
        loss_of(result).backward()
    return result


def _difference(expected: Any, found: Any) -> str:
    """What differs between two results, or an empty string."""
    ours, theirs = flatten(found), flatten(expected)
    if str(ours[1]) != str(theirs[1]) or len(ours[0]) != len(theirs[0]):
        return "the result has another structure"
    for k, (a, b) in enumerate(zip(ours[0], theirs[0], strict=True)):
        if isinstance(b, torch.Tensor):
            if not same_bits(a, b):
                return f"result {k} differs"
        elif a != b:
            return f"result {k} is {a!r} instead of {b!r}"
    return ""


def _states_differ(plain: nn.Module, ours: nn.Module) -> str:
    pairs = itertools.zip_longest(plain.named_parameters(), ours.named_parameters())
    for (name, b), (_, a) in pairs:
        if (a.grad is None) != (b.grad is None):
            return f"the gradient of {name} is there in one only"
        if a.grad is not None and b.grad is not None and not same_bits(a.grad, b.grad):
            return f"the gradient of {name} differs"
        if not same_bits(a, b):
            return f"{name} differs"
    for (name, b), (_, a) in zip(plain.named_buffers(), ours.named_buffers(), strict=True):
        if not same_bits(a, b):
            return f"buffer {name} differs"
    return ""


def same_bits(a: Any, b: torch.Tensor) -> bool:
    """Whether both hold the same numbers, NaN in the same places included."""
    if not isinstance(a, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not b.is_floating_point():
        return torch.equal(a, b)
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())
