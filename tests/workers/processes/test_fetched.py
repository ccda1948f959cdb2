"""What comes back from other processes can be saved, copied and pickled, each tensor by itself."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.capture.trees import flatten
from penstock.links.pickling import from_bytes, to_bytes

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
X = torch.randn(7, 3, generator=torch.Generator().manual_seed(1))


pytestmark = pytest.mark.usefixtures("pool")


class Odd(nn.Module):
    """Parameters of odd sizes, a buffer of integers; results of several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 7)
        self.norm = nn.BatchNorm1d(7)
        self.b = nn.Linear(7, 5)
        self.c = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        z = self.b(self.norm(self.a(x)).relu())
        return {"y": self.c(z), "half": z[:, :3].half(), "is": z > 0, "first": x}


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in flatten(value)[0] if isinstance(leaf, torch.Tensor)]


def check(value: Any) -> None:
    """It is the same after every way to write it down, and no larger than it has to be."""
    size = sum(t.numel() * t.element_size() for t in tensors_in(value))
    buffer = io.BytesIO()
    torch.save(value, buffer)
    assert len(buffer.getvalue()) < size + 1500 * (1 + len(tensors_in(value)))
    found = torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    for other in (found, pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
        pairs = zip(tensors_in(value), tensors_in(other), strict=True)
        for k, (mine, theirs) in enumerate(pairs):
            assert mine.dtype == theirs.dtype, k
            assert torch.equal(mine, theirs), k
    for tensor in tensors_in(value):
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    named = {str(k): t.detach() for k, t in enumerate(tensors_in(value)) if t.is_contiguous()}
    again = safetensors.torch.load(safetensors.torch.save(named))
    assert all(torch.equal(again[name], tensor) for name, tensor in named.items())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_worker_processes_have(dtype: torch.dtype) -> None:
    """Optimizer state, gradients, results, losses, and the model's own state."""
    torch.manual_seed(1)
    model, x = Odd().to(dtype), X.to(dtype)
    with ps.Pipeline(
        model,
        (x,),
        devices=["cpu"] * 2,
        workers="processes",
        num_microbatches=2,
        cuts=["b"],
        replicas=1,
    ) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.1, eps=1e-3, amsgrad=True)
        for _ in range(2):
            optimizer.zero_grad()
            loss = pipe.train_step(
                x, target=x[:, :1], loss_fn=lambda out, y: F.mse_loss(out["y"], y)
            )
            optimizer.step()
        check(loss)
        check(optimizer.state_dict())
        check([p.grad for p in pipe.parameters()])
        check(dict(pipe.state_dict()))
        with torch.no_grad():
            check(pipe(x))


def test_gradients_of_one_worker_may_be_kept_apart() -> None:
    """A gradient that is kept is not written to by later steps."""
    torch.manual_seed(1)
    model = Odd()
    with ps.Pipeline(
        model,
        (X,),
        devices=["cpu"] * 2,
        workers="processes",
        num_microbatches=2,
        cuts=["b"],
        replicas=1,
    ) as pipe:
        step: dict[str, Any] = {"target": X[:, :1], "loss_fn": lambda o, y: F.mse_loss(o["y"], y)}
        pipe.train_step(X, **step)
        kept = [p.grad for p in pipe.parameters()]
        copies = copy.deepcopy(kept)
        model.zero_grad()
        pipe.train_step(X * 2, **step)
        assert all(torch.equal(a, b) for a, b in zip(kept, copies, strict=True) if b is not None)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.int64, torch.uint8, torch.complex64], ids=str)
def test_what_ranks_send_each_other(dtype: torch.dtype) -> None:
    value = {
        "a": torch.arange(15).to(torch.uint8).reshape(3, 5),
        "b": torch.arange(7).to(dtype),
        "none": torch.zeros(0, 3, dtype=dtype),
        "step": torch.tensor(3.0),
        "is": torch.tensor([True]),
        "t": torch.arange(6).to(dtype).reshape(2, 3).t(),
    }
    found = from_bytes(to_bytes(value))
    for mine, theirs in zip(tensors_in(value), tensors_in(found), strict=True):
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()
        assert mine.data_ptr() % 64 == theirs.data_ptr() % 64 or not mine.numel()
    check(found)
