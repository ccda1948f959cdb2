"""Losses, metrics, hooks and clipping: a pipeline gives the bits of plain PyTorch."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from tests.support.models import mlp, uniform_plan
from tests.support.training import (
    LABELS,
    USES,
    Plain,
    X,
    Y,
    assert_same,
    balanced,
    counted,
    gradients,
    routed,
    used,
    used_plainly,
)

KINDS: Any = ["threads", "processes"]


pytestmark = pytest.mark.usefixtures("pool")


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize(
    ("schedule", "recompute"), [("1f1b", "none"), ("zero-bubble", "none"), ("gpipe", "all")]
)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", USES)
def test_the_bits_of_plain_pytorch(name: str, kind: Any, schedule: str, recompute: str) -> None:
    options = {"schedule": schedule, "recompute": recompute, "devices": ["cpu"] * 2}
    found = used(name, workers=kind, **options)
    assert_same(found, used_plainly(name))


def make(model: nn.Module, kind: Any = "threads", *args: Any, **options: Any) -> ps.Pipeline:
    """A pipeline in two stages and three micro-batches."""
    args = args or (X,)
    program = ps.capture(model, args, keep_closed=options.pop("keep_closed", ()))
    plan = uniform_plan(program, options.pop("stages", 2), 3, **options)
    devices = ["cpu"] * len(plan.stages)
    return ps.Pipeline(model, args, program=program, plan=plan, workers=kind, devices=devices)


@pytest.mark.parametrize("kind", KINDS)
def test_several_targets(kind: Any) -> None:
    def loss_fn(output: torch.Tensor, target: Any) -> torch.Tensor:
        first, (second, nothing), name = target
        assert nothing is None
        assert name == "l1"
        return F.mse_loss(output, first) + F.l1_loss(output, second["values"])

    model, twin = mlp(6, 6, 5), mlp(6, 6, 5)
    twin.load_state_dict(model.state_dict())
    target = (Y, [{"values": 2 * Y}, None], "l1")
    with make(model, kind) as pipe:
        found = pipe.train_step(X, target=target, loss_fn=loss_fn, outputs=True)
        with torch.no_grad():
            assert torch.equal(found.outputs, pipe(X))
    expected = Plain(twin).train_step(X, target=target, loss_fn=loss_fn, outputs=True)
    assert_same(found, expected)
    assert_same(gradients(pipe), gradients(Plain(twin)))
    assert found.metrics is None


def test_metrics_are_off_unless_asked_for() -> None:
    with make(mlp(6, 6, 5)) as pipe:
        loss = pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert type(loss) is torch.Tensor
        found = pipe.train_step(X, target=Y, loss_fn=F.mse_loss, metrics=lambda output, _: output)
        assert found.outputs is None
        assert [len(part) for part in found.metrics] == [4, 4, 3]
        assert not any(part.requires_grad for part in found.metrics)


@pytest.mark.parametrize("kind", KINDS)
def test_metrics_that_fail_leave_nothing(kind: Any) -> None:
    with make(mlp(6, 6, 5), kind) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        before = gradients(pipe)
        with pytest.raises(ps.WorkerError, match="in the metrics of micro-batch 0") as caught:
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss, metrics=lambda *_: 1 / 0)
        assert caught.value.action == "metrics"
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert_same(gradients(pipe), before)
        pipe.zero_grad()
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert_same(gradients(pipe), before)


def test_outputs_that_cannot_be_put_together() -> None:
    with make(routed(), "threads", X, LABELS) as pipe:
        with pytest.raises(ps.InputError, match="no batch dimension"):
            pipe.train_step(X, LABELS, target=LABELS, loss_fn=balanced, outputs=True)
        assert gradients(pipe) == {}


@pytest.mark.parametrize("kind", KINDS)
def test_an_argument_of_the_loss_is_never_split(kind: Any) -> None:
    """Even if it has as many entries as the batch has rows."""

    def loss_fn(output: torch.Tensor, target: torch.Tensor, *, codes: Any) -> torch.Tensor:
        assert len(codes["all"]) == len(X)
        assert codes["name"] == "codes"
        return (output[:, None] - codes["all"]).square().mean() + target.mean()

    with make(mlp(6, 6, 5), kind) as pipe:
        codes = {"all": Y, "name": "codes"}
        pipe.train_step(X, target=Y, loss_fn=loss_fn, loss_kwargs={"codes": codes})


class Centred(nn.Module):
    """A loss that remembers a mean, as that of DINO does."""

    def __init__(self, scaled: bool = False) -> None:
        super().__init__()
        self.register_buffer("centre", torch.zeros(5))
        self.scale = nn.Parameter(torch.ones(5)) if scaled else None

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.centre = 0.9 * self.centre + 0.1 * output.detach().mean(0)
        output = output if self.scale is None else output * self.scale
        return F.mse_loss(output - self.centre, target)


@pytest.mark.parametrize(("kind", "scaled"), [("threads", True), ("processes", False)])
def test_a_loss_that_remembers_and_learns(kind: Any, scaled: bool) -> None:
    model, loss = mlp(6, 6, 5), Centred(scaled)
    twin, other = copy.deepcopy((model, loss))
    with make(model, kind) as pipe:
        for _ in range(2):
            mine = pipe.train_step(X, target=Y, loss_fn=loss)
            assert torch.equal(mine, Plain(twin).train_step(X, target=Y, loss_fn=other))
        assert torch.equal(loss.centre, other.centre)
        assert loss.centre.abs().sum() > 0
        assert_same(gradients(pipe), gradients(Plain(twin)))
        if scaled:
            assert torch.equal(loss.scale.grad, other.scale.grad)  # type: ignore[union-attr]


def test_a_loss_that_normalises_one_row_is_no_fault_of_the_model() -> None:
    norm = nn.BatchNorm1d(5)
    with make(mlp(6, 6, 5)) as pipe, pytest.raises(ps.WorkerError) as caught:
        pipe.train_step(X[:3], target=Y[:3], loss_fn=lambda out, y: F.mse_loss(norm(out), y))
    assert "the loss of micro-batch 0" in str(caught.value)
    assert "the model itself" not in str(caught.value)


def test_a_step_that_fails_leaves_the_loss_as_it_was() -> None:
    model, loss = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 5)), Centred(scaled=True)
    with make(model, "threads", schedule="gpipe") as pipe:
        pipe.train_step(X, target=Y, loss_fn=loss)
        before = loss.centre.clone(), loss.scale.grad.clone()  # type: ignore[union-attr]
        model[0].weight.register_hook(lambda gradient: 1 / 0)  # type: ignore[arg-type]
        with pytest.raises(ps.WorkerError, match="division by zero"):
            pipe.train_step(X, target=Y, loss_fn=loss)
    assert torch.equal(loss.centre, before[0])
    assert torch.equal(loss.scale.grad, before[1])  # type: ignore[union-attr, arg-type]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "metrics": ({"metrics": 3}, "metrics=3 is not a function"),
    "arguments": ({"loss_kwargs": [1]}, r"loss_kwargs=\[1\] is not a dict"),
    "no tensor": ({"target": [1.0] * 11}, "the target, a list, contains no tensor"),
    "an array": ({"target": Y.numpy()}, "the target, a ndarray, contains no tensor"),
    "a constant": ({"target": torch.ones(())}, "can be given in loss_kwargs"),
    "no target": ({"target": None, "weight": counted}, "target=labels"),
    "weights": ({"weight": lambda t: t}, r"returned a Tensor of shape \(4, 5\), not one number"),
    "a text": ({"weight": lambda t: "much"}, "returned a str, not one number"),
    "negative": ({"weight": lambda t: len(t) - 3.5}, "none may be negative"),
    "no number": ({"weight": lambda t: float("nan")}, "add up to nan"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_fit(name: str) -> None:
    options, text = BAD[name]
    with make(mlp(6, 6, 5)) as pipe:
        with pytest.raises(ps.InputError, match=text):
            pipe.train_step(X, **{"target": Y, "loss_fn": F.mse_loss, **options})
        assert gradients(pipe) == {}


# -- what a forward leaves in an attribute for the loss ---------------------------------------


class Leaving(nn.Module):
    """A layer that leaves its balance behind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.balance: Any = 0.0
        self.history: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.balance = x.square().mean()
        self.history = [x.detach()]
        return x


