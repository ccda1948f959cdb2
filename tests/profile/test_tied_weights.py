"""What tied weights cost where a model is cut: their gradients come back for every micro-batch."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from torch import nn

import penstock as ps
from penstock.plan.layout import Layout, Memory, Stretch
from penstock.profile.data import Link, Profile
from penstock.profile.measure import bytes_across, weights_across

WIDTH, WORDS, ROWS = 8, 50, 4


class Tied(nn.Module):
    """The last call reads the weight of the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.between = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens (rows); returns (rows, words)."""
        found: torch.Tensor = self.head(self.between(self.embedding(x)))
        return found


@pytest.fixture
def program() -> ps.Program:
    return ps.capture(Tied(), (torch.zeros(ROWS, dtype=torch.int64),))


def test_weights_are_apart_from_what_grows_with_rows(program: ps.Program) -> None:
    row, weight = 4 * WIDTH, 4 * WIDTH * WORDS
    assert bytes_across(program) == (8, row, row, 4 * WORDS)
    assert weights_across(program) == (0, weight, weight, 0)
    assert weights_across(program, torch.float16) == (0, weight / 2, weight / 2, 0)
    plain = ps.capture(nn.Linear(4, 4), (torch.zeros(ROWS, 4),))
    assert weights_across(plain) == ()


def test_a_link_carries_their_gradients(program: ps.Program) -> None:
    """Back, so half of them in the mean of both directions; and a stage holds them."""
    measured: Profile = ps.profile(program, devices=["cpu", "cpu"], num_microbatches=2)
    links = {"cpu>cpu": Link(latency_seconds=0.0, bytes_per_second=1000.0)}
    with_links = replace(measured, links=links)
    without = replace(with_links, tied=())
    stretches = [Stretch(0, 0, 1), Stretch(1, 1, 3)]
    weight = 4 * WIDTH * WORDS
    more, less = (Layout(each, 2) for each in (with_links, without))
    seconds = [layout.costs(stretches).transfer[0] for layout in (more, less)]
    assert seconds[0] - seconds[1] == pytest.approx(weight / 2 / 1000.0)
    crossing = [layout.crossing((0, 1)) for layout in (more, less)]
    assert (crossing[0] - crossing[1]).tolist() == [[0.0, weight / 2000, weight / 2000, 0.0]]
    held = [layout.standing(stretches[1], Memory()) for layout in (more, less)]
    assert held[0] - held[1] == weight
