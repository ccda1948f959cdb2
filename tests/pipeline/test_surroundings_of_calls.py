"""What a script does around a pipeline's calls, to what it gives them, and to what it gets."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import penstock as ps
from penstock.errors import InputError, WorkerError
from penstock.torch_internals import TorchDispatchMode

pytestmark = pytest.mark.usefixtures("pool", "one_thread")

KINDS = ["threads", "processes"]
X, Y = torch.randn(8, 6), torch.randint(0, 4, (8,))


class Plus(nn.Module):
    """Autograd saves nothing of its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


class Scale(nn.Module):
    """Writes to its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(1.5)


def build(*first: nn.Module) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*first, nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))


def make(model: nn.Module, workers: Any = "threads", **options: Any) -> ps.Pipeline:
    asked = {"replicas": 1, "audit": None, **options}
    return ps.Pipeline(
        *(model, (X.clone(),)), devices=["cpu"] * 2, workers=workers, num_microbatches=2, **asked
    )


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad for p in model.parameters()]


def plain(model: nn.Module) -> list[torch.Tensor | None]:
    for x, y in zip(X.split(4), Y.split(4), strict=True):
        (F.cross_entropy(model(x.clone()), y) / 2).backward()
    return gradients(model)


# -- inputs that are written to before the backward --------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("first", [(), (Scale(),)])
def test_written_inputs_are_seen_as_by_torch(first: tuple[nn.Module, ...], replicas: int) -> None:
    with make(build(*first), replicas=replicas) as pipe:
        batch = X.clone()
        loss = F.cross_entropy(pipe(batch), Y)
        batch.zero_()
        with pytest.raises(WorkerError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("workers", KINDS)
def test_nobody_minds_where_they_are_not_needed_any_more(workers: str) -> None:
    model = build(Plus())
    with make(model, workers) as pipe:
        batch = X.clone()
        loss = F.cross_entropy(pipe(batch), Y)
        batch.zero_()
        loss.backward()
    assert all(map(torch.equal, gradients(model), plain(build(Plus()))))


def test_they_are_seen_where_a_forward_runs_again_for_its_backward() -> None:
    with make(build(), recompute="all") as pipe:
        batch = X.clone()
        loss = F.cross_entropy(pipe(batch), Y)
        batch.zero_()
        with pytest.raises(InputError, match="written to between the forward and the backward"):
            loss.backward()
    with make(build()) as pipe:
        batch = X.clone()
        loss = F.cross_entropy(pipe(batch), Y)
        loss.backward(retain_graph=True)
        batch.zero_()
        with pytest.raises(InputError, match="its inputs have been written to since"):
            loss.backward()


def test_they_are_seen_by_a_second_backward_though_the_first_did_not_mind() -> None:
    with make(build(Plus())) as pipe:
        batch = X.clone()
        loss = F.cross_entropy(pipe(batch), Y)
        batch.zero_()
        loss.backward(retain_graph=True)
        with pytest.raises(InputError, match="its inputs have been written to since"):
            loss.backward()


def test_nobody_keeps_the_inputs_after_the_backward() -> None:
    with make(build()) as pipe:
        batch = X.clone()
        gone = weakref.ref(batch)
        loss = F.cross_entropy(pipe(batch), Y)
        loss.backward()
        del batch
        gc.collect()
        assert gone() is None
        assert loss.isfinite()


class Mixing(nn.Module):
    """Has another input that is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, mixes: torch.Tensor) -> torch.Tensor:
        return self.last(torch.sparse.mm(mixes, self.first(x + 1).t()).t())


def test_a_sparse_input_beside_one_that_is_written_to() -> None:
    batch, mixes = X.clone(), torch.eye(6).to_sparse()
    options: dict[str, Any] = {"num_microbatches": 2, "batch_dim": {0: 0, 1: None}}
    with ps.Pipeline(
        Mixing(), (batch, mixes), devices=["cpu"] * 2, replicas=1, audit=None, **options
    ) as pipe:
        loss = F.cross_entropy(pipe(batch, mixes), Y)
        batch.zero_()
        loss.backward()


def test_a_model_may_write_to_its_own_inputs() -> None:
    model = build(Scale())
    for recompute in ("none", "all"):
        model.zero_grad()
        with make(model, recompute=recompute) as pipe:
            F.cross_entropy(pipe(X.clone()), Y).backward()
        assert all(map(torch.equal, gradients(model), plain(build(Scale()))))


# -- losses that write -------------------------------------------------------------------------


