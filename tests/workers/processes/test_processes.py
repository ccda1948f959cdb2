"""Worker processes: what threads can do, they can, and every bit is the same."""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.capture.trees import flatten
from tests.support.models import cases, mlp, pipeline, planned

X, Y = torch.randn(12, 6), torch.randn(12, 6)


pytestmark = pytest.mark.usefixtures("pool")


def both(model: nn.Module, **options: Any) -> list[ps.Pipeline]:
    """The same model on threads and on processes."""
    found = []
    for kind in ("threads", "processes"):
        twin = copy.deepcopy(model)
        pipe = ps.Pipeline(twin, (X,), devices=["cpu"] * 2, workers=kind, **options, replicas=1)
        options["plan"] = pipe.plan
        options = {"plan": pipe.plan}
        found.append(pipe)
    return found


@pytest.fixture
def pipes() -> Iterator[list[ps.Pipeline]]:
    layers = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)) for _ in range(4)]
    found = both(nn.Sequential(*layers), num_microbatches=3, schedule="1f1b", cuts=["2"])
    yield found
    for pipe in found:
        pipe.close()


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for (name, a), (_, b) in zip(
        ours.state_dict().items(), theirs.state_dict().items(), strict=True
    ):
        assert torch.equal(a, b), name
    for (name, p), (_, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize("name", list(cases()))
@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "interleaved"])
def test_the_bits_of_threads(name: str, schedule: str) -> None:
    case = cases()[name]
    if name in ("resnet50", "vit") and schedule != "zero-bubble":
        pytest.skip("one schedule is enough for the larger ones")
    plan = planned(name, 2, 3, schedule)
    found = []
    for kind in ("threads", "processes"):
        with pipeline(case, plan, workers=kind) as pipe:
            torch.manual_seed(5)
            optimizer = pipe.optimizer(torch.optim.SGD, lr=0.01, momentum=0.9)
            losses = []
            for _ in range(2):
                optimizer.zero_grad()
                losses.append(
                    pipe.train_step(
                        *case.args, **case.kwargs, target=case.target, loss_fn=case.loss_fn
                    )
                )
                optimizer.step()
            with torch.no_grad():
                result = pipe.eval()(*case.args, **case.kwargs)
            found.append((pipe.model, losses, flatten(result)[0]))
    threads, processes = found
    assert_same(processes[0], threads[0])
    for mine, theirs in zip(processes[1] + processes[2], threads[1] + threads[2], strict=True):
        assert torch.equal(torch.as_tensor(mine), torch.as_tensor(theirs))


def each(pipes: list[ps.Pipeline], steps: Any) -> None:
    """Do the same with both, from the same seed; then everything is the same."""
    results = []
    for pipe in pipes:
        torch.manual_seed(3)
        results.append(steps(pipe))
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert_same(pipes[1].model, pipes[0].model)


def step(pipe: ps.Pipeline) -> torch.Tensor:
    return pipe.train_step(X, target=Y, loss_fn=F.mse_loss)


def test_the_plain_style(pipes: list[ps.Pipeline]) -> None:
    def steps(pipe: ps.Pipeline) -> list[torch.Tensor]:
        x = X.clone().requires_grad_()
        output = pipe(x)
        F.mse_loss(output, Y).backward()
        assert x.grad is not None
        return [output, x.grad]

    each(pipes, steps)


def test_two_batches_under_way_and_one_forgotten(pipes: list[ps.Pipeline]) -> None:
    def steps(pipe: ps.Pipeline) -> list[torch.Tensor]:
        a, b, c = pipe(X), pipe(2 * X), pipe(3 * X)
        del b
        gc.collect()
        F.mse_loss(c, Y).backward()
        F.mse_loss(a, Y).backward()
        return [a, c, step(pipe)]

    each(pipes, steps)


def test_accumulating_and_changing_gradients_by_hand(pipes: list[ps.Pipeline]) -> None:
    def steps(pipe: ps.Pipeline) -> list[torch.Tensor]:
        losses = [step(pipe), step(pipe)]
        norm = pipe.clip_grad_norm_(0.1)
        losses.append(step(pipe))
        for number, parameter in enumerate(pipe.parameters()):
            if number % 3 == 0:
                parameter.grad = None
            elif number % 3 == 1:
                parameter.grad = torch.ones_like(parameter)
        return [*losses, norm, step(pipe)]

    each(pipes, steps)


