"""Replicas: whoever is faster, what comes of a step has the bits of one device."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.comparison.reference import run_with_threads
from penstock.engine.state import State
from penstock.engine.sums import OrderedSum
from penstock.engine.turns import LocalTurns
from penstock.links.local import Aborted
from tests.support.models import AddsItself, Remembers, replicated, uniform_plan
from tests.support.training import USES, assert_same, used_plainly

pytestmark = pytest.mark.usefixtures("pool")

KINDS = ["threads", "processes"]

X = torch.randn(11, 6, generator=torch.Generator().manual_seed(3))
Y = torch.randn(11, 6, generator=torch.Generator().manual_seed(4))


def make(
    model: nn.Module,
    args: Any = (X,),
    *,
    stages: int = 1,
    replicas: int = 2,
    count: int = 5,
    schedule: str = "1f1b",
    recompute: str = "none",
    keep_closed: Any = (),
    shares: tuple[int, ...] = (),
    **options: Any,
) -> ps.Pipeline:
    program = ps.capture(model, args, keep_closed=keep_closed)
    plan = uniform_plan(program, stages, count, schedule, recompute=recompute)
    plan = replicated(plan, replicas, shares)
    options = {"audit": None, **options}
    return ps.Pipeline(model, args, program=program, plan=plan, devices=plan.devices, **options)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize(
    ("kind", "stages", "replicas"),
    [
        *(("threads", p, r) for p, r in [(1, 2), (2, 2), (1, 3), (3, 2)]),
        *(("processes", p, r) for p, r in [(1, 2), (2, 2)]),
    ],
)
@pytest.mark.parametrize("name", USES)
def test_losses_hooks_and_clipping(name: str, kind: str, stages: int, replicas: int) -> None:
    build, args, use = USES[name]
    with make(build(), args, stages=stages, replicas=replicas, count=3, workers=kind) as pipe:
        assert len(pipe._workers.members) == stages * replicas
        assert_same(use(pipe), used_plainly(name))


def finite(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """A loss that fails where a target is infinite."""
    if not target.isfinite().all():
        raise ValueError("no loss")
    return F.mse_loss(output, target)


DELAYS = random.Random(0)


class Delayed(nn.Module):
    """A layer that now and then takes its time, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        delay = DELAYS.random() * 4e-3
        time.sleep(delay)
        result = self.linear(x)
        if result.requires_grad:
            result.register_hook(lambda gradient: time.sleep(delay))
        return result  # type: ignore[no-any-return]


