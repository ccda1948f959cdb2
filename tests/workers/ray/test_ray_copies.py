"""Copies of what actors have: what is sent, who has them, and what is done once more."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.links.local import Aborted
from penstock.workers.copies import Copies
from penstock.workers.members import Member
from penstock.workers.processes.remembering import Memory
from penstock.workers.ray.buddies import Gathered, buddies_of
from penstock.workers.ray.copies import (
    GRADIENT,
    PART,
    STATE,
    VALUE,
    ActorCopies,
    Change,
    Shelf,
)
from penstock.workers.ray.parcel import unwrapped


def members(nodes: str, replicas: int = 1) -> list[Member]:
    """A member on each of these nodes."""
    each = len(nodes) // replicas
    return [
        Member(k, torch.device("cpu"), k % each, k // each, 1, "host", "actor", 0, node)
        for k, node in enumerate(nodes)
    ]


@pytest.mark.parametrize(
    ("nodes", "buddies"),
    [
        ("a", [None]),
        ("aa", [1, 0]),
        ("aaa", [1, 2, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("aab", [2, 2, 0]),
        ("abc", [1, 2, 0]),
    ],
)
def test_a_buddy_is_on_another_node_and_has_as_little_as_can_be(
    nodes: str, buddies: list[int | None]
) -> None:
    assert buddies_of(members(nodes)) == buddies


def test_what_was_done_since_the_copy_that_is_safe() -> None:
    done: list[str] = []
    copies = Copies()
    copies.note(lambda: done.append("before"), copies.made)
    first = copies.make()
    copies.note(lambda: done.append("step"), copies.made)
    assert copies.is_behind
    copies.arrived(first)
    second = copies.make(lambda: done.append("own"))
    assert not copies.is_behind
    copies.note(lambda: done.append("pass"), copies.made)
    for work in copies.since():
        work()
    assert done == ["step", "own", "pass"]
    copies.arrived(second)
    assert len(copies.since()) == 1
    copies.make(lambda: done.append("undone"))
    copies.unmake()
    assert (copies.made, len(copies.since())) == (second, 1)
    copies.clear()
    assert copies.since() == []


def test_a_shelf_has_the_last_two_copies_and_the_last_of_one_number() -> None:
    shelf = Shelf()
    shelf.put(Change(1, {("value", 0): "a", ("value", 1): "b"}, []))
    shelf.put(Change(2, {("value", 0): "c"}, [("value", 1)]))
    shelf.put(Change(2, {("value", 0): "d"}, []))  # the other one was given up
    assert shelf.copy(1) == {("value", 0): "a", ("value", 1): "b"}
    assert shelf.copy(2) == {("value", 0): "d", ("value", 1): "b"}
    shelf.put(Change(3, {}, []))
    assert shelf.copy(1) is None
    assert shelf.copy(3) == shelf.copy(2)


class Buddy:
    """Stands for the handle of an actor, and keeps what it is sent."""

    def __init__(self, fails: bool = False) -> None:
        self.hold = self
        self.sent: list[Any] = []
        self.fails = fails

    def options(self, **_: Any) -> Buddy:
        return self

    def remote(self, worker: int, parcel: Any) -> Any:
        if self.fails:
            raise RuntimeError("it has died")
        self.sent.append(parcel)
        return None


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setattr(ray, "get", lambda found: found)


def worker() -> Any:
    """As much of an actor's state as is copied: a layer, and its part of an optimizer."""
    layer = nn.Linear(2, 2)
    tensors = dict(enumerate(layer.parameters()))
    optimizer = torch.optim.Adam(layer.parameters())
    own = SimpleNamespace(tensors=tensors, optimizers={7: optimizer}, memory=Memory([], {}))
    numbers = {id(tensor): number for number, tensor in tensors.items()}
    own.remembered = lambda _: {numbers[id(p)]: s for p, s in optimizer.state.items()}
    own.step = lambda: (layer(torch.ones(1, 2)).sum().backward(), optimizer.step())
    return own


def sent(buddy: Buddy, copies: ActorCopies, number: int) -> Any:
    copies.wait(number, 10.0)
    return unwrapped(buddy.sent[-1])


