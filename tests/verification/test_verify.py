"""`verify` compares everything, finds what was planted, and names the place."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.comparison.compare import compare, compare_leaves
from tests.support.models import cases, mlp

# Of models that give something else at every call nobody knows whether their rows meet.
pytestmark = pytest.mark.filterwarnings("ignore::penstock.RowsWarning")

X, Y = torch.randn(7, 6), torch.randn(7, 6)


def verify(model: nn.Module, **options: Any) -> ps.VerifyReport:
    """Of a model of linear layers, cut before its third part unless told otherwise."""
    chosen: dict[str, Any] = {"target": Y, "loss_fn": F.mse_loss, "devices": ["cpu"] * 2}
    chosen |= {"num_microbatches": 3, "schedule": "1f1b", "cuts": ["2"]}
    return ps.verify(model, (X,), **{**chosen, **options}, replicas=1)


def layered(middle: nn.Module, last: nn.Module | None = None) -> nn.Module:
    """Two linear layers, and what is to be found between them."""
    return nn.Sequential(nn.Linear(6, 6), nn.Tanh(), middle, nn.Linear(6, 6), last or nn.Tanh())


class Drifting(nn.Module):
    """Gives another result at every call, whichever copy is called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]

    def __deepcopy__(self, memo: Any) -> Drifting:
        twin = Drifting()
        twin.calls = self.calls  # shared, as a global would be
        return twin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls[0] += 1
        return x * (1 + 1e-3 * self.calls[0])


class Placed(nn.Module):
    """Depends on the thread that runs it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1.5 if threading.current_thread().name.startswith("penstock") else x


class _Slipping(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _Slipping.calls += 1
        return gradient * (1 + 1e-3 * _Slipping.calls)


class Slipping(nn.Module):
    """The identity, with another backward every time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Slipping.apply(x)


def test_everything_is_compared() -> None:
    model = nn.Sequential(*mlp(6, 6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3), nn.Linear(6, 6))
    report = verify(
        model,
        optimizer=torch.optim.AdamW,
        optimizer_options={"lr": 0.1, "amsgrad": True},
        clip_norm=0.05,
        recompute="all",
    )
    assert report.ok, str(report)
    assert report.place is None
    assert [comparison.what for comparison in report.comparisons] == [
        "result of a call",
        "gradients of backward()",
        "gradients of train_step()",
        "losses",
        "norms of the gradients",
        "parameters after 3 steps",
        "buffers after 3 steps",
        "result of a call in evaluation mode",
        "rows of a call in evaluation mode, next to those of the unsplit model",
    ]
    for words in ("workers=threads", "AdamW", "recomputing in 2", "clipped to 0.05", "1f1b"):
        assert words in report.subject


@pytest.mark.parametrize("where", [1, 2, 4])
def test_a_call_that_differs_is_named(where: int) -> None:
    model = nn.Sequential(*layered(nn.Tanh()))
    model[where] = Drifting()
    report = verify(model)
    assert not report.ok
    place = report.place
    assert place is not None
    assert (place.call, place.label, place.microbatch) == (where, str(where), 0)
    assert place.stage == (0 if where < 2 else 1)
    assert place.largest is not None
    assert place.largest > 0
    words = f"it arises in stage {place.stage}, call {where} ({where}), in micro-batch 0: "
    assert words in str(report)
    assert json.loads(json.dumps(asdict(report)))["place"]["label"] == str(where)


def test_what_differs_only_in_a_worker() -> None:
    report = verify(layered(Placed()))
    assert not report.ok
    assert report.place is not None
    assert report.place.parameter == "0.weight"
    assert "in how a worker runs the call" in str(report)


def test_what_differs_only_in_the_backward() -> None:
    report = verify(layered(Slipping()))
    first, gradients, *_ = report.comparisons
    assert first.ok
    assert gradients.different == ("0.weight", "0.bias")
    assert report.place is not None
    assert (report.place.stage, report.place.parameter) == (0, "0.weight")


def test_parameters_are_in_the_order_of_the_forward() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.middle, self.first = nn.Linear(6, 6), Slipping(), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.middle(self.last(self.first(x)))

    report = verify(Backwards(), cuts=["last"])
    different = report.comparisons[1].different
    assert different == ("first.weight", "first.bias", "last.weight", "last.bias")
    assert report.place is not None
    assert report.place.last == "last.weight (call 1)"


def with_norms() -> nn.Module:
    """BatchNorm in both halves."""
    norms = [nn.BatchNorm1d(6) for _ in range(2)]
    return nn.Sequential(nn.Linear(6, 6), norms[0], nn.Linear(6, 6), norms[1], nn.Linear(6, 6))


def test_running_statistics_that_are_put_off() -> None:
    report = verify(with_norms(), batchnorm="deferred")
    assert report.ok, str(report)
    assert "BatchNorm deferred" in report.subject
    assert "buffers after 3 steps" in [comparison.what for comparison in report.comparisons]


def test_rounded_boundaries_differ_by_design() -> None:
    report = verify(layered(nn.Tanh()), boundary_dtype=torch.bfloat16)
    assert not report.ok
    assert (report.place, report.boundary_dtype) == (None, "bfloat16")
    assert "boundaries in bfloat16" in report.subject
    assert "are rounded to bfloat16 at every cut, which changes" in str(report)
    assert 0 < report.comparisons[0].largest < 0.1
    both = verify(layered(Drifting()), boundary_dtype=torch.bfloat16)
    assert both.place is not None  # which rounding does not explain
    assert both.place.call == 2
    assert verify(layered(nn.Tanh())).boundary_dtype is None