def trained(pipe: Any, steps: int = 4) -> dict[str, torch.Tensor]:
    """What is left of some steps: losses, gradients, and the state dict."""
    found = {}
    for step in range(steps):
        found[f"loss {step}"] = pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    model = pipe.model
    found |= {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
    return found | {n: t.clone() for n, t in model.state_dict().items()}


def plainly(model: nn.Module) -> None:
    """A step of one device."""
    for x, y in zip(X.tensor_split(5), Y.tensor_split(5), strict=True):
        (F.mse_loss(model(x), y) * (len(x) / len(X))).backward()


@pytest.mark.parametrize(
    ("kind", "closed"),
    [("threads", ()), ("threads", ("1",)), ("threads", ("2",)), ("processes", ())],
)
@pytest.mark.parametrize("batchnorm", ["microbatch", "deferred"])
def test_whoever_is_faster(batchnorm: Any, kind: str, closed: Any) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            Delayed(), nn.Sequential(nn.BatchNorm1d(6), nn.ReLU()), Remembers(), Delayed()
        )

    keep = ("0.linear", "3.linear", *closed)
    keep = (*keep, *(() if batchnorm == "microbatch" else ("1.0",)))
    found = []
    for stages, shares in ((2, (5,)), (1, (1, 4)), (1, (2, 2, 1)), (2, ())):  # one thread each
        options = {"stages": stages, "replicas": len(shares) or 2, "shares": shares}
        options |= {"keep_closed": keep, "workers": kind}
        with make(build(), batchnorm=batchnorm, **options) as pipe:
            found.append(trained(pipe))
    for other in found[1:]:
        assert_same(other, found[0])
    model = build()
    if batchnorm == "microbatch":
        run_with_threads(lambda: [plainly(model) for _ in range(4)], 1)
        plain = dict(model.state_dict())
        assert_same({n: found[1][n] for n in plain}, plain)
        for name, parameter in model.named_parameters():
            assert torch.equal(found[1][f"gradient of {name}"], parameter.grad), name


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batchnorm", ["microbatch", "deferred"])
def test_batchnorms_that_run_again_count_once(batchnorm: Any, kind: str) -> None:
    """Where a forward runs again, others may be changing the running statistics."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        norms = nn.BatchNorm1d(6), nn.BatchNorm1d(6, momentum=None)
        return nn.Sequential(Delayed(), norms[0], nn.ReLU(), Delayed(), norms[1])

    found = []
    for stages, replicas in ((2, 1), (1, 2), (2, 2), (1, 3)):  # one thread each
        options = {"stages": stages, "replicas": replicas, "keep_closed": ("0.linear", "3.linear")}
        model = build()
        recompute = "all" if replicas < 3 else "none"
        options |= {"workers": kind, "batchnorm": batchnorm, "recompute": recompute}
        if batchnorm == "deferred":
            options["keep_closed"] += ("1", "4")
        with make(model, **options) as pipe:
            found.append(trained(pipe))
    for other in found[1:]:
        assert_same(other, found[0])
    model = build()
    model[1].register_forward_hook(lambda *_: None)  # which would get the twin
    with pytest.raises(ps.InputError, match=r"replicas=1"):
        make(model, recompute="all")


def test_other_shares_of_replicas_with_stages_are_refused_in_one_memory() -> None:
    with pytest.raises(ps.PlanError, match="2 workers run 1, 4 micro-batches"):
        make(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), stages=2, shares=(1, 4))


def test_hooks_of_parameters_see_one_micro_batch_after_the_other() -> None:
    def run(step: Callable[[nn.Module], None]) -> list[Any]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        seen: list[Any] = []
        model[0].weight.register_hook(lambda gradient: seen.append(gradient.clone()))
        model[2].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        step(model)
        return seen

    def in_replicas(model: nn.Module) -> None:
        with make(model, replicas=2) as pipe:
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)

    ours, theirs = run(in_replicas), run_with_threads(lambda: run(plainly), 1)
    by_shape = [[[t for t in seen if t.ndim == d] for d in (1, 2)] for seen in (ours, theirs)]
    assert [len(each) for each in by_shape[0]] == [5, 5]
    assert_same(by_shape[0], by_shape[1])


def test_losses_are_called_in_order() -> None:
    called: list[int] = []

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        called.append(int(target[0, 0]))
        time.sleep(0.002 * (3 - called[-1] % 3))
        return F.mse_loss(output, target)

    numbers = torch.arange(10.0).repeat_interleave(1)[:, None].expand(10, 6)
    with make(nn.Linear(6, 6), (torch.randn(10, 6),), replicas=3, count=10) as pipe:
        pipe.train_step(torch.randn(10, 6), target=numbers, loss_fn=loss_fn, metrics=None)
    assert called == list(range(10))


@pytest.mark.parametrize("kind", KINDS)
def test_a_failure_is_undone_and_the_next_step_is_right(kind: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), Remembers(), nn.Linear(6, 6))

    for last in range(5):
        with make(build(), replicas=2, workers=kind) as pipe:
            before = trained(pipe, 1)
            target = Y.clone()
            target.tensor_split(5)[last].fill_(torch.inf)
            with pytest.raises(ps.WorkerError, match=f"micro-batch {last}"):
                pipe.train_step(X, target=target, loss_fn=finite)
            after = {f"gradient of {n}": p.grad for n, p in pipe.model.named_parameters()}
            after |= pipe.model.state_dict()
            assert_same(after, {name: t for name, t in before.items() if name in after})
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in pipe.model.modules())
            ours = trained(pipe, 2)
        with make(build(), stages=2, replicas=1) as pipe:
            trained(pipe, 1)
            assert_same(ours, trained(pipe, 2))


@pytest.mark.parametrize("kind", KINDS)
def test_map_keeps_the_order(kind: str) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(Delayed(), nn.BatchNorm1d(6), nn.Linear(6, 6))
    batches = [torch.randn(rows, 6) for rows in (11, 1, 2, 7, 11)]
    with make(model, replicas=3, keep_closed=("0.linear",), workers=kind) as pipe:
        pipe.eval()
        found = list(pipe.map(batches))
        with torch.no_grad():
            parts = [b.tensor_split(min(5, len(b))) for b in batches]
            expected = [torch.cat([model(x) for x in each]) for each in parts]
    assert_same(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_steps_within_a_map_wait_for_the_forwards_that_were_started(kind: str) -> None:
    batches = [torch.randn(2000, 6) for _ in range(5)]
    found = []
    for replicas in (1, 2):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 256), nn.Tanh(), nn.Linear(256, 6))
        with make(model, stages=3 - replicas, replicas=replicas, workers=kind) as pipe:
            optimizer = pipe.optimizer(torch.optim.SGD, lr=0.05)
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
            found.append([])
            for output in pipe.map(batches, ahead=4):
                found[-1].append(output.clone())
                optimizer.step()
    assert_same(found[1], found[0])


class Slow(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.03)
        return x + 0


@pytest.mark.parametrize("width", [8, 4096], ids=["small parameters", "large parameters"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_within_a_map_wait_for_slow_stages(kind: str, width: int) -> None:
    """Batches that were started have the weights of that time in all stages, whoever updates."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), Slow(), nn.Linear(width, 6))
    batches = [torch.randn(5, 6) for _ in range(3)]
    with make(model, stages=2, replicas=1, keep_closed=("2",), workers=kind) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.5)
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        expected = [output.clone() for output in pipe.map(batches)]
        results = pipe.map(batches, ahead=4)
        found = [next(results).clone()]
        optimizer.step()
        found += results
        assert_same(found, expected)
        assert not torch.equal(next(iter(pipe.map(batches))), expected[0])


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_that_drop_gradients(kind: str) -> None:
    def dropped(model: nn.Module) -> nn.Module:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(drop_large)
        return model

    def build() -> nn.Module:
        torch.manual_seed(1)
        return dropped(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))

    expected = build()
    run_with_threads(lambda: plainly(expected), 1)
    theirs = [p.grad for p in expected.parameters()]
    assert {gradient is None for gradient in theirs} == {True, False}
    with make(build(), workers=kind) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        ours = [p.grad for p in pipe.model.parameters()]
    assert_same(ours, theirs)


