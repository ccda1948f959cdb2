"""BatchNorm with running statistics of the whole batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import penstock as ps
from tests.support.models import UNet, uniform_plan

X, Y = torch.randn(11, 6), torch.randn(11, 6)
IMAGES, MASKS = torch.randn(11, 3, 16, 16) * 2 + 1, torch.randn(11, 1, 16, 16)


pytestmark = pytest.mark.usefixtures("pool")


class Twice(nn.Module):
    """A BatchNorm that every forward calls twice, on different values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(self.norm(x)))


class Composed(nn.BatchNorm1d):
    """A BatchNorm with a module inside, as timm has them, and a forward of its own."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.act = nn.ReLU()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.act(super().forward(input))


def norms(momentum: float | None = 0.1) -> nn.Sequential:
    """BatchNorms at several depths."""
    torch.manual_seed(1)
    inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=momentum), nn.Tanh())
    return nn.Sequential(
        nn.BatchNorm1d(6, momentum=momentum),
        nn.Linear(6, 6),
        inner,
        Twice(),
        Composed(6),
        nn.Linear(6, 6),
    )


def pipeline(model: nn.Module, x: Any = X, **options: Any) -> ps.Pipeline:
    """Deferred, unless it is said otherwise; nothing is measured."""
    p, m = options.pop("p", 2), options.pop("m", 3)
    asked = {k: options.pop(k) for k in ("schedule", "recompute") if k in options}
    closed = [n for n, k in model.named_modules() if isinstance(k, nn.modules.batchnorm._BatchNorm)]
    program = ps.capture(model, (x,), keep_closed=closed)
    plan = uniform_plan(program, p, m, **asked)
    options = {"batchnorm": "deferred", "devices": ["cpu"] * p, **options}
    return ps.Pipeline(model, (x,), program=program, plan=plan, **options)


def buffers_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def trained(model: nn.Module, steps: int = 2, **options: Any) -> dict[str, torch.Tensor]:
    """The model's buffers after some steps."""
    with pipeline(model, **options) as pipe:
        for _ in range(steps):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    return buffers_of(model)


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    for name, buffer in theirs.items():
        assert torch.equal(ours[name], buffer), name


@pytest.mark.parametrize("momentum", [0.1, None])
def test_the_first_norm_is_that_of_the_whole_batch(momentum: float | None) -> None:
    """What enters it does not depend on micro-batches: 4, 4 and 3 rows are as good as 11."""
    model = norms(momentum)
    plain = copy.deepcopy(model[0])
    for _ in range(3):
        plain(X)
    found = trained(model, 3)
    assert int(found["0.num_batches_tracked"]) == 3
    for name in ("running_mean", "running_var"):
        ours, theirs = found[f"0.{name}"], getattr(plain, name)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_every_norm_has_moved_as_for_the_whole_batch() -> None:
    """The statistics of what entered each module, collected beside the pipeline."""
    model = norms()
    fresh = copy.deepcopy(model)
    inputs: dict[nn.Module, list[torch.Tensor]] = {}
    with pipeline(model) as pipe:
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.register_forward_pre_hook(
                    lambda m, args: inputs.setdefault(m, []).append(args[0])
                )
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    assert len(inputs) == 4
    for (name, module), other in zip(model.named_modules(), fresh.modules(), strict=True):
        if not isinstance(module, nn.BatchNorm1d):
            continue
        calls = len(inputs[module]) // 3
        for call in range(calls):
            nn.BatchNorm1d.forward(other, torch.cat(inputs[module][call::calls]))
        assert int(module.num_batches_tracked) == calls, name
        for buffer in ("running_mean", "running_var"):
            ours, theirs = getattr(module, buffer), getattr(other, buffer)
            torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_the_same_bits_for_every_split() -> None:
    expected = trained(norms(), p=2, schedule="gpipe")
    for options in (
        {"p": 2, "schedule": "interleaved"},
        {"p": 3, "schedule": "zero-bubble"},
        {"p": 2, "recompute": "boundaries", "schedule": "gpipe"},
        {"p": 2, "workers": "processes", "recompute": "all"},
    ):
        assert_equal(trained(norms(), **options), expected)


