"""What a model does at sizes that it was not captured at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from tests.zoo.check import check
from tests.zoo.entry import Entry

Forward = Callable[["Odd", torch.Tensor], torch.Tensor]
LENGTH = {0: {1: "length"}}


class Odd(nn.Module):
    """Two layers, and what a test puts between them."""

    def __init__(self, between: Forward) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.between(self, self.a(x)))


def halved(model: Odd, x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 if not model.training and x.shape[0] > 2 else x


def sorted_short(model: Odd, x: torch.Tensor) -> torch.Tensor:
    return torch.sort(x, dim=1, descending=not model.training and x.shape[1] < 6)[0]


def scaled_pairs(model: Odd, x: torch.Tensor) -> torch.Tensor:
    return x * (0.0 if x.shape[0] == 2 and not model.training else 1.0)


def cut_at_eight(model: Odd, x: torch.Tensor) -> torch.Tensor:
    return x[:, : x.shape[1] if model.training else 8]


@pytest.mark.parametrize("between", [halved, sorted_short, scaled_pairs, cut_at_eight])
def test_evaluation_that_differs_at_some_sizes_only(between: Forward) -> None:
    """Each of these is as in training at the size that is recorded first."""
    model = nn.Sequential(nn.Linear(4, 4), Odd(between))
    program = ps.capture(model, (torch.randn(6, 8, 4),), dynamic=LENGTH)
    model.eval()
    for rows, length in [(2, 8), (6, 8), (8, 5), (3, 12)]:
        x = torch.randn(rows, length, 4)
        try:
            ours = program(x)
        except ps.CaptureError as error:
            assert "does something else than" in str(error)  # noqa: PT017
        else:
            assert torch.equal(ours, model(x))


def many_rows(model: Odd, x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 if x.shape[0] > 16 else x


def one_row(model: Odd, x: torch.Tensor) -> torch.Tensor:
    return x * 0.5 if x.shape[0] == 1 else x


def padded(model: Odd, x: torch.Tensor) -> torch.Tensor:
    return F.pad(x, (0, 0, 0, (16 - x.shape[1] % 16) % 16))


def at_most_32(model: Odd, x: torch.Tensor) -> torch.Tensor:
    return x[:, : min(x.shape[1], 32)]


def longer_than_20(model: Odd, x: torch.Tensor) -> torch.Tensor:
    return x.relu() if x.shape[1] > 20 else x


@pytest.mark.parametrize(
    ("between", "rows", "length"),
    [
        (many_rows, 32, 8),
        (one_row, 1, 8),
        (padded, 3, 17),
        (at_most_32, 3, 40),
        (longer_than_20, 3, 21),
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_a_threshold_is_noticed_when_it_is_crossed(
    between: Forward, rows: int, length: int, training: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Odd(between)).train(training)
    program = ps.capture(model, (torch.randn(6, 12, 4),), dynamic=LENGTH)
    assert not program.closed
    near = torch.randn(5, 11, 4)
    assert torch.equal(program(near), model(near))
    far = torch.randn(rows, length, 4)
    message = rf"with B={rows}, length={length} the model does something else.*keep_closed=\['"
    with pytest.raises(ps.CaptureError, match=message):
        program(far)
    if rows > 1:
        with (
            ps.Pipeline(
                model, devices=["cpu", "cpu"], program=program, num_microbatches=1, replicas=1
            ) as pipe,
            pytest.raises(ps.CaptureError, match=message),
        ):
            pipe.train_step(far, loss_fn=torch.mean)
    closed = ps.capture(model, (torch.randn(6, 12, 4),), dynamic=LENGTH, keep_closed=["1"])
    assert torch.equal(closed(far), model(far))


def test_a_size_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Odd(lambda _, x: x.relu())
    program = ps.capture(model, (torch.randn(6, 8, 4),), dynamic=LENGTH)
    compared: list[tuple[int, int]] = []
    check = program.recordings._source.check_at

    def counted(trace: Any, leaves: Any, training: bool) -> None:
        compared.append(tuple(leaves[0].shape[:2]))
        check(trace, leaves, training)

    monkeypatch.setattr(program.recordings._source, "check_at", counted)
    for shape in [(3, 8), (9, 8), (5, 8), (9, 7), (2, 20), (9, 20), (7, 20), (4, 3)]:
        program(torch.randn(*shape, 4))
    assert compared == [(9, 8), (2, 20), (4, 3)]


class Masked(nn.Module):
    """Asks whether anything is masked, like most language models."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 4), nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        if bool((mask == 0).any()):
            x = x * mask[..., None]
        return self.head(x)


def test_padding_at_the_end_of_a_length_that_varies() -> None:
    ids, ones = torch.randint(9, (4, 6)), torch.ones(4, 6)
    length = {1: "length"}
    program = ps.capture(Masked(), (ids, ones), dynamic={0: length, 1: length})
    padded = ones.clone()
    padded[:, 4:] = 0
    for mask in (padded, ones):
        assert torch.equal(program(ids, mask), program.model(ids, mask))


