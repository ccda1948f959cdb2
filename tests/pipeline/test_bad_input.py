"""Every mistake gets an error that names the values and what would work, before anything runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import penstock as ps
from tests.support.models import mlp, uniform_plan

X = torch.randn(6, 8)


@pytest.fixture(scope="module")
def pipe() -> Iterator[ps.Pipeline]:
    with ps.Pipeline(
        mlp(8, 8, 8), (X,), devices=["cpu"] * 2, num_microbatches=2, replicas=1
    ) as found:
        yield found


def mean(output: torch.Tensor, *_: Any) -> torch.Tensor:
    return output.mean()


def test_more_stages_than_calls() -> None:
    with pytest.raises(
        ps.PlanError, match=r"4 stages.*into 3 at most.*Use at most 3 devices;.*replicas="
    ):
        ps.Pipeline(mlp(8, 8, 8), (X,), devices=["cpu"] * 4, replicas=1)


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        (["cpu", "cuda:77"], r"no device 'cuda:77' here: this machine has cpu"),
        (["cpu", "tpu"], r"'tpu' is not a device: this machine has cpu"),
        (["meta"], r"no device 'meta' here"),
        ("cpu", r"devices='cpu' is not a list.*\[\"cpu\", \"cpu\"\]"),
        ([], r"devices=\[\] is not a list"),
    ],
)
def test_devices_that_do_not_exist(devices: Any, words: str) -> None:
    with pytest.raises(ps.InputError, match=words):
        ps.Pipeline(mlp(8, 8, 8), (X,), devices=devices, replicas=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_microbatches": 7}, r"num_microbatches=7.*6 rows.*between 1 and 6"),
        ({"num_microbatches": 0}, r"num_microbatches=0"),
        ({"schedule": "2f2b"}, r"'2f2b' is unknown; choose naive, gpipe, 1f1b, eager-1f1b"),
        ({"workers": "mpi"}, "'mpi' is unknown; choose one of auto, threads, processes"),
    ],
)
def test_options_that_do_not_exist(options: dict[str, Any], words: str) -> None:
    told: list[Any] = []
    with pytest.raises(ps.InputError, match=words):
        ps.Pipeline(
            mlp(8, 8, 8),
            (X,),
            devices=["cpu"] * 2,
            progress=lambda *step: told.append(step),
            **options,
            replicas=1,
        )
    assert all("recording" in what for _, _, what in told)  # nothing was measured


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((torch.randn(6, 8, 1),), {}, r"3 dimensions, of shape \(6, 8, 1\).*float32\[Bx8\]"),
        ((torch.randn(6, 8).double(),), {}, r"dtype torch.float64.*float32\[Bx8\]"),
        ((torch.randn(6, 9),), {}, r"\(6, 9\), 9 instead of 8 in dimension 1"),
        ((torch.randn(6, 8), 1), {}, r"another structure.*\(Tensor, int\).*\(float32\[Bx8\]\)"),
        ((), {"inputs": torch.randn(6, 8)}, r"another structure.*inputs=Tensor.*TypeError"),
        (([1.0],), {}, r"another structure"),
        ((None,), {}, r"another structure.*\(NoneType\)"),
        ((torch.randn(0, 8),), {}, r"no rows"),
    ],
)
def test_a_batch_unlike_the_example(pipe: ps.Pipeline, args: Any, kwargs: Any, words: str) -> None:
    with pytest.raises(ps.InputError, match=words):
        pipe.train_step(*args, loss_fn=mean, **kwargs)
    with pytest.raises(ps.InputError, match=words):
        pipe(*args, **kwargs)
    assert all(p.grad is None for p in pipe.parameters())


def test_another_batch_size_is_normal(pipe: ps.Pipeline) -> None:
    for rows in (1, 2, 7, 30):
        assert pipe(torch.randn(rows, 8)).shape == (rows, 8)


@pytest.mark.parametrize("target", [torch.zeros(5, 8), torch.zeros(()), {"a": torch.zeros(7)}])
def test_a_target_of_other_rows(pipe: ps.Pipeline, target: Any) -> None:
    with pytest.raises(ps.InputError, match=r"the target has shape .*but the batch has 6 rows"):
        pipe.train_step(X, target=target, loss_fn=mean)


def test_a_loss_that_is_no_function(pipe: ps.Pipeline) -> None:
    with pytest.raises(ps.InputError, match="loss_fn=3 is not a function"):
        pipe.train_step(X, loss_fn=3)


def test_weights_that_make_no_sense(pipe: ps.Pipeline) -> None:
    with pytest.raises(ps.InputError, match=r"weight='tokens' is unknown"):
        pipe.train_step(X, loss_fn=mean, weight="tokens")
    with pytest.raises(ps.InputError, match=r"add up to 0.0"):
        pipe.train_step(X, target=X, loss_fn=mean, weight=lambda target: 0)


class Whole(nn.Module):
    """Its Python depends on the values, so it cannot be looked into."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * float(x.sum() > 0)


def test_a_model_that_is_one_closed_call() -> None:
    with pytest.raises(ps.PlanError, match=r"(?s)into 1 at most.*reads a tensor's value"):
        ps.Pipeline(Whole(), (X,), devices=["cpu"] * 2, replicas=1)
    with ps.Pipeline(Whole(), (X,), devices=["cpu"], num_microbatches=1, replicas=1) as alone:
        assert torch.equal(alone(X), alone.model(X))