def sum_of_squares(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target, reduction="sum")


def test_sums_and_weighted_means() -> None:
    labels = torch.tensor([-100, 1, -100, 2, 3, 4, -100])
    whole = verify(layered(nn.Tanh()), loss_fn=sum_of_squares, weight=None)
    assert whole.ok, str(whole)
    counted = verify(
        layered(nn.Tanh()),
        target=labels,
        loss_fn=lambda o, t: F.cross_entropy(o, t, ignore_index=-100),
        weight=lambda t: (t != -100).sum(),
    )
    assert counted.ok, str(counted)


def test_a_micro_batch_in_which_nothing_counts() -> None:
    """Its mean is no number, on one device as well, and is left out there, too."""
    labels = torch.tensor([-100, -100, -100, 2, 3, 4, 1])
    report = verify(
        layered(nn.BatchNorm1d(6)),
        target=labels,
        loss_fn=F.cross_entropy,
        weight=lambda t: (t != -100).sum(),
    )
    assert report.ok, str(report)
    assert not any(comparison.undefined for comparison in report.comparisons)


def no_number(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target) * float("nan")


class Penalised(nn.Module):
    """Gives the penalty of its weights as well, which has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.layers(x), self.layers[0].weight.pow(2).sum()


def test_a_result_without_rows_that_changes_with_the_weights() -> None:
    def loss(result: tuple[torch.Tensor, torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(result[0], target) + 0.01 * result[1]

    torch.manual_seed(0)
    x, target = torch.randn(8, 4), torch.arange(8) % 3
    found = ps.verify(Penalised(), (x,), target=target, loss_fn=ps.whole_batch(loss))
    assert found.ok, str(found)


def test_nans_in_the_same_places_are_equal_and_are_said() -> None:
    report = verify(layered(nn.Tanh()), loss_fn=no_number)
    assert report.ok, str(report)
    assert "losses: 3 compared, all equal, but 3 have a NaN in the same places" in str(report)
    assert "result of a call: 1 compared, all bitwise equal" in str(report)


def test_nans_in_other_places_differ() -> None:
    ours, theirs = torch.tensor([1.0, float("nan"), 2.0]), torch.tensor([1.0, 2.0, float("nan")])
    found = compare("results", {"a": ours, "b": ours}, {"a": theirs, "b": ours})
    assert (found.different, found.undefined, found.largest) == (("a",), ("b",), float("inf"))
    assert compare("results", {"b": ours}, {"b": ours + 1}).different == ("b",)
    small = torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn)  # which know few operations
    assert compare("results", {"c": small}, {"c": small[[1, 0]]}).different == ("c",)


def test_processes_are_named_and_exact() -> None:
    case = cases()["named"]
    report = ps.verify(
        case.model(),
        case.args,
        case.kwargs,
        target=case.target,
        loss_fn=case.loss_fn,
        devices=["cpu"] * 2,
        num_microbatches=3,
        workers="processes",
        recompute="all",
        optimizer=torch.optim.Adagrad,
        replicas=1,
    )
    assert report.ok, str(report)
    assert report.workers == "processes"
    assert "workers=processes" in str(report)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"optimizer": "AdamW"}, "'AdamW' is not an optimizer class"),
        ({"optimizer": torch.optim.AdamW(mlp(2, 2).parameters())}, "is not an optimizer class"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS evaluates the model several times"),
        ({"clip_norm": 0.0}, "must be greater than 0"),
        ({"weight": "tokens"}, "weight='tokens' is unknown"),
        ({"batchnorm": "later"}, "batchnorm='later' is unknown"),
        ({"boundary_dtype": torch.int8}, "is not supported; give bfloat16 or float16"),
    ],
)
def test_mistakes(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ps.InputError, match=words):
        verify(layered(nn.Tanh()), **options)


def test_a_misspelt_option_is_one_of_verify() -> None:
    misspelt: Any = {"num_microbatch": 2}
    with pytest.raises(TypeError, match=r"verify\(\) got an unexpected .*'num_micro"):
        ps.verify(
            mlp(4, 4), (torch.randn(4, 4),), loss_fn=F.mse_loss, devices=2, **misspelt, replicas=1
        )


def test_results_that_are_no_tensors_are_compared() -> None:
    assert compare_leaves("results", [1, "a"], [1, "a"]).ok
    assert compare_leaves("results", [1, "a"], [1, "b"]).different == ("1",)
    assert compare_leaves("results", [1.5], [2.0]).largest == 0.5
    assert not compare_leaves("results", [1, 2], [1]).ok
    assert compare("results", {"a": torch.ones(1)}, {}).different == ("a",)


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated:FutureWarning")
def test_tensors_with_a_history_are_copied_without_it() -> None:
    """`copy.deepcopy` refuses models with them, before a forward or after one."""
    normed = nn.utils.weight_norm(nn.Linear(6, 6))
    model = layered(normed)
    assert isinstance(normed.weight, torch.Tensor)
    assert normed.weight.grad_fn is not None
    assert verify(model).ok
    model(X).sum().backward()
    assert verify(model).ok