def drop_large(parameter: torch.Tensor) -> None:
    """Drop a gradient that has become large."""
    if parameter.grad is not None and parameter.grad.abs().max() > 0.05:
        parameter.grad = None


class Reversible(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function.apply(x, self.weight)  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.linear, x, use_reentrant=True)  # type: ignore[no-any-return]


class AddsByAnother(AddsItself):
    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return nested(ctx, gradient)


nested = AddsItself.backward


@pytest.mark.parametrize("kind", KINDS)
def test_a_backward_within_a_backward(kind: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 6), Reversible(AddsItself), Checkpointed())

    expected = build()
    run_with_threads(lambda: plainly(expected), 1)
    with make(build(), workers=kind) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        ours = [p.grad for p in pipe.model.parameters()]
    assert_same(ours, [p.grad for p in expected.parameters()])


class UsedTwice(Reversible):
    """The same weight has a gradient from outside the Function as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.weight


@pytest.mark.parametrize("kind", [Reversible, UsedTwice])
def test_a_hidden_backward_within_a_backward_is_refused(kind: type[Reversible]) -> None:
    model = nn.Sequential(nn.Linear(6, 6), kind(AddsByAnother), nn.Linear(6, 6))
    with (
        make(model, workers="processes") as pipe,
        pytest.raises(ps.InputError, match=r"adds to \.grad itself"),
    ):
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)


class Moody(nn.Module):
    """A loss that remembers how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.mse_loss(output, target) * self.calls


def test_a_loss_that_remembers_is_refused_where_replicas_do_not_share_it() -> None:
    with (
        make(nn.Linear(6, 6), workers="processes") as pipe,
        pytest.raises(ps.InputError, match=r"loss function .* has changed"),
    ):
        pipe.train_step(X, target=Y, loss_fn=Moody())


def test_a_replica_that_waits_for_its_turn_is_not_blamed() -> None:
    model = nn.Sequential(HangsAtLarge(), nn.BatchNorm1d(6))
    with make(model, workers="processes", timeout=3) as pipe:
        x = X.clone()
        x.tensor_split(5)[1].fill_(1000.0)
        with pytest.raises(ps.WorkerTimeout) as caught:
            pipe.train_step(x, target=Y, loss_fn=F.mse_loss)
    assert (caught.value.worker, caught.value.microbatch) == (1, 1)


