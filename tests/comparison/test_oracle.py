"""What everything is compared with: plain PyTorch, the unsplit model's results, enough of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.capture.recorder import Recorder
from penstock.comparison.compare import compare_results, gap, rows_in_order
from penstock.comparison.reference import one_device
from penstock.oracle import Oracle, row_dim
from penstock.passes import Passes
from tests.support.models import uniform_plan

pytestmark = pytest.mark.filterwarnings("ignore::penstock.RowsWarning")

_numbers = torch.Generator().manual_seed(6)
X = torch.randn(8, 6, generator=_numbers)
Y = torch.randn(8, 4, generator=_numbers)
SPLIT: dict[str, Any] = {"devices": ["cpu", "cpu"], "cuts": ["b"], "schedule": "gpipe"}


class Two(nn.Module):
    """Two linear layers, and what is made of their result."""

    def __init__(self, end: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.a, self.b, self.end = nn.Linear(6, 8), nn.Linear(8, 4), end

    def forward(self, x: torch.Tensor) -> Any:
        return self.end(self.b(self.a(x).tanh()), x)


def own(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return z


def verify(end: Callable[..., Any] = own, loss: Any = None, **options: Any) -> ps.VerifyReport:
    loss = loss or (lambda output, target: F.mse_loss(output, target))
    return ps.verify(Two(end), (X,), target=Y, loss_fn=loss, **{**SPLIT, **options}, replicas=1)


def first(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Of the leaves of a result."""
    return (output[0] - target).square().mean()


ENDS: dict[str, tuple[Callable[..., Any], Any]] = {
    "two entries a row": (lambda z, x: torch.cat([z, -z]), lambda output, target: output.mean()),
    "transposed": (
        lambda z, x: z.view(-1, 2, 2).transpose(0, 1).reshape(-1, 2),
        lambda output, target: output.square().mean(),
    ),
    "a range": (lambda z, x: (z, torch.arange(x.shape[0])), first),
    "a count": (lambda z, x: (z, torch.tensor(x.shape[0])), first),
    "pairs of rows": (lambda z, x: (z, z @ z.t()), first),
    "in reverse": (lambda z, x: (z, z.flip(0)), first),
}


@pytest.mark.parametrize("name", ENDS)
def test_results_that_nobody_can_put_together_are_never_exact(name: str) -> None:
    end, loss = ENDS[name]
    if name in ("a count", "pairs of rows"):
        with pytest.raises(ps.InputError, match="cannot be put together"):
            verify(end, loss, num_microbatches=4)
        return
    report = verify(end, loss, num_microbatches=4)
    assert not report.ok, str(report)
    assert "result of a call (" in str(report)


def test_ones_own_rows_are_told_from_rounding() -> None:
    numbers = torch.randn(6, 3)
    twice = torch.cat([numbers, numbers])
    for whole in (numbers, twice, numbers[:, :1], torch.arange(6), numbers > 0):
        assert rows_in_order(whole, whole).ok
    assert rows_in_order(twice, twice * (1 + 1e-7)).ok
    assert rows_in_order(numbers, numbers * (1 + 1e-7)).ok
    assert not rows_in_order(numbers, numbers.flip(0)).ok
    assert not rows_in_order(numbers, numbers.roll(1, 1)).ok
    assert not rows_in_order(torch.arange(6) % 3, torch.arange(6)).ok
    assert not rows_in_order(numbers, twice).ok


def test_results_are_merged_where_there_is_one_entry_a_row() -> None:
    whole, rows = torch.zeros(2, 5, 5), [3, 2]
    assert row_dim(whole, [torch.zeros(2, 3, 5), torch.zeros(2, 2, 5)], rows) == 1
    assert row_dim(whole, [torch.zeros(2, 5, 3), torch.zeros(2, 5, 2)], rows) == 2
    assert row_dim(whole, [torch.zeros(2, 3, 3), torch.zeros(2, 2, 2)], rows) is None
    assert row_dim(torch.zeros(10), [torch.zeros(6), torch.zeros(4)], rows) is None
    assert row_dim(torch.zeros(()), [torch.zeros(()), torch.zeros(())], rows) is None


