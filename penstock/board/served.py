"""The state of a pipeline as its server of metrics gives it, read on any machine."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import msgspec

from penstock.board.control import answer_in
from penstock.board.memory import Counted, Reading
from penstock.board.runs import Description, Run
from penstock.board.server import read_all
from penstock.board.status import Process, process_of
from penstock.display.safe import printable
from penstock.errors import InputError

STATE = "/state"
"""The path of it."""

ASKED = {
    "/stacks": "stacks",
    "/news": "news",
    "/history": "history",
    "POST /record": "record",
}
"""Requests that are answered as the questions of `penstock.board.control` are."""

_VERSION = 1
_LONGEST = 4 << 20  # bytes of a state
_LONGEST_ANSWER = 1 << 26  # bytes of an answer to a question
_PATIENCE = 3.0  # seconds for one
_PAUSE = 0.25  # seconds between an answer and the next question
_BOUND = 1 << 62  # of all numbers in a state; bytes, nanoseconds, times of all clocks
_MOST_OTHERS = 1024  # ranks that are asked
_TRIES = 3  # without an answer, until it is gone


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank knows of its workers.

    Attributes:
        penstock: the version of this format.
        now: when it was taken, in nanoseconds of the clock by which all its times are.
        description: of the pipeline.
        readings: what the records of its workers say, in the order of `description.recorded`.
        processes: those of these workers, in the same order.
        counted: the passes.
    """

    penstock: int
    now: int
    description: Description
    readings: Sequence[Reading]
    processes: Sequence[Process]
    counted: Counted

    def later(self, by: int) -> State:
        """The same by a clock that is so many nanoseconds ahead."""
        counted = self.counted
        latest = [replace(step, end=step.end + by) for step in counted.latest]
        begun = counted.begun and counted.begun + by
        readings = [replace(r, since=r.since and r.since + by) for r in self.readings]
        return msgspec.structs.replace(
            self,
            now=self.now + by,
            readings=readings,
            counted=replace(counted, begun=begun, latest=latest),
        )


def state_of(run: Run) -> bytes:
    """The state of a run now, as JSON."""
    description = run.description
    pids = {worker.number: worker.pid for worker in description.workers}
    state = State(
        penstock=_VERSION,
        now=time.monotonic_ns(),
        description=description,
        readings=run.board.readings(),
        processes=[process_of(pids[number]) for number in description.recorded],
        counted=run.board.counted(),
    )
    return msgspec.json.encode(state)


def url_of(text: str) -> str:
    """Where the state is that is served at `HOST:PORT` or a URL.

    Raises:
        InputError: it is neither.
    """
    try:
        parts = urlsplit(text if "://" in text else f"http://{text}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port or parts.scheme != "http":
        raise InputError(
            f"{text!r} is no address of metrics: give HOST:PORT, such as 127.0.0.1:9100, or a URL, "
            "such as http://127.0.0.1:9100/metrics; Pipeline.metrics says which"
        )
    return _url(host, port)


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{STATE}"


class Remote:
    """A pipeline, or a rank's part of one, as its server of metrics says; asked in a thread.

    It has what a view takes from a `Run`. Times are by the clock of this machine.

    Args:
        url: of the state.

    Attributes:
        path: the URL as a path, which no other pipeline has.
        board: has `counted()`.
        problem: why there is no state; empty if there is one, or none yet.
    """

    def __init__(self, url: str) -> None:
        self.url, self.problem = url, ""
        self.path = PurePosixPath(url)
        self._state: State | None = None
        self._by: int | None = None
        self._first, self._is_closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._ask, name="penstock-remote", daemon=True)
        self._thread.start()

    @property
    def board(self) -> Remote:
        """What has `counted()`, as the board of a `Run` has."""
        return self

    @property
    def is_alive(self) -> bool:
        """Whether it has answered, and goes on answering."""
        return self._state is not None and not self.problem

    @property
    def description(self) -> Description:
        """The pipeline's workers, plan and process; raises `InputError` before the first answer."""
        return self._known.description

    @property
    def _known(self) -> State:
        if self._state is None:
            raise InputError(self.problem or f"{self.url} has not answered yet")
        return self._state

    @property
    def ahead(self) -> int:
        """Nanoseconds by which this machine's clock is ahead of that of its workers."""
        return self._by or 0

    def readings(self) -> dict[int, Reading]:
        """What the records of its workers said at the latest answer, by their numbers."""
        return dict(zip(self.description.recorded, self._known.readings, strict=True))

    def processes(self) -> Mapping[int, Process]:
        """What is known of the processes of its workers, by their numbers."""
        return dict(zip(self.description.recorded, self._known.processes, strict=True))

    def counted(self) -> Counted:
        """The steps counted up to the latest answer."""
        return self._known.counted

    def ask(self, question: str, timeout: float) -> Any:
        """What its process answers, as `Run.ask` has it; of it nothing is believed.

        Args:
            question: one of `ASKED`.
            timeout: seconds to wait for the answer.

        Raises:
            OSError: there was none in time.
            ValueError: it has none; the message says why.
        """
        request = next(request for request, what in ASKED.items() if what == question)
        method, _, path = request.rpartition(" ")
        url = self.url.removesuffix(STATE) + path
        try:
            return clean(answer_in(_page(url, method or "GET", timeout, _LONGEST_ANSWER)))
        except http.client.HTTPException as error:
            raise ValueError(_why(error)) from error
        except RecursionError as error:
            raise ValueError("the answer is nested too deeply") from error

    def dumped(self, timeout: float) -> str:
        """Nothing: that is to be had on its own machine only."""
        raise FileNotFoundError("it is on another machine")

    def wait(self) -> None:
        """Wait for the first answer.

        Raises:
            InputError: there is none, or it is not what Penstock serves.
        """
        if not self._first.wait(_PATIENCE + 1):
            self.problem = _no_status(self.url, f"there was no answer within {_PATIENCE:.0f} s")
        if self.problem:
            self.close()
            raise InputError(self.problem)

    def close(self) -> None:
        """Ask no more, once what was asked has been answered."""
        self._is_closed.set()
        self._thread.join(_PATIENCE + 1)

    def _ask(self) -> None:
        failed = 0
        while not self._is_closed.is_set():
            try:
                self._take(_fetched(self.url))
                failed, self.problem = 0, ""
            except (OSError, http.client.HTTPException, ValueError) as error:
                failed += 1
                if self._state is None or failed >= _TRIES:
                    self.problem = _no_status(self.url, _why(error))
            self._first.set()
            self._is_closed.wait(_PAUSE)

    def _take(self, state: State) -> None:
        if self._by is None or self._state is None or self._state.description != state.description:
            self._by = time.monotonic_ns() - state.now
        self._state = state.later(self._by)


