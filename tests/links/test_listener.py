"""Processes that connect to each other: those that know the secret, and nobody else."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.links import handshake
from penstock.links.handshake import Address, Listener, call, new_secret, route_to
from penstock.links.wire import Wire

LOOPBACK = ["127.0.0.1"]


@pytest.fixture
def place() -> Iterator[Listener]:
    found = Listener("127.0.0.1")
    yield found
    found.close()


class Beside:
    """Something that runs in another thread; its result, or error, comes with `result()`."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._found: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,))
        self._thread.start()

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            self._found = work()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found


def calls(address: Address, numbers: tuple[int, int], secret: str, timeout: float = 5) -> Beside:
    return Beside(lambda: call(address, LOOPBACK, numbers, secret, timeout))


def apart(address: Address) -> Address:
    """As it is known on another machine."""
    return address._replace(machine="another")


@pytest.mark.parametrize("far", [False, True])
def test_both_ways_to_connect(place: Listener, far: bool) -> None:
    secret = new_secret()
    calling = calls(apart(place.address) if far else place.address, (3, 7), secret)
    here = place.accept([(3, 7)], secret, 5)[3, 7]
    there = calling.result()
    sending = threading.Thread(target=there.send, args=(b"x" * 3_000_000,))
    sending.start()
    assert here.receive(5).data == b"x" * 3_000_000
    sending.join()


@pytest.mark.parametrize("far", [False, True])
def test_who_does_not_know_the_secret_is_turned_away(place: Listener, far: bool) -> None:
    secret, address = new_secret(), apart(place.address) if far else place.address
    wrong = calls(address, (1, 0), new_secret(), 0.5)
    unexpected = calls(address, (2, 0), secret)
    right = calls(address, (1, 0), secret)
    found = place.accept([(1, 0)], secret, 5)
    assert list(found) == [(1, 0)]
    found[1, 0].send(b"4")
    assert right.result().receive(5).data == b"4"
    place.close()
    with pytest.raises(TimeoutError, match="cannot be reached within"):
        wrong.result()
    with contextlib.suppress(TimeoutError):
        assert unexpected.result().ready()  # it is closed


def test_who_listens_must_know_the_secret_too(place: Listener) -> None:
    calling = calls(place.address, (1, 0), new_secret(), 0.5)
    with pytest.raises(TimeoutError, match=r"did not connect within .*others were turned away"):
        place.accept([(1, 0)], new_secret(), 1)
    with pytest.raises(TimeoutError, match="it has another secret"):
        calling.result()


@pytest.mark.parametrize("answer", ["challenge", b"HTTP/1.1 400 Bad Request\r\n\r\n" * 9])
def test_something_else_listens_there(answer: str | bytes) -> None:
    """One that repeats what it is told, and one that says something else; both get nothing."""
    secret, heard = new_secret(), bytearray()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            sock = server.accept()[0]
            with sock, contextlib.suppress(OSError):
                if isinstance(answer, bytes):
                    sock.sendall(answer)
                else:
                    sock.sendall(b"penstock" + bytes(32))
                    said = sock.recv(1000)
                    heard.extend(said)
                    sock.sendall(said[-32:])  # the proof of the caller is none of the listener

        serving = Beside(serve)
        address = Address("another", "", "127.0.0.1", server.getsockname()[1])
        with pytest.raises(TimeoutError, match=r"another machine cannot be reached within 0 s"):
            call(address, LOOPBACK, (1, 0), secret, 0.3)
        serving.result()
    assert secret.encode() not in heard
    assert bytes.fromhex(secret) not in heard


