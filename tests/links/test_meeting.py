"""Processes that connect to each other: those that know the secret, and nobody else."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from penstock.links import meeting
from penstock.links.meeting import Address, Meeting, call, new_secret
from penstock.links.wire import Message


@pytest.fixture
def place() -> Iterator[Meeting]:
    found = Meeting()
    yield found
    found.close()


@pytest.mark.parametrize("far", [False, True])
def test_both_ways_to_meet(place: Meeting, far: bool) -> None:
    address, secret = place.address, new_secret()
    if far:
        address = address._replace(machine="another")
    there = call(address, ["localhost"], (3, 7), secret, 5)
    here, ip = place.accept([(3, 7)], secret, 5)[3, 7]
    assert ("127.0.0.1" in ip or ip == "::1") if far else ip == ""
    sending = threading.Thread(target=there.send, args=(Message(1, payload=b"x" * 3_000_000),))
    sending.start()
    assert here.receive(5).payload == b"x" * 3_000_000
    sending.join()


def test_strangers_are_turned_away(place: Meeting) -> None:
    secret = new_secret()
    wrong = call(place.address, [], (1, 0), new_secret(), 5)
    unexpected = call(place.address, [], (2, 0), secret, 5)
    short = socket.create_connection(("localhost", place.address.port))
    short.sendall(struct.pack("<i", 1))
    short.shutdown(socket.SHUT_WR)
    right = call(place.address, [], (1, 0), secret, 5)
    found = place.accept([(1, 0)], secret, 5)
    assert list(found) == [(1, 0)]
    found[1, 0][0].send(Message(4))
    assert right.receive(5).round == 4
    for wire in (wrong, unexpected):
        assert wire.ready()  # it is closed
    short.close()


def test_nobody_comes(place: Meeting) -> None:
    with pytest.raises(TimeoutError, match="rank 5 did not connect"):
        place.accept([(5, 0)], new_secret(), 0.1)


def test_nobody_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = Address("another", "", port)
    with pytest.raises(TimeoutError, match=f"port {port} of another machine.*localhost"):
        call(address, ["localhost"], (0, 0), new_secret(), 0.2)


def test_a_machine_is_told_from_another() -> None:
    assert meeting.this_machine() == meeting.this_machine() != ""
