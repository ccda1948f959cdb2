"""A few hundred hostile messages to real jobs; and that the fuzzer would see what is wrong."""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from pathlib import Path

import pytest

from tests.fuzz.attack import Attack
from tests.fuzz.messages import Hostile, payload
from tests.fuzz.run import Outcome, run
from tests.fuzz.sockets import listening


@pytest.mark.timeout(400)
@pytest.mark.parametrize("kind", ["processes", "ranks apart"])
def test_a_few_hundred_messages(kind: str) -> None:
    outcome = run(kind, messages=400, seed=0, steps=10, torchs=False)
    assert not outcome.problems, outcome.problems
    assert sum(outcome.sent.values()) >= 400
    assert len(outcome.kinds) == 12


def test_every_socket_is_found(tmp_path: Path) -> None:
    before = set(listening([os.getpid()]))
    path, name = tmp_path / "a.sock", f"fuzz-{os.getpid()}"
    near, hidden = socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)
    with socket.create_server(("127.0.0.1", 0)) as far, near, hidden:
        port = far.getsockname()[1]
        near.bind(str(path))
        hidden.bind(f"\0{name}")
        near.listen()
        hidden.listen()
        found = set(listening([os.getpid()])) - before
        assert {one[1:] for one in found} == {
            ("tcp", "127.0.0.1", port),
            ("unix", str(path), 0),
            ("unix", f"@{name}", 0),
        }
        for one in found:
            one.connect(tmp_path).close()


@pytest.mark.parametrize("protocol", [0, 2, 5])
def test_a_pickle_leaves_a_mark(tmp_path: Path, protocol: int) -> None:
    pickle.loads(payload(str(tmp_path / "marks/unpickled"), protocol))
    assert list(tmp_path.glob("marks/*"))


def test_messages_can_be_repeated() -> None:
    hostile = Hostile("/nowhere", "secret")
    said = []
    for _ in range(2):
        heard = b""
        for seed in range(60):
            one, other = socket.socketpair()
            with one, other:
                one.setblocking(False)
                for _ in hostile.message(seed)[1](one):
                    if one.fileno() < 0:
                        break
                other.setblocking(False)
                try:
                    heard += other.recv(1 << 16)
                except OSError:
                    heard += b"-"
        said.append(heard)
    assert said[0] == said[1]
    assert len(said[0]) > 1000


def test_a_server_that_unpickles_is_found_out(tmp_path: Path) -> None:
    mark = tmp_path / "marks" / "unpickled"
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    other, _ = server.accept()
                except OSError:
                    return
                with other:
                    other.settimeout(0.2)
                    try:
                        pickle.loads(other.recv(1 << 16))
                    except Exception:
                        continue

        threading.Thread(target=serve, daemon=True).start()
        port = server.getsockname()[1]
        end = time.monotonic() + 60
        attack = Attack(
            os.getpid(), tmp_path, Hostile(str(mark), "secret"), 0, 300.0, lambda one: str(one.port)
        )
        attack.go_on(
            lambda: mark.exists() or time.monotonic() > end, lambda name: name != str(port)
        )
        attack.end()
        server.shutdown(socket.SHUT_RDWR)
    assert mark.exists()


def test_what_is_wrong_is_said() -> None:
    def rank(losses: list[float], threads: int) -> dict[str, object]:
        return {"losses": losses, "threads": threads, "sockets": 3}

    outcome = Outcome("processes", quiet=[[rank([1.0], 1)], [rank([1.0], 2)]], unpickled=1)
    outcome.hostile = [[rank([2.0], 1)]]
    found = " ".join(outcome.problems)
    for words in (
        "1 pickles were read",
        "nothing was sent to",
        "losses differ",
        "threads are left",
    ):
        assert words in found
