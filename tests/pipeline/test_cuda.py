"""On GPUs: exact as well, and neither copies nor autograd's device threads block anything."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.comparison.reference import one_device, run_with_threads
from tests.support.models import Case, cases, uniform_plan

pytestmark = pytest.mark.cuda
LAYOUTS = [("cuda:0",), ("cuda:0", "cuda:0"), ("cuda:0", "cuda:0", "cuda:0")]


def moved(values: Any) -> Any:
    if isinstance(values, dict):
        return {name: moved(value) for name, value in values.items()}
    if isinstance(values, tuple):
        return tuple(moved(value) for value in values)
    return values.cuda() if isinstance(values, torch.Tensor) else values


def on_gpu(case: Case) -> Case:
    return Case(
        case.name,
        lambda: case.build().cuda(),
        moved(case.args),
        moved(case.kwargs),
        moved(case.target),
        case.loss_fn,
    )


def assert_same_gradients(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert a.grad is not None, name
        assert torch.equal(a.grad, b.grad.to(a.device)), name


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference must be deterministic itself, and choose cuDNN's kernels as the pipeline."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


@pytest.mark.parametrize("devices", LAYOUTS)
@pytest.mark.parametrize("name", ["gpt2", "vit", "resnet50"])
def test_stages_on_one_gpu_are_exact(name: str, devices: tuple[str, ...]) -> None:
    case = on_gpu(cases()[name])
    with ps.Pipeline(
        case.model(), case.args, case.kwargs, devices=devices, num_microbatches=3, replicas=1
    ) as pipe:
        twin = copy.deepcopy(pipe.model)
        reference = one_device(twin, pipe.program, 3, case.args, case.kwargs)
        loss = pipe.train_step(*case.args, target=case.target, loss_fn=case.loss_fn, **case.kwargs)
        expected = run_with_threads(
            lambda: reference.train_step(0, case.loss_fn, case.target), pipe.threads_per_worker
        )
        assert torch.equal(loss, expected)
        assert_same_gradients(pipe.model, twin)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("devices", LAYOUTS)
def test_backward_from_the_outside_does_not_hang(devices: tuple[str, ...]) -> None:
    """Autograd has one thread per GPU: a node that blocked it would block the workers too."""
    case = on_gpu(cases()["vit"])
    with ps.Pipeline(
        case.model(), case.args, devices=devices, num_microbatches=3, replicas=1
    ) as pipe:
        twin = copy.deepcopy(pipe.model)
        case.loss_fn(pipe(*case.args), case.target).backward()
        reference = one_device(twin, pipe.program, 3, case.args, case.kwargs)
        reference.call_and_backward(0, case.loss_fn, case.target)
        assert_same_gradients(pipe.model, twin)


@pytest.mark.parametrize("devices", [("cpu", "cuda:0"), ("cuda:0", "cpu"), ("cpu", "cuda", "cpu")])
def test_cpu_and_gpu_together(devices: tuple[str, ...]) -> None:
    """Kernels of different devices round differently, so this one is compared with a tolerance."""
    case = cases()["unet"]
    model = case.model()
    program = ps.capture(model, case.args)
    plan = uniform_plan(program, len(devices), 3)  # measured, a CPU would have no weights
    with ps.Pipeline(model, case.args, devices=devices, plan=plan, program=program) as pipe:
        twin = copy.deepcopy(pipe.model).cpu()
        last = torch.device(devices[-1])
        for _ in range(2):
            pipe.train_step(*case.args, target=case.target.to(last), loss_fn=case.loss_fn)
        for _ in range(2):
            for part, target in zip(
                case.args[0].tensor_split(3), case.target.tensor_split(3), strict=True
            ):
                (case.loss_fn(twin(part), target) * (len(part) / len(case.target))).backward()
        assert {p.device.type for p in pipe.parameters()} == {"cpu", "cuda"}
        for ours, theirs in zip(pipe.parameters(), twin.parameters(), strict=True):
            assert ours.grad is not None
            assert torch.allclose(ours.grad.cpu(), theirs.grad, rtol=1e-3, atol=1e-4)


def test_an_error_on_a_gpu_leaves_the_pipeline_usable() -> None:
    case = on_gpu(cases()["gpt2"])
    with ps.Pipeline(
        case.model(),
        case.args,
        case.kwargs,
        devices=["cuda", "cuda"],
        num_microbatches=3,
        replicas=1,
    ) as pipe:
        with pytest.raises(ps.WorkerError, match="in the loss"):
            pipe.train_step(loss_fn=lambda output: output["nothing"], **case.kwargs)
        assert all(p.grad is None for p in pipe.parameters())
        pipe.train_step(target=case.target, loss_fn=case.loss_fn, **case.kwargs)
