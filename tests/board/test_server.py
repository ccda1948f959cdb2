"""A thread that answers whoever connects, and whom nobody keeps from it."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from penstock.board import process, server
from penstock.board.server import Server, read_all
from tests.support.threads import NewThreads


def line(said: bytes) -> str | None:
    first, end, _ = said.partition(b"\n")
    return first.decode() if end else None


class Serving:
    """A server that repeats what it is asked for, and counts how often it does."""

    def __init__(self, listener: socket.socket) -> None:
        self.where, self.count = listener.getsockname(), 0
        self.length = 1
        self.server = Server(listener, line, self._respond, "test")

    def _respond(self, asked: str) -> bytes:
        self.count += 1
        if asked == "wrong":
            raise ValueError
        return asked.encode() * self.length


@pytest.fixture
def serving() -> Iterator[Serving]:
    found = Serving(socket.create_server(("127.0.0.1", 0)))
    yield found
    found.server.close()


def connected(serving: Serving) -> socket.socket:
    return socket.create_connection(serving.where, 20)


def ask(serving: Serving, said: bytes) -> bytes:
    with connected(serving) as sock:
        sock.sendall(said)
        return read_all(sock, time.monotonic() + 20, 1 << 25)


def test_requests_and_responses(serving: Serving) -> None:
    assert ask(serving, b"one\n") == b"one"
    assert ask(serving, b"wrong\n") == b""
    assert ask(serving, b"two\nthree\n") == b"two"


def test_a_long_response_to_who_reads_slowly(serving: Serving) -> None:
    serving.length = 20 << 20
    with connected(serving) as slow:
        slow.sendall(b"a\n")
        assert ask(serving, b"b\n")[:1] == b"b"
        assert read_all(slow, time.monotonic() + 20, 1 << 25) == b"a" * serving.length


def test_who_does_not_read_is_given_up(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_PATIENCE", 0.2)
    serving.length = 50 << 20
    with connected(serving) as deaf:
        deaf.sendall(b"a\n")
        wait_until(lambda: serving.count == 1 and not serving.server._connections)


@pytest.mark.parametrize("said", [b"", b"x", b"\xff" * 8000])
def test_who_says_nothing_whole_is_given_up(
    serving: Serving, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(server, "_PATIENCE", 0.2)
    with connected(serving) as silent:
        silent.sendall(said)
        assert read_all(silent, time.monotonic() + 20, 1) == b""


def test_one_that_drips_is_given_up_too(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often it says something."""
    monkeypatch.setattr(server, "_PATIENCE", 0.3)
    with connected(serving) as dripping, contextlib.suppress(OSError):
        end = time.monotonic() + 20
        while time.monotonic() < end:
            dripping.sendall(b"x")
            time.sleep(0.02)
        pytest.fail("it was heard for 20 s")


def test_who_says_too_much_is_given_up(serving: Serving) -> None:
    with connected(serving) as sock, contextlib.suppress(ConnectionError):
        sock.sendall(b"x" * (1 << 20))
        assert read_all(sock, time.monotonic() + 20, 1) == b""
    assert ask(serving, b"one\n") == b"one"


def test_the_oldest_of_too_many_goes(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_PATIENCE", 60.0)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(connected(serving)) for _ in range(server._MOST + 10)]
        assert ask(serving, b"one\n") == b"one"
        assert len(serving.server._connections) <= server._MOST
        assert read_all(silent[0], time.monotonic() + 20, 1) == b""


def test_those_who_ask_at_once_get_one_response(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that many cost no more than one."""
    monkeypatch.setattr(server, "_PAUSE", 0.4)  # they all come meanwhile
    monkeypatch.setattr(server, "_AT_ONCE", 64)
    with contextlib.ExitStack() as stack:
        many = [stack.enter_context(connected(serving)) for _ in range(40)]
        for each in many:
            each.sendall(b"one\n")
        found = [read_all(each, time.monotonic() + 20, 10) for each in many]
    assert found == [b"one"] * 40
    assert serving.count < 10


def test_it_rests(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """For longer than it works."""
    rests: list[float] = []
    wait = serving.server._is_closed.wait

    def noted(seconds: float) -> bool:
        rests.append(seconds)
        return wait(seconds)

    monkeypatch.setattr(serving.server._is_closed, "wait", noted)
    respond = serving.server._respond
    serving.server._respond = lambda asked: time.sleep(0.03) or respond(asked)  # type: ignore
    assert ask(serving, b"one\n") == b"one"
    wait_until(lambda: any(seconds >= 0.27 for seconds in rests))


def test_other_users_are_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(name := f"\0penstock-test-{os.getpid()}")
    serving = Serving(listener)

    def asked() -> bytes:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(20)
            sock.connect(name)
            with contextlib.suppress(BrokenPipeError):
                sock.sendall(b"one\n")
            return read_all(sock, time.monotonic() + 20, 10)

    assert asked() == b"one"
    stranger = SimpleNamespace(size=12, unpack=lambda data: (1, os.geteuid() + 1, 1))
    monkeypatch.setattr(process, "_CREDENTIALS", stranger)
    with contextlib.suppress(ConnectionError):
        assert asked() == b""
    serving.server.close()


def test_a_closed_one_leaves_nothing(new_threads: NewThreads) -> None:
    serving = Serving(socket.create_server(("127.0.0.1", 0)))
    with connected(serving) as sock:
        serving.server.close()
        serving.server.close()
        assert new_threads() == []
        with contextlib.suppress(ConnectionError):
            assert read_all(sock, time.monotonic() + 20, 1) == b""
    with pytest.raises(ConnectionRefusedError):
        connected(serving)


def test_all_is_read_or_there_is_an_error() -> None:
    one, other = socket.socketpair()
    with one, other:
        one.sendall(b"x" * 100)
        with pytest.raises(TimeoutError):
            read_all(other, time.monotonic() + 0.1, 1 << 20)
        one.sendall(b"x" * 100)
        with pytest.raises(ValueError, match="more than"):
            read_all(other, time.monotonic() + 20, 50)


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.01)