class HangsAtLarge(nn.Module):
    """In the forward of whatever has large numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return HangingFunction.apply(self.linear(x), x)  # type: ignore[no-any-return]


class HangingFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if x.max() > 900:
            time.sleep(60)
        return result.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


@pytest.mark.parametrize("kind", KINDS)
def test_a_timeline_has_the_workers_of_all_replicas(kind: str) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    with make(model, stages=2, replicas=2, workers=kind) as pipe:
        with pipe.recording() as timelines:
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        predicted = pipe.plan.timeline()
    for timeline in (timelines[0], predicted):
        assert timeline.num_workers == 4
        of = {w: {e.action.microbatch for e in timeline.events if e.worker == w} for w in range(4)}
        assert of == {0: {0, 2, 4}, 1: {0, 2, 4}, 2: {1, 3}, 3: {1, 3}}


def test_checkpoints_go_on_with_other_numbers(tmp_path: Any) -> None:
    def build() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 6))

    found = []
    here, apart = KINDS
    ways = [
        ((2, 1, here), (2, 1, here)),
        ((1, 3, here), (2, 1, apart)),
        ((2, 2, apart), (1, 2, here)),
        ((1, 2, apart), (2, 2, apart)),
    ]
    for first, second in ways:
        path = str(tmp_path / f"{first}{second}")
        torch.manual_seed(0)
        for stages, replicas, kind in (first, second):
            model = build()
            with make(model, stages=stages, replicas=replicas, workers=kind) as pipe:
                optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.1)
                if (tmp_path / f"{first}{second}").exists():
                    ps.load(path).restore(pipe, optimizer=optimizer)
                for _ in range(2):
                    optimizer.zero_grad()
                    pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
                    optimizer.step()
                pipe.save(path, optimizer=optimizer)
                found.append((model.state_dict(), optimizer.state_dict()))
    for k in (3, 5, 7):
        assert_same([*found[k]], [*found[1]])


def test_what_is_not_possible_says_so() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    with pytest.raises(ps.InputError, match=r"replicas=0; give a number from 1"):
        ps.Pipeline(model, (X,), devices=["cpu"] * 2, replicas=0)
    with pytest.raises(ps.PlanError, match="3 replicas need as many parts of the devices"):
        ps.Pipeline(model, (X,), devices=["cpu"] * 4, replicas=3)
    with pytest.raises(ps.PlanError, match="zero-bubble may halve backwards"):
        ps.Pipeline(model, (X,), devices=["cpu"] * 2, replicas=2, schedule="zero-bubble")
    with pytest.raises(ps.PlanError, match="2 replicas cannot share 1 micro-batches"):
        ps.Pipeline(model, (X,), devices=["cpu"] * 2, replicas=2, num_microbatches=1)


@pytest.mark.parametrize("seed", range(20))
def test_an_ordered_sum_is_that_of_one_after_the_other(seed: int) -> None:
    drawn = random.Random(seed)
    terms = [torch.randn(5) * 10 ** drawn.uniform(-4, 4) for _ in range(9)]
    expected, leaf = nn.Parameter(torch.zeros(5)), nn.Parameter(torch.zeros(5))
    for term in terms:
        expected.grad = term.clone() if expected.grad is None else expected.grad + term
    turns = LocalTurns()

    def add(numbers: list[int]) -> None:
        total = OrderedSum(turns)
        for number in numbers:
            time.sleep(drawn.random() * 1e-3)
            total.add(number, [[(leaf, terms[number])]])
        total.add_pending()

    order = drawn.sample(range(9), 9)
    threads = [threading.Thread(target=add, args=(sorted(order[k::3]),)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, expected.grad)


def test_turns_that_are_done_twice_or_early_count_once() -> None:
    turns = LocalTurns()
    for number in (1, 0, 0, 1):
        turns.done(number)
    turns.wait(2)
    turns.abort()
    with pytest.raises(Aborted):
        turns.wait(3)
    turns.reset(7)
    turns.wait(7)


class Counts(nn.Module):
    """Remembers in plain attributes, as some code of users' does."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.calls = 0
        self.history: list[float] = []
        self.last = torch.zeros(())
        self.register_buffer("mean", torch.zeros(6))
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "number":
            self.calls += 1
            calls = self.calls
            time.sleep(5e-4)
            return x * self.scale * calls
        if self.kind == "list":
            self.history.append(1.0)
            return F.dropout(x, 0.1, self.training) * self.scale * len(self.history)
        if self.kind == "tensor":
            self.last = x
            time.sleep(1e-3)
            return self.last * self.scale
        self.mean = self.mean * 0.5 + x.detach().mean(0)  # another buffer
        return x * self.scale - self.mean


