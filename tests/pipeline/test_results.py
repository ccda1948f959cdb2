"""What a pipeline returns for a batch is what the model returns for it, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps

pytestmark = pytest.mark.usefixtures("one_thread")


Forward = Callable[[Any, torch.Tensor, torch.Tensor], Any]


class Returns(nn.Module):
    """Two layers, and whatever a function makes of what they give."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.function = function
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x, self.b(self.a(x).tanh()))


def pipeline(
    function: Forward,
    x: torch.Tensor,
    microbatches: int = 3,
    example: torch.Tensor | None = None,
    **options: Any,
) -> tuple[nn.Module, ps.Pipeline]:
    torch.manual_seed(0)
    model = Returns(function)
    if example is not None:
        options["program"] = ps.capture(model, (example,))
    options = {"cuts": ["b"], "schedule": "gpipe", "recompute": "none"} | options
    devices = ["cpu", "cpu"]
    return model, ps.Pipeline(
        model, (x,), devices=devices, num_microbatches=microbatches, **options, replicas=1
    )


X = torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
SEQUENCES = torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(1))


def close(one: Any, other: Any) -> bool:
    """Whether rows are the same up to the rounding of matrices of other sizes."""
    return bool(torch.allclose(torch.as_tensor(one), torch.as_tensor(other), atol=1e-6))


PUT_TOGETHER: dict[str, tuple[Forward, torch.Tensor]] = {
    "rows": (lambda m, x, z: z, X),
    "rows in another dimension": (lambda m, x, z: z.t(), X),
    "rows of sequences": (lambda m, x, z: z.transpose(0, 1), SEQUENCES),
    "rows times length, the rows first": (lambda m, x, z: z.reshape(-1, 4), SEQUENCES),
    "how many rows": (lambda m, x, z: x.shape[0], X),
    "a plain number": (lambda m, x, z: 7, X),
    "what no input is in": (lambda m, x, z: torch.arange(x.shape[1]), X),
    "what a parameter alone makes": (lambda m, x, z: m.scale.exp(), X),
    "whole numbers": (lambda m, x, z: z.argmax(-1), X),
    "no numbers": (lambda m, x, z: (z - z) / (z - z), X),
}


@pytest.mark.parametrize("what", PUT_TOGETHER)
def test_what_is_put_together_is_what_the_model_gives(what: str) -> None:
    function, x = PUT_TOGETHER[what]
    model, pipe = pipeline(lambda m, x, z: {"z": z, "found": function(m, x, z)}, x)
    with pipe:
        expected, found = model(x)["found"], pipe(x)["found"]
        if what == "no numbers":
            assert found.isnan().all()
        else:
            assert torch.as_tensor(expected).shape == torch.as_tensor(found).shape
            assert close(expected, found)
        assert type(expected) is type(found)
        with torch.no_grad():
            again = pipe(x)["found"]
        assert torch.equal(*map(torch.nan_to_num, map(torch.as_tensor, (again, found))))


