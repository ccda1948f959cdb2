"""A wire that is interrupted in the midst of a message says so, and is never misread."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from penstock.links.wire import Gone, Message, Wire


@pytest.fixture
def ends() -> Iterator[tuple[Wire, socket.socket]]:
    here, there = socket.socketpair()
    wire = Wire(here)
    yield wire, there
    wire.close()
    there.close()


def test_the_rest_of_a_message_does_not_come(ends: tuple[Wire, socket.socket]) -> None:
    wire, there = ends
    there.send(b"half a header")
    with pytest.raises(TimeoutError, match="the rest"):
        wire.receive(0.05)
    there.send(b"and more that would be taken for a message" * 3)
    with pytest.raises(Gone, match="interrupted"):
        wire.receive(0.05)
    with pytest.raises(Gone, match="interrupted"):
        wire.send(Message(0))


def test_a_message_that_was_sent_in_part_is_the_last(ends: tuple[Wire, socket.socket]) -> None:
    wire, _ = ends
    with pytest.raises(TimeoutError):
        wire.send(Message(0, payload=bytes(10_000_000)), 0.05)
    with pytest.raises(Gone, match="interrupted"):
        wire.send(Message(1), 0.05)


def test_what_is_started_later_does_not_inherit_files_that_came() -> None:
    here, there = socket.socketpair()
    one, other = Wire(here), Wire(there)
    one.send(Message(0, fd=1))
    fd = other.receive(1.0).fd
    assert not os.get_inheritable(fd)
    os.close(fd)
    one.close()
    other.close()
