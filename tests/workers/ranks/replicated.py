"""What ranks do as stages x replicas, and what they cannot."""

from __future__ import annotations

import copy
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.workers.ranks import ring
from tests.support.models import Remembers, replicated, uniform_plan
from tests.support.training import USES, halve, used
from tests.workers.ranks.norms import norms
from tests.workers.ranks.steps import SMALL, Found, X, Y, gradients, small_pipe

SMALL_BUCKET = 200
"""Bytes: so that every small model has many."""

SOME = ("microbatch", "fewer rows", "fails and goes on", "fails in a backward")
"""What ranks do over a process group as well."""


def everything(shape: str) -> dict[str, Found]:
    """All uses and steps, by name; `shape` is stages x replicas."""
    stages, count = map(int, shape.split("x"))
    ring.BUCKET = SMALL_BUCKET
    found = {name: used(name, stages=stages, replicas=count) for name in USES}
    for mode in ("microbatch", "deferred"):
        found[mode] = norms({}, stages, count, mode)  # type: ignore[arg-type]
    for steps in SMALL:
        with small_pipe(stages, count) as pipe:
            torch.manual_seed(3)
            found[steps.__name__] = steps(pipe)
    for name, more in MORE.items():
        found[name] = more(stages, count, {})
    return found


def some(shape: str) -> dict[str, Found]:
    """A few steps with each of some optimizers, batches of many sizes, and a failure."""
    stages, count = map(int, shape.split("x"))
    ring.BUCKET = SMALL_BUCKET
    found = {"microbatch": norms({}, stages, count, "microbatch", "none")}
    for name in SOME[1:]:
        found[name] = MORE[name](stages, count, {})
    return found


def reference(options: dict[str, Any]) -> dict[str, Found]:
    """The same in two stages of one replica; the uses are compared with plain PyTorch."""
    found: dict[str, Found] = {}
    for mode in ("microbatch", "deferred"):
        found[mode] = norms(options, 2, 1, mode, "none")  # type: ignore[arg-type]
    for steps in SMALL:
        with small_pipe(**options) as pipe:
            torch.manual_seed(3)
            found[steps.__name__] = steps(pipe)
    for name, more in MORE.items():
        found[name] = more(2, 1, options)
    return found


def with_plan(
    model: nn.Module, stages: int, count: int, m: int = 5, keep_closed: Any = (), **options: Any
) -> ps.Pipeline:
    """A pipeline of so many stages and replicas."""
    program = ps.capture(model, (X,), keep_closed=keep_closed)
    shares = (1,) * (count - 1) + (m - count + 1,)  # the last one runs most
    plan = replicated(uniform_plan(program, stages, m), count, shares if count > 1 else ())
    return ps.Pipeline(model, (X,), program=program, plan=plan, **{"audit": None, **options})


def noisy() -> nn.Module:
    """BatchNorms of both kinds of momentum, in any layout, and dropout."""
    torch.manual_seed(9)
    return nn.Sequential(
        *(nn.Linear(6, 12), nn.BatchNorm1d(12, momentum=None), nn.Dropout(0.3)),
        *(nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4, momentum=0.3)),
        *(nn.Flatten(), nn.BatchNorm1d(16, affine=False), nn.Linear(16, 6)),
    )


def fewer_rows(stages: int, count: int, options: dict[str, Any]) -> Found:
    """Batches of which some replicas get nothing, in training, in evaluation and by `map`."""
    losses: list[Any] = []
    with with_plan(noisy(), stages, count, **options) as pipe:
        torch.manual_seed(3)
        for rows in (11, 10):
            x, y = X[:rows], Y[:rows]
            losses.append(pipe.train_step(x, target=y, loss_fn=F.mse_loss, weight=sized))
            losses.append(pipe.train_microbatches([(x,)], targets=[y], loss_fn=F.mse_loss))
        losses += list(pipe.map([X, X[:10]]))  # in training mode, so statistics are updated
        losses.append(pipe.eval_step(X, target=Y, loss_fn=F.mse_loss))
        pipe.eval()
        losses += list(pipe.map([X, X[:3], X[:1], X]))
        return {"losses": losses, "state": copy.deepcopy(pipe.state_dict())}