REFUSED: dict[str, tuple[Forward, torch.Tensor, str]] = {
    "two views": (lambda m, x, z: torch.cat([z, -z]), X, "not one entry a row"),
    "length times rows": (
        lambda m, x, z: z.transpose(0, 1).reshape(-1, 4),
        SEQUENCES,
        "depend on the other rows",
    ),
    "one more than there are rows": (
        lambda m, x, z: torch.cat([z, z[:1]]),
        X,
        r"B\+1 entries in dimension 0",
    ),
    "every pair of rows": (lambda m, x, z: z @ z.t(), X, "dimensions 0 and 1 all grow"),
    "a range": (lambda m, x, z: torch.arange(x.shape[0]), X, "their place among them"),
    "a count": (lambda m, x, z: torch.tensor(x.shape[0]), X, "no batch dimension"),
    "a mean": (lambda m, x, z: z.mean(), X, "no batch dimension"),
    "reversed": (lambda m, x, z: z.flip(0), X, "their place among them"),
    "summed up": (lambda m, x, z: z.cumsum(0), X, "the other rows"),
    "a share of the batch": (lambda m, x, z: z.softmax(0), X, "the other rows"),
    "sorted": (lambda m, x, z: z.sort(0).values, X, "the other rows"),
    "centred": (lambda m, x, z: z - z.mean(0), X, "the other rows"),
    "ranks": (lambda m, x, z: z.argsort(0), X, "the other rows"),
    "rows moved on by one": (lambda m, x, z: z.roll(1, 0), X, "their place among them"),
    "what is chosen by value": (lambda m, x, z: z[z[:, 0] > 0], X, "size depends on values"),
}
REFUSED["two views"] = (*REFUSED["two views"][:2], "their place among them")


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_what_would_be_another_result_is_refused(what: str, rows: int) -> None:
    """However few rows the example has."""
    function, x, why = REFUSED[what]
    model, pipe = pipeline(function, x, example=x[:rows])
    with pipe:
        for enabled in (True, False):
            with (
                torch.set_grad_enabled(enabled),
                pytest.raises(ps.InputError, match=rf"{why}(?s:.)*merge=.*num_microbatches=1"),
            ):
                pipe(x)
        with pytest.raises(ps.InputError, match=why):
            pipe.train_step(x, loss_fn=torch.sum, outputs=True)
        assert all(p.grad is None for p in model.parameters())
        with pytest.raises(ps.InputError, match=why):
            list(pipe.map([x]))
        pipe.eval()
        with pytest.raises(ps.InputError, match=why):
            pipe(x)
    whole, pipe = pipeline(function, x, microbatches=1)
    with pipe:
        assert torch.equal(whole(x), pipe(x))


DUMMIES = {"zeros": torch.zeros(8, 6), "ones": torch.ones(8, 6), "twos": torch.full((2, 6), 2.0)}


@pytest.mark.parametrize("dummy", DUMMIES)
@pytest.mark.parametrize("what", ["reversed", "sorted", "centred", "a share of the batch"])
def test_rows_of_an_example_that_are_alike_hide_nothing(what: str, dummy: str) -> None:
    """As those of `torch.zeros` are, of which every order is the same."""
    function, x, why = REFUSED[what]
    _, pipe = pipeline(function, x, example=DUMMIES[dummy])
    with pipe, pytest.raises(ps.InputError, match=why):
        pipe(x)


def test_rows_of_an_example_that_are_alike_are_put_together() -> None:
    model, pipe = pipeline(lambda m, x, z: z, X, example=torch.zeros(4, 6))
    with pipe:
        assert close(model(X), pipe(X))


class Tokens(nn.Module):
    """Embeds ids and masks some, perhaps in reverse order."""

    def __init__(self, reverse: bool, entries: int = 10) -> None:
        super().__init__()
        self.table = nn.Embedding(entries, 4)
        self.reverse = reverse

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = self.table(ids) * mask[..., None]
        return found.flip(0) if self.reverse else found


@pytest.mark.parametrize("id", [0, 7])
def test_ids_of_an_example_that_are_alike_hide_nothing(id: int) -> None:
    ids, mask = torch.full((4, 5), id), torch.ones(4, 5, dtype=torch.int64)
    reverse, forward = (ps.capture(Tokens(each), (ids, mask)) for each in (True, False))
    assert reverse.train.joins[0].mixes
    assert not forward.train.joins[0].why


def test_a_table_of_one_entry_takes_ids_of_an_example_as_they_are() -> None:
    """Other ids do not exist."""
    program = ps.capture(Tokens(False, 1), (torch.zeros(4, 5, dtype=torch.int64), torch.ones(4, 5)))
    assert not program.train.joins[0].why


