"""Capture: what it takes to be the same, what it must leave alone, what it must close."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.capture.forward import Forward


class Two(nn.Module):
    """Two layers, and what a subclass does between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 4)

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h.tanh()

    def forward(self, x: torch.Tensor) -> object:
        return self.b(self.between(self.a(x)))


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))


# -- a NaN, or what is no tensor, does not hide that a program is wrong ------------------------


class Unseen(Two):
    """Another thread writes to a tensor, which no recording can see."""

    def between(self, h: torch.Tensor) -> torch.Tensor:
        h = h * 1
        with ThreadPoolExecutor(1) as other:
            other.submit(h.detach().mul_, 2).result()
        return h.tanh()


class WithNan(Unseen):
    def forward(self, x: torch.Tensor) -> object:
        z = super().forward(x)
        return {"o": z, "dbg": (z * 0) / (z * 0)}


class Count:
    """A result that is no tensor, nor anything that says when it is equal."""

    def __init__(self, values: list[float]) -> None:
        self.values = values


class Inner(nn.Module):
    def forward(self, h: torch.Tensor) -> Count:
        return Count(h.detach().sum(0).tolist())


class WithObject(Unseen):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> object:
        z = super().forward(x)
        return {"ok": x * 2, "count": self.inner(z)}


def test_a_nan_in_the_result_hides_nothing() -> None:
    model = WithNan()
    with torch.no_grad():
        model.a.weight.mul_(3)
    program = ps.capture(model, (X,))
    assert torch.equal(program(X)["o"], model(X)["o"])
    assert "another result" in program.closed[""]


def test_results_that_are_no_tensors_are_compared() -> None:
    model = WithObject()
    program = ps.capture(model, (X,))
    assert program(X)["count"].values == model(X)["count"].values
    assert "another result" in program.closed[""]


# -- what modules hold is left alone -----------------------------------------------------------


class Frozen(OrderedDict[str, Any]):
    """A configuration that must not be changed, as diffusers has them."""

    def __init__(self, **values: Any) -> None:
        super().__init__(**values)
        for key, value in self.items():
            object.__setattr__(self, key, value)
        self.__frozen = True

    def __setitem__(self, key: str, value: Any) -> None:
        if hasattr(self, "_Frozen__frozen"):
            raise RuntimeError("frozen")
        super().__setitem__(key, value)

    def clear(self) -> None:
        raise RuntimeError("frozen")

    def copy(self) -> Any:
        raise RuntimeError("frozen")


class Configured(Two):
    """Reads a configuration, and notes at its first call that it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Frozen(scale=2.0)
        self.seen = Counter[str]()
        self.by_name: dict[str, list[int]] = defaultdict(list, calls=[])
        self.ready = False

    def forward(self, x: torch.Tensor) -> object:
        if not self.ready:
            self.ready = True
            self.cache = object()
        self.seen["calls"] += 1
        self.by_name["calls"].append(1)
        return super().forward(x) * self.config.scale  # type: ignore[operator, attr-defined]


def test_containers_of_classes_of_their_own_stay_as_they_are() -> None:
    model = Configured()
    config, seen, by_name = model.config, model.seen, model.by_name
    program = ps.capture(model, (X,))
    assert not model.seen
    assert model.by_name == {"calls": []}
    assert not model.ready
    held = config, seen, by_name
    assert all(a is b for a, b in zip(held, (model.config, model.seen, model.by_name), strict=True))
    assert torch.equal(program(X), model(X))


# -- a view of a parameter crosses a cut, without gradients -------------------------------------


class TiedByView(Two):
    """One weight used on both sides of the cut, by a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 6))

    def forward(self, x: torch.Tensor) -> object:
        view = self.weight[:8]
        h = x @ view.t()
        return h.tanh() @ view


def test_a_view_of_a_parameter_crosses_without_gradients() -> None:
    model = TiedByView()
    options: dict[str, Any] = {"num_microbatches": 4, "devices": ["cpu"] * 2}

    def in_parts(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([model(part) for part in x.tensor_split(4)])

    with ps.Pipeline(model, (X,), cuts=["tanh()"], **options, replicas=1) as pipe:
        for context in (torch.no_grad, torch.inference_mode):
            with context():
                assert torch.equal(pipe(X), in_parts(X))
                for found, x in zip(pipe.map([(X,), (X + 1,)]), (X, X + 1), strict=True):
                    assert torch.equal(found, in_parts(x))
        out = pipe(X)
        out.sum().backward()
        ours, model.weight.grad = model.weight.grad, None
        for x in X.tensor_split(4):
            model(x).sum().backward()
        assert torch.equal(ours, model.weight.grad)


# -- what closes a module, and what does not ------------------------------------------------------


class Names(Two):
    """Parts with the names of what a graph module has itself."""

    def __init__(self) -> None:
        super().__init__()
        self.graph = nn.Linear(8, 8)
        self.code = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.recompile = nn.Parameter(torch.randn(8))
        self.register_buffer("meta", torch.randn(8))

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return self.code(self.graph(h) * self.recompile) + self.meta


class WithScale(Two):
    """A parameter is part of the result, as in CLIP."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> object:
        return {"f": super().forward(x), "logit_scale": self.scale}


class Force(nn.Module):
    """Computes a gradient within its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            given = h if h.requires_grad else h.detach().requires_grad_()
            energy = self.layer(given).square().sum()
            (force,) = torch.autograd.grad(energy, given, create_graph=self.training)
        return h + force


class Hooked(Force):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        h = self.layer(h)
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient * 2)
        return h * 1


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.GRU(8, 8, batch_first=True)
        self.after = nn.Linear(8, 8)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        lengths = torch.full((len(h),), 3)
        sequence = h[:, None].expand(-1, 3, -1)
        packed = nn.utils.rnn.pack_padded_sequence(sequence, lengths, batch_first=True)
        padded, _ = nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return self.after(padded[:, 0])


