"""How backwards divide into halves, and what is held for them."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.profile import measure
from penstock.profile.halving import halving_seconds, weight_share
from penstock.profile.stepping import Saved
from penstock.profile.team import _FEWEST_PASSES, _MOST_PASSES, Team, _is_steady, _Pace
from penstock.profile.timing import Timing, spread
from tests.support.models import cases

X = torch.randn(8, 4)


def profiled(model: nn.Module, x: torch.Tensor = X, count: int = 2) -> ps.Profile:
    return ps.profile(ps.capture(model, (x,)), devices=["cpu"], num_microbatches=count)


# -- halves -------------------------------------------------------------------------------


def _hooked() -> nn.Module:
    layer = nn.Linear(4, 4)
    layer.register_full_backward_hook(lambda *_: None)
    return layer


def _tied() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(nn.Linear(4, 4), layer, nn.ReLU(), layer)


class _Functions(nn.Module):
    """A product with a parameter, something else with one, and a product without."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Parameter(torch.ones(4, 4))
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.square) * self.scale
        result: torch.Tensor = x @ x.mT
        return result


@pytest.fixture
def _for_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is too small to be put off."""
    monkeypatch.setattr(measure, "halving_seconds", lambda _: 0.0)


@pytest.mark.usefixtures("_for_free")
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize(
    ("make", "x", "expected"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.LayerNorm(4)), X, [0, 1]),
        (lambda: nn.Sequential(nn.Embedding(9, 4), nn.GELU()), torch.arange(8), [0]),
        (lambda: nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(4)), X[..., None], [0]),
        (lambda: nn.Sequential(nn.Linear(4, 4), _hooked()), X, [0]),
        (_tied, X, [0]),
        (_Functions, X, [0]),
    ],
)
def test_which_calls(
    make: Callable[[], nn.Module],
    x: torch.Tensor,
    expected: list[int],
    empty: bool,
) -> None:
    with ps.empty_weights() if empty else nullcontext():
        model = make()
    (weight,) = profiled(model, x, count=1).on("cpu").weight
    assert [k for k, seconds in enumerate(weight) if seconds] == expected


@pytest.mark.parametrize("empty", [False, True])
def test_what_is_shorter_than_it_takes_to_put_it_off_is_not(empty: bool) -> None:
    """The large layer's weight half takes milliseconds, that of the small one a few us."""
    assert halving_seconds(torch.device("cpu")) > 0
    with ps.empty_weights() if empty else nullcontext():
        model = nn.Sequential(*(nn.Linear(*s) for s in ((4, 4), (4, 4), (4, 1024), (1024, 1024))))
    (weight,) = profiled(model, torch.randn(8, 4), count=1).on("cpu").weight
    assert weight[1] == 0
    assert weight[3] > 0


@pytest.mark.usefixtures("_for_free")
def test_the_weight_half_is_a_part_of_the_backward() -> None:
    model = nn.Sequential(
        *(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64), nn.ReLU())
    )
    model[3].requires_grad_(False)
    kind = profiled(model, torch.randn(32, 64)).on("cpu")
    (weight,), (backward,) = kind.weight, kind.backward
    assert weight[0] == backward[0] > 0  # nobody wants the gradient of the input
    assert weight[1] == weight[3] == weight[4] == 0
    assert 0 < weight[2] < backward[2]


def test_what_is_measured_of_the_halves_reaches_no_gradient() -> None:
    x, layer = torch.randn(4, 4, requires_grad=True), nn.Linear(4, 4)
    weights = list(layer.parameters())
    share = weight_share([layer(x)], [x], weights, torch.device("cpu"))
    assert 0 < share < 1
    assert [t.grad for t in (x, *weights)] == [None] * 3
    assert weight_share([layer(x)], [x.detach()], weights, torch.device("cpu")) == 1
    assert weight_share([layer(x).relu()], [x], weights, torch.device("cpu")) == 0
    assert weight_share([layer(x)], [x], [], torch.device("cpu")) == 0


@pytest.mark.usefixtures("_for_free")
def test_a_model_without_weights_has_halves_too() -> None:
    with ps.empty_weights():
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    kind = profiled(model, torch.randn(8, 64)).on("cpu")
    (weight,), (backward,) = kind.weight, kind.backward
    assert weight[0] == backward[0] > 0
    assert weight[1] == 0
    assert 0 < weight[2] < backward[2]


# -- memory -------------------------------------------------------------------------------


