"""Tied weights that go over a link once in a generation, and again whenever they may differ."""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace
from torch import nn
from torch.nn import functional as F

import penstock as ps
from tests.generation.subjects import VOCABULARY, gpt2, tokens
from tests.support.models import uniform_plan


def copying(model: Any, example: dict[str, Any]) -> ps.Pipeline:
    """Two stages in threads, whose link rounds, and so copies, what goes over it."""
    program = ps.capture(model, kwargs=example)
    plan = replace(uniform_plan(program, 2, 1), boundary_dtype="bfloat16")
    options: Any = {"threads_per_worker": 1, "audit": None, "progress": None}
    return ps.Pipeline(model, kwargs=example, program=program, plan=plan, **options)


def there(pipe: Any) -> list[Any]:
    """What the ends of links have of weights."""
    return [
        once._there
        for of_mode in pipe._workers._assemblies.values()
        for assembly in of_mode
        for ends in assembly._once.values()
        for once in ends.values()
    ]


def test_once_until_autograd_or_the_address_says_that_they_have_changed() -> None:
    model, ids = gpt2(), tokens(2)
    with copying(model, {"input_ids": ids}) as pipe, torch.no_grad():
        sessions, weight = pipe._sessions, model.transformer.wte.weight
        since: list[bool] = []

        def step() -> torch.Tensor:
            done = sessions.start(pipe.session(), (), {"input_ids": ids}, weights_stay=True)
            order = done.started.order
            since.append(order.weights_since == order.number)
            logits: torch.Tensor = sessions.finish(done).logits
            return logits

        first = step()
        assert torch.equal(step(), first)
        weight.mul_(2.0)
        assert not torch.equal(step(), first)
        weight.data = weight.data / 2.0
        assert torch.equal(step(), first)
        assert since == [True, False, True, True]
        assert any(there(pipe))
        sessions.drop()
        assert not any(there(pipe))


def test_nothing_is_left_of_them_after_a_generation() -> None:
    model, ids = gpt2(), tokens(4)
    with copying(model, {"input_ids": ids}) as pipe:
        pipe.generate(ids, max_new_tokens=4, group_size=2)
        assert not any(there(pipe))


class Changing(nn.Module):
    """Its own `generate` changes a tied weight before each call, so that autograd does not see."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.layers(self.embedding(ids)), self.embedding.weight)

    @torch.no_grad()
    def generate(self, ids: torch.Tensor) -> torch.Tensor:
        """The results (rows, 4, length, words) of four calls."""
        found = []
        for _ in range(4):
            self.embedding.weight.data.mul_(2.0)
            found.append(self(ids))
        return torch.stack(found, 1)


def test_a_loop_of_the_users_own_may_change_them() -> None:
    ids, plain, model = tokens(2), Changing().eval(), Changing().eval()
    wanted = plain.generate(ids)
    with copying(model, {"ids": ids}) as pipe:
        found = pipe.generate(ids, group_size=2)
    for mine, theirs in zip(found.unbind(1), wanted.unbind(1), strict=True):
        assert (mine - theirs).abs().max() < 0.05 * theirs.abs().max()  # bfloat16 has 8 bits
