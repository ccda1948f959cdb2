"""Every gradient, parameter and result is bit for bit that of one device. No tolerances here."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import penstock as ps
from penstock.capture.trees import flatten
from penstock.comparison.reference import one_device, run_with_threads
from penstock.schedule import SCHEDULES
from tests.support.models import Case, cases, pipeline, planned

WORKERS = (1, 2, 3, 4)
COUNTS = (1, 2, 3, 5, 8)
EVERYTHING = list(itertools.product(WORKERS, COUNTS, SCHEDULES))
NAMES = list(SCHEDULES)
# Every number of workers meets every count, and every schedule is there twice. Twice as many for
# the larger models; everything for the others, but by default only these.
COVERING, TWICE = (
    [
        (p, m, NAMES[(5 * i + j + k) % len(NAMES)])
        for i, p in enumerate(WORKERS)
        for j, m in enumerate(COUNTS)
        for k in offsets
    ]
    for offsets in ((0,), (0, 4))
)
# By default the larger models are tried with these only.
LARGER = {
    "vit": {point for point in COVERING if point[:2] in {(1, 3), (3, 5), (4, 8)}},
    "resnet50": {next(point for point in COVERING if point[:2] == (2, 3))},
}
RECOMPUTED = list(itertools.product(("all", "boundaries"), ("1f1b", "zero-bubble", "interleaved")))


def selection() -> list[Any]:
    found = []
    for name in cases():
        for p, m, schedule in TWICE if name in LARGER else EVERYTHING:
            default = (p, m, schedule) in LARGER.get(name, COVERING)
            marks = () if default else (pytest.mark.slow,)
            label = f"{name}-{p}-{m}-{schedule}"
            found.append(pytest.param(name, p, m, schedule, marks=marks, id=label))
    return found


def recomputed() -> list[Any]:
    """Every model with everything; by default the larger ones only in pieces, and with halves."""
    found = []
    for name, (recompute, schedule) in itertools.product(cases(), RECOMPUTED):
        default = name != "resnet50" and (
            name not in LARGER or (recompute, schedule) == ("boundaries", "zero-bubble")
        )
        marks = () if default else (pytest.mark.slow,)
        found.append(pytest.param(name, recompute, schedule, marks=marks))
    return found


def replicated() -> list[Any]:
    """Every model in replicas of one stage and of two; by default the larger ones only once."""
    found = []
    shapes = itertools.product(cases(), [(1, 2), (2, 2), (1, 3)], ["threads", "processes"])
    for name, (p, replicas), workers in shapes:
        first = (p, replicas, workers) == (1, 2, "threads")
        default = first or (workers == "threads" and name not in LARGER)
        marks = () if default else (pytest.mark.slow,)
        found.append(pytest.param(name, p, replicas, workers, marks=marks))
    return found


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: p.grad for name, p in model.named_parameters()}


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    different = [
        name
        for name, expected in theirs.items()
        if (ours[name] is None) != (expected is None)
        or (expected is not None and not torch.equal(ours[name], expected))
    ]
    assert not different, f"{len(different)} of {len(theirs)} differ, the first is {different[0]}"


@pytest.mark.parametrize(("name", "p", "m", "schedule"), selection())
def test_training_is_exact(name: str, p: int, m: int, schedule: str) -> None:
    assert_exact(name, planned(name, p, m, schedule))


@pytest.mark.parametrize(("name", "recompute", "schedule"), recomputed())
def test_recomputing_is_exact(name: str, recompute: str, schedule: str) -> None:
    plan = planned(name, 2, 3, schedule, recompute=recompute)
    assert all(stage.recompute for stage in plan.stages)
    if recompute == "boundaries" and schedule == "1f1b":
        assert any(len(stage.recompute) > 1 for stage in plan.stages)
    assert_exact(name, plan)


@pytest.mark.parametrize(("name", "p", "replicas", "workers"), replicated())
def test_replicas_are_exact(name: str, p: int, replicas: int, workers: Any) -> None:
    plan = planned(name, p, 5, "1f1b", recompute="none")
    others = (plan.devices,) * (replicas - 1)
    assert_exact(name, msgspec.structs.replace(plan, other_replicas=others), workers=workers)


def assert_exact(name: str, plan: ps.Plan, **options: Any) -> None:
    """Outputs, losses, gradients and state are those of one device, over a few steps."""
    case, m = cases()[name], plan.num_microbatches
    with pipeline(case, plan, **options) as pipe:
        threads = pipe.threads_per_worker
        twin = copy.deepcopy(pipe.model)
        reference = one_device(twin, pipe.program, m, case.args, case.kwargs)
        ours = pipe.optimizer(torch.optim.SGD, lr=0.01, momentum=0.9)
        theirs = torch.optim.SGD(twin.parameters(), lr=0.01, momentum=0.9)

        output = pipe(*case.args, **case.kwargs)
        case.loss_fn(output, case.target).backward()
        expected = run_with_threads(
            lambda: reference.call_and_backward(0, case.loss_fn, case.target), threads
        )
        for a, b in zip(flatten(output)[0], flatten(expected)[0], strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        assert_same(gradients(pipe.model), gradients(twin))

        for step in (1, 2, 3):
            ours.zero_grad()
            theirs.zero_grad()
            loss = pipe.train_step(
                *case.args, target=case.target, loss_fn=case.loss_fn, **case.kwargs
            )
            alone = run_with_threads(
                lambda step=step: reference.train_step(step, case.loss_fn, case.target), threads
            )
            assert torch.equal(loss, alone)
            assert_same(gradients(pipe.model), gradients(twin))
            ours.step()
            theirs.step()
        assert_same(pipe.state_dict(), twin.state_dict())


def plain_loop(model: nn.Module, case: Case, m: int) -> None:
    """Gradient accumulation as anybody would write it, without Penstock."""
    inputs = case.args[0].tensor_split(m)
    for part, target in zip(inputs, case.target.tensor_split(m), strict=True):
        loss = case.loss_fn(model(part), target) * (len(part) / len(case.target))
        loss.backward()


@pytest.mark.parametrize(
    ("p", "m", "name"),
    [
        (2, 3, "unet"),
        (4, 5, "unet"),
        (2, 3, "resnet50"),
        pytest.param(4, 5, "resnet50", marks=pytest.mark.slow),
    ],
)
def test_equal_to_a_plain_loop(name: str, p: int, m: int) -> None:
    case = cases()[name]
    with pipeline(case, planned(name, p, m)) as pipe:
        twin = copy.deepcopy(pipe.model)
        pipe.train_step(*case.args, target=case.target, loss_fn=case.loss_fn)
        run_with_threads(lambda: plain_loop(twin, case, m), pipe.threads_per_worker)
        assert_same(gradients(pipe.model), gradients(twin))
        assert_same(pipe.state_dict(), twin.state_dict())


@pytest.mark.parametrize("name", list(cases()))
def test_evaluation_is_the_models_own(name: str) -> None:
    case = cases()[name]
    with pipeline(case, planned(name, 3, 3)) as pipe, torch.no_grad():
        pipe.eval()
        output = flatten(pipe(*case.args, **case.kwargs))[0]
        reference = one_device(pipe.model, pipe.program, 3, case.args, case.kwargs)
        expected = flatten(run_with_threads(lambda: reference.call(0), 1))[0]
        assert len(output) == len(expected) > 0
        for a, b in zip(output, expected, strict=True):
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
            assert not getattr(a, "requires_grad", False)


def trained(p: int, schedule: str, seed: int) -> dict[str, torch.Tensor]:
    case = cases()["gpt2"]
    with pipeline(case, planned("gpt2", p, 3, schedule)) as pipe:
        torch.manual_seed(seed)
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=1e-3)
        for _ in range(2):
            optimizer.zero_grad()
            pipe.train_step(target=case.target, loss_fn=case.loss_fn, **case.kwargs)
            optimizer.step()
        return {name: tensor.clone() for name, tensor in pipe.state_dict().items()}


def test_dropout_depends_on_the_seed_and_not_on_the_split() -> None:
    first = trained(2, "1f1b", seed=5)
    assert_same(first, trained(2, "1f1b", seed=5))
    assert_same(first, trained(3, "gpipe", seed=5))
    assert_same(first, trained(2, "zero-bubble-v", seed=5))
    other = trained(2, "1f1b", seed=6)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_a_pipeline_leaves_the_random_stream_alone() -> None:
    case = cases()["gpt2"]
    with pipeline(case, planned("gpt2", 2, 3)) as pipe:
        torch.manual_seed(7)
        state = torch.get_rng_state()
        pipe.train_step(target=case.target, loss_fn=case.loss_fn, **case.kwargs)
        assert torch.equal(torch.get_rng_state(), state)


def test_verify_says_yes() -> None:
    case = cases()["named"]
    report = ps.verify(
        case.model(),
        case.args,
        case.kwargs,
        target=case.target,
        loss_fn=case.loss_fn,
        devices=["cpu"] * 3,
        num_microbatches=4,
        replicas=1,
    )
    assert report.ok, str(report)
    assert "3 stages" in str(report)
    assert "gradients of train_step(): 6 compared, all bitwise equal" in str(report)


class Counting(nn.Module):
    """Gives another result every time: what no split can reproduce."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        type(self).calls += 1
        return x * type(self).calls


def test_verify_says_no() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Counting(), nn.Linear(4, 2))
    report = ps.verify(
        model,
        (torch.randn(6, 4),),
        loss_fn=lambda output: output.square().mean(),
        devices=["cpu", "cpu"],
        num_microbatches=2,
        replicas=1,
    )
    assert not report.ok
    assert "NOT exact" in str(report)
    assert "gradients of train_step(): 4 of 4 differ" in str(report)