def leaving(*places: int) -> nn.Sequential:
    return nn.Sequential(*(Leaving() if k in places else nn.Linear(6, 6) for k in range(6)))


def balances(model: nn.Module) -> torch.Tensor:
    found = [m.balance for m in model.modules() if isinstance(m, Leaving)]
    return torch.stack(found).sum()


LOSSES: dict[str, Callable[[nn.Module], Callable[..., torch.Tensor]]] = {
    "through a helper": lambda m: lambda out, y: F.mse_loss(out, y) + balances(m),
    "of a layer": lambda m: lambda out, y, layer=m[1]: F.mse_loss(out, y) + layer.balance,
    "partial": lambda m: partial(lambda out, y, parts: out.sum() + parts[1].balance, parts=[*m]),
    "a module": lambda m: Reading(m),
    "a method": lambda m: Trainer(m).loss,
}


class Trainer:
    """An object that has the model."""

    def __init__(self, model: nn.Module) -> None:
        self.parts = {"model": model}

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target) + self.parts["model"][1].balance


class Reading(nn.Module):
    """A loss that has the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target) + balances(self.model)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOSSES)
def test_what_an_earlier_stage_leaves_is_not_for_the_loss(name: str, kind: Any) -> None:
    with make(model := leaving(1), kind) as pipe:
        with pytest.raises(ps.InputError, match="the loss reads 'balance' of the module '1'"):
            pipe.train_step(X, target=X, loss_fn=LOSSES[name](model))
        with pytest.raises(ps.InputError, match="the metrics function reads 'balance'"):
            pipe.train_step(X, target=X, loss_fn=F.mse_loss, metrics=LOSSES[name](model))
        pipe.train_step(X, target=X, loss_fn=F.mse_loss, metrics=lambda out, y: out.mean())


@pytest.mark.parametrize(("stages", "places"), [(1, (1, 5)), (2, (5,))])
def test_what_the_last_stage_leaves_is_the_micro_batchs_own(stages: int, places: Any) -> None:
    model = leaving(*places)
    twin = copy.deepcopy(model)
    with make(model, stages=stages) as pipe:
        loss = pipe.train_step(X, target=X, loss_fn=LOSSES["through a helper"](model))
    expected = Plain(twin).train_step(X, target=X, loss_fn=LOSSES["through a helper"](twin))
    assert torch.equal(loss, expected)
    assert_same(gradients(pipe), gradients(Plain(twin)))


KEPT: dict[str, Callable[[torch.Tensor], Any]] = {
    "detached": lambda balance: balance.detach(),
    "a number": lambda balance: balance.item(),
    "in a list": lambda balance: [balance.detach()],
}


class Keeping(Leaving):
    """A layer that leaves its balance behind as something that has no gradients."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.kept = KEPT[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.balance = self.kept(self.balance)
        return x