@pytest.mark.parametrize(
    ("model", "args", "words"),
    [
        (mlp(8, 8, 8), X, r"args is a Tensor.*write args=\(x,\)"),
        (lambda x: x, (X,), "a function, not an nn.Module"),
    ],
)
def test_a_model_and_arguments_of_another_kind(model: Any, args: Any, words: str) -> None:
    with pytest.raises(ps.InputError, match=words):
        ps.Pipeline(model, args, devices=["cpu"] * 2, replicas=1)


def test_a_plan_of_something_else(pipe: ps.Pipeline) -> None:
    with pytest.raises(ps.PlanError, match="made for another model"):
        ps.Pipeline(mlp(8, 9, 8), (X,), devices=["cpu"] * 2, plan=pipe.plan)
    with pytest.raises(ps.PlanError, match="for 2 devices and there are 3"):
        ps.Pipeline(mlp(8, 8, 8), (X,), devices=["cpu"] * 3, plan=pipe.plan)


def test_a_plan_that_cuts_where_it_cannot_be_cut() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x)
            column = x[:, 0]
            x.relu_()
            return self.layers[1](x) * column.unsqueeze(1)

    program = ps.capture(InPlace(), (X,))
    forbidden = next(k for k in range(1, len(program)) if program.cuts.forbidden(k))
    plan = uniform_plan(program, 2, 2, cuts=(1,))
    stages = [s.calls for s in plan.stages]
    edited = [(0, forbidden), (forbidden, stages[1][1])]
    moved = tuple(
        msgspec.structs.replace(stage, calls=calls)
        for stage, calls in zip(plan.stages, edited, strict=True)
    )
    with pytest.raises(ps.PlanError, match=f"cuts before call {forbidden}.*changed later"):
        ps.Pipeline(
            program.model,
            program=program,
            devices=["cpu"] * 2,
            plan=msgspec.structs.replace(plan, stages=moved),
        )


def test_an_example_without_rows_or_with_different_ones() -> None:
    with pytest.raises(ps.InputError, match="no input can be split"):
        ps.capture(mlp(8, 8), (3,))
    with pytest.raises(ps.InputError, match=r"different batch sizes: input 0 has 6, input 1 has 5"):
        ps.capture(mlp(8, 8), (X, X[:5]))
    with pytest.raises(ps.InputError, match="batch_dim=3 does not exist in input 0"):
        ps.capture(mlp(8, 8), (X,), batch_dim=3)


class Summary(nn.Module):
    """Returns a number for the whole batch, as models that compute their own loss do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        output = self.second(self.first(x))
        return {"loss": output.square().mean(), "output": output}


def test_a_result_without_a_batch_dimension() -> None:
    with ps.Pipeline(Summary(), (X,), devices=["cpu"] * 2, num_microbatches=2, replicas=1) as pipe:
        with pytest.raises(ps.InputError, match=r"no batch dimension.*train_step"):
            pipe(X)
        loss = pipe.train_step(X, loss_fn=lambda output: output["loss"])
        assert loss.ndim == 0


CALLED = {"times": 0}


class Counts(nn.Module):
    """Does something else every other time, by what it keeps outside."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CALLED["times"] += 1
        return self.b(self.a(x)) if CALLED["times"] % 2 else self.a(x)


def test_a_forward_that_changes_from_run_to_run_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Counts())
    with pytest.raises(
        ps.CaptureError, match=r"forward of 1 \(Counts\) does something else every time"
    ):
        ps.capture(model, (torch.randn(6, 4),))


class Reshapes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).view(3, 7)


class Takes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Reshapes()])

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x) * scale


def test_an_error_in_the_forward_names_module_and_line() -> None:
    x = torch.randn(6, 4)
    with pytest.raises(ps.CaptureError, match=r"missing 1 .*'scale'.*forward takes \(x, scale\)"):
        ps.capture(Takes(), (x,))
    with pytest.raises(
        ps.CaptureError, match=r"\(in blocks.0, .*test_bad_input.py:\d+, in forward\)"
    ):
        ps.capture(Takes(), (x, x))
    with pytest.raises(ps.CaptureError, match="on several devices, meta and cpu"):
        ps.capture(nn.Linear(4, 4), (x.to("meta"),))


FOUR = torch.randn(6, 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cuts": "b"}, r"cuts='b' is not a list; write cuts="),
        ({"cuts": 3}, "cuts=3 is not a list"),
        ({"cuts": [None]}, "None is neither a module's name nor"),
        ({"cuts": [True]}, "True is neither"),
        ({"keep_closed": "a"}, "keep_closed='a' is not a list"),
        ({"keep_closed": 3}, "keep_closed=3 is not a list"),
        ({"dynamic": {0: 1}}, "0 has 1, not a dictionary of dimensions"),
        ({"dynamic": {0: {1: None}}}, "0 has {1: None}, not a dictionary"),
        ({"dynamic": {0: {"a": "b"}}}, "not a dictionary of dimensions"),
    ],
)
def test_lists_and_names_of_another_kind(options: dict[str, Any], words: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with pytest.raises(ps.InputError, match=words):
        ps.Pipeline(
            model, (FOUR,), devices=["cpu", "cpu"], num_microbatches=1, **options, replicas=1
        )


def test_examples_without_anything_in_them() -> None:
    with pytest.raises(ps.InputError, match="the example has no rows"):
        ps.capture(nn.Linear(4, 4), (FOUR[:0],))
    with pytest.raises(ps.InputError, match="the dimension 'length' is empty"):
        ps.capture(nn.Linear(4, 4), (torch.randn(6, 0, 4),), dynamic={0: {1: "length"}})


def test_a_module_kept_closed_by_its_other_name() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 4))
    model.add_module("again", model[0])
    assert set(ps.capture(model, (FOUR,), keep_closed=["again"]).closed) == {"0"}