class Trying(Force):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        try:
            h = h.view(3, 999)
        except RuntimeError:
            h = self.layer(h)
        return h


class Around(Two):
    """A module between two layers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return self.inner(h).tanh()


def value_of(result: Any) -> torch.Tensor:
    return result["f"] * result["logit_scale"] if isinstance(result, dict) else result


@pytest.mark.parametrize(
    ("build", "closed"),
    [
        (Names, {}),
        (WithScale, {}),
        (lambda: Around(Force()), {"inner": "computes gradients"}),
        (lambda: Around(Hooked()), {"inner": "hangs hooks"}),
        (lambda: Around(Packed()), {"inner": "packs sequences"}),
        (lambda: Around(Trying()), {}),
    ],
    ids=["names", "a parameter in the result", "autograd.grad", "hooks", "packed", "try"],
)
def test_cut_and_trained_alike(build: Callable[[], nn.Module], closed: dict[str, str]) -> None:
    model = build()
    program = ps.capture(model, (X,))
    assert program.closed.keys() == closed.keys()
    assert all(why in program.closed[path] for path, why in closed.items())
    options: dict[str, Any] = {"num_microbatches": 4, "devices": ["cpu"] * 2}
    with ps.Pipeline(model, (X,), program=program, **options, replicas=1) as pipe:
        pipe.train_step(X, loss_fn=lambda result: value_of(result).square().mean())
    ours = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    for x in X.tensor_split(4):
        (value_of(model(x)).square().mean() / 4).backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(ours[name], parameter.grad), name


def test_lazy_modules_are_called_first() -> None:
    model = Around(nn.LazyLinear(8))
    with pytest.raises(ps.InputError, match=r"inner\.weight, inner\.bias .* Call it once"):
        ps.capture(model, (X,))
    model(X)
    assert len(ps.capture(model, (X,))) > 2


class Scaled(Two):
    def forward(self, x: torch.Tensor, factors: Any = None) -> object:
        return super().forward(x) * float(factors.sum())  # type: ignore[operator]


def test_an_array_of_numpy_is_a_constant() -> None:
    model, factors = Scaled(), np.array([1.0, 2.0])
    program = ps.capture(model, (X, factors))
    assert torch.equal(program(X, factors.copy()), model(X, factors))
    assert torch.equal(program(X, factors + 1), model(X, factors + 1))


class Tied(nn.Module):
    """A table and a head that have a weight together, where both are called, or only the table."""

    def __init__(self, together: bool, both: bool = True) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(8, 4), nn.Linear(4, 4), nn.Linear(4, 8)
        self.both = both
        if together:
            self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(self.table(x))
        result: torch.Tensor = self.head(h) if self.both else h
        return result


@pytest.mark.parametrize(
    ("both", "more", "targets"),
    [
        (True, 0, [F.embedding, "body", F.linear]),
        (False, 1, ["table", "body"]),  # it was opened for nothing
    ],
)
def test_tied_weights_cost_no_recording(
    monkeypatch: pytest.MonkeyPatch, both: bool, more: int, targets: list[Any]
) -> None:
    tokens, recordings = torch.tensor([[1], [2], [3], [4]]), []
    usual = Forward.record

    def counted(self: Forward, *args: Any, **kwargs: Any) -> Any:
        recordings.append(args)
        return usual(self, *args, **kwargs)

    monkeypatch.setattr(Forward, "record", counted)
    ps.capture(Tied(False, both), (tokens,))
    without = len(recordings)
    program = ps.capture(Tied(True, both), (tokens,))
    assert [call.target for call in program.train.calls] == targets
    assert len(recordings) == 2 * without + more


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_traced_model_is_refused_and_may_be_a_part() -> None:
    traced = torch.jit.trace(nn.Linear(6, 4), X)
    for model in (traced, torch.jit.script(nn.Linear(6, 4))):
        with pytest.raises(ps.InputError, match=r"torch\.jit has compiled it.*nn\.Sequential"):
            ps.capture(model, (X,))
    program = ps.capture(nn.Sequential(traced), (X,))
    assert torch.equal(program.replay((X,), {}, None), traced(X))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_refused(layout: torch.layout) -> None:
    nested = torch.nested.nested_tensor([X[:3], X[:2]], layout=layout)
    with pytest.raises(ps.InputError, match=r"input 0 is a nested tensor.*to_padded_tensor"):
        ps.capture(Two(), (nested,))
    padded = torch.nested.to_padded_tensor(nested, 0.0)
    with ps.Pipeline(Two(), (padded,), devices=1) as pipe:
        pipe(padded)
        with pytest.raises(ps.InputError, match=r"input 0 of the batch is a nested tensor"):
            pipe(nested)