class Slowly(nn.Module):
    """Draws a weight's parametrization by the old ways: hooks before the forward set it."""

    def __init__(self, norm: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.linear = norm(nn.Linear(6, 6))
        self.linear.register_forward_pre_hook(lambda module, args: time.sleep(1e-3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()  # type: ignore[no-any-return]


class Drawing(nn.Module):
    """Draws from a generator of its own, which another module may draw from as well."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.generator = generator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(1e-3 * torch.rand(1, generator=self.inner.generator).item())
        return x + torch.rand(x.shape, generator=self.inner.generator)


class Reads(nn.Module):
    """Reads the statistics that another module of it has left."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.last = Delayed()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.last(self.norm(self.first(x)))
        return x * self.norm.running_var


def shared_buffer() -> nn.Module:
    first, second = Remembers(), Remembers()
    second.mean = first.mean
    return nn.Sequential(first, Delayed(), second, nn.Linear(6, 6))


def shared_generator() -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    return nn.Sequential(Drawing(generator), Delayed(), Drawing(generator), nn.Linear(6, 6))


REMEMBERING: dict[str, Callable[[], nn.Module]] = {
    **{
        kind: lambda kind=kind: nn.Sequential(nn.Linear(6, 6), Counts(kind), nn.Linear(6, 6))
        for kind in ("number", "list", "tensor", "buffer")
    },
    "weight norm": lambda: Slowly(nn.utils.weight_norm),
    "spectral norm": lambda: Slowly(nn.utils.spectral_norm),
    "shared buffer": shared_buffer,
    "shared generator": shared_generator,
    "read elsewhere": Reads,
}


UNSEEN = ("number", "list", "tensor", "buffer", "weight norm", "spectral norm", "shared generator")
"""What of it is in attributes, or generators, which replicas in other processes do not see."""


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", REMEMBERING)
def test_whatever_modules_remember(name: str, kind: str) -> None:
    found = []
    delayed = ("1.linear", "last.linear") if name in ("shared buffer", "shared generator") else ()
    keep = delayed[:1] if delayed else (("last.linear",) if name == "read elsewhere" else ())
    alone = 1 if delayed else 2  # what is shared cannot be cut apart; else one thread each
    for stages, replicas in ((alone, 1), (1, 2), *([(1, 3)] if kind == "threads" else [])):
        torch.manual_seed(0)
        model = REMEMBERING[name]()
        options = {"stages": stages, "keep_closed": keep}
        if replicas > 1 and kind == "processes" and name in UNSEEN:
            with (
                pytest.raises(ps.InputError, match=r"replicas=\d: .* remembers"),
                make(model, replicas=replicas, workers=kind, **options) as pipe,
            ):
                trained(pipe, 3)
            continue
        with make(model, replicas=replicas, workers=kind, **options) as pipe:
            found.append(trained(pipe, 3))
    for other in found[1:]:
        assert_same(other, found[0])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [7])
def test_shares_of_unlike_sizes_do_not_wait_for_each_other(count: int, kind: str) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(6, 6), nn.BatchNorm1d(6))))

    x, found = torch.randn(28, 6), []
    for replicas in (1, 2):
        options = {"schedule": "interleaved", "count": count, "timeout": 30.0, "workers": kind}
        with make(build(), (x,), stages=2, replicas=replicas, **options) as pipe:
            assert len(pipe.plan.stages) == 4
            found.append([pipe.train_step(x, target=x, loss_fn=F.mse_loss)])
            found[-1] += [p.grad for p in pipe.model.parameters()]
    assert_same(found[1], found[0])


def test_recomputing_leaves_modules_alone_that_others_run() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(6))
            self.scale = nn.Parameter(torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale * self.mask

    class Watched(dict[str, Any]):
        def clear(self) -> None:
            raise AssertionError("another replica may read it")

    module = Looks()
    module._buffers = Watched(module._buffers)
    state = State([module], ())
    state.put_back()
    for kind in ("number", "buffer"):
        model = nn.Sequential(nn.Linear(6, 6), Counts(kind), nn.Linear(6, 6))
        with pytest.raises(ps.InputError, match=r"replicas=1"):
            make(model, recompute="all")


def test_forwards_and_sums_do_not_wait_for_each_other() -> None:
    """Where somebody holds the node that adds: forwards ask it under a lock of the leaf."""
    leaf, x = nn.Parameter(torch.zeros(4, 4)), torch.randn(2, 4)
    held, over = get_gradient_edge(leaf).node, threading.Event()

    def forwards() -> None:
        while not over.is_set():
            F.linear(x, leaf)

    thread = threading.Thread(target=forwards)
    thread.start()
    try:
        total = OrderedSum(LocalTurns())
        for number in range(4000):
            total.add(number, [[(leaf, torch.ones(4, 4))]])
            total.add_pending()
    finally:
        over.set()
        thread.join()
    assert held.variable.grad is not None
    assert torch.equal(held.variable.grad, torch.full((4, 4), 4000.0))
