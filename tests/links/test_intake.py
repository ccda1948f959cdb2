"""Who waits takes in what comes meanwhile, over all links."""

from __future__ import annotations

import gc
import socket
from typing import Any

import pytest
import torch

from penstock.links.intake import Intake
from penstock.links.shared_memory import Receiver, Sender
from penstock.links.slots import Arrivals
from penstock.links.wire import Gone, Wire

CPU = torch.device("cpu")
pytestmark = pytest.mark.timeout(20)


class End:
    """What one of two workers has of the links between them."""

    def __init__(self, sock: socket.socket, others: Intake) -> None:
        self.dispatch = 0
        self.wire = Wire(sock)
        self.sender = Sender(self.wire, self)
        self.receiver = Receiver(self.wire, self, Arrivals(CPU))
        others.add(self.receiver)

    def send(self, *numbers: float) -> None:
        for number in numbers:
            self.sender.put([torch.full((2,), number)])

    def got(self, count: int) -> list[float]:
        return [float(self.receiver.get()[0][0]) for _ in range(count)]


class Link:
    """A link between two workers, of which the second one waits for something."""

    def __init__(self, intake: Intake) -> None:
        here, there = socket.socketpair()
        self.first, self.second = End(here, Intake()), End(there, intake)


@pytest.fixture
def intake() -> Intake:
    return Intake()


def fill(end: End) -> int:
    """Send until there is no room; returns how many messages were sent."""
    count = 0
    while end.wire.has_room():
        end.send(count)
        count += 1
    return count


def test_what_comes_elsewhere_makes_room_and_is_had_later(intake: Intake) -> None:
    waited, other = Link(intake), Link(intake)
    count = fill(other.first)
    fd = waited.second.wire.fileno()
    assert intake.wait(fd) == set()
    assert other.first.wire.has_room()
    other.first.send(-1.0)
    waited.first.send(5.0)
    assert intake.wait(fd) == {fd}
    assert waited.second.wire.ready()  # what is waited for is left to who waits
    assert waited.second.got(1) == [5.0]
    assert other.second.got(count + 1) == [*range(count), -1.0]
    assert other.second.receiver.get_nowait() is None


def test_who_waits_for_room_takes_in_what_comes_over_the_same_link(intake: Intake) -> None:
    """Both ends are full: neither has room before the other has read."""
    link = Link(intake)
    there, here = fill(link.first), fill(link.second)
    out = link.second.wire.fileno()
    assert intake.wait(out=out, timeout=0.0) == set()
    assert link.first.wire.has_room()
    assert link.first.got(here) == [*range(here)]
    assert intake.wait(out=out) == {out}
    assert link.second.got(there) == [*range(there)]


def test_the_time_is_over(intake: Intake) -> None:
    link = Link(intake)
    assert intake.wait(link.second.wire.fileno(), timeout=0.01) == set()


def test_values_of_a_dispatch_that_was_given_up_are_thrown_away(intake: Intake) -> None:
    link = Link(intake)
    link.first.send(1.0, 2.0)
    link.second.receiver.take_in()
    link.first.dispatch = link.second.dispatch = 1
    link.first.send(3.0)
    assert link.second.got(1) == [3.0]
    slots: Any = link.first.sender._slots
    assert not any(slot.lent for slot in slots.every)  # also those that nobody wanted


def test_who_is_gone_is_left_to_those_who_want_something_of_it(intake: Intake) -> None:
    waited, other = Link(intake), Link(intake)
    other.first.send(1.0)
    other.first.wire.close()
    fd = waited.second.wire.fileno()
    assert intake.wait(fd) == set()
    assert intake.wait(fd, timeout=0.01) == set()  # and it is not looked at again
    assert other.second.got(1) == [1.0]
    with pytest.raises(Gone):
        other.second.receiver.get()


def test_a_link_that_was_closed_here_is_left_out(intake: Intake) -> None:
    waited, other = Link(intake), Link(intake)
    other.second.wire.close()
    waited.first.send(1.0)
    fd = waited.second.wire.fileno()
    assert intake.wait(fd) == {fd}


def test_links_that_are_let_go_of_are_forgotten(intake: Intake) -> None:
    waited = Link(intake)
    link: Link | None = Link(intake)
    assert len(intake._every) == 2
    del link
    gc.collect()
    assert len(intake._every) == 1
    assert intake.wait(waited.second.wire.fileno(), timeout=0.01) == set()
