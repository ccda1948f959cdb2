"""The mistakes that a user of PyTorch makes first: each is told what works instead."""

from __future__ import annotations

import copy
import functools
import os
import pickle
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.comparison.reference import run_with_threads
from penstock.engine.user_functions import callable_as
from tests.support.models import uniform_plan

X, Y = torch.randn(8, 6), torch.randint(0, 4, (8,))


class Net(nn.Module):
    """Two layers, and attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.config = {"width": 8}
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(x).tanh())
        return result


def built(**options: Any) -> ps.Pipeline:
    torch.manual_seed(0)
    model = Net()
    program = ps.capture(model, (X,))
    plan = uniform_plan(program, 2, 2)
    return ps.Pipeline(
        model, (X,), **{"devices": 2, "program": program, "plan": plan, **options}, replicas=1
    )


@pytest.fixture(scope="module")
def pipe() -> Iterator[ps.Pipeline]:
    with built() as found:
        yield found


# -- building ---------------------------------------------------------------------------------


def test_a_number_of_devices() -> None:
    with built(devices=2) as pipe:
        assert pipe.plan.devices == ("cpu", "cpu")


def test_a_number_of_devices_where_there_are_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.devices.choice import existing_devices

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert list(map(str, existing_devices(2))) == ["cuda:0", "cuda:1"]
    with pytest.raises(ps.DeviceError, match=r"no device 'cuda:3' here.*cuda:2"):
        existing_devices(4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"devices": 0}, "devices=0 is not a list"),
        ({"devices": True}, "devices=True is not a list"),
        ({"devices": 2.0}, "devices=2.0 is not a list"),
        ({"devices": torch.device("cpu")}, "is not a list"),
        ({"devices": {"cpu": 2}}, "is not a list"),
        ({"timeout": "5"}, "timeout='5' must be a positive number of seconds"),
        ({"timeout": -1}, "timeout=-1 must be a positive number of seconds"),
        ({"allocator": "none"}, 'allocator=\'none\' is unknown; choose "keep" or "system"'),
    ],
)
def test_options_of_a_pipeline(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ps.InputError, match=words):
        built(**options)


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        ((), {}, r"Net is recorded on an example.*Pipeline\(model, \(x,\)"),
        ((), {"kwargs": X}, r"kwargs is a Tensor, not the dict.*kwargs=\{\"x\": x\}"),
        (((X,),), {"dynamic": "x"}, r"dynamic='x' is not a dict"),
    ],
)
def test_an_example_that_is_none(args: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ps.InputError, match=words):
        ps.Pipeline(Net(), *args, devices=["cpu", "cpu"], **options, replicas=1)
    with pytest.raises(ps.InputError, match=words):
        ps.capture(Net(), *(args or ((),)), **options)


def test_errors_name_the_argument_that_the_user_has(pipe: ps.Pipeline) -> None:
    with pytest.raises(ps.InputError, match=r"dimensions that dynamic= names") as caught:
        pipe(torch.randn(8, 7))
    assert "capture(" not in str(caught.value)


# -- optimizers -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda p: p.optimizer(torch.optim.SGD(p.parameters(), lr=0.3)),
            r"an SGD that exists already.*pipe.optimizer\(torch.optim.SGD, lr=0.3\)",
        ),
        (lambda p: p.optimizer("adamw"), r"'adamw', not a class.*torch.optim.AdamW, lr"),
        (lambda p: p.optimizer("rmsprop"), r"torch.optim.RMSprop"),
        (lambda p: p.optimizer(p.parameters(), lr=0.1), r"a generator first.*come second"),
        (lambda p: p.optimizer(nn.Linear, lr=0.1), r"Linear first, not an optimizer class"),
        (lambda p: p.optimizer(functools.partial(torch.optim.SGD)), "a partial first"),
        (lambda p: p.optimizer(torch.optim.SGD, 0.1), r"params is 0.1.*by name, lr=0.1"),
        (lambda p: p.optimizer(torch.optim.SGD, p.model.first.weight), "params is Parameter"),
        (lambda p: p.optimizer(torch.optim.SGD, "*.bias"), r"params is \*.bias, not"),
        (lambda p: p.optimizer(torch.optim.SGD, [{"lr": 1.0}]), "'lr' and no \"params\""),
    ],
)
def test_optimizers(pipe: ps.Pipeline, make: Callable[[ps.Pipeline], Any], words: str) -> None:
    with pytest.raises(ps.InputError, match=words):
        make(pipe)


@pytest.mark.parametrize(
    "wrap",
    [
        list,
        lambda ps: [("a name", p) for p in ps],
        lambda ps: [{"params": list(ps)}],
        lambda ps: [{"params": next(iter(ps))}],
        lambda ps: [{"params": [("a name", p) for p in ps]}],
        lambda ps: [{"params": ps}],
        lambda ps: [{"params": (p for p in ps)}],
    ],
)
def test_parameters_that_no_worker_has(pipe: ps.Pipeline, wrap: Any) -> None:
    """They would never have been updated."""
    with pytest.raises(ps.InputError, match=r"shape \(2, 3\) is not one of the model's"):
        pipe.optimizer(torch.optim.SGD, wrap(nn.Linear(3, 2).parameters()), lr=0.1)
    pipe.optimizer(torch.optim.SGD, wrap(pipe.model.parameters()), lr=0.1)


def test_a_group_of_parameters_that_no_worker_has() -> None:
    """Nothing is updated, not even what workers have."""
    with built() as pipe:
        _add_a_foreign_group(pipe)


def _add_a_foreign_group(pipe: ps.Pipeline) -> None:
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    optimizer.add_param_group({"params": nn.Linear(3, 2).parameters()})
    before = {name: value.clone() for name, value in pipe.state_dict().items()}
    for parameter in pipe.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    for _ in range(2):
        with pytest.raises(ps.InputError, match=r"shape \(2, 3\) is not one of the model's"):
            optimizer.step()
    assert all(torch.equal(value, before[n]) for n, value in pipe.state_dict().items())
    del optimizer.param_groups[-1]
    optimizer.step()
    assert not torch.equal(next(iter(pipe.state_dict().values())), next(iter(before.values())))


def test_optimizers_cannot_be_copied(pipe: ps.Pipeline) -> None:
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    for do in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"save optimizer.state_dict\(\)"):
            do(optimizer)


# -- steps ------------------------------------------------------------------------------------


def no_target(output: torch.Tensor) -> torch.Tensor:
    return output.mean()


@pytest.mark.parametrize(
    ("args", "options", "words"),
    [
        ((X,), {"loss_fn": nn.CrossEntropyLoss}, r"is a class.*loss_fn=CrossEntropyLoss\(\)"),
        ((X,), {"metrics": nn.MSELoss}, r"is a class.*metrics=MSELoss\(\)"),
        ((X,), {"loss_fn": None}, "loss_fn=None is not a function.*one is needed"),
        (
            (X,),
            {"target": None},
            r"cross_entropy\(output\), as no target= was given; give target=y",
        ),
        (
            (X,),
            {"target": None, "loss_fn": nn.CrossEntropyLoss()},
            r"CrossEntropyLoss\(output\), as no target= was given",
        ),
        ((X,), {"loss_fn": no_target}, r"no_target\(output, target\); too many"),
        ((X,), {"metrics": no_target}, r"metrics=no_target is called as no_target\(output, t"),
        ((X,), {"loss_kwargs": {"wait": 1}}, r"\(output, target, wait=...\).*'wait'"),
        ((X,), {"target": None, "targets": Y}, r"targets= is no argument.*mean target=\?"),
        ((X,), {"target": None, "labels": Y}, r"labels= is no.*takes \(x\).*mean target=\?"),
        ((X,), {"loss_fn": None, "criterion": F.mse_loss}, r"criterion= is no.*loss_fn=\?"),
        ((X,), {"metric": no_target}, r"metric= is no.*mean metrics=\?"),
        ((X, Y), {"target": None}, r"takes \(x\), and 2 positional.*target=y, loss_fn=loss_fn"),
        ((X, Y, F.cross_entropy), {}, r"takes \(x\), and 3 positional"),
        (((X,),), {}, r"a batch that is a tuple is unpacked by \*batch"),
        (({"x": X},), {}, r"a batch that is a dict is unpacked by \*\*batch"),
    ],
)
def test_steps(pipe: ps.Pipeline, args: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ps.InputError, match=words):
        pipe.train_step(*args, **{"target": Y, "loss_fn": F.cross_entropy, **options})
    assert all(p.grad is None for p in pipe.parameters())


class Partly(nn.Module):
    def forward(self, output: torch.Tensor, target: Any = None, *more: Any) -> torch.Tensor:
        return output.mean()


@pytest.mark.parametrize(
    "function",
    [
        Partly(),
        lambda *args: args[0].mean(),
        lambda output, target=None: output.mean(),
        functools.partial(F.cross_entropy, reduction="mean"),
        torch.sub,  # that has no signature
        functools.wraps(no_target)(lambda *args: args[0].mean()),
        F.cross_entropy,
    ],
)
def test_what_can_be_called_is_left_alone(function: Any) -> None:
    assert callable_as("loss_fn", function, True, {}) is function


# -- what a module has and a pipeline has not --------------------------------------------------


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("module", r"the model itself is pipe\.model"),
        ("config", r"its model has: pipe\.model\.config"),
        ("first", r"its model has: pipe\.model\.first"),
        ("named_buffers", r"its model has: pipe\.model\.named_buffers"),
        ("to", r"devices=\[\.\.\.\]"),
        ("cuda", r"devices=\[\.\.\.\]"),
        ("half", "before the pipeline is built, or use torch.autocast"),
        ("compile", "before the pipeline is built"),
        ("forward", r"pipe\(x\)"),
        ("backward", r"loss\.backward\(\)"),
        ("train_setp", "did you mean 'train_step'"),
        ("modle", "did you mean 'model'"),
        ("nothing_like_it", "a Pipeline has no attribute 'nothing_like_it'$"),
    ],
)
def test_attributes_of_the_model(pipe: ps.Pipeline, name: str, words: str) -> None:
    assert not hasattr(pipe, name)
    with pytest.raises(AttributeError, match=words):
        getattr(pipe, name)


def test_a_pipeline_that_could_not_be_built_has_no_model() -> None:
    with pytest.raises(AttributeError, match="no attribute 'model'"):
        _ = ps.Pipeline.__new__(ps.Pipeline).model


def test_what_a_model_is_given_to(pipe: ps.Pipeline) -> None:
    for take in (torch.optim.SGD, list, nn.ParameterList):
        with pytest.raises(TypeError, match=r"optimizer takes pipe\.parameters.*pipe\.model"):
            take(pipe)  # type: ignore[operator]


def test_copies_and_pickles(pipe: ps.Pipeline, tmp_path: Path) -> None:
    for do in (
        *(copy.copy, copy.deepcopy, pickle.dumps),
        lambda p: torch.save(p, tmp_path / "pipe.pt"),
        lambda p: copy.deepcopy({"in": [p]}),
    ):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.*pipe\.model"):
            do(pipe)


def test_functional_call(pipe: ps.Pipeline) -> None:
    parameters = dict(pipe.named_parameters())
    with pytest.raises(TypeError, match=r"give it pipe\.model"):
        torch.func.functional_call(pipe, parameters, (X,))  # type: ignore[arg-type]
    torch.func.functional_call(pipe.model, parameters, (X,))
    assert [n for n, _ in pipe.named_parameters("net")] == [f"net.{n}" for n in parameters]
    assert not list(pipe.parameters(recurse=False))


# -- when it is over --------------------------------------------------------------------------


def test_a_closed_pipeline_says_how_to_go_on() -> None:
    pipe = built()
    pipe.train_step(X, target=Y, loss_fn=F.cross_entropy)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
    pipe.close()
    words = r"close\(\) was called\. Its model .* weights.*Pipeline\(pipe\.model, \.\.\., plan="
    for do in (
        lambda: pipe(X),
        lambda: pipe.train_step(X, target=Y, loss_fn=F.cross_entropy),
        optimizer.step,
    ):
        with pytest.raises(ps.ClosedError, match=words):
            do()
    with ps.Pipeline(pipe.model, (X,), devices=2, plan=pipe.plan) as again:
        parts = X.tensor_split(min(len(X), pipe.plan.num_microbatches))
        expected = run_with_threads(
            lambda: torch.cat([pipe.model(part) for part in parts]), pipe.threads_per_worker
        )
        assert torch.equal(again(X), expected)


def test_a_fork_of_a_pipeline_with_threads_does_not_wait() -> None:
    """It has none of the threads."""
    with built() as pipe:
        pipe(X)
        read, write = os.pipe()
        if (pid := os.fork()) == 0:
            try:
                found = ""
                for do in (lambda: pipe(X), lambda: pipe.train_step(X, loss_fn=no_target)):
                    try:
                        do()
                    except ps.ClosedError as error:
                        found += str(error)
                pipe.close()
                os.write(write, found.encode())
            except BaseException:
                os.write(write, traceback.format_exc().encode())
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as file:
            said = file.read()
        os.waitpid(pid, 0)
        assert said.count("this process is a fork of the process that has built it") == 2
        assert "Pipeline(" not in said
        pipe.train_step(X, target=Y, loss_fn=F.cross_entropy)  # the original goes on