def test_a_gradient_that_somebody_keeps_stays_as_it_is(pipes: list[ps.Pipeline]) -> None:
    pipe = pipes[1]
    step(pipe)
    kept = [p.grad for p in pipe.parameters()]
    part = kept[0].view(-1)[:3]  # type: ignore[union-attr]
    values = [g.clone() for g in kept if g is not None]
    pipe.zero_grad()
    step(pipe)
    step(pipe)
    assert all(torch.equal(k, v) for k, v in zip(kept, values, strict=True) if k is not None)
    assert torch.equal(part, values[0].view(-1)[:3])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
        (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    ],
)
def test_optimizers(pipes: list[ps.Pipeline], kind: Any, options: dict[str, Any]) -> None:
    states = []

    def steps(pipe: ps.Pipeline) -> list[torch.Tensor]:
        named = list(pipe.named_parameters())
        optimizer = pipe.optimizer(
            kind,
            [
                {"params": [p for n, p in named if "weight" in n], "weight_decay": 0.3},
                {"params": [p for n, p in named if "weight" not in n]},
            ],
            **options,
        )
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            losses.append(step(pipe))
            optimizer.step()
            scheduler.step()
        saved = optimizer.state_dict()
        states.append(saved)
        again = pipe.optimizer(kind, optimizer.param_groups, **options)
        again.load_state_dict(copy.deepcopy(saved))
        step(pipe)
        again.step()
        return losses

    each(pipes, steps)
    mine, theirs = states[1], states[0]
    assert mine["param_groups"] == theirs["param_groups"]
    assert mine["state"].keys() == theirs["state"].keys()
    for number, values in theirs["state"].items():
        for name, value in values.items():
            assert torch.equal(torch.as_tensor(mine["state"][number][name]), torch.as_tensor(value))


def test_a_state_dict_goes_both_ways(pipes: list[ps.Pipeline]) -> None:
    def steps(pipe: ps.Pipeline) -> list[torch.Tensor]:
        saved = {name: value.clone() for name, value in pipe.state_dict().items()}
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        first = step(pipe)
        optimizer.step()
        optimizer.zero_grad()
        pipe.load_state_dict(saved)
        torch.manual_seed(3)
        return [first, step(pipe)]

    each(pipes, steps)


def test_modes_and_frozen_parameters_are_followed(pipes: list[ps.Pipeline]) -> None:
    def steps(pipe: ps.Pipeline) -> list[torch.Tensor]:
        pipe.model[1].eval()
        first = step(pipe)
        pipe.zero_grad()
        for parameter in pipe.model[2].parameters():
            parameter.requires_grad_(False)
        second = step(pipe)
        assert pipe.model[2][0].weight.grad is None
        pipe.eval()
        third = step(pipe)
        pipe.train()
        return [first, second, third, step(pipe)]

    each(pipes, steps)


def test_the_model_stays_after_the_workers(pipes: list[ps.Pipeline]) -> None:
    for pipe in pipes:
        torch.manual_seed(3)
        step(pipe)
        pipe.close()
        pipe.model(X).sum().backward()
    assert_same(pipes[1].model, pipes[0].model)


def test_functions_and_classes_of_a_script_need_no_import(pipes: list[ps.Pipeline]) -> None:
    scale = 3.0

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return scale * F.mse_loss(output, target)

    each(pipes, lambda pipe: [pipe.train_step(X, target=Y, loss_fn=loss)])


def test_hooks_of_parameters_travel() -> None:
    model = mlp(6, 6, 6, 6)
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    found = both(model, num_microbatches=2, schedule="gpipe")
    for pipe in found:
        step(pipe)
    assert_same(found[1].model, found[0].model)
    for pipe in found:
        pipe.close()


def test_what_cannot_be_sent_is_refused() -> None:
    model = mlp(6, 6, 6)
    model[0].lock = threading.Lock()
    with pytest.raises(ps.InputError, match=r'cannot be sent.*workers="threads"'):
        ps.Pipeline(
            model, (X,), devices=["cpu"] * 2, workers="processes", num_microbatches=2, replicas=1
        )


