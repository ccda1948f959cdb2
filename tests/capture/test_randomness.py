"""Random numbers from numpy and from Python, and what modules store for one another."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

import penstock as ps
from penstock.capture import Key, randomness
from penstock.capture.calls import Unrecordable
from penstock.capture.surroundings import Surroundings
from penstock.devices.cpu import Cpu
from penstock.planning.tuning import mean_square
from tests.support.models import own_forward

X = torch.randn(6, 4)


class Masked(nn.Module):
    """A closed module that hides numbers at random, as numpy or Python has it."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        if self.source == "numpy":
            return x * torch.from_numpy((np.random.rand(*x.shape) > 0.5).astype("float32"))
        return x * random.choice([0.5, 2.0]) + torch.rand(1)


class Model(nn.Module):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), Masked(source), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize("source", ["numpy", "python"])
def test_what_numpy_and_python_draw_is_seeded_as_well(source: str) -> None:
    model = Model(source)
    before = random.getstate(), np.random.get_state()[1].tobytes()  # type: ignore[union-attr]
    program = ps.capture(model, (X,))
    (call,) = (call for call in program.train.calls if call.random)
    assert (call.label, call.draws_in_python) == ("layers.1", True)
    assert not any(call.random for call in program.eval.calls)
    key = Key(1, 2, 3)
    assert torch.equal(program.replay((X,), {}, key), own_forward(program, (X,), {}, key))
    others = [program.replay((X,), {}, Key(1, k, 0)) for k in range(4)]
    assert not all(torch.equal(others[0], other) for other in others)
    report = ps.verify(
        model,
        (X,),
        loss_fn=mean_square,
        devices=["cpu", "cpu"],
        num_microbatches=3,
        cuts=["layers.1"],
        replicas=1,
    )
    assert report.ok, str(report)
    assert before == (random.getstate(), np.random.get_state()[1].tobytes())  # type: ignore[union-attr]


class Chooses(nn.Module):
    """Its own Python draws, between two calls."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        scale = random.choice([1.0, 1.0, 1.0])  # no recording shows a difference
        return self.b(x * scale)


def test_python_that_draws_between_calls_is_closed() -> None:
    program = ps.capture(nn.Sequential(nn.Linear(4, 4), Chooses()), (X,))
    assert program.closed == {"1": "its Python draws random numbers by itself"}


class SeedsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        torch.manual_seed(5)
        np.random.seed(5)
        return gradient


class Seeds(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = SeedsInBackward.apply(x)
        return result


def test_profiling_leaves_the_generators_alone() -> None:
    program = ps.capture(nn.Sequential(nn.Linear(4, 4), Seeds()), (X,))
    before = torch.get_rng_state(), np.random.get_state()[1].tobytes()  # type: ignore[union-attr]
    ps.profile(program, devices=["cpu"], num_microbatches=1)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1] == np.random.get_state()[1].tobytes()  # type: ignore[union-attr]


def test_a_random_module_that_is_called_with_keywords() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)
            self.last = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.inner(query=x, key=x, value=x)[0])

    x = torch.randn(4, 5, 4)
    report = ps.verify(
        Attention(),
        (x,),
        loss_fn=mean_square,
        devices=["cpu", "cpu"],
        num_microbatches=2,
        replicas=1,
    )
    assert report.ok, str(report)


class Cell(nn.Module):
    """Remembers what it gave, and adds it to what it gives next."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) + (0 if self.state is None else self.state)
        self.state = y
        return y


class Resets(nn.Module):
    """Makes its cell forget, which is nothing new the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(4, 4), Cell(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.cell.state = None
        return self.last(self.cell(self.first(x)))


def test_a_module_that_writes_to_a_closed_one_is_closed_with_it() -> None:
    model = nn.Sequential(Resets(), Resets())
    program = ps.capture(model, (X,))
    assert program.closed["0"] == "its forward assigns to 0.cell.state"
    assert set(program.closed) == {"0", "1", "0.cell", "1.cell"}
    assert program.labels == ("0", "1")
    with torch.no_grad():
        expected = model(X)
        assert all(torch.equal(program(X), expected) for _ in range(3))


class Inner(nn.Module):
    """Reads a value, so it is closed; its embedding is called from outside as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.linear = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.linear(self.embed(ids))
        return x if x.sum() > 0 else -x


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = Inner(), nn.Linear(4, 2)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(ids) + self.inner.embed(ids))


