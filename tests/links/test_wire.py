"""A wire that is interrupted in the midst of a message says so, and is never misread."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from penstock.links.wire import Frame, Gone, Wire


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
        wire.send(b"more")


def test_nobody_reads(ends: tuple[Wire, socket.socket]) -> None:
    wire, _ = ends
    with pytest.raises(TimeoutError, match="nothing was read"):
        wire.send(bytes(10_000_000), -1, 0.1)
    assert wire.busy


def test_a_message_of_which_nothing_was_sent_does_not_break_the_wire(
    ends: tuple[Wire, socket.socket],
) -> None:
    wire, there = ends
    there.setblocking(False)
    with suppress(BlockingIOError):
        while True:  # until there is no room for one more
            wire._socket.send(bytes(1000))
    with pytest.raises(TimeoutError, match="nothing was read"):
        wire.send(b"late", -1, 0.05)
    with suppress(BlockingIOError):
        while there.recv(100_000):
            pass
    wire.send(b"now")
    assert there.recv(100)[8:11] == b"now"


def test_a_message_that_was_sent_in_part_is_the_last(ends: tuple[Wire, socket.socket]) -> None:
    wire, _ = ends
    with pytest.raises(TimeoutError):
        wire.send(bytes(10_000_000), -1, 0.05)
    with pytest.raises(Gone, match="interrupted"):
        wire.send(b"", -1, 0.05)


def test_frames_of_any_length_follow_each_other(ends: tuple[Wire, socket.socket]) -> None:
    one, there = ends
    other = Wire(there)
    lengths = (0, 1, 39, 40, 41, 48, 4096, 100_000, 0, 7)
    sent = [bytes([k] * length) for k, length in enumerate(lengths)]
    for data in sent:
        one.send(data)
    assert [other.receive(1.0) for _ in sent] == [Frame(data) for data in sent]
    with pytest.raises(TimeoutError, match="no message"):
        other.receive(0.01)


def test_what_is_started_later_does_not_inherit_files_that_came() -> None:
    here, there = socket.socketpair()
    one, other = Wire(here), Wire(there)
    one.send(b"", 1)
    fd = other.receive(1.0).fd
    assert not os.get_inheritable(fd)
    os.close(fd)
    one.close()
    other.close()
