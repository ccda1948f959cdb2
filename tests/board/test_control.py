"""Questions of other processes, and what they are answered."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.board import control
from penstock.board.control import Control, ask
from tests.support.threads import NewThreads


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A longer name than sockets may have."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    return folder / "a.sock"


@pytest.fixture
def listening(path: Path) -> Iterator[Control]:
    found = Control(path, {"two": lambda: [1, 2], "wrong": lambda: 1 / 0, "odd": object})
    yield found
    found.close()


@pytest.mark.usefixtures("listening")
def test_what_is_answered(path: Path) -> None:
    assert ask(path, "two") == [1, 2]
    with pytest.raises(ValueError, match="ZeroDivisionError: division by zero"):
        ask(path, "wrong")
    with pytest.raises(ValueError, match="unknown: 'three'"):
        ask(path, "three")
    with pytest.raises(ValueError, match="TypeError"):
        ask(path, "odd")
    assert ask(path, "two") == [1, 2]


@pytest.mark.usefixtures("listening")
def test_strangers_do_not_stop_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_PATIENCE", 0.1)
    monkeypatch.chdir(path.parent)
    for said in (b"", b"\xff\xfe\n", b"x" * 100_000, os.urandom(5000), b"two"):
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(path.name)
            other.sendall(said)
    slow = socket.socket(socket.AF_UNIX)  # says nothing, and stays
    slow.connect(path.name)
    assert ask(path, "two") == [1, 2]
    slow.close()


def test_it_ends(new_threads: NewThreads, path: Path) -> None:
    found = Control(path, {})
    (thread,) = new_threads()
    found.close()
    found.close()
    thread.join(5)
    assert not thread.is_alive()
    assert not path.exists()
    with pytest.raises(OSError, match="No such file"):
        ask(path, "two")
