"""Odd uses of worker processes: what threads do, or an error that says why not."""

from __future__ import annotations

import copy
import gc
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.capture.capturing import CaptureOptions
from penstock.workers.processes.parts import RemoteParts
from penstock.workers.processes.shared_model import SharedModel
from tests.support.models import mlp
from tests.support.pool import drain

X, Y = torch.randn(12, 6), torch.randn(12, 6)


pytestmark = pytest.mark.usefixtures("pool")


def make(model: nn.Module, kind: Any, m: int = 2, **options: Any) -> ps.Pipeline:
    devices = ["cpu"] * 2
    return ps.Pipeline(
        model,
        (X,),
        devices=devices,
        workers=kind,
        num_microbatches=m,
        schedule="1f1b",
        **options,
        replicas=1,
    )


def alike(model: nn.Module, use: Callable[[ps.Pipeline], Any], **options: Any) -> None:
    """The use of a pipeline gives the same on both kinds of workers, and leaves the same."""
    found = []
    for kind in ("threads", "processes"):
        twin = copy.deepcopy(model)
        with make(twin, kind, **options) as pipe:
            torch.manual_seed(3)
            results = use(pipe)
            gradients = [p.grad for p in twin.parameters()]
            found.append([*results, *gradients, *twin.state_dict().values()])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)


def step(pipe: ps.Pipeline, x: torch.Tensor = X) -> torch.Tensor:
    return pipe.train_step(x, target=Y, loss_fn=F.mse_loss)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.LSTM(6, 6, batch_first=True), nn.GRU(6, 6, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x[:, None])[0])[0][:, 0]


def test_training_after_inference_mode() -> None:
    """The first batches that are so large come in that mode, and their memory is used again."""
    x, y = X.repeat(2000, 1), Y.repeat(2000, 1)

    def use(pipe: ps.Pipeline) -> Any:
        with torch.inference_mode():
            found = [pipe(x), *pipe.map([x, x])]
        loss = pipe.train_step(x, target=y, loss_fn=F.mse_loss)
        return [loss, *(f.clone() for f in found)]

    alike(nn.Sequential(*mlp(6, 6, 6)), use)


def test_recurrent_layers() -> None:
    alike(Recurrent(), lambda pipe: [step(pipe), step(pipe)])


