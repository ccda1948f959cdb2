"""The link between machines: what is sent in which message, and what is awaited before it comes."""

from __future__ import annotations

import socket
from collections import defaultdict, deque
from typing import Any

import pytest
import torch

from penstock.links import process_group
from penstock.links.process_group import GroupEnd, Peer
from penstock.links.wire import Gone, Wire

CPU = torch.device("cpu")


class Work:
    """A message under way: it arrives where one of its size is awaited."""

    def __init__(self, network: Network, group: Any, kind: str, buffer: torch.Tensor) -> None:
        self.queues = network.queues[group]
        self.buffer = buffer
        self.done = False
        self.queues[kind].append(self)
        network.match(group)

    def wait(self, timeout: Any) -> None:
        if not self.done:
            raise RuntimeError("Timed out")


class Network:
    """Stands in for `torch.distributed`; sizes must agree to the byte."""

    def __init__(self) -> None:
        self.queues: Any = defaultdict(lambda: {"out": deque(), "in": deque()})
        self.sent: list[int] = []
        self.awaited_first: list[bool] = []

    def isend(self, buffer: torch.Tensor, group: Any, group_dst: int) -> Work:
        self.sent.append(len(buffer))
        self.awaited_first.append(bool(self.queues[group]["in"]))
        return Work(self, group, "out", buffer)

    def irecv(self, buffer: torch.Tensor, group: Any, group_src: int) -> Work:
        return Work(self, group, "in", buffer)

    def get_group_rank(self, group: Any, rank: int) -> int:
        return rank

    def match(self, group: Any) -> None:
        queues = self.queues[group]
        while queues["out"] and queues["in"]:
            out, into = queues["out"].popleft(), queues["in"].popleft()
            assert len(out.buffer) == len(into.buffer)
            into.buffer.copy_(out.buffer)
            out.done = into.done = True


class Ends:
    """Both ends of a link."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.dispatch = 0
        here, there = socket.socketpair()
        self.near = self.line(here, Peer(1, "there", "back", CPU))  # type: ignore[arg-type]
        self.far = self.line(there, Peer(0, "back", "there", CPU))  # type: ignore[arg-type]

    def line(self, sock: socket.socket, peer: Peer) -> GroupEnd:
        return GroupEnd(Wire(sock), peer, self, CPU, lambda: None, lambda: 5.0)

    def across(self, *values: Any) -> tuple[Any, ...]:
        self.near.put(values)
        return self.far.get()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    network = Network()
    monkeypatch.setattr(process_group, "dist", network)
    return Ends(network)


def test_values_arrive_as_they_were(ends: Ends) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    sent = (x, None, torch.randn(4, 3).t(), "text", torch.arange(5), torch.empty(0, 2))
    for _ in range(3):
        found = ends.across(*sent)
        assert found[1] is None
        assert found[3] == "text"
        for mine, theirs in zip(found, sent, strict=True):
            if isinstance(theirs, torch.Tensor):
                assert torch.equal(mine, theirs)
                assert mine.stride() == theirs.stride()
                assert mine.requires_grad == theirs.requires_grad
                assert mine.data_ptr() % 64 == theirs.data_ptr() % 64


def test_after_the_first_of_a_kind_a_message_is_awaited_before_it_is_sent(ends: Ends) -> None:
    sizes = [4, 4, 3]
    for _ in range(3):
        ends.near.expect(["four", "four", "three"])
        for rows in sizes:
            x = torch.randn(rows, 16)
            assert torch.equal(ends.across(x, None)[0], x)
    assert ends.network.sent == [256, 256, 192] * 3
    # the second pass is the first that knows both kinds
    assert ends.network.awaited_first == [False, True, False] + [True] * 6


def test_what_is_smaller_than_agreed_is_padded_and_of_the_larger_the_rest_follows(
    ends: Ends,
) -> None:
    for rows in (4, 2, 9, 9):
        ends.near.expect(["any"])
        x = torch.randn(rows, 16)
        assert torch.equal(ends.across(x)[0], x)
    assert ends.network.sent == [256, 256, 128, 448, 576]


def test_nothing_but_none_needs_no_message(ends: Ends) -> None:
    assert ends.across(None, None) == (None, None)
    assert ends.network.sent == []


def test_both_directions_at_once_and_the_sender_lets_go(ends: Ends) -> None:
    for number in range(4):
        ends.near.put((torch.full((2,), number),))
        ends.far.put((torch.full((3,), -number),))
    for number in range(4):
        assert ends.far.get()[0].tolist() == [number] * 2
        assert ends.near.get()[0].tolist() == [-number] * 3
    ends.near.put((torch.zeros(2),))
    ends.far.get()
    assert len(ends.near._under_way) == 1  # the others have been acknowledged


def test_messages_of_a_dispatch_that_was_given_up_are_thrown_away(ends: Ends) -> None:
    ends.near.put((torch.zeros(8),))
    ends.near.put((torch.zeros(16),))
    ends.dispatch = 1
    assert torch.equal(ends.across(torch.ones(4))[0], torch.ones(4))
    assert torch.equal(ends.across(torch.ones(40))[0], torch.ones(40))


def test_a_message_that_does_not_come(ends: Ends) -> None:
    ends.near.put((torch.zeros(8),))
    ends.network.queues["there"]["out"].clear()
    with pytest.raises(Gone, match="the link to rank 0 broke: Timed out"):
        ends.far.get()
    ends.near.close()
    with pytest.raises(Gone):
        ends.far.get()


def test_what_is_there_is_had_without_waiting(ends: Ends) -> None:
    assert ends.far.get_nowait() is None
    ends.near.put((torch.zeros(2),))
    ends.dispatch = 1
    assert ends.far.get_nowait() is None  # of a dispatch that was given up
    ends.near.put((torch.ones(2),))
    found = ends.far.get_nowait()
    assert found is not None
    assert torch.equal(found[0], torch.ones(2))
