"""Losses of a whole batch: the bits of one device, for any micro-batches, replicas and workers."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from tests.support.models import replicated, uniform_plan
from tests.support.training import assert_same, contrastive, used, used_plainly

KINDS: Any = ["threads", "processes"]
X = torch.randn(11, 6, generator=torch.Generator().manual_seed(1))
Y = torch.randn(11, 4, generator=torch.Generator().manual_seed(2))

pytestmark = [
    pytest.mark.usefixtures("pool"),
    pytest.mark.filterwarnings("error::penstock.errors.RowsWarning"),
]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 4))
    )


def pipeline(model: nn.Module, kind: Any = "threads", **options: Any) -> ps.Pipeline:
    program = ps.capture(model, (X,))
    replicas = options.pop("replicas", 1)
    plan = replicated(uniform_plan(program, 2, 3, options.pop("schedule", "1f1b")), replicas)
    return ps.Pipeline(model, (X,), program=program, plan=plan, workers=kind, **options)


def noisy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return contrastive(output + 0.1 * torch.randn(output.shape), target)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zero-bubble"])
@pytest.mark.parametrize("kind", KINDS)
def test_verified(kind: Any, schedule: str) -> None:
    """With dropout, BatchNorm, a loss that draws, uneven micro-batches and an optimizer."""
    report = ps.verify(
        *(network(), (X,)),
        target=Y,
        loss_fn=ps.whole_batch(noisy),
        devices=["cpu", "cpu"],
        workers=kind,
        num_microbatches=3,
        schedule=schedule,
        optimizer=torch.optim.AdamW,
        replicas=1,
    )
    assert report.ok, report


def test_replicas() -> None:
    found = used("whole", workers="threads", devices=["cpu"] * 4, replicas=2)
    assert_same(found, used_plainly("whole"))


def test_any_number_of_microbatches_sees_the_whole_batch() -> None:
    """The same loss as the model itself gives, though not its bits, as kernels round otherwise."""
    model = network().eval()
    expected = contrastive(model(X), Y)
    with pipeline(model) as pipe:
        found = pipe.eval_step(X, target=Y, loss_fn=ps.whole_batch(contrastive))
        torch.testing.assert_close(found, expected.detach())
        with torch.no_grad():
            assert torch.equal(found, contrastive(pipe(X), Y))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_with_parameters_of_its_own(kind: Any) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return contrastive(self.scale * output, target) + self.scale.square()

    loss_fn = Scaled()
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    twin = copy.deepcopy(model)
    with pipeline(model, kind) as pipe:
        loss = pipe.train_step(X, target=Y, loss_fn=ps.whole_batch(loss_fn))
    ours, loss_fn.scale.grad = loss_fn.scale.grad, None
    parts = [twin(part) for part in X.tensor_split(3)]
    result = torch.cat(parts).detach().requires_grad_()
    expected = loss_fn(result, Y)
    expected.backward()
    assert torch.equal(loss, expected.detach())
    assert loss_fn.scale.grad is not None
    assert ours is not None
    assert torch.equal(ours, loss_fn.scale.grad)


@pytest.mark.parametrize("kind", KINDS)
def test_scaling_and_autocast(kind: Any) -> None:
    model, twin = network(), network()
    with pipeline(model, kind) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        scaler = pipe.scaler(init_scale=8.0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = pipe.train_step(X, target=Y, loss_fn=ps.whole_batch(contrastive), scaler=scaler)
        scaled = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        scaler.step(optimizer)
        scaler.update()
    with pipeline(twin, kind) as pipe, torch.autocast("cpu", torch.bfloat16):
        alone = contrastive(pipe(X), Y)
        with torch.autocast("cpu", enabled=False):
            (alone * 8.0).backward()
    assert torch.equal(loss, alone.detach())
    plain = [p.grad for p in twin.parameters() if p.grad is not None]
    assert all(map(torch.equal, scaled, plain))
    assert not torch.equal(model[0].weight, twin[0].weight)


def test_hooks_of_steps_are_told_the_loss() -> None:
    told: list[dict[str, Any]] = []
    with pipeline(network()) as pipe:
        pipe.on_step(told.append)
        loss = pipe.train_step(X, target=Y, loss_fn=ps.whole_batch(contrastive))
    assert [news["loss"] for news in told] == [float(loss)]


def test_without_gradients() -> None:
    with pipeline(network()) as pipe, torch.no_grad():
        pipe.train_step(X, target=Y, loss_fn=ps.whole_batch(contrastive))
        assert all(p.grad is None for p in pipe.parameters())


def test_no_warning_and_what_the_warning_says() -> None:
    with pipeline(network()) as pipe:
        pipe.train_step(X, target=Y, loss_fn=ps.whole_batch(contrastive))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipe.train_step(X, target=Y, loss_fn=lambda o, t: (o @ t.t()).logsumexp(1).mean())
        assert any("penstock.whole_batch(fn)" in str(each.message) for each in caught)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loss_that_fails_leaves_the_gradients(kind: Any) -> None:
    with pipeline(network(), kind) as pipe:
        pipe.train_step(X, target=Y, loss_fn=ps.whole_batch(contrastive))
        before = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
        with pytest.raises(ZeroDivisionError):
            pipe.train_step(X, target=Y, loss_fn=ps.whole_batch(lambda *_: 1 / 0))
        after = [p.grad for p in pipe.parameters() if p.grad is not None]
        assert all(map(torch.equal, before, after))
        pipe.train_step(X, target=Y, loss_fn=ps.whole_batch(contrastive))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"weight": None}, "weight=None combines the losses of micro-batches"),
        ({"weight": len}, "leave weight= out"),
        ({"outputs": "list"}, "give outputs=True"),
        ({"target": None}, "give target=y"),
        ({"loss_kwargs": {"heat": 1}}, "heat"),
    ],
)
def test_what_has_no_meaning(options: dict[str, Any], words: str) -> None:
    given = {"target": Y, "loss_fn": ps.whole_batch(contrastive)} | options
    with pipeline(network()) as pipe, pytest.raises(ps.InputError, match=words):
        pipe.train_step(X, **given)


@pytest.mark.parametrize("kind", KINDS)
def test_what_forwards_leave_is_that_of_one_micro_batch(kind: Any) -> None:
    """Even what the last stage leaves right before the loss, which others may read."""

    class Leaving(nn.Module):
        balance: Any = 0.0

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.linear(x)
            self.balance = x.square().mean()
            return x

    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Leaving())

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return contrastive(output, target) + model[2].balance

    with pipeline(model, kind) as pipe, pytest.raises(ps.InputError, match="reads 'balance'"):
        pipe.train_step(X, target=Y, loss_fn=ps.whole_batch(loss_fn))


def test_no_scalar() -> None:
    with pipeline(network()) as pipe, pytest.raises(ps.InputError, match="scalar is needed"):
        pipe.train_step(X, loss_fn=ps.whole_batch(lambda output: output.square()))


def test_micro_batches_by_hand() -> None:
    with pipeline(network()) as pipe, pytest.raises(ps.InputError, match="call train_step"):
        pipe.train_microbatches(
            [(X[:4],), (X[4:],)], targets=[Y[:4], Y[4:]], loss_fn=ps.whole_batch(contrastive)
        )


@pytest.mark.parametrize("given", [nn.MSELoss, 3, None])
def test_no_function(given: Any) -> None:
    with pytest.raises(ps.InputError, match=r"give a function of \(output, target\)"):
        ps.whole_batch(given)


def test_it_can_be_called_and_marked_twice() -> None:
    loss_fn = ps.whole_batch(ps.whole_batch(contrastive))
    assert torch.equal(loss_fn(Y, Y), contrastive(Y, Y))
    assert "contrastive" in repr(loss_fn)


def test_memory_that_the_plan_does_not_count() -> None:
    """A schedule that holds two of eight micro-batches, and a limit that fits these only."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    x = torch.randn(2048, 64)
    options: dict[str, Any] = {"devices": ["cpu", "cpu"], "num_microbatches": 8, "replicas": 1}
    with ps.Pipeline(model, (x,), schedule="1f1b", recompute="none", **options) as pipe:
        plan = pipe.plan
        few, all_ = plan.memory_with([2, 1]), plan.memory_with([8, 8])
        assert all_ > few
    limit = (few + all_) // 2
    options |= {"memory_limit": limit, "schedule": "1f1b", "recompute": "none"}
    with ps.Pipeline(model, (x,), **options) as pipe:
        with pytest.raises(ps.InputError, match=r'takes .* memory_limit .*schedule="gpipe"'):
            pipe.train_step(x, loss_fn=ps.whole_batch(lambda output: output.std()))
        pipe.eval_step(x, loss_fn=ps.whole_batch(lambda output: output.std()))


def test_memory_of_replicas_is_that_of_their_shares() -> None:
    """GPipe holds all micro-batches of a replica, so nothing is added to what is planned."""
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "num_microbatches": 5, "replicas": 2}
    with ps.Pipeline(model, (torch.randn(40, 64),), schedule="gpipe", **options) as pipe:
        plan = pipe.plan
        assert plan.largest_share == 3
        planned = max(stage.memory_bytes for stage in plan.stages)
        assert plan.memory_with([plan.largest_share] * len(plan.stages)) == planned