def test_two_dozen_silent_strangers_and_some_that_talk(
    place: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them keeps anybody waiting, though each of them may take a minute."""
    monkeypatch.setattr(handshake, "_GREETING_TIMEOUT", 60.0)
    here = ("127.0.0.1", place.address.port)
    with contextlib.ExitStack() as stack:
        for k in range(40):
            stranger = stack.enter_context(socket.create_connection(here))
            if k % 4 == 1:
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n" * 100)
            elif k % 4 == 2:
                stranger.sendall(b"abc")
            elif k % 4 == 3:
                stranger.shutdown(socket.SHUT_WR)
        calling = [calls(apart(place.address), (k, 0), "secret", 20) for k in range(3)]
        found = place.accept([(k, 0) for k in range(3)], "secret", 30)
        for k, one in enumerate(calling):
            found[k, 0].send(bytes([k]))
            assert one.result().receive(5).data == bytes([k])


def test_the_oldest_of_too_many_strangers_goes(
    place: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "_MOST_STRANGERS", 3)
    here = ("127.0.0.1", place.address.port)
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection(here)) for _ in range(5)]
        calling = calls(apart(place.address), (1, 0), "secret")
        place.accept([(1, 0)], "secret", 10)
        calling.result()
        for stranger in strangers:
            stranger.settimeout(5)
            assert len(stranger.recv(100)) in (0, 40)
            assert stranger.recv(100) == b""


def test_silent_strangers_are_turned_away_in_time(
    place: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshake, "_GREETING_TIMEOUT", 0.1)
    with socket.create_connection(("127.0.0.1", place.address.port)) as stranger:
        with pytest.raises(TimeoutError, match=r"\(1 others were turned away\)"):
            place.accept([(1, 0)], "secret", 0.5)
        assert len(stranger.recv(100)) == 40
        assert stranger.recv(100) == b""


def test_one_that_calls_again_is_heard(place: Listener) -> None:
    """It may have given up the first call just when that was accepted."""

    def thrice() -> list[Wire]:
        return [call(place.address, [], (k, 0), "secret", 5) for k in (1, 1, 2)]

    calling = Beside(thrice)
    found = place.accept([(1, 0), (2, 0)], "secret", 5)
    first, second, _ = calling.result()
    assert first.ready()  # it is closed
    found[1, 0].send(b"4")
    assert second.receive(5).data == b"4"


def test_nobody_comes(place: Listener) -> None:
    with pytest.raises(TimeoutError, match="rank 5 did not connect"):
        place.accept([(5, 0)], new_secret(), 0.1)


def test_nobody_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = Address("another", "", "127.0.0.1", port)
    with pytest.raises(TimeoutError, match=f"port {port} of another machine.*localhost"):
        call(address, ["localhost"], (0, 0), new_secret(), 0.2)


def test_a_machine_is_told_from_another() -> None:
    assert handshake.this_machine() == handshake.this_machine() != ""


def test_only_other_machines_need_a_port() -> None:
    place = Listener()
    assert place.address.port == 0
    assert place._far is None
    place.close()
    place = Listener("127.0.0.1")
    assert place._far is not None
    assert place._far.getsockname()[0] == "127.0.0.1"
    place.close()
    with pytest.raises(OSError, match="assign"):
        Listener("192.0.2.1")  # an address for documentation, which no machine has


def test_the_way_to_another_machine() -> None:
    assert route_to(["127.0.0.1"]) == ("127.0.0.1", "127.0.0.1")
    assert route_to(["no-such-host.invalid"]) == ("", "")


def test_processes_of_other_users_are_on_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    here = handshake.this_machine()
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert handshake.this_machine() != here


def test_other_users_are_turned_away_on_this_machine(
    place: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before they are told anything, even if they know the secret; and nobody calls one of them."""
    monkeypatch.setattr(handshake, "is_of_this_user", lambda sock: False)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(place.address.path)
        with pytest.raises(TimeoutError, match=r"\(1 others were turned away\)"):
            place.accept([(1, 0)], "secret", 0.3)
        assert stranger.recv(100) == b""
    with pytest.raises(TimeoutError, match="another user listens there"):
        call(place.address, [], (1, 0), "secret", 0.3)


def test_too_many_open_files(place: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers have taken all that the process may have; one that knows the secret comes in."""
    monkeypatch.setattr(handshake, "_GREETING_TIMEOUT", 60.0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            here = ("127.0.0.1", place.address.port)
            stack.enter_context(socket.create_connection(here))
        calling = calls(apart(place.address), (1, 0), "secret", 20)
        time.sleep(0.5)  # it has connected, behind them
        highest = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 3, hard))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        filling: list[int] = []
        with contextlib.suppress(OSError):
            while True:
                filling.append(os.dup(0))
        os.close(filling.pop())
        os.close(filling.pop())
        for fd in filling:
            stack.callback(os.close, fd)
        found = place.accept([(1, 0)], "secret", 20)
        found[1, 0].send(b"4")
        assert calling.result().receive(5).data == b"4"
