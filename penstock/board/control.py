"""Answers other processes of this user that look at a pipeline, over a socket beside its board.

Most of what they want to know is on the board. What is not (such as the stacks of threads) is asked
for here, of a thread that does nothing else. A question is a line, an answer a line of JSON; the
socket is a file in a folder that nobody else can enter.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from penstock.board.memory import Board
from penstock.board.process import is_of_this_user
from penstock.board.server import Server, read_all
from penstock.display.safe import printable

SUFFIX = ".sock"
"""Of the socket beside a board's file."""

Known = Mapping[str, Callable[[], Any]]
"""For every question a function that returns the answer, as plain data.

It is called in another thread than the script's.
"""

_PATIENCE = 1.5  # seconds to wait for an answer
_LONGEST = 1 << 28  # bytes of an answer


class Control:
    """Answers questions until it is closed.

    Args:
        path: of the socket, which is made.
        known: what is answered.

    Raises:
        OSError: there can be no socket of this name.
    """

    def __init__(self, path: Path, known: Known) -> None:
        listener = socket.socket(socket.AF_UNIX)
        try:
            with _short(path) as name:
                listener.bind(name)
                os.chmod(name, 0o600)
            self._server = Server(listener, _question, Answers(known), "penstock-control")
        except BaseException:
            listener.close()
            raise
        self._path, self._process = path, os.getpid()

    def close(self) -> None:
        """Stop listening."""
        if os.getpid() == self._process:  # and not a fork of it
            self._path.unlink(missing_ok=True)
        self._server.close()


def listen(board: Board, known: Known) -> None:
    """Answer other processes of this user until a board is closed, if they can find it.

    Args:
        board: beside whose file the socket is.
        known: what is answered, which must not keep the board alive.
    """
    if board.path is None or not board.close.alive:
        return
    with suppress(OSError):  # a name that is too long, say: then nobody can ask
        control = Control(board.path.with_suffix(SUFFIX), known)
        board.closing.append(control.close)


def _question(received: bytes) -> str | None:
    """The line that has come, if it is whole."""
    line, end, _ = received.partition(b"\n")
    return line.decode(errors="replace").strip() if end else None


class Answers:
    """Gives the answer to a question, as JSON.

    Args:
        known: what is answered.
    """

    def __init__(self, known: Known) -> None:
        self._known = dict(known)

    def __call__(self, question: str) -> bytes:
        """The answer, or why there is none."""
        try:
            known = self._known.get(question)
            answer = {"answer": known()} if known else {"error": f"unknown: {question!r}"}
            return msgspec.json.encode(answer) + b"\n"
        except Exception as error:
            return msgspec.json.encode({"error": f"{type(error).__name__}: {error}"}) + b"\n"


@contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name for a socket of any path: names of sockets may have about a hundred characters."""
    if not Path("/proc/self/fd").exists():
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def ask(path: Path, question: str, timeout: float = _PATIENCE) -> Any:
    """The answer of the process that listens there.

    Args:
        path: of its socket.
        question: one that it knows.
        timeout: seconds to wait for it.

    Raises:
        OSError: nobody of this user listens there, or there was no answer in time.
        ValueError: it has no answer; the message says why.
    """
    end = time.monotonic() + timeout
    with socket.socket(socket.AF_UNIX) as other:
        other.settimeout(timeout)
        with _short(path) as name:
            other.connect(name)
        if not is_of_this_user(other):
            raise PermissionError(f"{path} is the socket of another user")
        other.sendall(f"{question}\n".encode())
        return answer_in(read_all(other, end, _LONGEST))


def answer_in(data: bytes) -> Any:
    """What an answer says.

    Args:
        data: that `Answers` gave, or a stranger.

    Raises:
        ValueError: it says why there is none, or is none.
    """
    try:
        found = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError("the pipeline was closed before it answered") from error
    if "answer" not in found:
        raise ValueError(printable(str(found.get("error", "there is no answer"))))
    return found["answer"]