def test_a_pipeline_that_merges_in_another_order_is_not_exact(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    call = Passes.call

    def turned(passes: Passes, args: Any, kwargs: Any) -> Any:
        return call(passes, args, kwargs).roll(3, 0)

    assert verify(num_microbatches=3).ok
    monkeypatch.setattr(Passes, "call", turned)
    report = verify(num_microbatches=3)
    assert not report.ok
    assert "result of a call: 1 of 1 differ" in str(report)


def test_three_micro_batches_at_least_and_a_batch_that_does_not_divide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    steps: list[int] = []
    step = ps.Pipeline.train_step

    def noted(pipe: Any, *args: Any, **kwargs: Any) -> Any:
        steps.append(len(args[0]))
        return step(pipe, *args, **kwargs)

    monkeypatch.setattr(ps.Pipeline, "train_step", noted)
    plan = uniform_plan(ps.capture(Two(own), (X,)), 2, 1, "gpipe")
    assert plan.num_microbatches == 1
    report = ps.verify(
        Two(own), (X,), target=Y, loss_fn=F.mse_loss, devices=["cpu", "cpu"], plan=plan
    )
    assert report.ok, str(report)
    assert "3 micro-batches" in report.subject
    assert steps == [8, 8, 8]  # 3, 3 and 2 rows
    steps.clear()
    report = verify(num_microbatches=4)
    assert report.ok, str(report)
    assert "4 micro-batches" in report.subject
    assert steps == [8, 8, 7]
    assert "1 micro-batches" in verify(num_microbatches=1).subject


def test_nothing_of_penstock_runs_around_what_does_not_draw(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Two(own)
    program = ps.capture(model, (X,))
    theirs, plain = copy.deepcopy(model), copy.deepcopy(model)

    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a recorder was made")

    monkeypatch.setattr(Recorder, "__init__", refused)
    loss = one_device(theirs, program, 3, (X,), {}).train_step(0, F.mse_loss, Y)
    total = torch.zeros(())
    for x, y in zip(X.tensor_split(3), Y.tensor_split(3), strict=True):
        part = F.mse_loss(plain(x), y)
        (part * (len(x) / 8)).backward()
        total = total + part.detach() * (len(x) / 8)
    assert torch.equal(loss, total)
    for p, q in zip(theirs.parameters(), plain.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


class Sums(nn.Module):
    """Of arguments whose rows are in other places."""

    def forward(self, x: torch.Tensor, tall: torch.Tensor, *, scale: Any) -> dict[str, Any]:
        pairs = tall.view(-1, 2, tall.shape[1]).sum(1)
        return {"sum": (x.t() + pairs) * scale["by"], "scale": scale["by"]}


def test_rows_anywhere() -> None:
    x, tall, by = torch.randn(3, 5), torch.randn(10, 3), torch.randn(3)
    dims: dict[str | int, Any] = {0: 1, 1: (0, 2), "scale": None}
    oracle = Oracle(Sums(), (x, tall), {"scale": {"by": by}}, 2, batch_dim=dims)
    assert oracle.rows == [3, 2]
    (first_x, first_tall), kwargs = oracle.microbatches[0]
    assert torch.equal(first_x, x[:, :3])
    assert torch.equal(first_tall, tall[:6])
    assert kwargs["scale"]["by"] is by
    result = oracle.call(0)
    expected = Sums()(x, tall, scale={"by": by})
    assert torch.equal(result["sum"], expected["sum"])
    assert torch.equal(result["scale"], by)
    with pytest.raises(ValueError, match="no dimension has one entry for each row"):
        Oracle(Two(ENDS["two entries a row"][0]), (X,), {}, 3).call(0)


class _Kept:
    def __init__(self, rows: torch.Tensor) -> None:
        self.layers = [rows * 2, {"sum": rows.sum(1)}]
        self.name = "kept"


class _WithObject(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, _Kept]:
        noisy = nn.functional.dropout(x, 0.5, training=self.training)
        return noisy, _Kept(noisy)


def test_objects_in_results_are_put_together() -> None:
    """Those of the micro-batches, and not that of another forward with other random numbers."""
    oracle = Oracle(_WithObject(), (torch.randn(5, 4),), {}, 2)
    torch.manual_seed(3)
    noisy, kept = oracle.call(0)
    assert torch.equal(kept.layers[0], noisy * 2)
    assert torch.equal(kept.layers[1]["sum"], noisy.sum(1))
    assert kept.name == "kept"


def test_how_far_results_are_apart_where_both_are_infinite_or_undefined() -> None:
    inf, nan = float("inf"), float("nan")
    ours = torch.tensor([1.0, inf, -inf, nan])
    assert gap(ours, ours + torch.tensor([0.5, 0.0, 0.0, 0.0])) == 0.5
    assert gap(ours, torch.tensor([1.0, inf, inf, nan])) == inf
    assert gap(ours, torch.tensor([nan, inf, -inf, nan])) == inf


def test_a_result_of_another_structure() -> None:
    found = compare_results("results", (torch.ones(1), torch.ones(1)), [torch.ones(1)])
    assert not found.ok
    assert "its structure" in str(found)