@pytest.mark.parametrize("fill", [-1e9, torch.finfo(torch.float32).min, float("-inf")])
@pytest.mark.parametrize("what", ["reversed", "sorted", "centred"])
def test_a_masked_column_hides_nothing(what: str, fill: float) -> None:
    """However large its numbers are."""
    function, x, why = REFUSED[what]

    def masked(z: torch.Tensor) -> torch.Tensor:
        return z.masked_fill(torch.arange(4) == 1, fill)

    _, pipe = pipeline(lambda m, x, z: masked(function(m, x, z)), x)
    with pipe, pytest.raises(ps.InputError, match=why):
        pipe(x)
    model, pipe = pipeline(lambda m, x, z: masked(z), x)
    with pipe:
        assert close(model(x), pipe(x))


@pytest.mark.parametrize("what", ["reversed", "sorted", "centred", "summed up", "two views"])
def test_dropout_in_both_modes_hides_nothing(what: str) -> None:
    function, x, _ = REFUSED[what]
    _, pipe = pipeline(lambda m, x, z: function(m, x, F.dropout(z, 0.1)), x)
    with pipe, pytest.raises(ps.InputError, match="depend on the other rows"):
        pipe(x)


def test_dropout_in_both_modes_is_put_together() -> None:
    _, pipe = pipeline(lambda m, x, z: F.dropout(z, 0.1), X)
    with pipe:
        assert pipe(X).shape == (8, 4)