@pytest.mark.timeout(60)
def test_a_child_of_a_closed_module_that_is_called_by_itself() -> None:
    model, ids = Outer(), torch.randint(0, 9, (3, 5))
    program = ps.capture(model, (ids,))
    assert set(program.closed) == {"inner"}
    assert torch.equal(program(ids), model(ids))
    reason = program.cuts.forbidden(1)
    assert reason is not None
    assert "is used on both sides inside closed modules" in reason


def test_what_a_module_passes_on_without_a_value_does_not_close_its_owner() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pass_on, self.a, self.b = nn.Identity(), nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, mask: Any = None) -> torch.Tensor:
            x = self.a(x)
            return self.b(x) if self.pass_on(mask) is None else x

    assert ps.capture(Optional(), (X,)).labels == ("a", "b")


class DropsLayers(nn.Module):
    """Gives as many results as it has not dropped layers: LayerDrop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = [x]
        for layer in self.layers:
            if not self.training or torch.rand(()) > 0.1:
                given.append(layer(given[-1]))
        return tuple(given)


class TakesTheLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.encoder, self.head = nn.Linear(4, 4), DropsLayers(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.first(x))[-1])


def test_results_whose_number_random_numbers_decide() -> None:
    model = nn.Sequential(nn.Linear(4, 4), TakesTheLast())
    program = ps.capture(model, (X,))
    assert program.closed["1"] == "what it is given depends on random numbers"
    for step in range(20):
        key = Key(3, step, 0)
        assert torch.equal(program.replay((X,), {}, key), own_forward(program, (X,), {}, key))


def checked(forward: Any) -> Any:
    """What beartype makes of a function that is given a sequence: it looks at a random item."""

    def wrapper(
        self: nn.Module,
        x: torch.Tensor,
        *,
        __beartype_getrandbits: Any = random.getrandbits,
    ) -> torch.Tensor:
        assert __beartype_getrandbits(32) >= 0
        result: torch.Tensor = forward(self, x)
        return result

    return wrapper


class Checked(nn.Module):
    """Its Python draws random numbers on which nothing depends."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4))

    @checked
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * 2


def test_what_beartype_draws_closes_nothing() -> None:
    program = ps.capture(Checked(), (X,))
    assert len(program) == 4
    wrapper: Any = Checked.forward
    assert wrapper.__kwdefaults__["__beartype_getrandbits"] == random.getrandbits


class Absent:
    """Stands for a package that is not there, as lazy imports do: whatever is asked of it fails."""

    def __getattr__(self, name: str) -> Any:
        raise ImportError("it is not installed")


absent = Absent()


class BesideAbsent(nn.Module):
    """A model in a file with such a thing."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).relu())


def test_what_stands_for_an_absent_package_is_not_asked() -> None:
    assert not ps.capture(BesideAbsent(), (torch.randn(3, 4),)).closed


def test_an_accelerators_call_may_draw_on_the_cpu_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = torch.Generator().manual_seed(7)
    kind = SimpleNamespace(has_streams=True, generator=lambda device: theirs)
    monkeypatch.setattr(
        randomness, "kind_of", lambda d: kind if torch.device(d).type == "cuda" else Cpu()
    )

    def both(device: object) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.rand(2), torch.rand(2, generator=theirs)

    before = torch.get_rng_state(), theirs.get_state()
    for device in ("cuda", "cuda:1", torch.device("cuda")):
        one, other = (randomness.draw(Key(0, 0, 0), 5, both, device=device) for _ in range(2))
        assert all(map(torch.equal, one, other))
        watched = randomness.Watched(both)
        one, other = (watched(Key(0, 0, 0), 5, device=device) for _ in range(2))
        assert all(map(torch.equal, one, other))
        assert watched.draws
        assert torch.equal(torch.get_rng_state(), before[0])
        assert torch.equal(theirs.get_state(), before[1])


def test_the_devices_of_a_call() -> None:
    cpu, meta = torch.device("cpu"), torch.device("meta")
    held = nn.Linear(2, 2, device="meta")
    found = [
        randomness._devices_of((torch.rand,), {"size": (2,), "device": "cuda:1"}),
        randomness._devices_of((nn.Dropout(), X), {"device": "not a device"}),
        randomness._devices_of((torch.rand, 2, meta), {}),
        randomness._devices_of((held, 2), {"mode": "cuda"}),
    ]
    assert found == [{torch.device("cuda", 1)}, {cpu}, {meta}, {meta}]


def test_settings_of_the_models_devices_count() -> None:
    kind = Mock(type="cuda", settings=Mock(return_value=("True",)))
    surroundings = Surroundings([], kind, seeded=False)
    surroundings.check_settings("block")
    kind.settings.return_value = ("False",)
    with pytest.raises(Unrecordable, match=r"changes a setting of torch.*of_kind"):
        surroundings.check_settings("block")