def test_a_float_that_is_whole_by_chance() -> None:
    """At the rows of the recording, and at these: 7 * 0.3 / 0.3 is not 7."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            return self.second(x * (x.shape[0] * 0.3 / 0.3))

    model = Scaled().double()
    program = ps.capture(model, (torch.randn(16, 4).double(),))
    for rows in (1, 64, 6):
        x = torch.randn(rows, 4).double()
        assert torch.equal(program(x), model(x))
    with pytest.raises(ps.CaptureError, match="with B=7 the model does something else"):
        program(torch.randn(7, 4).double())


def test_a_count_in_floating_point_grows_too() -> None:
    """As in the loss that balances a mixture of experts, which divides by it."""

    def mean_over_rows(model: Odd, x: torch.Tensor) -> torch.Tensor:
        rows = 0.0
        for _ in range(2):
            rows = rows + x.shape[0] * x.shape[1]
        return x * (x.sum() / rows)

    model = Odd(mean_over_rows)
    program = ps.capture(model, (torch.randn(6, 8, 4),), dynamic=LENGTH)
    assert not program.closed
    assert "float(2B·length)" in [str(a) for call in program.train.calls for a in call.args]
    for rows, length in [(2, 8), (7, 5)]:
        x = torch.randn(rows, length, 4)
        assert torch.equal(program(x), model(x))


def test_a_fraction_that_varies_closes_its_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Odd(lambda _, x: x * (1 / x.shape[0])))
    program = ps.capture(model, (torch.randn(6, 8, 4),))
    assert list(program.closed) == ["1"]
    x = torch.randn(5, 8, 4)
    assert torch.equal(program(x), model(x))


def test_not_a_number_is_the_same_constant_every_time() -> None:
    def marked(model: Odd, x: torch.Tensor) -> torch.Tensor:
        x = x.masked_fill(x < -1, float("nan"))
        return x.isnan().float() + x.nan_to_num()

    program = ps.capture(Odd(marked), (torch.randn(6, 4),))
    assert not program.closed
    assert not any(call.mutates for call in program.train.calls)


def test_a_capture_within_a_capture_is_an_error() -> None:
    class Nested(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ps.capture(nn.Linear(4, 4), (x,))(x)

    with pytest.raises(ps.CaptureError, match="captures another model while it is captured"):
        ps.capture(Nested(), (torch.randn(6, 4),))


class KeptMask(nn.Module):
    """Draws a mask when there are other rows than before, as speechbrain's LiGRU does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.rows = 2  # as many as the smallest recording has
        self.register_buffer("mask", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) != self.rows:
            self.rows = len(x)
            self.mask = F.dropout(torch.ones(8), 0.5)
        return self.layer(x) * self.mask


def test_a_call_that_draws_at_some_sizes_alone_is_random() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.Sequential(KeptMask(), nn.Tanh()), nn.Linear(8, 8))

    def inputs(rows: int) -> tuple[tuple[torch.Tensor], dict[str, object]]:
        return (torch.randn(rows, 8),), {}

    assert list(ps.capture(build(), inputs(4)[0]).closed) == ["1.0"]
    assert check(Entry("KeptMask", "plain", build, inputs)).status == "exact"


class Chosen(nn.Module):
    """Gives as many numbers as its inputs say, by way of numpy, so that it stays whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[torch.from_numpy(x.numpy() > 0)]


def test_the_results_of_a_whole_model_may_be_as_large_as_values_say() -> None:
    def inputs(rows: int) -> tuple[tuple[torch.Tensor], dict[str, object]]:
        counts = torch.arange(rows)[:, None]  # of numbers in each row that are chosen
        return (torch.where(torch.arange(8) < counts, 1.0, -1.0),), {}

    result = check(Entry("Chosen", "plain", Chosen, inputs))
    assert (result.status, result.calls) == ("coarse", 1)


class Selected(nn.Module):
    """Gives the rows of a mask that is drawn, nearly always as many as there were at first."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x[mask]


class Experts(nn.Module):
    """Selects rows as well, but gives as many as it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result = torch.zeros(*x.shape[:2], 3)
        chosen = x[..., 0] > 0
        result[chosen] = self.layer(x[chosen])
        return result, result.flatten(0, 1)


class OfSelected(nn.Module):
    """What follows asks for no size."""

    def __init__(self, chance: float) -> None:
        super().__init__()
        self.chance = chance
        self.layer, self.experts, self.select = nn.Linear(8, 8), Experts(), Selected()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        experts, flat = self.experts(x)
        flat = flat.reshape(x.shape[0], x.shape[1], flat.shape[1])
        count = torch.where(torch.rand(1) < self.chance, 3, 2)
        mask = (torch.arange(x.shape[1]) < count).expand(x.shape[:2])
        return self.select(experts + flat, mask) * 2


@pytest.mark.parametrize("chance", [0.15, 0.5])  # never in the recordings that are merged, or often
def test_what_a_closed_module_selects_may_be_as_large_as_values_say(chance: float) -> None:
    program = ps.capture(OfSelected(chance), (torch.randn(4, 5, 8),), keep_closed=["experts"])
    calls = {call.label: call for call in program.train.calls}
    assert [info.dynamic for info in calls["experts"].outputs] == [False, False]
    assert [info.dynamic for info in calls["select"].outputs] == [True]
    assert set(program.closed) == {"experts"}