def padded(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    target[target == 3] = -100
    return F.cross_entropy(output, target)


def shifted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    target.add_(1)
    return F.mse_loss(output.mean(1), target.float())


def averaging(output: torch.Tensor, target: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    mean.mul_(0.5).add_(output.detach().mean())
    return F.cross_entropy(output, target) * (1 + mean)


@pytest.mark.parametrize("loss_fn", [padded, shifted, averaging])
def test_a_loss_writes_once(loss_fn: Callable[..., torch.Tensor]) -> None:
    def kwargs() -> dict[str, torch.Tensor]:
        return {"mean": torch.zeros(())} if loss_fn is averaging else {}

    target, mine, more, mores = Y.clone(), Y.clone(), kwargs(), kwargs()
    model = build()
    with make(model) as pipe:
        losses = [
            pipe.train_step(X, target=target, loss_fn=loss_fn, loss_kwargs=more) for _ in range(2)
        ]
    reference = build()
    for loss in losses:
        parts = [
            loss_fn(reference(x), y, **mores) / 2
            for x, y in zip(X.split(4), mine.split(4), strict=True)
        ]
        assert torch.equal(loss, parts[0] + parts[1])
    assert torch.equal(target, mine)
    assert more == mores


def test_a_sum_that_writes_to_its_target_is_warned_of() -> None:
    def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        target.add_(1)
        return F.mse_loss(output.mean(1), target.float(), reduction="sum")

    with make(build()) as pipe, pytest.warns(ps.RowsWarning):
        pipe.train_step(X, target=Y.clone(), loss_fn=summed)


@pytest.mark.parametrize(
    ("loss_fn", "first", "name"),
    [
        (shifted, (), "the loss writes to its targets"),
        (averaging, (), "the loss writes to its loss_kwargs"),
        (F.cross_entropy, (Scale(),), "the model writes to its inputs"),
    ],
)
def test_what_is_written_in_other_processes_is_said_to_be_lost(
    loss_fn: Callable[..., torch.Tensor], first: tuple[nn.Module, ...], name: str
) -> None:
    x, y, more = X.clone(), Y.clone(), {"mean": torch.zeros(())}
    with make(build(*first), "processes") as pipe:
        options = {"target": y, "loss_fn": loss_fn}
        if loss_fn is averaging:
            options["loss_kwargs"] = more
        with pytest.warns(UserWarning, match=name):
            pipe.train_step(x, **options)
        pipe.train_step(x, **options)  # it is said once
    assert torch.equal(x, X)
    assert torch.equal(y, Y)
    assert not more["mean"]


def test_a_complex_loss_is_refused() -> None:
    with make(build()) as pipe, pytest.raises(InputError, match="complex"):
        pipe.train_step(X, target=Y, loss_fn=lambda o, y: F.cross_entropy(o, y) * (1 + 0j))


# -- contexts and modes ------------------------------------------------------------------------

FACTOR = ContextVar("FACTOR", default=1.0)


def test_threads_are_in_the_context_of_the_script() -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target) * FACTOR.get()

    with make(build()) as pipe:
        token = FACTOR.set(3.0)
        try:
            loss = pipe.train_step(X, target=Y, loss_fn=loss_fn)
            evaluated = pipe.eval_step(X, target=Y, loss_fn=loss_fn)
        finally:
            FACTOR.reset(token)
    model = build()
    parts = [
        F.cross_entropy(model(x), y) * 3 / 2 for x, y in zip(X.split(4), Y.split(4), strict=True)
    ]
    assert torch.equal(loss, parts[0] + parts[1])
    assert torch.equal(evaluated, loss)


class Doubled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 2 if func is F.linear else found


class Counted(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [Doubled, Counted, save_on_cpu])
@pytest.mark.parametrize("workers", KINDS)
def test_modes_around_a_call_are_refused(
    mode: Callable[[], AbstractContextManager[Any]], workers: str
) -> None:
    model = build()
    with make(model, workers) as pipe:
        with mode():
            with pytest.raises(InputError, match="see"):
                pipe.train_step(X, target=Y, loss_fn=F.cross_entropy)
            with pytest.raises(InputError, match="see"):
                pipe(X)
        assert gradients(model) == [None] * 4
        with torch.device("cpu"), torch.no_grad():
            pipe(X)  # this says where tensors are made
        pipe.train_step(X, target=Y, loss_fn=F.cross_entropy)
    assert all(map(torch.equal, gradients(model), plain(build())))


def test_saved_tensors_are_nobodys_matter_without_gradients() -> None:
    with make(build()) as pipe, save_on_cpu(), torch.no_grad():
        assert torch.equal(pipe(X), torch.cat([build()(x) for x in X.split(4)]))


# -- gradients in other memory -----------------------------------------------------------------


@pytest.mark.parametrize("workers", KINDS)
def test_gradients_may_be_given_other_memory(workers: str) -> None:
    model = build()
    with make(model, workers) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=1.0)
        pipe.train_step(X, target=Y, loss_fn=F.cross_entropy)
        before = [p.detach().clone() for p in model.parameters()]
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.data = parameter.grad.data * 0.0
        assert pipe.clip_grad_norm_(1.0) == 0
        optimizer.step()
        assert all(map(torch.equal, model.parameters(), before))
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.data = torch.zeros_like(parameter)
        pipe.train_step(X, target=Y, loss_fn=F.cross_entropy)  # adds to what there is
        assert all(map(torch.equal, gradients(model), plain(build())))