def test_a_loss_with_parameters_is_refused(pipes: list[ps.Pipeline]) -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self.weight * F.mse_loss(output, target)

    with pytest.raises(ps.InputError, match="uses parameters"):
        pipes[1].train_step(X, target=Y, loss_fn=Weighted())


def test_sparse_gradients_are_refused() -> None:
    model = nn.Sequential(nn.Embedding(10, 6, sparse=True), nn.Linear(6, 6))
    tokens = torch.randint(10, (12,))
    with (
        ps.Pipeline(
            model,
            (tokens,),
            devices=["cpu"] * 2,
            workers="processes",
            num_microbatches=2,
            replicas=1,
        ) as pipe,
        pytest.raises(ps.InputError, match="sparse gradient"),
    ):
        pipe.train_step(tokens, target=Y, loss_fn=F.mse_loss)


def test_recording(pipes: list[ps.Pipeline]) -> None:
    pipe = pipes[1]
    with pipe.recording() as timelines:
        step(pipe)
    actions = [a for actions in pipe.plan.schedule_for(3).workers for a in actions]
    assert sorted(e.action for e in timelines[0].events) == sorted(actions)
    starts = {event.action: event.start for event in timelines[0].events}
    for action, start in starts.items():  # one clock for all processes
        if action.kind.value == "F" and action.stage == 1:
            assert start > starts[action._replace(stage=0)]


def test_no_profile_of_other_processes(pipes: list[ps.Pipeline], tmp_path: Path) -> None:
    with (
        pytest.raises(ps.InputError, match=r"does not see other processes.*workers='threads'"),
        pipes[1].recording(profile=tmp_path / "step.json"),
    ):
        step(pipes[1])
    assert list(tmp_path.iterdir()) == []


def test_autocast_is_followed(pipes: list[ps.Pipeline]) -> None:
    def steps(pipe: ps.Pipeline) -> list[torch.Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            return [pipe(X)]

    each(pipes, steps)
    assert steps_dtype(pipes[1]) is torch.bfloat16


def steps_dtype(pipe: ps.Pipeline) -> torch.dtype:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        found: torch.dtype = pipe.eval().model[0][0](X).dtype
    return found


def test_verify() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.3), nn.BatchNorm1d(6), nn.Linear(6, 6))
    report = ps.verify(
        model,
        (X,),
        target=Y,
        loss_fn=F.mse_loss,
        devices=["cpu"] * 2,
        workers="processes",
        replicas=1,
    )
    assert report.ok, str(report)


def test_other_memory_is_noticed(pipes: list[ps.Pipeline]) -> None:
    pipe = pipes[1]
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    step(pipe)
    optimizer.step()
    optimizer.zero_grad()
    pipe.model[0][0].double()
    for use in (optimizer.step, lambda: step(pipe)):
        with pytest.raises(ps.InputError, match=r"was given other memory.*build a new pipeline"):
            use()


def test_replaced_parameters_are_noticed(pipes: list[ps.Pipeline]) -> None:
    pipe = pipes[1]
    pipe.model[0][0].weight = nn.Parameter(torch.zeros(6, 6))
    with pytest.raises(ps.InputError, match=r"'0.0.weight' was replaced"):
        step(pipe)


def test_each_stage_is_given_away_before_the_next_is_read() -> None:
    """So no process but the workers together ever has the memory of the whole model."""
    seeded, private = ps.SeededWeights(3), []

    class Watched:
        def materialise(self, model: nn.Module, names: Any, device: Any) -> None:
            seeded.materialise(model, names, device)
            there = [p for p in model.parameters() if not p.is_meta]
            private.append(sum(p.untyped_storage().resizable() for p in there))

    with ps.empty_weights():
        model, twin = mlp(6, 6, 6, 6), mlp(6, 6, 6, 6)
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "num_microbatches": 2, "schedule": "1f1b"}
    with ps.Pipeline(
        model, (X,), weights=Watched(), workers="processes", **options, replicas=1
    ) as pipe:
        ours = step(pipe)
    with ps.Pipeline(twin, (X,), weights=seeded, plan=pipe.plan, devices=["cpu"] * 2) as other:
        assert torch.equal(step(other), ours)
    assert_same(model, twin)
    assert 0 < max(private) < len(list(model.parameters()))
