"""Forwards that decide on their inputs' values: every way is recorded, and taken when it fits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.comparison.reference import run_with_threads
from tests.support.models import uniform_plan


class Masked(nn.Module):
    """Leaves the mask away where it masks nothing, as transformers' attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        if not mask.all():
            x = self.drop(x) * mask.unsqueeze(1)
            if mask.logical_not().all():
                x = x + 1
        return self.layers[2](self.layers[1](x).tanh())


def batch(*rows: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(len(rows), 4), torch.tensor(rows)


MIXED = batch(True, False, True, True, True, True, False, False)  # 3 ways in 4 micro-batches


def test_the_way_is_that_of_the_inputs() -> None:
    model = Masked().eval()
    program = ps.capture(model, batch(True, False, True))
    for rows in [(True, False), (True,), (False,) * 5, (True, True, False, False), (True,) * 9]:
        x, mask = batch(*rows)
        assert torch.equal(program(x, mask), model(x, mask))
    assert program.train.answers == (False, False)
    assert not program.closed


def test_a_way_is_recorded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    program = ps.capture(Masked(), batch(True, True))
    found = [program.trace_for(list(batch(*rows)), True) for rows in [(True,), (False,), (False,)]]
    assert found[0] is program.train
    assert found[1] is found[2] is not program.train
    assert program.trace_for(list(batch(False)), False) is not found[1]  # dropout, or none


class Classes(Masked):
    """Asks something that can only be asked if the first answer was no."""

    def forward(self, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        if (classes > 3).any():
            return self.layers[1](x)  # type: ignore[no-any-return]
        x = self.layers[0](x)
        return x * 2 if (F.one_hot(classes, 4).sum(0) > 2).any() else x


def test_a_question_that_cannot_be_asked_is_another_way() -> None:
    x = torch.randn(4, 4)
    program = ps.capture(Classes(), (x, torch.tensor([0, 1, 2, 3])))
    for classes in ([0, 1, 2, 3], [5, 0, 0, 0], [0, 0, 0, 1], [3, 2, 1, 7]):
        given = torch.tensor(classes)
        assert torch.equal(program(x, given), program.model(x, given))


class Several(nn.Module):
    """The same layers on both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x if mask.all() else x * 2


@pytest.mark.parametrize("steps", [1, 2])
def test_gradients_of_several_ways_are_added_in_the_order_of_micro_batches(steps: int) -> None:
    """Weights wait for the end of a step in zero-bubble, but not on a way that is new."""
    torch.manual_seed(3)
    model = Several()
    twin = copy.deepcopy(model)
    x, mask = torch.randn(12, 4), torch.ones(12, dtype=torch.bool)
    program = ps.capture(model, (x, mask))
    plan = uniform_plan(program, 2, 6, "zero-bubble", cuts=(2,))
    with ps.Pipeline(model, plan=plan, program=program, devices=plan.devices, audit=None) as pipe:
        for step in range(steps):
            mask[6 - 2 * step] = False
            pipe.train_step(x, mask, loss_fn=lambda out: out.square().mean())
            for part, own in zip(x.split(2), mask.split(2), strict=True):
                (twin(part, own).square().mean() * (2 / 12)).backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("example", [(True,) * 4, (False,) * 4, (True, False, False, True)])
@pytest.mark.parametrize("cut", [1, 2])
def test_micro_batches_go_different_ways_in_one_step(example: tuple[bool, ...], cut: int) -> None:
    model = Masked()
    twin, (x, mask) = copy.deepcopy(model), MIXED
    program = ps.capture(model, batch(*example))
    plan = uniform_plan(program, 2, 4, "1f1b", cuts=(cut,))
    torch.manual_seed(7)
    with ps.Pipeline(model, plan=plan, program=program, devices=plan.devices) as pipe:
        report = ps.verify(
            twin,
            MIXED,
            target=torch.randn(8, 4),
            loss_fn=F.mse_loss,
            devices=["cpu", "cpu"],
            num_microbatches=4,
            replicas=1,
        )
        assert report.ok, str(report)
        pipe.eval()
        twin.eval()
        loss = pipe.train_step(x, mask, loss_fn=lambda out: out.square().mean())

        def plainly() -> torch.Tensor:
            total = torch.zeros(())
            for rows, masks in zip(x.tensor_split(4), mask.tensor_split(4), strict=True):
                part = twin(rows, masks).square().mean()
                (part * 0.25).backward()
                total = total + part.detach() * 0.25
            return total

        assert torch.equal(loss, run_with_threads(plainly, 1))
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)


class Chatty(Masked):
    """What it returns depends on the way."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        y = super().forward(x, mask)
        return {"y": y, "masked": ~mask} if not mask.all() else {"y": y}  # type: ignore[return-value]


def test_results_of_different_kinds_are_not_put_together() -> None:
    program = ps.capture(Chatty(), MIXED)
    plan = uniform_plan(program, 2, 4, "gpipe", cuts=(1,))
    with ps.Pipeline(program.model, plan=plan, program=program, devices=plan.devices) as pipe:
        with pytest.raises(ps.InputError, match="different ways"):
            pipe(*MIXED)
        pipe.train_step(*MIXED, loss_fn=lambda out: out["y"].sum())
        assert set(pipe(*batch(False, False))) == {"y", "masked"}


class ByAmount(Masked):
    """What it does depends on a number read off the inputs."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.layers[0](x) * int(mask.sum())


class ByParameter(Masked):
    """What it does depends on a weight, by way of a tensor that was empty at first."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen = torch.zeros(4)
        seen.add_(self.layers[1].bias)
        return self.layers[0](x) if seen.sum() > 0 else self.layers[1](x)


@pytest.mark.parametrize(
    ("kind", "words"), [(ByAmount, "more than a yes or no"), (ByParameter, "a parameter")]
)
def test_other_readings_close_the_module(kind: type[Masked], words: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    program = ps.capture(Around(kind(), model), batch(True, False, True))
    assert list(program.closed) == ["inner"]
    assert words in program.closed["inner"]


class Around(nn.Module):
    def __init__(self, inner: nn.Module, rest: nn.Module) -> None:
        super().__init__()
        self.inner, self.rest = inner, rest

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.rest(self.inner(x, mask))


def test_a_decision_that_depends_on_the_rows_closes_the_module() -> None:
    class Crowd(Masked):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.layers[0](x) if mask.sum() > 3 else self.layers[1](x)

    x, mask = batch(True, True, True)
    program = ps.capture(Around(Crowd(), nn.Linear(4, 4)), (x, mask))
    assert "depends on the rows" in program.closed["inner"]


def test_a_way_that_cannot_be_recorded_is_an_error() -> None:
    class Rare(Masked):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            return x if mask.all() else x * float(x.detach().mean())

    program = ps.capture(Rare(), batch(True, True))
    with pytest.raises(ps.CaptureError, match="takes another way than with the example"):
        program(*batch(True, False))


class ReadsEarly(nn.Module):
    """Reads a weight before its layers in training, and where it is used in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            scale = self.scale.exp()
            return self.second(self.first(x)) * scale  # type: ignore[no-any-return]
        return self.second(self.first(x)) * self.scale.exp()  # type: ignore[no-any-return]


def test_every_weight_is_in_the_same_stage_on_all_ways() -> None:
    """In evaluation the first stage passes on what only the second one uses."""
    model = ReadsEarly()
    program = ps.capture(model, (torch.randn(6, 4),))
    names = {id(p): n for n, p in model.named_parameters()}
    (cut,) = (k for k, c in enumerate(program.train.calls) if c.target == "second")
    found = [
        [sorted(names[id(p)] for p in stage.module.parameters()) for stage in stages]
        for stages in (program.stages([cut], training=training) for training in (True, False))
    ]
    expected = [["first.bias", "first.weight", "scale"], ["second.bias", "second.weight"]]
    assert found == [expected, expected]
    plan = uniform_plan(program, 2, 3, cuts=[cut])
    x = torch.randn(6, 4)
    with ps.Pipeline(
        model, program=program, plan=plan, devices=plan.devices, workers="processes"
    ) as pipe:
        pipe.eval()
        with torch.no_grad():
            assert torch.equal(pipe(x), torch.cat([model(part) for part in x.tensor_split(3)]))
        result, parts = pipe(x), [model(part) for part in x.tensor_split(3)]
        result.square().sum().backward()
        ours = [p.grad for p in model.parameters()]
        model.zero_grad()
        for part in parts:
            part.square().sum().backward()
        for (name, parameter), mine in zip(model.named_parameters(), ours, strict=True):
            assert torch.equal(parameter.grad, mine), name