@pytest.mark.parametrize(("precision", "is_taken"), [("highest", False), ("medium", True)])
def test_products_may_round_as_torch_allows(precision: str, is_taken: bool) -> None:
    """Where it allows bfloat16, a CPU's kernel for more rows may take that, and one for few not."""

    def a_little_more(m: nn.Module, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return z * (1 + torch.tensor(x.shape[0]) * 1e-3)

    torch.set_float32_matmul_precision(precision)
    try:
        _, pipe = pipeline(a_little_more, X)
        refused = nullcontext() if is_taken else pytest.raises(ps.InputError, match="other rows")
        with pipe, refused:
            pipe(X)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_what_training_alone_does_with_rows_shows() -> None:
    """The evaluation, which is compared where dropout hides it, does something else."""

    def mixed(m: nn.Module, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        z = F.dropout(z, 0.1, m.training)
        return z * 0.9 + z.flip(0) * 0.1 if m.training else z

    _, pipe = pipeline(mixed, X)
    with pipe:
        with pytest.raises(ps.InputError, match="depend on the other rows"):
            pipe(X)
        pipe.eval()
        assert pipe(X).shape == (8, 4)


def test_a_result_is_named_in_the_error() -> None:
    _, pipe = pipeline(lambda m, x, z: {"f": z, "more": (z, z @ z.t())}, X)
    with pipe, pytest.raises(ps.InputError, match=r"float32\[BxB\] as result\['more'\]\[1\]"):
        pipe(X)


def test_batchnorm_is_of_micro_batches_and_is_merged() -> None:
    """In training it mixes rows, as documented; in evaluation it does not."""
    model, pipe = pipeline(lambda m, x, z: m.norm(z), X)
    with pipe:
        parts = [model(part) for part in X.tensor_split(3)]
        assert torch.equal(pipe(X), torch.cat(parts))
        model.eval(), pipe.eval()
        assert close(pipe(X), model(X))


def test_evaluation_says_how_rows_are_where_dropout_hides_it() -> None:
    _, pipe = pipeline(lambda m, x, z: F.dropout(z, 0.5, m.training).flip(0), X)
    with pipe, pytest.raises(ps.InputError, match="their place among them"):
        pipe(X)
    _, pipe = pipeline(lambda m, x, z: F.dropout(z, 0.5, m.training).reshape(-1, 4), SEQUENCES)
    with pipe:
        assert pipe(SEQUENCES).shape == (40, 4)


def nt_xent(views: torch.Tensor) -> torch.Tensor:
    """The loss of SimCLR: every row finds its other view among all rows."""
    views = F.normalize(views)
    similarity = (views @ views.t()).fill_diagonal_(-1e9)
    n = len(views) // 2
    return F.cross_entropy(similarity, torch.arange(2 * n).roll(n))


def views_of(parts: list[torch.Tensor]) -> torch.Tensor:
    halves = [part.chunk(2) for part in parts]
    return torch.cat([one for one, _ in halves] + [other for _, other in halves])


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_function_puts_results_together(kind: Any) -> None:
    model, pipe = pipeline(lambda m, x, z: torch.cat([z, -z]), X, merge=views_of, workers=kind)
    with pipe:
        plain = [model(part) for part in X.tensor_split(3)]
        expected = nt_xent(views_of(plain))
        expected.backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        model.zero_grad()
        loss = nt_xent(pipe(X))
        assert torch.equal(loss, expected)
        loss.backward()
        for name, parameter in model.named_parameters():
            if name in gradients:
                assert close(parameter.grad, gradients[name])
        assert close(loss, nt_xent(model(X)))


def test_results_in_a_list() -> None:
    model, pipe = pipeline(lambda m, x, z: z @ z.t(), X, merge="list")
    with pipe:
        plain = [model(part) for part in X.tensor_split(3)]
        found = pipe(X)
        assert isinstance(found, list)
        assert all(map(torch.equal, plain, found))
        sum(part.sum() for part in found).backward()
        ours = model.a.weight.grad.clone()
        model.zero_grad()
        sum(part.sum() for part in plain).backward()
        assert close(ours, model.a.weight.grad)


def test_outputs_of_a_step_in_a_list() -> None:
    model, pipe = pipeline(lambda m, x, z: z.sum(), X)
    with pipe:
        plain = [model(part).detach() for part in X.tensor_split(3)]
        step = pipe.train_step(X, loss_fn=lambda z: z, outputs="list")
        assert all(map(torch.equal, plain, step.outputs))
        with pytest.raises(ps.InputError, match="outputs='lst' is unknown"):
            pipe.train_step(X, loss_fn=lambda z: z, outputs="lst")  # type: ignore[arg-type]


def test_rows_one_after_the_other_anyway() -> None:
    model, pipe = pipeline(lambda m, x, z: z - z.mean(0), X, merge="rows")
    with pipe:
        plain = torch.cat([model(part) for part in X.tensor_split(3)])
        assert torch.equal(pipe(X), plain)
    _, pipe = pipeline(lambda m, x, z: z @ z.t(), X, merge="rows")
    with pipe, pytest.raises(ps.InputError, match="all grow"):
        pipe(X)


def test_an_unknown_way_to_merge() -> None:
    with pytest.raises(ps.InputError, match="merge='cat' is unknown"):
        ps.Pipeline(nn.Linear(6, 4), (X,), devices=["cpu"], merge="cat", replicas=1)  # type: ignore[arg-type]


class Otherwise(nn.Module):
    """Goes another way without gradients, and gives its rows the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        return self.b(x if torch.is_grad_enabled() else x * 3).flip(0)


def test_the_order_of_rows_shows_in_a_way_that_two_rows_are_the_first_to_take() -> None:
    """Rows that are repeated in turn, there and back, would be the same either way."""
    x = torch.randn(8, 6)
    program = ps.capture(Otherwise(), (x,))
    with torch.no_grad():
        trace = program.trace_for(program.flatten_inputs((x[:2],), {}), False)
    assert trace is not program.eval
    assert trace.joins[0].mixes


def test_micro_batches_of_other_lengths() -> None:
    """A model that shortens its result to the longest row of what it is given."""

    def shortened(_: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y[:, : int((x[:, :, 0] != 0).sum(1).max())]

    x = SEQUENCES.clone()
    x[3:, 4:, 0] = 0
    model = Returns(shortened)
    pipe = ps.Pipeline(model, (x,), devices=["cpu"], num_microbatches=3)
    shapes = r"\(3, 5, 4\), \(3, 4, 4\), \(2, 4, 4\).*not only in dimension 0.*merge="
    with pipe:
        with pytest.raises(ps.InputError, match=shapes):
            pipe(x)
        pipe.train_step(x, loss_fn=lambda out: out.square().mean())
        assert torch.equal(pipe(x[3:]), torch.cat([model(part) for part in x[3:].split((2, 2, 1))]))
