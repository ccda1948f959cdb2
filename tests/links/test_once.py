"""A weight goes over a link once, as long as it is known not to change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.links.link import Values
from penstock.links.local import LocalLink
from penstock.links.once import OnceSink, OnceSource

CPU = torch.device("cpu")


class Ends:
    """Both ends of a link for ways with the weight at two places, and without; what has gone."""

    def __init__(self) -> None:
        link = LocalLink(CPU, CPU)
        self.sink, self.source = OnceSink(link), OnceSource(link)
        self.gone: list[Values] = []
        put = link.send

        def send(microbatch: int, results: Values) -> Any:
            self.gone.append(results)
            return put(microbatch, results)

        link.send = send  # type: ignore[method-assign]
        for end in (self.sink, self.source):
            for crossing in ({1: "weight"}, {}, {0: "weight"}):
                end.add(crossing)

    def begin(self, ways: list[int], since: int) -> None:
        for end in (self.sink, self.source):
            end.begin(ways, since)

    def across(self, microbatch: int, *values: Any) -> Values:
        self.roots = self.sink.send(microbatch, values)
        return self.source.receive(microbatch)


@pytest.fixture
def ends() -> Ends:
    return Ends()


def test_once_in_a_pass(ends: Ends) -> None:
    weight, x = torch.ones(3, requires_grad=True), torch.zeros(2)
    ends.begin([0, 1, 2, 0], 5)
    for microbatch, values in enumerate([(x, weight), (x, None), (weight, x), (x, weight)]):
        found = ends.across(microbatch, *values)
        for value, sent in zip(found, values, strict=True):
            if sent is None:
                assert value is None
                continue
            assert torch.equal(value, sent)
            assert value.requires_grad == sent.requires_grad
        assert [root is not None for root in ends.roots] == [v is weight for v in values]
    went = [[value is weight for value in values] for values in ends.gone]
    assert went == [[False, True], [False, False], [False, False], [False, False]]


def test_each_has_a_gradient_of_its_own(ends: Ends) -> None:
    weight = torch.ones(3, requires_grad=True)
    ends.begin([2, 2], 5)
    (first, _), (second, _) = (ends.across(k, weight.detach().clone(), None) for k in (0, 1))
    first.requires_grad_()
    second.requires_grad_()
    (second * 2).sum().backward()
    assert first.grad is None
    assert torch.equal(second.grad, torch.full((3,), 2.0))


@pytest.mark.parametrize("changes", [False, True])
def test_again_when_it_may_have_changed(ends: Ends, changes: bool) -> None:
    weight = torch.ones(3)
    for number in (7, 8):
        ends.begin([2], number if changes else 7)
        ends.across(0, weight, None)
    assert [values[0] is weight for values in ends.gone] == [True, changes]


def test_again_after_both_have_let_go(ends: Ends) -> None:
    weight = torch.ones(3)
    for _ in range(2):
        ends.begin([2], 7)
        (found, _) = ends.across(0, weight, None)
        assert found is weight
        ends.sink.clear()
        ends.source.clear()
