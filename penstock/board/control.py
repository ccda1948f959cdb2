"""Answers other processes of this user that look at a pipeline, over a socket beside its board.

Most of what they want to know is on the board. What is not (the stacks of threads) is asked for
here, of a thread that does nothing else. Questions and answers are lines of JSON; the socket is a
file in a folder that nobody else can enter.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

SUFFIX = ".sock"
"""Of the socket beside a board's file."""

_PATIENCE = 2.0  # seconds for a question to come, and for an answer to be read
_LONGEST = 1 << 12  # bytes of a question


class Control:
    """Answers questions until it is closed.

    Args:
        path: of the socket, which is made.
        answers: for every question a function that gives the answer, called in another thread.

    Raises:
        OSError: there can be no socket of this name.
    """

    def __init__(self, path: Path, answers: Mapping[str, Callable[[], Any]]) -> None:
        listener = socket.socket(socket.AF_UNIX)
        try:
            with _short(path) as name:
                listener.bind(name)
            listener.listen()
        except BaseException:
            listener.close()
            raise
        self._is_closed = threading.Event()
        arguments = listener, dict(answers), self._is_closed
        self._thread = threading.Thread(
            target=_serve, args=arguments, name="penstock-control", daemon=True
        )
        self._thread.start()
        self._listener, self._path, self._process = listener, path, os.getpid()

    def close(self) -> None:
        """Stop listening."""
        if os.getpid() == self._process:  # and not a fork of it
            self._is_closed.set()
            self._path.unlink(missing_ok=True)
            with suppress(OSError):  # closed before
                self._listener.shutdown(socket.SHUT_RDWR)  # which wakes the thread
            if self._thread is not threading.current_thread():
                self._thread.join(_PATIENCE)
        self._listener.close()


def _serve(
    listener: socket.socket, answers: dict[str, Callable[[], Any]], is_closed: threading.Event
) -> None:
    """Answer one after the other; runs in a thread of its own."""
    while True:
        try:
            other, _ = listener.accept()
        except OSError:
            if listener.fileno() < 0 or is_closed.is_set():
                return
            is_closed.wait(_PATIENCE)  # too many open files, say
            continue
        with other:
            try:
                other.settimeout(_PATIENCE)
                question = _line(other)
                known = answers.get(question)
                answer = {"answer": known()} if known else {"error": f"unknown: {question!r}"}
                other.sendall(msgspec.json.encode(answer) + b"\n")
            except Exception as error:
                said = {"error": f"{type(error).__name__}: {error}"}
                with suppress(OSError):  # whoever asked has gone
                    other.sendall(msgspec.json.encode(said) + b"\n")


def _line(other: socket.socket) -> str:
    data = b""
    while not data.endswith(b"\n") and len(data) < _LONGEST:
        more = other.recv(_LONGEST)
        if not more:
            break
        data += more
    return data.decode(errors="replace").strip()


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


def ask(path: Path, question: str, timeout: float = 1.5) -> Any:
    """The answer of the process that listens there.

    Args:
        path: of its socket.
        question: one that it knows.
        timeout: seconds to wait for it.

    Raises:
        OSError: nobody listens there, or there was no answer in time.
        ValueError: it has no answer; the message says why.
    """
    with socket.socket(socket.AF_UNIX) as other:
        other.settimeout(timeout)
        with _short(path) as name:
            other.connect(name)
        other.sendall(f"{question}\n".encode())
        data = b""
        while more := other.recv(1 << 16):
            data += more
    try:
        found = msgspec.json.decode(data)
    except msgspec.DecodeError as error:
        raise ValueError("the pipeline was closed before it answered") from error
    if "error" in found:
        raise ValueError(found["error"])
    return found["answer"]