def sized(target: torch.Tensor) -> float:
    return float(len(target) ** 2)


def saved(stages: int, count: int, options: dict[str, Any]) -> Found:
    """A checkpoint in the midst, which is read by another pipeline of the same kind."""
    losses: list[Any] = []

    def steps(pipe: ps.Pipeline, optimizer: Any, number: int) -> None:
        for _ in range(number):
            optimizer.zero_grad()
            losses.append(pipe.train_step(X, target=Y, loss_fn=F.mse_loss))
            optimizer.step()

    with with_plan(noisy(), stages, count, **options) as pipe:
        torch.manual_seed(3)
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.02)
        steps(pipe, optimizer, 2)
        workers = pipe._runner.workers
        with workers.operation("a folder"):
            made = tempfile.mkdtemp() if workers.role.leads else None
            folder = Path(workers.broadcast(made, "leader"))
        pipe.save(folder, optimizer=optimizer)
    with with_plan(noisy(), stages, count, **options) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.02)
        ps.load(folder).restore(pipe, optimizer=optimizer)
        steps(pipe, optimizer, 2)
        remembered = optimizer.state_dict()["state"]
        state = copy.deepcopy(pipe.state_dict())
    return {
        "losses": losses,
        "state": state,
        "optimizer": {str(k): v for k, v in remembered.items()},
    }


def half_weights(stages: int, count: int, options: dict[str, Any]) -> Found:
    """Weights in bfloat16 with copies in float32."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).bfloat16()
    x, losses = X.bfloat16(), []
    program = ps.capture(model, (x,))
    plan = replicated(uniform_plan(program, stages, 4), count)
    with ps.Pipeline(model, (x,), program=program, plan=plan, **options) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01, master_weights=True)
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(pipe.train_step(x, target=Y.bfloat16(), loss_fn=F.mse_loss))
            optimizer.step()
        return {"losses": losses, "state": copy.deepcopy(pipe.state_dict())}


def fails_and_goes_on(stages: int, count: int, options: dict[str, Any]) -> Found:
    """A loss that fails for a micro-batch leaves everything as it was before the step."""
    losses: list[Any] = []
    with with_plan(noisy(), stages, count, **options) as pipe:
        torch.manual_seed(3)
        losses.append(pipe.train_step(X, target=Y, loss_fn=F.mse_loss))
        before = {n: p.grad.clone() for n, p in pipe.named_parameters() if p.grad is not None}
        for row in (0, 10):
            bad = Y.clone()
            bad[row] = float("inf")
            try:
                pipe.train_step(X, target=bad, loss_fn=finite)
            except ps.WorkerError as error:
                losses.append(torch.tensor(error.microbatch))
        after = {n: p.grad for n, p in pipe.named_parameters() if p.grad is not None}
        assert before.keys() == after.keys()
        assert all(map(torch.equal, before.values(), after.values()))
        losses.append(pipe.train_step(X, target=Y, loss_fn=F.mse_loss))
        return {"losses": losses, "state": copy.deepcopy(pipe.state_dict())}


def finite(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that fails where a target is infinite."""
    if not target.isfinite().all():
        raise ValueError("no loss")
    return F.mse_loss(output, target)


class Kinds(nn.Module):
    """Weights used twice, now and then, never, frozen, through a checkpoint and with hooks."""

    def __init__(self, hooks: bool) -> None:
        super().__init__()
        self.first, self.tied, self.last = (nn.Linear(6, 6) for _ in range(3))
        self.rare, self.frozen = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self.inner[0].weight = self.first.weight
        self.again = Reentrant(self.inner)
        self.unused = nn.Parameter(torch.ones(3))
        if hooks:
            self.tied.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            self.last.bias.register_post_accumulate_grad_hook(halve)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positive = bool(x.sum() > 0)
        x = self.tied(self.first(x).tanh()).tanh()
        if positive:
            x = self.rare(x)
        x = self.again(self.frozen(x))
        return self.last(self.tied(x).tanh()) + 0 * self.unused.sum()  # type: ignore[no-any-return]