@pytest.mark.parametrize("name", KEPT)
def test_what_is_left_without_gradients_is_not_for_the_loss_either(name: str) -> None:
    model = nn.Sequential(Keeping(name), nn.Linear(6, 6))

    def weighted(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        balance: Any = model[0].balance
        return F.mse_loss(out, y) * (balance[0] if isinstance(balance, list) else balance)

    with make(model) as pipe:
        with pytest.raises(ps.InputError, match="the loss reads 'balance' of the module '0'"):
            pipe.train_step(X, target=X, loss_fn=weighted)
        pipe.train_step(X, target=X, loss_fn=F.mse_loss)
    twin = copy.deepcopy(model)
    with make(model, stages=1) as pipe:  # where it is the micro-batch's own
        loss = pipe.train_step(X, target=X, loss_fn=weighted)
    model = twin
    assert torch.equal(loss, Plain(twin).train_step(X, target=X, loss_fn=weighted))


def test_running_statistics_of_an_earlier_stage_are_not_for_the_loss() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))

    def penalised(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean: Any = model[1].running_mean
        return F.mse_loss(out, y) + mean.square().sum()

    with make(model) as pipe:
        with pytest.raises(ps.InputError, match="the loss reads 'running_mean' of the module '1'"):
            pipe.train_step(X, target=X, loss_fn=penalised)
        model.eval()
        pipe.train_step(X, target=X, loss_fn=penalised)


class Penalised:
    """A loss as an object, which may have been made where another one was."""

    def __init__(self, norm: Any = None) -> None:
        self.norm = norm

    def __call__(self, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        more = 0.0 if self.norm is None else self.norm.running_mean.square().sum()
        return F.mse_loss(out, y) + more


def test_a_loss_that_was_looked_at_is_kept() -> None:
    """Else another one could be made in its place, and be taken for it."""
    with make(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))) as pipe:
        loss = Penalised()
        pipe.train_step(X, target=X, loss_fn=loss)
        known = weakref.ref(loss)
        del loss
        gc.collect()
        assert known() is not None


def test_losses_of_one_code_over_other_modules_are_not_the_same() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))

    def with_statistics(norm: nn.Module) -> Callable[..., torch.Tensor]:
        def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            mean: Any = norm.running_mean
            return F.mse_loss(out, y) + mean.square().sum()

        return loss

    with make(model) as pipe:
        pipe.train_step(X, target=X, loss_fn=with_statistics(nn.BatchNorm1d(6)))
        with pytest.raises(ps.InputError, match="the loss reads 'running_mean'"):
            pipe.train_step(X, target=X, loss_fn=with_statistics(model[1]))