def others_of(first: Remote) -> list[str]:
    """Where the other ranks serve their states: worker k at the port of worker 0 plus k."""
    about, where = first.description, urlsplit(first.url)
    host, port = where.hostname or "", (where.port or 0) - about.rank
    if about.ranks == 1:
        return []
    return [
        _url(host if worker.host == about.host else worker.host, port + worker.number)
        for worker in about.workers[:_MOST_OTHERS]
        if worker.number != about.rank and 0 < port + worker.number < 1 << 16
    ]


def _fetched(url: str) -> State:
    """What is served there.

    Raises:
        OSError: nobody answers, or not in time.
        HTTPException: it does not speak HTTP, or has no such page.
        ValueError: it is not the state of a pipeline.
    """
    return state_from(_page(url, "GET", _PATIENCE, _LONGEST))


def _page(url: str, method: str, patience: float, most: int) -> bytes:
    """What is served at an address, without believing anything of it.

    Args:
        url: of it.
        method: of HTTP.
        patience: seconds to wait.
        most: bytes that there may be.

    Raises:
        OSError: nobody answers, or not in time.
        HTTPException: it does not speak HTTP, or has no such page.
        ValueError: there is more.
    """
    parts, end = urlsplit(url), time.monotonic() + patience
    with socket.create_connection((parts.hostname, parts.port), patience) as sock:
        host = sock.getpeername()[0]  # an address: names may be anybody's
        sock.sendall(
            f"{method} {parts.path} HTTP/1.0\r\nHost: [{host}]:{parts.port}\r\n\r\n".encode()
        )
        data = read_all(sock, end, most)
    head, _, body = data.partition(b"\r\n\r\n")
    version, _, status = printable(head.partition(b"\r\n")[0].decode("latin-1")).partition(" ")
    if not version.startswith("HTTP/"):
        raise http.client.BadStatusLine(f"{version[:80]!r} is no HTTP")
    if not status.startswith("200"):
        raise http.client.HTTPException(f"the server answers {status[:80]}")
    return body


def state_from(data: bytes) -> State:
    """A state, of which nothing is believed.

    Raises:
        ValueError: it is none, or nobody could show it.
    """
    try:
        state = msgspec.json.decode(data, type=State)
        state = msgspec.convert(clean(msgspec.to_builtins(state)), State)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    about = state.description
    if state.penstock != _VERSION:
        raise ValueError(f"it is of version {state.penstock}; this Penstock reads {_VERSION}")
    if not len(state.readings) == len(state.processes) == len(about.recorded):
        raise ValueError("it does not say what every worker does")
    if not set(about.recorded) <= {worker.number for worker in about.workers}:
        raise ValueError("it speaks of workers that it has not")
    return state


def clean(value: Any) -> Any:
    """Plain data with texts that cannot write anything but themselves on a terminal.

    Raises:
        ValueError: it has numbers that are none, or out of all bounds.
    """
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, (int, float)) and not -_BOUND < value < _BOUND:
        raise ValueError(f"{str(value)[:20]} is no number that a state has")
    if isinstance(value, dict):
        return {clean(key): clean(each) for key, each in value.items()}
    return [clean(each) for each in value] if isinstance(value, (list, tuple)) else value


def _why(error: Exception) -> str:
    if type(error) is http.client.HTTPException:
        return str(error)
    if isinstance(error, TimeoutError):
        return f"there was no answer within {_PATIENCE:.0f} s"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens there"
    if isinstance(error, (socket.gaierror, OSError)):
        return error.strerror or str(error)
    return f"the answer is not the state of a pipeline ({error})"


def _no_status(url: str, why: str) -> str:
    return (
        f"no pipeline is to be seen at {url}: {why}. Pipeline(metrics=9100) serves it on its own "
        'machine, metrics="0.0.0.0:9100" to others; Pipeline.metrics says where'
    )


RunView = Run | Remote
"""A pipeline that is looked at: one of this user on this machine, or one served at an address."""
