"""Stages as CUDA graphs have the bits of stages that run kernel by kernel.

On machines without a GPU the operators of a CPU are recorded (`tests/support/recording.py`).
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps
from penstock.bench.subjects import gpt2_like, language_loss, tokens
from penstock.engine.graphs import Graphs
from tests.support.recording import Recorder, recording_cpus

ROWS, WIDTH, CLASSES = 14, 8, 3


class OnGpu:
    """Counts what a GPU records."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: list[Any] = []
        record = Graphs._record

        def noted(*args: Any, **kwargs: Any) -> Any:
            found = record(*args, **kwargs)
            self.made.append(found[1])
            return found

        patch.setattr(Graphs, "_record", noted)


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A device whose work can be recorded."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS is first used
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    is_cpu = request.param == "cpu"
    if not is_cpu:
        torch.use_deterministic_algorithms(True)
    yield request.param
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def recorded(device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Recorder | OnGpu]:
    """What was recorded."""
    if device != "cpu":
        yield OnGpu(monkeypatch)
        return
    with recording_cpus() as recorder:
        yield recorder


class Skips(nn.Module):
    """Values pass stages, and one weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = 0.5
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        first = torch.tanh(self.one(x))
        second = torch.tanh(self.two(first)) * self.scale
        third = self.two(second).relu_() + first
        return self.last(third * x)


def mlp() -> nn.Module:
    return nn.Sequential(
        *(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Dropout(0.3)),
        *(nn.Linear(16, 16), nn.ReLU(inplace=True), nn.Linear(16, CLASSES)),
    )


def batch(device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    return x.to(device), torch.randint(CLASSES, (ROWS,), generator=generator).to(device)


Steps = Callable[[ps.Pipeline, nn.Module, Tensor, Tensor], list[Tensor]]


def run(
    build: Callable[[], nn.Module],
    steps: Steps,
    device: str,
    graphs: bool,
    data: Callable[[str], tuple[Tensor, Tensor]] = batch,
    **options: Any,
) -> list[Tensor]:
    """What steps leave, and the parameters, gradients and buffers that the model has then."""
    torch.manual_seed(7)
    model = build().to(device)
    x, y = data(device)
    given = {"workers": 1, "replicas": 1, "num_microbatches": 3, "recompute": "none", **options}
    with ps.Pipeline(
        model,
        (x,),
        devices=[device] * given.pop("workers"),
        threads_per_worker=1,
        progress=None,
        audit=None,
        cuda_graphs=graphs,
        **given,
    ) as pipe:
        found = steps(pipe, model, x, y)
    found += [parameter.detach().clone() for parameter in model.parameters()]
    found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*found, *(buffer.clone() for buffer in model.buffers())]


def check(
    build: Callable[[], nn.Module],
    steps: Steps,
    device: str,
    recorded: Recorder | OnGpu,
    least: int = 2,
    **options: Any,
) -> None:
    """The bits are the same, and something was recorded."""
    wanted = run(build, steps, device, False, **options)
    assert not recorded.made
    found = run(build, steps, device, True, **options)
    assert len(recorded.made) >= least
    assert [torch.equal(a, b) for a, b in zip(found, wanted, strict=True)] == [True] * len(wanted)


def trained(pipe: ps.Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01)
    losses = []
    for _ in range(3):
        losses.append(pipe.train_step(x, target=y, loss_fn=F.cross_entropy))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def several_kinds(pipe: ps.Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Training, evaluation, and the plain style, where all forwards come before the backwards."""
    found = trained(pipe, model, x, y)
    pipe.eval()
    with torch.no_grad():
        found += [pipe(x) for _ in range(3)]
    pipe.train()
    for _ in range(3):
        result = pipe(x)
        F.cross_entropy(result, y).backward()
        found.append(result.detach())
    found.append(pipe.train_step(x[:9], target=y[:9], loss_fn=F.cross_entropy))
    return found


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("build", [mlp, Skips])
def test_bits_are_those_without_graphs(
    build: Callable[[], nn.Module], workers: int, device: str, recorded: Recorder | OnGpu
) -> None:
    """Dropout, BatchNorm, values in place, skip connections, several micro-batches in flight."""
    check(build, several_kinds, device, recorded, workers=workers)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, device: str, recorded: Recorder | OnGpu) -> None:
    def steps(pipe: ps.Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
        with torch.autocast(torch.device(device).type, dtype):
            return [pipe.train_step(x, target=y, loss_fn=F.cross_entropy) for _ in range(3)]

    check(mlp, steps, device, recorded, workers=2)


def test_a_weight_that_autocast_casts_once_for_two_uses(device: str) -> None:
    """Its gradients are added in the lower precision then, which a recording does not know."""

    def steps(pipe: ps.Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            return [pipe.train_step(x, target=y, loss_fn=F.cross_entropy) for _ in range(3)]

    with recording_cpus() if device == "cpu" else nullcontext():
        found, wanted = (run(Skips, steps, device, graphs) for graphs in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


class Columns(nn.Module):
    """The last stage is but a view of what enters it."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.scale = nn.Linear(WIDTH, CLASSES), nn.Parameter(torch.ones(CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return (self.one(x) * self.scale).t()


def test_gradients_of_views_keep_their_layout(
    device: str, recorded: Recorder | OnGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels are chosen by it. Autograd finds another way back once a view's base is written."""
    layouts = set()
    usual = Graphs.backward

    def backward(self: Graphs, *args: Any) -> Any:
        found = usual(self, *args)
        layouts.update((g.shape, g.stride()) for g in found.inputs if g is not None)
        return found

    monkeypatch.setattr(Graphs, "backward", backward)

    def steps(pipe: ps.Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
        def loss(columns: Tensor, target: Tensor) -> Tensor:
            chosen = F.one_hot(target, CLASSES).t().contiguous()
            return (columns * chosen.to(columns.dtype)).sum() / len(target)

        return [pipe.train_step(x[:9], target=y[:9], loss_fn=loss) for _ in range(3)]

    check(Columns, steps, device, recorded, workers=2, cuts=[2])
    assert layouts == {((3, CLASSES), (1, 3))}


def test_a_language_model(device: str, recorded: Recorder | OnGpu) -> None:
    """Tokens, which are no floating-point numbers, and attention."""

    def data(device: str) -> tuple[Tensor, Tensor]:
        x, y = tokens(6, 16)
        return x.to(device), y.to(device)

    def steps(pipe: ps.Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        losses = []
        for _ in range(3):
            losses.append(pipe.train_step(x, target=y, loss_fn=language_loss))
            optimizer.step()
        return losses

    check(lambda: gpt2_like(2, 32, 2, 16), steps, device, recorded, workers=2, data=data)


def test_an_attribute_that_changes_is_recorded_anew(
    device: str, recorded: Recorder | OnGpu
) -> None:
    """The probability of a Dropout, and whether a layer is frozen."""

    def steps(pipe: ps.Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
        found = trained(pipe, model, x, y)
        model[3].p = 0.9  # type: ignore[index]
        found += trained(pipe, model, x, y)
        model[0].weight.requires_grad_(False)  # type: ignore[index]
        found += trained(pipe, model, x, y)
        model[0].weight.requires_grad_(True)  # type: ignore[index]
        model[3].p = 0.3  # type: ignore[index]
        return found + trained(pipe, model, x, y)

    check(mlp, steps, device, recorded, 6)


class Closed(nn.Module):
    """It has no children, so the pipeline calls it as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH) + 0.1)
        self.register_buffer("mean", torch.ones(WIDTH))
        self.times: Any = 1

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        x = F.linear(F.linear(x, self.weight).relu(), self.weight)
        return torch.atan2(x * self.mean, x * self.times)


def closed() -> nn.Module:
    return nn.Sequential(Closed(), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


CHANGES: dict[str, Callable[[Any], None]] = {
    "a number of another type": lambda m: setattr(m, "times", 1.0),
    "zero": lambda m: setattr(m, "times", 0.0),
    "zero, and then minus zero": lambda m: setattr(m, "times", -0.0),
    "a weight that lies otherwise": lambda m: setattr(m.weight, "data", m.weight.data.t()),
    "a buffer that is elsewhere": lambda m: setattr(m.mean, "data", m.mean.data.clone()),
}


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_changes_is_noticed(schedule: str, device: str, recorded: Recorder | OnGpu) -> None:
    """Numbers, and how tensors lie in memory; a buffer is saved as each micro-batch finds it."""

    def steps(pipe: ps.Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
        found = trained(pipe, model, x, y)
        for change in CHANGES.values():
            change(model[0])  # type: ignore[index]
            found += trained(pipe, model, x, y)
        return found

    check(closed, steps, device, recorded, 6, schedule=schedule, workers=2, cuts=["1"])


def test_a_weight_is_cast_once_for_two_uses_within_a_module(
    device: str, recorded: Recorder | OnGpu
) -> None:
    def steps(pipe: ps.Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
        with torch.autocast(torch.device(device).type, torch.bfloat16):
            return [pipe.train_step(x, target=y, loss_fn=F.cross_entropy) for _ in range(3)]

    check(closed, steps, device, recorded)


def test_a_weight_that_is_changed_before_the_backward(
    device: str, recorded: Recorder | OnGpu
) -> None:
    def steps(pipe: ps.Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
        found = several_kinds(pipe, model, x, y)
        result = pipe(x)
        with torch.no_grad():
            model[4].weight.mul_(1.5)  # type: ignore[index]
        with pytest.raises(ps.WorkerError, match="modified by an inplace operation"):
            F.cross_entropy(result, y).backward()
        return found

    run(mlp, steps, device, True)
    assert recorded.made


def test_a_loss_that_computes_gradients(device: str, recorded: Recorder | OnGpu) -> None:
    """It goes back through the last stage, and then the step does."""

    def steps(pipe: ps.Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
        def loss(output: Tensor, target: Tensor) -> Tensor:
            value = F.cross_entropy(output, target)
            (given,) = torch.autograd.grad(value, [output], retain_graph=True)
            return value + given.square().sum()

        return [pipe.train_step(x, target=y, loss_fn=loss) for _ in range(3)]

    check(mlp, steps, device, recorded)


def test_weights_that_are_elsewhere(device: str, recorded: Recorder | OnGpu) -> None:
    """A recording reads the memory that it knows."""

    def steps(pipe: ps.Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
        found = trained(pipe, model, x, y)
        weight = model[4].weight  # type: ignore[index]
        weight.data = weight.data.clone() * 2
        return found + trained(pipe, model, x, y)

    check(mlp, steps, device, recorded, 4)


def test_hooks_of_parameters_are_called(device: str) -> None:
    """For every micro-batch; so nothing is recorded."""
    called = []

    def steps(pipe: ps.Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
        handle = model[0].weight.register_hook(lambda g: called.append(1) or g * 2)  # type: ignore[index]
        losses = [pipe.train_step(x, target=y, loss_fn=F.cross_entropy) for _ in range(3)]
        handle.remove()
        return losses

    with recording_cpus() if device == "cpu" else nullcontext():
        found, wanted = (run(mlp, steps, device, graphs) for graphs in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    assert len(called) == 2 * 9


def test_a_result_that_has_no_gradient(device: str, recorded: Recorder | OnGpu) -> None:
    """Backwards of the same slot from other results."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            shared = torch.tanh(x)
            return self.one(shared), self.two(shared)

    def steps(pipe: ps.Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
        found = []
        for k in (0, 0, 0, 1, 1, 0, 1):
            F.cross_entropy(pipe(x)[k], y).backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
        return found

    check(Two, steps, device, recorded, 4)


def test_what_reads_values_is_an_error_and_does_no_harm(device: str) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + x.nonzero().sum() * 0

    def steps(pipe: ps.Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
        pipe.train_step(x, target=y, loss_fn=F.cross_entropy)  # warms up
        with pytest.raises(ps.WorkerError, match="cannot be recorded as a CUDA graph"):
            pipe.train_step(x, target=y, loss_fn=F.cross_entropy)
        return []

    with recording_cpus() if device == "cpu" else nullcontext():
        run(Reads, steps, device, True)
        torch.rand(3, device=device)  # draws as before
        found, wanted = (run(mlp, several_kinds, device, graphs) for graphs in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_what_was_recorded_is_freed(device: str, recorded: Recorder | OnGpu) -> None:
    kept: list[Any] = []

    def steps(pipe: ps.Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
        return trained(pipe, model, x, y)

    run(mlp, steps, device, True)
    kept += [weakref.ref(each) for each in recorded.made]
    recorded.made.clear()
    gc.collect()
    assert kept
    assert [each() for each in kept] == [None] * len(kept)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"compile": True, "inference": True}, "reduce-overhead"),
        ({"batchnorm": "deferred"}, "looks at BatchNorms from Python"),
        ({"replicas": 2, "workers": 2}, "is for one replica"),
        ({"recompute": "all"}, "stage 0: its forward runs again before its backward"),
        ({"build": lambda: nn.Sequential(nn.ReLU(inplace=True), mlp())}, "is given in place"),
    ],
)
def test_what_does_not_go_with_graphs(
    options: dict[str, Any], words: str, recorded: Recorder | OnGpu, device: str
) -> None:
    with pytest.raises(ps.InputError, match=words):
        run(steps=trained, device=device, graphs=True, **{"build": mlp, **options})


def test_cpus_have_no_graphs() -> None:
    with pytest.raises(ps.InputError, match=r"no stage can be recorded .*it is on cpu"):
        run(mlp, trained, "cpu", True)


def test_it_is_said_which_stages_are_recorded(device: str, recorded: Recorder | OnGpu) -> None:
    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return self.layer(x)

    def steps(pipe: ps.Pipeline, model: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
        assert list(pipe.cuda_graphs) == [
            "its forward remembers something in attributes",
            "recorded",
        ]
        return trained(pipe, model, x, y)

    def build() -> nn.Module:
        return nn.Sequential(Remembers(), nn.Tanh(), nn.Linear(WIDTH, CLASSES))

    run(build, steps, device, True, workers=2, cuts=["2"], schedule="1f1b")
    with ps.Pipeline(build().to(device), (batch(device)[0],), devices=[device]) as pipe:
        assert list(pipe.cuda_graphs) == ["cuda_graphs=True was not asked for"]