def test_what_has_changed_is_sent_and_no_more() -> None:
    copies, buddy, own = ActorCopies(), Buddy(), worker()
    copies.have_buddy(0, buddy, has_twins=False)
    copies.make(own, 1)
    kinds = {(VALUE, 0), (VALUE, 1), (PART, 7)}
    assert kinds <= set(sent(buddy, copies, 1).changed)
    own.step()
    copies.make(own, 2)
    assert {VALUE, GRADIENT, STATE} <= {key[0] for key in sent(buddy, copies, 2).changed}
    copies.make(own, 3)
    again = sent(buddy, copies, 3).changed
    assert not any(isinstance(value, torch.Tensor) for value in again.values())
    own.tensors[0].grad = None
    with torch.no_grad():
        own.tensors[1].data.zero_()  # of which autograd has no version
        own.tensors[0].data.neg_()
    copies.make(own, 4)
    change = sent(buddy, copies, 4)
    assert (GRADIENT, 0) in change.gone
    assert {(VALUE, 0), (VALUE, 1)} <= set(change.changed)


def test_a_copy_is_of_its_moment() -> None:
    copies, buddy, own = ActorCopies(), Buddy(), worker()
    copies.have_buddy(0, buddy, has_twins=False)
    before = own.tensors[0].detach().clone()
    copies.make(own, 1)
    own.step()
    assert torch.equal(sent(buddy, copies, 1).changed[VALUE, 0], before)
    assert torch.equal(copies.all_of(1)[None][VALUE, 0], before)


def test_replicas_send_what_only_one_of_them_has() -> None:
    copies, buddy, own = ActorCopies(), Buddy(), worker()
    copies.have_buddy(0, buddy, has_twins=True)
    own.step()
    copies.make(own, 1)
    assert {key[0] for key in sent(buddy, copies, 1).changed} == {PART, STATE}


def test_a_buddy_that_has_died() -> None:
    copies = ActorCopies()
    copies.have_buddy(3, Buddy(fails=True), has_twins=False)
    copies.make(worker(), 1)
    with pytest.raises(PenstockError, match=r"buddy of worker 3 has not taken copy 1 .*has died"):
        copies.wait(1, 10.0)


def test_a_wait_for_a_copy_is_given_up() -> None:
    copies = ActorCopies()
    copies.interrupt()  # nobody waits, so it is not for a later wait
    timer = threading.Timer(0.1, copies.interrupt)
    timer.start()
    with pytest.raises(Aborted):
        copies.wait(1, 10.0)
    timer.join()


def test_what_copies_give_when_some_have_died() -> None:
    own: dict[Any, Any] = {(VALUE, 0): "w", (PART, 7): True, (STATE, 7, 0, None): ["b", "a"]}
    own |= {(STATE, 7, 0, "a"): 1, (STATE, 7, 0, "b"): 2}
    other = {(VALUE, 1): "v", (GRADIENT, 1): "g", (PART, 7): True}
    found = Gathered.of(members("ab"), {1: {None: other, 0: own}})
    assert found.values == {0: "w", 1: "v"}
    assert found.gradients == {1: "g"}
    assert found.states == {(7, 0): {0: {"b": 2, "a": 1}}, (7, 1): {}}
    assert list(found.states[7, 0][0]) == ["b", "a"]
    assert found.lost == []
    assert Gathered.of(members("ab"), {1: {None: other}}).lost == [0]


def test_what_replicas_have_is_left_with_one_of_them() -> None:
    part: dict[Any, Any] = {(PART, 7): True, (STATE, 7, 0, None): ["a"], (STATE, 7, 0, "a"): 1}
    whole = {(VALUE, 0): "w", (PART, 7): True}
    found = Gathered.of(members("ab", replicas=2), {1: {None: whole, 0: part}})
    assert found.values == {0: "w"}
    assert found.states == {(7, 0): {0: {"a": 1}}, (7, 1): {}}
    assert found.lost == []
    assert Gathered.of(members("ab", replicas=2), {1: {None: whole}}).lost == [0]