class Reentrant(nn.Module):
    """A checkpoint whose backward runs another one, which adds to `.grad`."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=True)  # type: ignore[no-any-return]


def all_kinds(stages: int, count: int, options: dict[str, Any]) -> Found:
    """Steps that add up of `Kinds` and of the same without what needs turns; also recomputed."""
    losses: list[Any] = []
    found: dict[str, torch.Tensor] = {}
    for hooks in (False, True):
        for nests in (False, True):
            for recompute in ("none", "all"):
                torch.manual_seed(8)
                model = Kinds(hooks)
                if not nests:
                    model.again = nn.Sequential(model.inner)  # type: ignore[assignment]
                program = ps.capture(model, (X,))
                plan = replicated(uniform_plan(program, stages, 5, recompute=recompute), count)
                name = f"{hooks} {nests} {recompute} "
                with ps.Pipeline(
                    model, (X,), program=program, plan=plan, audit=None, **options
                ) as pipe:
                    for sign in (1, -1, 1):
                        losses.append(pipe.train_step(sign * X, target=Y, loss_fn=F.mse_loss))
                    F.mse_loss(pipe(X), Y).backward()
                    for rows in (2, 3):
                        x, y = X[:rows], Y[:rows]
                        losses.append(pipe.train_step(x, target=y, loss_fn=F.mse_loss))
                    found |= {name + n: g for n, g in gradients(pipe).items()}
    return {"losses": losses, "gradients": found}


class Fragile(nn.Module):
    """Its backward fails where a value is large."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = x * 1
        large = bool((x > 50).any())
        if result.requires_grad:
            result.register_hook(lambda _: fail() if large else None)
        return result


def fail() -> None:
    raise ValueError("no backward")


def fails_in_a_backward(stages: int, count: int, options: dict[str, Any]) -> Found:
    """A backward fails when a part of the sums is under way: nothing has happened."""
    torch.manual_seed(3)
    layers = [nn.Linear(6, 6) for _ in range(5)]
    model = nn.Sequential(nn.Linear(6, 6), Fragile(), *layers)
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(6))
    losses: list[Any] = []
    with with_plan(model, stages, count, keep_closed=["1"], **options) as pipe:
        losses.append(pipe.train_step(X, target=Y, loss_fn=F.mse_loss))
        before = gradients(pipe)
        for row in (0, 4, 10):
            bad = X.clone()
            bad[row] = 100.0
            try:
                pipe.train_step(bad, target=Y, loss_fn=F.mse_loss)
            except ps.WorkerError as error:
                losses.append(torch.tensor(error.microbatch))
            after = gradients(pipe)
            assert before.keys() == after.keys()
            assert all(map(torch.equal, before.values(), after.values()))
        losses.append(pipe.train_step(X, target=Y, loss_fn=F.mse_loss))
        return {"losses": losses, "gradients": gradients(pipe)}


class Much(nn.Module):
    """Statistics and sparse gradients of more bytes than a socket takes before it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Embedding(3000, 64, sparse=True) for _ in range(2))
        self.norm, self.last = nn.BatchNorm1d(64 * 500), nn.Linear(64, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x.abs() * 1000).long().repeat(1, 200) % 3000
        both = self.one(ids).sum(1) * self.other(ids).sum(1)
        return self.last(self.norm(both.repeat(1, 500))[:, :64])  # type: ignore[no-any-return]


def much_at_once(stages: int, count: int, options: dict[str, Any]) -> Found:
    """Steps of which every replica has much to send before it has received anything."""
    torch.manual_seed(6)
    model, losses = Much(), []
    with with_plan(model, stages, count, batchnorm="deferred", **options) as pipe:
        for _ in range(2):
            losses.append(pipe.train_step(X, target=Y, loss_fn=F.mse_loss))
        grads = {name: gradient.to_dense() for name, gradient in gradients(pipe).items()}
        state = pipe.state_dict()
        statistics = {n: state[n].clone() for n in ("norm.running_mean", "norm.running_var")}
    return {"losses": losses, "gradients": grads, "state": statistics}


MORE: dict[str, Callable[[int, int, dict[str, Any]], Found]] = {
    "all kinds of gradients": all_kinds,
    "fails in a backward": fails_in_a_backward,
    "fewer rows": fewer_rows,
    "saved": saved,
    "half weights": half_weights,
    "fails and goes on": fails_and_goes_on,
    "much at once": much_at_once,
}


# -- what they cannot -------------------------------------------------------------------------


class Counts(nn.Module):
    """Remembers in an attribute how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 6), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