class _View(nn.Module):
    """Saves half of its hidden values, which keeps all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left = self.layer(x)[:, :4]
        return left * left


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize(
    ("make", "saved", "outputs"),
    [
        (mlp, [16, 16, 0], [16, 16, 16]),  # the ReLU's result is the last layer's input
        (_View, [16, 0, 32], [32, 0, 16]),
        (
            lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.Linear(4, 4)),
            [16, 16, 0],
            [16, 0, 16],
        ),
    ],
    ids=["mlp", "view", "inplace"],
)
def test_what_is_held_belongs_to_the_first_that_saves_it(
    make: Callable[[], nn.Module], saved: list[float], outputs: list[float], count: int, empty: bool
) -> None:
    with ps.empty_weights() if empty else nullcontext():
        model = make()
    costs = profiled(model, count=count)
    assert list(costs.saved) == saved
    assert list(costs.outputs) == outputs


def test_inputs_that_are_views_of_a_batch_count_with_their_own_rows() -> None:
    costs = profiled(mlp(), torch.randn(1000, 4)[3:11])
    assert costs.saved[0] == 16


def test_what_is_noted_stays_until_the_end_and_no_longer() -> None:
    with Saved([]) as saved:
        result = torch.ones(4, requires_grad=True).exp()
        held = weakref.ref(result.untyped_storage())
        del result
        assert held() is not None  # or something else could have its address
        assert list(saved.take().values()) == [16]
    assert held() is None


def test_sparse_tensors_count_for_nothing() -> None:
    matrix, x = torch.eye(4).to_sparse(), torch.ones(4, 4, requires_grad=True)
    with Saved([]) as saved:
        torch.sparse.mm(matrix, x)
        assert saved.take() == {}


@pytest.mark.parametrize("name", ["gpt2", "unet"])
def test_a_model_without_weights_holds_about_as_much(name: str) -> None:
    """Made-up values have no strides of their own, so that attention may copy some of them."""
    case = cases()[name]
    program = ps.capture(case.model(), case.args, case.kwargs)
    with ps.empty_weights():
        empty = case.model()
    weightless = ps.capture(empty, case.args, case.kwargs)
    real, guessed = (
        ps.profile(p, devices=["cpu"], num_microbatches=1) for p in (program, weightless)
    )
    assert sum(real.saved) > 0
    assert sum(guessed.saved) == pytest.approx(sum(real.saved), rel=0.1)


# -- how often ----------------------------------------------------------------------------


def timing(seconds: float) -> Timing:
    return Timing([seconds], [0.0], [(seconds, 0.0), (2 * seconds, 0.0)])


def passes(of: Callable[[int], float]) -> int:
    """How many there are when pass `k` takes `of(k)` seconds."""
    results: list[list[Timing]] = [[], []]
    pace = _Pace(results, 1.0, _MOST_PASSES, _is_steady)
    for k in range(100):
        pace.next()
        if not pace.goes_on:
            return k
        for result in results:
            result.append(timing(of(k)))
    raise AssertionError("it never ends")


def test_passes_until_they_agree() -> None:
    assert passes(lambda k: 1.0) == _FEWEST_PASSES
    assert passes(lambda k: 1.0 + k % 3) == _MOST_PASSES
    assert _FEWEST_PASSES < passes(lambda k: 1.0 + 0.3 * (k == 1) + 0.03 * (k == 2)) < _MOST_PASSES


def test_spread_is_the_middle_half_of_the_passes() -> None:
    assert spread([timing(s) for s in (1.0, 2.0, 3.0, 4.0, 100.0)]) == pytest.approx(2 / 3)


def test_what_halving_costs_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tiny layers by far the most is the graph that each half needs; of none it is nothing."""
    monkeypatch.setattr(measure, "halving_seconds", lambda _: 0.0)  # however small
    layers = nn.Sequential(*(nn.Linear(2, 2) for _ in range(8)))
    program = ps.capture(layers, (torch.randn(4, 2),))
    kind = ps.profile(program, devices=["cpu", "cpu"], seconds=2).on("cpu")
    assert len(kind.halving) == len(kind.rows)
    for rows, more in zip(kind.rows, kind.halving, strict=True):
        assert more > 0.1 * sum(map(sum, kind.seconds(rows)))
    norms = ps.capture(nn.Sequential(*(nn.LayerNorm(2) for _ in range(3))), (torch.randn(4, 2),))
    assert ps.profile(norms, devices=["cpu", "cpu"], seconds=1).on("cpu").halving == ()


def test_what_halving_costs_is_not_measured_for_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the first half of a backward there."""

    def refuse(*_: object) -> None:
        raise AssertionError("it is measured")

    monkeypatch.setattr(Team, "halving", refuse)
    program = ps.capture(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), (torch.randn(4, 2),))
    ps.profile(program, devices=["cpu"], seconds=1)
    with pytest.raises(AssertionError, match="it is measured"):
        ps.profile(program, devices=["cpu", "cpu"], seconds=1)