def test_gradients_are_those_of_micro_batches() -> None:
    found = []
    for batchnorm in ("microbatch", "deferred"):
        model = norms()
        trained(model, 1, batchnorm=batchnorm)
        found.append((model, buffers_of(model)))
    (plain, moved), (deferred, moved_once) = found
    for (name, p), q in zip(plain.named_parameters(), deferred.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name
    assert int(moved["0.num_batches_tracked"]) == 3 * int(moved_once["0.num_batches_tracked"])


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_calls_count_as_batches(workers: str) -> None:
    """In training mode, with and without gradients; in evaluation mode nothing moves."""
    expected = trained(norms(), 4)
    model = norms()
    with pipeline(model, workers=workers, recompute="all") as pipe:
        first, second = pipe(X), pipe(X)
        F.mse_loss(second, Y).backward()
        F.mse_loss(first, Y).backward()
        with torch.no_grad():
            pipe(X)
            assert len(list(pipe.map([(X,)]))) == 1
        assert_equal(buffers_of(model), expected)
        pipe.eval()
        pipe(X)
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert_equal(buffers_of(model), expected)
        pipe.train()
        model[0].eval()
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert int(model[0].num_batches_tracked) == 4
        assert int(model[2][1].num_batches_tracked) == 5


class Fails(nn.Module):
    """Fails in the forward of the last micro-batch, which has three rows, if its buffer says so."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("armed", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if int(self.armed) and len(x) == 3:
            raise ValueError("three rows")
        return x * 1


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_a_failed_step_moves_nothing(workers: str) -> None:
    model = nn.Sequential(*norms(), Fails(), nn.BatchNorm1d(6))
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    with pipeline(model, workers=workers) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        before = buffers_of(model)
        model[6].armed.fill_(1)
        with pytest.raises(ps.WorkerError, match="three rows"):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        model[6].armed.fill_(0)
        assert_equal(buffers_of(model), before)
        assert all(m.momentum == 0.1 for m in model.modules() if isinstance(m, nn.BatchNorm1d))
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    assert int(model[0].num_batches_tracked) == 2
    again = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    assert again == hooks


def test_norms_of_images_without_statistics_or_in_half() -> None:
    torch.manual_seed(1)
    model = UNet()
    model.down1[1] = nn.BatchNorm2d(4, track_running_stats=False)
    plain = copy.deepcopy(model)
    with pipeline(model, IMAGES) as pipe:
        pipe.train_step(IMAGES, target=MASKS, loss_fn=F.mse_loss)
    assert model.down1[1].running_mean is None
    plain(IMAGES)
    assert torch.equal(model.down2[1].num_batches_tracked, plain.down2[1].num_batches_tracked)

    model = nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 6)).bfloat16()
    with pipeline(model, X.bfloat16(), m=2) as pipe:
        pipe.train_step(X.bfloat16(), target=Y.bfloat16(), loss_fn=F.mse_loss)
    assert model[0].running_mean.dtype is torch.bfloat16
    torch.testing.assert_close(model[0].running_mean.float(), X.mean(0) / 10, rtol=0.05, atol=1e-3)


def test_a_norm_with_modules_stays_whole() -> None:
    """One that has weights besides its own is opened by a plain capture, which is refused."""
    model = nn.Sequential(nn.Linear(6, 6), Composed(6), nn.Linear(6, 6))
    model[1].act = nn.PReLU()
    opened = ps.capture(model, (X,))
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "num_microbatches": 3}
    with pytest.raises(
        ps.InputError, match=r"opened '1', .*; capture it with keep_closed=\[\"1\"\]"
    ):
        ps.Pipeline(model, (X,), program=opened, batchnorm="deferred", **options, replicas=1)
    with ps.Pipeline(model, (X,), batchnorm="deferred", **options, replicas=1) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    assert int(model[1].num_batches_tracked) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.compile itself
def test_what_is_refused() -> None:
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "num_microbatches": 2}
    with pytest.raises(ps.InputError, match="batchnorm='whole' is unknown; choose \"microbatch\""):
        ps.Pipeline(norms(), (X,), batchnorm="whole", **options, replicas=1)
    synced = nn.SyncBatchNorm.convert_sync_batchnorm(norms())
    for batchnorm in ("microbatch", "deferred"):
        with pytest.raises(ps.InputError, match="'0' is a SyncBatchNorm, which sums"):
            ps.Pipeline(synced, (X,), batchnorm=batchnorm, **options, replicas=1)
    compiled = nn.Sequential(nn.Linear(6, 6), torch.compile(nn.BatchNorm1d(6)))
    with pytest.raises(ps.InputError, match="'1' is compiled, so the BatchNorms"):
        ps.Pipeline(compiled, (X,), batchnorm="deferred", **options, replicas=1)


class Checkpointed(nn.Module):
    """Runs its layers a second time in the backward, as torch does it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = checkpoint(self.layers, x, use_reentrant=False)
        return result


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_a_models_own_checkpoints_do_not_count_twice(workers: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), Checkpointed(), nn.Linear(6, 6))
    program = ps.capture(model, (X,), keep_closed=["1", "1.layers.1"])
    plan = uniform_plan(program, 2, 3)
    options: dict[str, Any] = {"plan": plan, "devices": ["cpu"] * 2, "workers": workers}
    with ps.Pipeline(
        model, (X,), program=program, batchnorm="deferred", **options, replicas=1
    ) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        F.mse_loss(pipe(X), Y).backward()
    assert int(model[1].layers[1].num_batches_tracked) == 2