def test_many_losses_are_not_kept_for_ever() -> None:
    with make(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))) as pipe:
        for _ in range(70):
            pipe.train_step(X, target=X, loss_fn=Penalised())
        assert len(pipe._passes._losses) == 64
        for factor in range(70):
            scale = torch.tensor(float(factor))
            pipe.train_step(X, target=X, loss_fn=lambda out, y, s=scale: F.mse_loss(out, y) * s)
            pipe.train_step(X, target=X, loss_fn=lambda out, y: F.mse_loss(out, y) * scale)  # noqa: B023
        assert sum(len(key) for key in pipe._passes._mixing._losses) < 1000


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_of_the_scripts_own_graph_leaves_gradients_as_they_were(kind: Any) -> None:
    encoder = nn.Linear(6, 6)
    with make(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), kind) as pipe:
        h = encoder(X)
        pipe.train_step(h, target=X, loss_fn=F.mse_loss)
        before = {name: grad.clone() for name, grad in pipe.gradients().items()}
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            pipe.train_step(h, target=X, loss_fn=F.mse_loss)
        after = pipe.gradients()
        assert [name for name in before if not torch.equal(before[name], after[name])] == []
        pipe.train_step(encoder(X), target=X, loss_fn=F.mse_loss)


def test_a_model_without_parameters_has_no_gradients() -> None:
    with make(nn.Sequential(nn.Tanh(), nn.Sigmoid())) as pipe, torch.no_grad():
        pipe.train_step(X, target=X, loss_fn=F.mse_loss)
        assert pipe.gradients() == {}


def test_a_copy_may_stay_in_the_module_if_the_loss_reads_the_output() -> None:
    model = nn.Sequential(Keeping("detached"), nn.Linear(6, 6))
    with make(model) as pipe:
        pipe.train_step(X, target=X, loss_fn=lambda out, y: F.mse_loss(out, y) + model.training)


def test_a_loss_may_read_other_things_of_the_model() -> None:
    model = leaving(1)
    twin = copy.deepcopy(model)

    def penalised(model: nn.Module) -> Callable[..., torch.Tensor]:
        return lambda out, y: F.mse_loss(out, y) + 0.1 * model[5].weight.square().sum()

    with make(model) as pipe:
        loss = pipe.train_step(X, target=X, loss_fn=penalised(model))
    assert torch.equal(loss, Plain(twin).train_step(X, target=X, loss_fn=penalised(twin)))


# -- hooks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_late_hooks_of_a_module_that_is_looked_into_are_refused(kind: Any) -> None:
    model = nn.Sequential(mlp(6, 6, 6), mlp(6, 6, 5))
    with make(model, kind) as pipe:
        handle = model[1].register_forward_hook(lambda *_: None)
        for use in (lambda: pipe(X), lambda: pipe.train_step(X, target=Y, loss_fn=F.mse_loss)):
            with pytest.raises(ps.InputError, match=r"'1' \(Sequential\) has hooks"):
                use()
        handle.remove()
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)


def test_late_hooks_after_all_were_taken_away() -> None:
    """By a new dictionary, as scripts do it."""
    model = nn.Sequential(mlp(6, 6), nn.Linear(6, 5))
    with make(model) as pipe:
        model[0]._forward_hooks = OrderedDict()
        model[0].register_forward_hook(lambda *_: None)
        with pytest.raises(ps.InputError, match="were registered after the pipeline was built"):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)


def test_late_hooks_of_a_whole_module() -> None:
    seen: dict[str, list[int]] = {"threads": [], "processes": []}
    for kind, rows in seen.items():
        model = mlp(6, 6, 5)
        with make(model, kind) as pipe:
            model[2].register_forward_hook(lambda m, a, out, rows=rows: rows.append(len(out)))
            if kind == "threads":
                pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
                continue
            with pytest.raises(ps.InputError, match="hooks of a module were registered"):
                pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    assert seen == {"threads": [4, 4, 3], "processes": []}


def test_hooks_of_inputs_and_results() -> None:
    model = mlp(6, 6, 5)
    twin = copy.deepcopy(model)
    found = []
    with make(model) as pipe:
        for use in (pipe, twin):
            x = X.clone().requires_grad_()
            x.register_hook(lambda gradient: gradient * 2)
            output = use(x)
            output.register_hook(lambda gradient: gradient * 3)
            F.mse_loss(output, Y).backward()
            found.append(x.grad)
    assert torch.allclose(*found)  # type: ignore[arg-type] - one whole batch, and three parts


def test_hooks_of_the_whole_model_are_no_late_ones() -> None:
    model = mlp(6, 6, 5)
    model.register_forward_hook(lambda module, args, output: output * 2)
    twin = copy.deepcopy(model)
    with make(model, stages=1) as pipe:
        loss = pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    assert torch.equal(loss, Plain(twin).train_step(X, target=Y, loss_fn=F.mse_loss))


def test_clipping_some_parameters_by_name_is_refused() -> None:
    with make(mlp(6, 6, 5)) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        for clip in (pipe.clip_grad_norm_, pipe.clip_grad_value_):
            with pytest.raises(ps.InputError, match=r"contains '0.weight', which is not a tensor"):
                clip(1.0, parameters=["0.weight"])
        weight = pipe.model[0].weight
        assert torch.equal(pipe.clip_grad_norm_(1.0, parameters=weight), weight.grad.norm())