class Again(nn.Module):
    """Runs a BatchNorm again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.inner, x, use_reentrant=False)  # type: ignore[no-any-return]


class Strided(nn.Module):
    """A BatchNorm over rows that are not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.t().contiguous().t())  # type: ignore[no-any-return]


class Centred(nn.Module):
    """A loss with a memory."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(6))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.centre.add_(output.mean(0))
        return F.mse_loss(output - self.centre, target)


class Locked:
    """A loss that cannot be pickled."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with self._lock:
            return F.mse_loss(output, target)


class Growing:
    """A hook that remembers how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, value: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return value * self.calls


def hooked(hook: Callable[[torch.Tensor], torch.Tensor], layer: nn.Module | None = None) -> Any:
    """A layer whose result goes through a hook; of a BatchNorm, its running mean is added."""
    layer = layer or nn.Tanh()
    mean = "running_mean" if isinstance(layer, nn.BatchNorm1d) else None
    layer.register_forward_hook(
        lambda own, args, result: hook(result) + (getattr(own, mean) if mean else 0)
    )
    return layer


class Shifted(nn.BatchNorm1d):
    """Adds the running mean, as it was before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.running_mean is not None
        before = self.running_mean.clone()
        return super().forward(x) + before


class Scaled(nn.Module):
    """A loss with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output * self.scale, target)


def refused(rank: int) -> dict[str, str]:
    """What is raised, by what was tried, with two replicas of one stage."""
    found: dict[str, str] = {}

    def attempt(
        name: str,
        layer: nn.Module,
        loss: Any = F.mse_loss,
        x: torch.Tensor = X,
        y: torch.Tensor = Y,
        hook: Callable[[torch.Tensor], torch.Tensor] | None = None,
        **options: Any,
    ) -> None:
        try:
            torch.manual_seed(rank if name == "other weights" else 0)
            model = nn.Sequential(nn.Linear(6, 6), layer)
            if hook is not None:
                model[0].weight.register_hook(hook)
            with with_plan(model, 1, 2, keep_closed=["1"], **options) as pipe:
                pipe.train_step(x, target=y, loss_fn=loss)
                pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        except ps.PenstockError as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = ""

    attempt("buffers", Remembers())
    attempt("attributes", Counts())
    attempt("again", Again())
    attempt("strided", Strided())
    attempt("loss that remembers", nn.Tanh(), Centred())
    attempt("loss with a parameter", nn.Tanh(), Scaled())
    attempt("other inputs", nn.Tanh(), x=X + rank)
    attempt("other targets", nn.Tanh(), y=Y + rank)
    attempt("other weights", nn.Tanh())
    attempt("loss that cannot be pickled", nn.Tanh(), Locked())
    attempt("hook that remembers", nn.Tanh(), hook=Growing())
    attempt("module hook that remembers", hooked(Growing()))
    attempt("hook that reads statistics", hooked(lambda x: x, nn.BatchNorm1d(6)))
    attempt("forward that reads statistics", Shifted(6))
    attempt("strided, deferred", Strided(), batchnorm="deferred")
    attempt("nothing", nn.Tanh(), hook=torch.Tensor.clone)
    return found


class Failing(torch.optim.SGD):
    """Updates the weights, and then fails on one rank, if it is told to."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        if self.fails:
            raise RuntimeError("the step has failed")
        return found


def failed_step(rank: int) -> dict[str, Any]:
    """What training says after `optimizer.step` has failed on one rank, and after that."""
    found: dict[str, Any] = {}
    with with_plan(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)), 1, 2) as pipe:
        optimizer = pipe.optimizer(Failing, lr=0.1)
        for _ in range(3):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        state = copy.deepcopy(pipe.state_dict())
        Failing.fails = rank == 1
        for name in ("step", "after", "again"):
            try:
                if name == "step":
                    optimizer.step()
                pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
            except Exception as error:
                found[name] = f"{type(error).__name__}: {error}"
        Failing.fails = False
        pipe.load_state_dict(state)
        found["loss"] = pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    return found