@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_norms_that_were_frozen_when_the_model_was_recorded(workers: str) -> None:
    """They are trained later: forwards that are run again, or failed, do not count either."""
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), Fails(), nn.BatchNorm1d(6).eval())
    model[1].eval()
    plan = {"recompute": "all", "batchnorm": "microbatch", "workers": workers}
    with pipeline(model, **plan) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert int(model[1].num_batches_tracked) == 0
        model[1].train()
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert int(model[1].num_batches_tracked) == 3
        model[2].armed.fill_(1)
        with pytest.raises(ps.WorkerError, match="three rows"):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    assert int(model[1].num_batches_tracked) == 3
    assert int(model[3].num_batches_tracked) == 0


def of_rows(count: int) -> nn.Module:
    """A norm inside a part, of `count` channels."""
    inner = nn.Sequential(nn.Linear(6, count), nn.BatchNorm1d(count), nn.ReLU())
    return nn.Sequential(nn.Linear(6, 6), inner, nn.Linear(count, 6))


@pytest.mark.parametrize("mode", ["microbatch", "deferred"])
@pytest.mark.parametrize("workers", ["threads", "processes"])
def test_a_micro_batch_of_one_row(workers: Any, mode: Any) -> None:
    """At first the model's own forward refuses it; and where its size is known, the worker's."""
    with pipeline(of_rows(8), m=8, workers=workers, batchnorm=mode) as pipe:
        before = buffers_of(pipe.model)
        words = r"'1\.1' \(BatchNorm1d\).* given the shape \[1, 8\], one value per channel"
        fewer = "11 rows is in 8 micro-batches, .* with num_microbatches=5 or fewer"
        with pytest.raises(ps.InputError, match=f"{words}.* {fewer}"):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        norm = pipe.model.get_submodule("1.1")
        norm.eval()
        assert pipe(X).shape == (11, 6)
        norm.train()
        with pytest.raises(ps.InputError, match=f"{words}.* {fewer}"):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        with pytest.raises(ps.InputError, match=f"{words}.* 1 row is in 1 .* row; leave out"):
            pipe(X[:1])
        assert_equal(buffers_of(pipe.model), before)
        pipe.train_step(torch.cat([X, X]), target=torch.cat([Y, Y]), loss_fn=F.mse_loss)


def test_so_many_micro_batches_that_they_have_one_row() -> None:
    """It is found out when they are measured."""
    with pytest.raises(ps.InputError, match=r"'1\.1' .* with num_microbatches=5 or fewer"):
        ps.Pipeline(of_rows(8), (X,), devices=["cpu"] * 2, num_microbatches=11, replicas=1)