class Average(nn.Module):
    """Replaces its buffer by another tensor in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.average = 0.9 * self.average + 0.1 * x.detach().mean(0)
        return x - self.average


def test_buffers_that_a_forward_replaces() -> None:
    def use(pipe: ps.Pipeline) -> list[torch.Tensor]:
        losses = [step(pipe), step(pipe)]
        state = {k: v + 1 if "average" in k else v for k, v in pipe.state_dict().items()}
        pipe.load_state_dict(state)
        output = pipe(X)
        output.sum().backward()
        return [*losses, output, step(pipe)]

    model = nn.Sequential(nn.Linear(6, 6), Average(), nn.Linear(6, 6), Average())
    alike(model, use, keep_closed=["1", "3"], merge="rows")  # its rows meet in the average


def test_a_gradient_that_is_kept_while_others_stay() -> None:
    with make(mlp(6, 6, 6), "processes") as pipe:
        step(pipe)
        weight = pipe.model[0].weight
        kept, value = weight.grad, weight.grad.clone()
        weight.grad = None
        step(pipe)
        assert torch.equal(kept, value)
        assert weight.grad is not kept


@pytest.mark.parametrize("dropped", ["one", "all"])
@pytest.mark.parametrize("kept_as", ["view", "array", "storage", "exported"])
def test_memory_of_a_gradient_that_is_kept(kept_as: str, dropped: str) -> None:
    with make(mlp(6, 6, 6), "processes", audit=None) as pipe:
        step(pipe)
        weight = pipe.model[0].weight
        value = weight.grad.clone()
        kept: Any = {
            "view": lambda gradient: gradient.view(-1),
            "array": lambda gradient: gradient.numpy(),
            "storage": lambda gradient: gradient.untyped_storage(),
            "exported": lambda gradient: gradient.__dlpack__(),
        }[kept_as](weight.grad)
        if dropped == "one":
            weight.grad = None
        else:
            pipe.model.zero_grad()
        with torch.no_grad():
            weight.mul_(2)
        step(pipe)
        now = {
            "view": lambda: kept,
            "array": lambda: torch.from_numpy(kept),
            "storage": lambda: torch.tensor([]).set_(kept),
            "exported": lambda: torch.utils.dlpack.from_dlpack(kept),
        }[kept_as]()
        assert torch.equal(now.view(-1), value.view(-1))
        assert not torch.equal(weight.grad, value)


def replaced(gradient: torch.Tensor) -> torch.Tensor:
    memory = gradient.data
    gradient.data = memory * 0.5
    return memory


def transposed(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.t_().clone()


def flattened(gradient: torch.Tensor) -> torch.Tensor:
    memory = gradient.data
    gradient.data = memory.view(-1)
    return memory


def marked(gradient: torch.Tensor) -> torch.Tensor:
    gradient.note = "clipped"
    return torch.zeros(())


def recorded(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.mul_(torch.ones((), requires_grad=True)).detach().clone()


@pytest.mark.parametrize("change", [replaced, transposed, flattened, marked, recorded])
def test_what_the_user_makes_of_a_gradient_does_not_outlast_it(change: Any) -> None:
    def use(pipe: ps.Pipeline) -> list[torch.Tensor]:
        step(pipe)
        weight = pipe.model[0].weight
        kept = change(weight.grad)
        value = kept.clone()
        pipe.model.zero_grad()
        with torch.no_grad():
            weight.mul_(2)
        results = [step(pipe), kept, value, weight.grad.clone()]
        assert torch.equal(kept, value)
        assert not hasattr(weight.grad, "note")
        assert not weight.grad.requires_grad
        return [*results, step(pipe)]

    alike(mlp(6, 6, 6), use, audit=None)


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
@pytest.mark.parametrize("change", [replaced, transposed])
def test_a_gradient_that_is_something_else_is_added_to(change: Any) -> None:
    def use(pipe: ps.Pipeline) -> list[torch.Tensor]:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        step(pipe)
        kept = change(pipe.model[0].weight.grad)
        value = kept.clone()
        loss = step(pipe)
        assert torch.equal(kept, value)
        change(pipe.model[0].weight.grad)
        optimizer.step()
        return [loss, step(pipe)]

    alike(mlp(6, 6, 6), use, audit=None)


def halve(parameter: nn.Parameter) -> None:
    parameter.grad.data = parameter.grad.data * 0.5  # type: ignore[union-attr]


@pytest.mark.parametrize("replicas", [1, 2])
def test_hooks_that_give_gradients_other_memory(replicas: int) -> None:
    found = []
    for kind in ("threads", "processes"):
        torch.manual_seed(2)
        model = mlp(6, 6, 6)
        model[0].weight.register_post_accumulate_grad_hook(halve)
        devices = ["cpu"] * 2
        cuts = {"cuts": ()} if replicas > 1 else {}
        with ps.Pipeline(
            model,
            (X,),
            devices=devices,
            workers=kind,
            num_microbatches=2,
            replicas=replicas,
            audit=None,
            **cuts,
        ) as pipe:
            for factor in (1, 2, 3):
                step(pipe, factor * X)
                step(pipe, factor * X.flip(0))
                found.append(model[0].weight.grad.clone())
                model.zero_grad()
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_are_added_to_where_they_are() -> None:
    with make(mlp(6, 6, 6), "processes", audit=None) as pipe:
        step(pipe)
        gradients = [p.grad for p in pipe.model.parameters()]
        for _ in range(3):
            step(pipe)
            assert all(p.grad is g for p, g in zip(pipe.model.parameters(), gradients, strict=True))


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_graph_that_needs_a_gradient_which_is_added_to(kind: str) -> None:
    with make(mlp(6, 6, 6), kind, audit=None) as pipe:
        step(pipe)
        factor = torch.ones((6, 6), requires_grad=True)
        result = (pipe.model[0].weight.grad * factor).sum()
        step(pipe)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.backward()


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("untouched_by", ["freezing", "inputs"])
def test_a_graph_that_needs_a_gradient_which_a_pass_leaves_alone(
    kind: str, untouched_by: str
) -> None:
    with make(mlp(6, 6, 6), kind, audit=None) as pipe:
        step(pipe)
        factor, weight = torch.ones((6, 6), requires_grad=True), pipe.model[0].weight
        value = weight.grad.clone()
        result = (weight.grad * factor).sum()
        if untouched_by == "freezing":
            weight.requires_grad_(False)
            step(pipe)
        else:
            pipe(X).sum().backward(inputs=[pipe.model[2].weight])
        result.backward()
        assert torch.equal(factor.grad, value)


def test_gradients_are_added_to_where_they_are_while_others_are_dropped() -> None:
    with make(mlp(6, 6, 6), "processes", audit=None) as pipe:
        step(pipe)
        dropped, *others = pipe.model.parameters()
        gradients = [p.grad for p in others]
        for _ in range(3):
            dropped.grad = None
            step(pipe)
            assert all(p.grad is g for p, g in zip(others, gradients, strict=True))


def test_an_optimizers_step_that_a_signals_handler_interrupts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with make(mlp(6, 6, 6), "processes") as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        step(pipe)
        weight = pipe.model[0].weight
        before = weight.detach().clone()

        def interrupted(*_: Any) -> None:
            raise TimeoutError("an alarm")

        with monkeypatch.context() as patched:
            patched.setattr(SharedModel, "stepped", interrupted)
            with pytest.raises(TimeoutError, match="an alarm"):
                optimizer.step()
        assert not pipe._runner.workers._pool.under_way
        assert torch.equal(weight, torch.add(before, weight.grad, alpha=-0.1))
        step(pipe)


@pytest.mark.filterwarnings("ignore:grad and param do not obey")
def test_gradients_that_change_places() -> None:
    def use(pipe: ps.Pipeline) -> list[torch.Tensor]:
        step(pipe)
        one, other = pipe.model[0].weight, pipe.model[2].weight
        one.grad, other.grad = other.grad, one.grad
        loss = step(pipe)
        one.grad = one.grad.t()
        return [loss, step(pipe)]

    alike(mlp(6, 6, 6, 6), use)


def test_an_optimizers_state_outlives_the_workers() -> None:
    drain()
    states = []
    for kind in ("threads", "processes"):
        torch.manual_seed(1)
        model = mlp(6, 6, 6)
        with pytest.MonkeyPatch.context() as patch:
            from penstock.workers.processes import backend
            from penstock.workers.processes.pool import ProcessPool

            patch.setattr(backend, "ProcessPool", ProcessPool)  # that really end
            with make(model, kind) as pipe:
                optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
                step(pipe)
                optimizer.step()
        states.append(optimizer.state_dict()["state"])
    assert len(states[0]) == 4
    for number, values in states[0].items():
        assert torch.equal(states[1][number]["momentum_buffer"], values["momentum_buffer"])


def test_inputs_that_come_from_one_graph() -> None:
    def use(pipe: ps.Pipeline) -> list[torch.Tensor]:
        torch.manual_seed(2)
        front = nn.Linear(6, 6)
        step(pipe, front(X).tanh())
        return [front.weight.grad, front.bias.grad]  # type: ignore[list-item]

    alike(mlp(6, 6, 6), use, m=3)


@pytest.mark.parametrize("late", ["registered", "removed"])
def test_hooks_that_come_or_go_later_are_refused(late: str) -> None:
    model = mlp(6, 6, 6)
    handle = model[0].weight.register_hook(lambda gradient: gradient * 2)
    with make(model, "processes") as pipe:
        step(pipe)
        if late == "removed":
            handle.remove()
        else:
            model[2].weight.register_post_accumulate_grad_hook(lambda parameter: None)
        with pytest.raises(ps.InputError, match="registered or removed after"):
            step(pipe)


def losses(model: nn.Module) -> list[Callable[..., torch.Tensor]]:
    scale = nn.Parameter(torch.ones(()))
    return [
        lambda output, target: F.mse_loss(output, target) + model[0].weight.square().sum(),
        lambda output, target: scale * F.mse_loss(output, target),
        nn.CrossEntropyLoss(),
    ]


@pytest.mark.parametrize("number", [0, 1])
def test_losses_whose_gradients_would_be_lost_are_refused(number: int) -> None:
    model = mlp(6, 6, 6)
    with make(model, "processes") as pipe:
        with pytest.raises(ps.InputError, match="uses parameters"):
            pipe.train_step(X, target=Y, loss_fn=losses(model)[number])
        pipe.train_step(X, target=Y.softmax(1), loss_fn=losses(model)[2])


def test_a_target_that_asks_for_a_gradient_is_refused() -> None:
    with (
        make(mlp(6, 6, 6), "processes") as pipe,
        pytest.raises(ps.InputError, match="the target requires a gradient"),
    ):
        pipe.train_step(X, target=Y.clone().requires_grad_(), loss_fn=F.mse_loss)


def test_buffers_that_repeat_their_elements() -> None:
    class Masked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(6, 6)
            self.register_buffer("mask", torch.rand(1, 6).expand(6, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.linear(x, self.weight * self.mask, self.bias)

    alike(nn.Sequential(Masked(), nn.Tanh(), nn.Linear(6, 6)), lambda pipe: [step(pipe)])


def test_a_path_in_the_module_search_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from penstock.workers.processes import backend
    from penstock.workers.processes.pool import ProcessPool

    monkeypatch.setattr(backend, "ProcessPool", ProcessPool)
    monkeypatch.setattr(sys, "path", [*sys.path, tmp_path])
    with make(mlp(6, 6, 6), "processes") as pipe:
        step(pipe)


def test_a_fork_leaves_results_alone() -> None:
    with make(mlp(6, 6, 6), "processes", m=1) as pipe, torch.no_grad():
        output = pipe(X)
        value = output.clone()
        child = os.fork()
        if child == 0:
            try:
                del output
                gc.collect()
                with pytest.raises(ps.ClosedError, match="this process is a fork"):
                    pipe(X)
                pipe.close()
                os._exit(0)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        pipe(3 * X)
        pipe(4 * X)
        assert torch.equal(output, value)


def test_parameters_that_share_memory_are_refused() -> None:
    """Tied as one object they are fine; by `.data` they would drift apart."""
    model = mlp(6, 6, 6)
    model[2].weight.data = model[0].weight.data
    with pytest.raises(ps.InputError, match=r"'0\.weight' and '2\.weight' share memory"):
        make(model, "processes")
    model[2].weight = model[0].weight
    alike(model, lambda pipe: [step(pipe)])
    memory = torch.zeros(100)
    model.register_buffer("whole", memory)
    model.register_buffer("part", memory[10:20])  # ends before the weight begins
    model[0].bias.data = memory[30:36]
    with pytest.raises(ps.InputError, match=r"'whole' and '0\.bias' share memory"):
        make(model, "processes")


class Odd(Exception):  # noqa: N818
    """Is made from something else than its `args`."""

    def __init__(self, number: int, *, unit: str) -> None:
        super().__init__(f"{number} {unit}")
        self.number = number


def _odd(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise Odd(3, unit="apples")


def test_an_exception_arrives_as_it_was_raised() -> None:
    with make(mlp(6, 6, 6), "processes") as pipe, pytest.raises(ps.WorkerError) as caught:
        pipe.train_step(X, target=Y, loss_fn=_odd)
    cause = caught.value.__cause__
    assert isinstance(cause, Odd)
    assert (cause.number, cause.args) == (3, ("3 apples",))


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_groups_that_the_script_edits(kind: Any) -> None:
    """What is in the groups when a step begins is what it updates, as in a plain optimizer."""
    model, twin = mlp(6, 6, 6), mlp(6, 6, 6)
    twin.load_state_dict(model.state_dict())
    with make(model, kind) as pipe:
        ours = pipe.optimizer(torch.optim.AdamW, [model[0].weight, model[0].bias], lr=0.1)
        theirs = torch.optim.AdamW([twin[0].weight, twin[0].bias], lr=0.1)
        for change in range(3):
            step(pipe)
            for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
                other.grad = mine.grad.clone()  # type: ignore[union-attr]
            for optimizer, module in ((ours, model), (theirs, twin)):
                if change == 1:
                    optimizer.param_groups[0]["params"].pop(0)
                    more = {**optimizer.param_groups[0], "params": [module[2].weight], "lr": 0.3}
                    optimizer.param_groups.append(more)
                if change == 2:
                    optimizer.param_groups[0]["params"].append(module[0].weight)
                optimizer.step()
        for (name, mine), other in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine, other), name


@pytest.mark.parametrize("divided", [False, True])
def test_a_state_whose_loading_is_interrupted(
    divided: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step has it, and not what some workers remembered before."""
    with make(mlp(6, 6, 6), "processes") as pipe:
        first = pipe.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        step(pipe)
        first.step()
        saved = copy.deepcopy(first.state_dict())
        for values in saved["state"].values():
            values["momentum_buffer"] *= 3
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        if divided:
            optimizer.step()
        with monkeypatch.context() as patch:
            patch.setattr(RemoteParts, "load", _interrupt)
            load = partial(optimizer.load_state_dict, saved)
            if not divided:
                load()
            with pytest.raises(KeyboardInterrupt):
                (load if divided else optimizer.step)()
        optimizer.step()
        found = optimizer.state_dict()["state"]
        for number, parameter in enumerate(pipe.parameters()):
            before = saved["state"][number]["momentum_buffer"]
            expected = before.mul(0.9).add(parameter.grad)
            assert torch.equal(found[number]["momentum_buffer"], expected)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_another_thread_closes_in_the_midst(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that are busy for one thread are not asked for anything by the other."""
    fetched: list[Any] = []
    with make(mlp(6, 6, 6), "processes") as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1, momentum=0.9)
        step(pipe)
        optimizer.step()
        monkeypatch.setattr(RemoteParts, "fetch", lambda *a: fetched.append(a))
        workers = pipe._runner.workers._pool  # type: ignore[attr-defined]
        finish = workers.finish

        def closed_meanwhile(*arguments: Any) -> Any:
            other = threading.Thread(target=pipe.close)
            other.start()
            other.join()
            return finish(*arguments)

        monkeypatch.setattr(workers, "finish", closed_meanwhile)
        with pytest.raises((ps.ClosedError, ps.WorkerError)):
            step(pipe)
        assert not fetched
    drain()  # these workers may still be busy


@pytest.mark.filterwarnings("ignore:optimizer.step")  # there are no gradients
def test_workers_forget_optimizers_that_are_gone() -> None:
    with make(mlp(6, 6, 6), "processes") as pipe:
        workers = pipe._runner.workers._pool  # type: ignore[attr-defined]
        kept = pipe.optimizer(torch.optim.SGD, lr=0.1)
        kept.step()
        for _ in range(3):
            optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
            optimizer.step()
        del optimizer.param_groups[0]["params"][-1]
        optimizer.step()
        del optimizer
        kept.step()
        pipe.optimizer(torch.optim.SGD, lr=0.1).step()
        gc.collect()
        assert workers.run([_optimizers] * 2) == [[0, 5]] * 2
        kept.step()


def _optimizers(own: Any) -> list[int]:
    return list(own.optimizers)


def test_options_of_an_optimizer_that_cannot_be_sent_leave_the_pipeline_open() -> None:
    with make(mlp(6, 6, 6), "processes") as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        step(pipe)
        for _ in range(2):  # before and after it has parts
            optimizer.param_groups[0]["odd"] = (n for n in range(3))
            with pytest.raises(ps.InputError, match="cannot be sent"):
                optimizer.step()
            del optimizer.param_groups[0]["odd"]
            optimizer.step()


class CountsPickles:
    """A loss function that counts how often it is pickled."""

    def __init__(self) -> None:
        self.pickled = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target)

    def __getstate__(self) -> dict[str, Any]:
        self.pickled += 1
        return {"pickled": 0}


def test_a_loss_is_pickled_once_a_step() -> None:
    loss = CountsPickles()
    with make(mlp(6, 6, 6), "processes") as pipe:
        for times in (1, 2):
            pipe.train_step(X, target=Y, loss_fn=loss)
            assert loss.pickled == times


def test_parametrized_modules() -> None:
    """Each has a class of its own, which torch does not pickle."""
    found = []
    for kind in ("threads", "processes"):
        torch.manual_seed(0)
        layers = [nn.Linear(6, 6) for _ in range(4)]
        nn.utils.parametrizations.weight_norm(layers[0])
        nn.utils.parametrizations.orthogonal(layers[1])
        nn.utils.parametrizations.spectral_norm(layers[3])
        model = nn.Sequential(*layers)
        x = torch.randn(12, 6)
        options: Any = {"devices": ["cpu"] * 2, "cuts": ["2"], "num_microbatches": 3}
        options["keep_closed"] = ["0", "1", "3"]  # opened, they would not be sent
        with ps.Pipeline(model, (x,), workers=kind, **options) as pipe:
            optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
            for _ in range(3):
                optimizer.zero_grad()
                loss = pipe.train_step(x, target=x, loss_fn=nn.functional.mse_loss)
                optimizer.step()
            found.append([loss, *(t.clone() for t in model.state_dict().values())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_capture_leaves_a_core_to_each_process_that_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[int] = []
    capture = CaptureOptions.capture

    def noted(options: CaptureOptions, *args: Any) -> Any:
        found.append(torch.get_num_threads())
        return capture(options, *args)

    monkeypatch.setattr(CaptureOptions, "capture", noted)
    before = torch.get_num_threads()
    torch.set_num_threads(5)
    try:
        for kind in ("threads", "processes"):
            make(mlp(6, 6, 6), kind).close()
            assert torch.get_num_threads() == 5
    finally:
        torch.set_num_threads(before)
    assert (found[0], found[-1]) == (5, 3)


class Placed(nn.Module):
    """Has an empty buffer by which it knows its device, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("place", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.ones((), device=self.place.device)


def test_a_stage_whose_tensors_are_empty() -> None:
    with make(nn.Sequential(nn.Linear(6, 6), Placed()), "processes") as pipe:
        step(pipe)
        assert all(p.grad is not None for p in pipe.model.parameters())
