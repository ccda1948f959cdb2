"""Loss scaling is torch's, bit for bit, and a step that is skipped is skipped everywhere."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.capture import Key
from penstock.comparison.reference import run_with_threads
from penstock.engine.ends import Endings, Loss
from tests.support.precision import SCALE, X, Y, island, pipe_of

CPUS = ["cpu"] * 2


def accumulate(model: nn.Module, scaler: torch.amp.GradScaler, m: int = 3) -> torch.Tensor:
    """A step of one device as anybody would write it; returns the loss."""
    total: Any = None
    for x, y in zip(X.tensor_split(m), Y.tensor_split(m), strict=True):
        with torch.autocast("cpu", torch.float16):
            loss = F.mse_loss(model(x), y) * (len(x) / len(X))
        scaler.scale(loss).backward()
        total = loss.detach() if total is None else total + loss.detach()
    return total


def assert_same(pipe: ps.Pipeline, twin: nn.Module) -> None:
    theirs = twin.state_dict()
    assert all(torch.equal(v, theirs[k]) for k, v in pipe.state_dict().items())


class Nothing(Endings):
    """The endings of a model that returns nothing."""

    def result(self, microbatch: int, values: Any) -> Any:
        return None


@pytest.mark.parametrize(
    ("times", "clip", "plain", "fused"),
    [
        (1, False, False, False),
        (2, True, False, False),
        (1, True, True, False),
        (1, False, True, True),
    ],
)
def test_equal_to_torchs_on_one_device(times: int, clip: bool, plain: bool, fused: bool) -> None:
    """Also with several steps' gradients added up, and with an optimizer of the user's own."""
    model = island(dropout=0.0)
    twin = copy.deepcopy(model)
    options: dict[str, Any] = {"lr": 0.05, "fused": fused}
    with pipe_of(model, devices=CPUS) as pipe:
        make = torch.optim.AdamW
        ours = make(model.parameters(), **options) if plain else pipe.optimizer(make, **options)
        theirs = make(twin.parameters(), **options)
        scaler, other = pipe.scaler(**SCALE), torch.amp.GradScaler("cpu", **SCALE)
        scales, skipped = [], 0
        for _ in range(8):
            before = twin.first.weight.detach().clone()
            for _ in range(times):
                with torch.autocast("cpu", torch.float16):
                    loss = pipe.train_step(X, target=Y, loss_fn=F.mse_loss, scaler=scaler)
                assert torch.equal(loss, run_with_threads(lambda: accumulate(twin, other), 1))
            for s, o, m in ((scaler, ours, pipe), (other, theirs, nn.utils)):
                if clip:
                    s.unscale_(o)
                    norm = (m.clip_grad_norm_ if m is pipe else _clip(twin))(0.1)
                    assert norm.ndim == 0
                s.step(o)
                s.update()
                o.zero_grad()
            scales.append(scaler.get_scale())
            assert scaler.state_dict() == other.state_dict()
            assert_same(pipe, twin)
            skipped += torch.equal(before, twin.first.weight)
        assert 1 <= skipped < 7
        assert any(a < b for a, b in itertools.pairwise(scales))  # it has grown again


def _clip(model: nn.Module) -> Any:
    return lambda most: nn.utils.clip_grad_norm_(model.parameters(), most)


def test_the_plain_style() -> None:
    model = island(dropout=0.0)
    twin = copy.deepcopy(model)
    with pipe_of(model, microbatches=1, devices=CPUS) as pipe:
        ours = pipe.optimizer(torch.optim.SGD, lr=0.1)
        theirs = torch.optim.SGD(twin.parameters(), lr=0.1)
        scaler, other = pipe.scaler(**SCALE), torch.amp.GradScaler("cpu", **SCALE)
        for _ in range(6):
            with torch.autocast("cpu", torch.float16):
                loss = F.mse_loss(pipe(X), Y)
            scaler.scale(loss).backward()
            run_with_threads(lambda: accumulate(twin, other, m=1), 1)
            for s, o in ((scaler, ours), (other, theirs)):
                s.step(o)
                s.update()
                o.zero_grad()
            assert_same(pipe, twin)
            assert scaler.state_dict() == other.state_dict()


def test_its_state_goes_both_ways() -> None:
    with pipe_of(island(), devices=CPUS) as pipe:
        scaler = pipe.scaler(init_scale=8.0, growth_interval=5)
        other = torch.amp.GradScaler("cpu")
        other.load_state_dict(scaler.state_dict())
        assert other.get_scale() == 8.0
        again = pipe.scaler()
        again.load_state_dict(other.state_dict())
        assert again.state_dict() == scaler.state_dict()
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss, scaler=again)
        first = pipe.model.first.weight.grad.clone()
        pipe.zero_grad()
        off = pipe.scaler(enabled=False)
        pipe.eval().train()
        assert pipe.train_step(X, target=Y, loss_fn=F.mse_loss, scaler=off).ndim == 0
        assert first.norm() > 4 * pipe.model.first.weight.grad.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scale", [3.7, 1024.0, 65536.0, 1e30])
def test_the_gradient_to_start_from_is_autograds(dtype: torch.dtype, scale: float) -> None:
    """Overflow included: in float16 a scale of 65536 is infinite before it is weighted."""
    loss = torch.ones((), dtype=dtype, requires_grad=True)
    (start,) = torch.autograd.grad((loss * 0.3) * torch.tensor(scale), loss)
    scaled = Loss(lambda output: loss * 1, [()], [0.3], scale=scale)
    _, found = scaled.of(0, Key(0, 0, 0), (), Nothing(), (), {})
    assert torch.equal(found, start)
    assert found.dtype is dtype


def test_what_is_wrong_is_said() -> None:
    with pipe_of(island(), devices=CPUS) as pipe:
        with pytest.raises(ps.InputError, match=r"was not created by pipe.scaler\(init_scale="):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss, scaler=torch.amp.GradScaler("cpu"))
        assert all(p.grad is None for p in pipe.parameters())
        with pytest.raises(ps.InputError, match=r"does not take growth_factor=0\.5"):
            pipe.scaler(growth_factor=0.5)
        for wrong in ({"scale": 4}, {"init_scale": "big"}):
            with pytest.raises(ps.InputError, match="does not take"):
                pipe.scaler(**wrong)
