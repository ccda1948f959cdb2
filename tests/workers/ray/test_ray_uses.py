"""All that a script does with a pipeline, in a Ray cluster as with threads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from tests.support.actors import lent_actors
from tests.support.models import replicated, uniform_plan

HERE = ps.Ray(cpus=1)
_numbers = torch.Generator().manual_seed(1)
X, Y = torch.randn(12, 8, generator=_numbers), torch.randn(12, 4, generator=_numbers)
Found = dict[str, Any]


@pytest.fixture(autouse=True)
def _actors() -> Iterator[None]:
    with lent_actors():
        yield


class Counting(nn.Module):
    """Counts its forwards in an attribute, and replaces a buffer in each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("average", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return x - self.average


def model() -> nn.Module:
    torch.manual_seed(1)
    first = [nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Dropout(0.1)]
    return nn.Sequential(*first, nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))


def make(kind: Any, subject: nn.Module, replicas: int = 1, **options: Any) -> ps.Pipeline:
    program = ps.capture(subject, (X,), keep_closed=options.pop("keep_closed", ()))
    plan = replicated(uniform_plan(program, 2 // replicas, 3), replicas)
    devices = ["cpu"] * 2
    return ps.Pipeline(
        subject, devices=devices, workers=kind, plan=plan, program=program, **options
    )


def alike(use: Callable[[ps.Pipeline], Found], **options: Any) -> None:
    """The use of a pipeline finds the same with both kinds of workers, and leaves the same."""
    found = []
    for kind in ("threads", HERE):
        subject = options.pop("model", None) or model()
        torch.manual_seed(5)
        with make(kind, copy.deepcopy(subject), **options) as pipe:
            own = use(pipe)
            own |= {f"gradient {n}": g.clone() for n, g in pipe.gradients().items()}
            own |= {n: t.clone() for n, t in pipe.state_dict().items()}
        left = pipe.model
        own |= {f"left {n}": t for n, t in left.state_dict().items()}
        own |= {f"left {n}": p.grad for n, p in left.named_parameters() if p.grad is not None}
        found.append(own)
        options["model"] = subject
    ours, theirs = found
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def step(pipe: ps.Pipeline, **options: Any) -> torch.Tensor:
    return pipe.train_step(X, target=Y, loss_fn=F.mse_loss, **options)


def moments(optimizer: torch.optim.Optimizer) -> Found:
    state = optimizer.state_dict()["state"]
    return {f"{name} {k}": value for k, own in state.items() for name, value in own.items()}


def trained(pipe: ps.Pipeline) -> Found:
    """Both styles, with clipping, a schedule, gradients that add up, and an optimizer's state."""
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
    rates = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    found: Found = {}
    for k in range(3):
        loss = F.mse_loss(pipe(X), Y)
        loss.backward()
        found |= {f"loss {k}": loss.detach(), f"norm {k}": pipe.clip_grad_norm_(0.5)}
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
    step(pipe)
    pipe.clip_grad_value_(0.01)
    found |= {f"clipped {n}": g.clone() for n, g in pipe.gradients().items()}
    found["accumulated"] = step(pipe)
    optimizer.step()
    pipe.zero_grad(set_to_none=False)
    found["after zeros"] = step(pipe)
    return found | moments(optimizer)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("replicas", [1, 2])
def test_training(replicas: int) -> None:
    alike(trained, replicas=replicas)


def test_results_and_metrics() -> None:
    def use(pipe: ps.Pipeline) -> Found:
        given = step(pipe, metrics=lambda o, t: (o - t).abs().mean(), outputs=True)
        found: Found = {"loss": given.loss, "outputs": given.outputs}
        found |= {f"metric {k}": each for k, each in enumerate(given.metrics)}
        x = X.clone().requires_grad_()
        pipe(x).square().mean().backward()
        assert x.grad is not None
        found["of the input"] = x.grad
        found["evaluated"] = pipe.eval_step(X, target=Y, loss_fn=F.mse_loss)
        pipe.eval()
        with torch.no_grad():
            found["called"] = pipe(X)
            found |= {f"mapped {k}": y for k, y in enumerate(pipe.map([X, 2 * X, 3 * X]))}
        pipe.train()
        return found

    alike(use)


def test_two_batches_wait_for_their_backwards() -> None:
    def use(pipe: ps.Pipeline) -> Found:
        one, other = pipe(X), pipe(2 * X)
        other.square().mean().backward()
        del one
        third = pipe(3 * X)
        third.square().mean().backward(inputs=[pipe.model[0].weight])  # type: ignore[index]
        return {"other": other.detach(), "third": third.detach()}

    alike(use)


def test_what_the_script_changes_is_followed() -> None:
    """In place, by flags, by attributes, in its settings; and gradients that it gives."""

    def use(pipe: ps.Pipeline) -> Found:
        subject: Any = pipe.model
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        found = {"first": step(pipe)}
        optimizer.step()
        optimizer.zero_grad()
        pipe.fetch()
        with torch.no_grad():
            subject[0].weight.mul_(1.5)
        subject[3].p = 0.5
        subject[4].weight.requires_grad_(False)
        found["changed"] = step(pipe)
        subject[4].weight.requires_grad_(True)
        subject[2].eval()
        subject[6].weight.grad = torch.ones_like(subject[6].weight)
        found["given"] = step(pipe)
        optimizer.step()
        with torch.autocast("cpu", torch.bfloat16):
            found["cast"] = step(pipe)
        pipe.load_state_dict({n: t + 1 for n, t in pipe.state_dict().items()})
        found["loaded"] = step(pipe)
        return found

    alike(use)


def test_loss_scaling() -> None:
    def use(pipe: ps.Pipeline) -> Found:
        optimizer, scaler = pipe.optimizer(torch.optim.SGD, lr=0.1), pipe.scaler(init_scale=16.0)
        found = {"finite": step(pipe, scaler=scaler)}
        scaler.unscale_(optimizer)
        found["norm"] = pipe.clip_grad_norm_(0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        pipe.train_step(X, target=Y * float("inf"), loss_fn=F.mse_loss, scaler=scaler)
        scaler.step(optimizer)  # is left out
        scaler.update()
        assert scaler.get_scale() == 8.0
        pipe.zero_grad()
        return found

    alike(use)


def test_buffers_that_a_forward_replaces() -> None:
    def use(pipe: ps.Pipeline) -> Found:
        return {
            "one": step(pipe),
            "two": step(pipe),
            "evaluated": pipe.eval_step(X, target=Y, loss_fn=F.mse_loss),
        }

    subject = nn.Sequential(nn.Linear(8, 16), Counting(), nn.Linear(16, 16), nn.Linear(16, 4))
    alike(use, model=subject, keep_closed=["1"], merge="rows")


def test_a_loss_that_is_a_module() -> None:
    """Its buffers come back."""

    class Smoothed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(()))

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            found = F.mse_loss(output, target)
            self.mean.mul_(0.9).add_(found.detach(), alpha=0.1)
            return found

    def use(pipe: ps.Pipeline) -> Found:
        loss = Smoothed()
        found = [pipe.train_step(X, target=Y, loss_fn=loss) for _ in range(2)]
        assert loss.mean != 0
        return {"one": found[0], "two": found[1], "mean": loss.mean}

    alike(use)


def test_hooks_of_parameters_travel() -> None:
    subject = model()
    subject[4].weight.register_hook(lambda gradient: 2 * gradient)  # type: ignore[index]
    alike(lambda pipe: {"loss": step(pipe)}, model=subject)


def test_checkpoints(tmp_path: Path) -> None:
    """Workers write their parts; another number of stages, of threads, goes on."""
    torch.manual_seed(5)
    with make(HERE, model()) as pipe:
        optimizer = pipe.optimizer(torch.optim.Adam, lr=0.01)
        for _ in range(2):
            step(pipe)
            optimizer.step()
            optimizer.zero_grad()
        pipe.save(tmp_path / "at two", optimizer=optimizer)
        pipe.save(tmp_path / "again", optimizer=optimizer, background=True).wait()
        losses = [step(pipe)]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(step(pipe))
        expected = moments(optimizer)
    files = sorted(p.name for p in (tmp_path / "at two").glob("model-*"))
    assert len(files) == 2
    for kind, folder in ((HERE, "at two"), ("threads", "again")):
        with make(kind, model()) as pipe:
            optimizer = pipe.optimizer(torch.optim.Adam, lr=0.01)
            ps.load(tmp_path / folder).restore(pipe, optimizer=optimizer)
            assert torch.equal(step(pipe), losses[0])
            optimizer.step()
            optimizer.zero_grad()
            assert torch.equal(step(pipe), losses[1])
            found = moments(optimizer)
            assert all(torch.equal(value, expected[name]) for name, value in found.items())


def test_an_optimizers_state_outlives_the_workers() -> None:
    with make(HERE, model()) as pipe:
        optimizer = pipe.optimizer(torch.optim.Adam)
        step(pipe)
        optimizer.step()
        before = moments(optimizer)
    after = moments(optimizer)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_members_and_what_they_do() -> None:
    with make(HERE, model()) as pipe:
        assert [member.kind for member in pipe.members] == ["actor"] * 2
        assert len({member.node for member in pipe.members}) == 1
        assert all(member.node for member in pipe.members)
        assert len({member.pid for member in pipe.members}) == 2
        with pipe.recording() as timelines:
            step(pipe)
        assert {event.action.stage for event in timelines[0].events} == {0, 1}
        assert [worker.passes for worker in pipe.status().workers] == [1, 1]
        assert pipe.links == ("shared memory",)


def test_why_there_is_no_audit() -> None:
    with make(HERE, model()) as pipe:
        assert "on Ray no process has the current weights" in pipe.audit.why_not


def test_a_resize_goes_on_with_everything() -> None:
    """Gradients that are being accumulated, the optimizer's state, random numbers."""

    def through(kind: Any, sizes: tuple[int, ...]) -> Found:
        torch.manual_seed(5)
        devices = ["cpu"] * 2
        found: Found = {}
        options = {"num_microbatches": 3, "workers": kind, "schedule": "1f1b", "progress": None}
        with ps.Pipeline(model(), (X,), devices=devices, **options) as pipe:
            optimizer = pipe.optimizer(torch.optim.Adam, lr=0.01)
            for size in sizes:
                found[f"{len(found)}"] = step(pipe)
                if size:
                    assert pipe.resize(["cpu"] * size, progress=None)
                    assert len(pipe.members) == size
                found[f"{len(found)}"] = step(pipe)
                optimizer.step()
                optimizer.zero_grad()
            return found | moments(optimizer) | pipe.state_dict()

    ours, theirs = through(HERE, (0, 1, 2)), through("threads", (0, 0, 0))
    assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []
