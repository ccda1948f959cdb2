"""Finds the running pipelines of this user: a folder with the board of each, and what it is of.

The folder is `penstock` in `XDG_RUNTIME_DIR` or `/run/user/UID`, or else `penstock-UID` in the
folder for temporary files, and nobody else can read it. A pipeline that is closed removes its
files; those of processes that were killed are removed by whoever looks next.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from penstock.board.control import SUFFIX, ask
from penstock.board.dump import dumped, offer_dumps
from penstock.board.memory import DESCRIPTION, Board, Reading, opened
from penstock.board.process import is_alive, started_at, where
from penstock.files import write_whole

BOARD = ".board"
"""The suffix of a board's file."""


class Worker(msgspec.Struct, frozen=True):
    """A worker, as a description has it.

    Attributes:
        number: of the member.
        device: as its machine names it.
        replica: whose stages it runs.
        place: which of its replica's workers it is.
        pid: the process that it is, or that it is a thread of.
        host: the name of its machine.
        stages: that it runs.
        memory: bytes that it holds at most, as planned.
        limit: bytes that it may hold; 0 if that was not given.
    """

    number: int
    device: str
    replica: int
    place: int
    pid: int
    host: str
    stages: tuple[int, ...]
    memory: int = 0
    limit: int = 0


class Description(msgspec.Struct, frozen=True, kw_only=True):
    """What a board is of.

    Attributes:
        pid: of the process that drives the pipeline, or of this rank.
        started: when that process started, as `started_at` says.
        host: the name of its machine.
        command: of that process.
        began: when the pipeline was built, in seconds since 1970.
        model: the class of the model.
        plan: in words.
        microbatches: of a batch.
        workers: all of them, by number.
        recorded: the numbers of those whose records are on this board, in their order.
        placement: for every stage which of its replica's workers runs it.
        predicted_seconds: of a step.
        bound_seconds: of a step.
        rank: the number of the worker that this process is; 0 if it drives all workers.
        ranks: how many processes run the script; 1 if one of them drives all workers.
        job: a name that is the same for all ranks of a job; empty if there is only one process.
    """

    pid: int
    started: int
    host: str
    command: str
    began: float
    model: str
    plan: str
    microbatches: int
    workers: tuple[Worker, ...]
    recorded: tuple[int, ...]
    placement: tuple[int, ...]
    predicted_seconds: float
    bound_seconds: float
    rank: int = 0
    ranks: int = 1
    job: str = ""


@dataclass(frozen=True)
class Run:
    """A running pipeline, or a rank's part of one.

    Attributes:
        description: what it is.
        board: what its workers are doing.
        path: of the board's file; `None` if it has no name.
    """

    description: Description
    board: Board
    path: Path | None

    @property
    def is_alive(self) -> bool:
        """Whether the process that drives it still runs."""
        return is_alive(self.description.pid, self.description.started)

    def readings(self) -> dict[int, Reading]:
        """What the records on its board say now, by the numbers of this machine's workers."""
        found = dict(zip(self.description.recorded, self.board.readings(), strict=True))
        here = {w.number for w in self.description.workers if w.host == self.description.host}
        return {number: reading for number, reading in found.items() if number in here}

    @property
    def ahead(self) -> int:
        """Nanoseconds by which this process's clock is ahead of that of its workers: none."""
        return 0

    def ask(self, question: str, timeout: float) -> Any:
        """What its process answers, see `penstock.board.control`.

        Args:
            question: one that it knows.
            timeout: seconds to wait for the answer.

        Raises:
            OSError: there was none in time.
            ValueError: it has none; the message says why.
        """
        if self.path is None:
            raise ValueError("it cannot be asked: its board has no name")
        return ask(self.path.with_suffix(SUFFIX), question, timeout)

    def dumped(self, timeout: float) -> str:
        """The stacks of its process's threads, which need no Python there.

        Args:
            timeout: seconds to wait.

        Raises:
            OSError: there are none.
        """
        if self.path is None:
            raise FileNotFoundError("its board has no name")
        about = self.description
        return dumped(self.path.parent, about.pid, about.started, timeout)

    @property
    def pids(self) -> set[int]:
        """The processes that drive it and that its workers are."""
        return {self.description.pid, *(worker.pid for worker in self.description.workers)}


def folders() -> list[Path]:
    """Where boards of this user may be: the first is for new ones."""
    found = []
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}"
    with suppress(OSError):
        if Path(runtime).stat().st_uid == os.getuid() and os.access(runtime, os.W_OK):
            found.append(Path(runtime) / "penstock")
    with suppress(OSError):  # there may be no such place
        found.append(Path(tempfile.gettempdir()) / f"penstock-{os.getuid()}")
    return found


def _made(path: Path) -> Path:
    """A folder, made if need be.

    Raises:
        OSError: it cannot be made, or others could read it.
    """
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    is_private = stat.S_ISDIR(found.st_mode) and not found.st_mode & 0o077
    if not is_private or found.st_uid != os.getuid():
        raise PermissionError(f"{path} is not a folder of this user that only he can read")
    return path


def new_board(workers: int) -> Board:
    """A board where others of this user find it; without a name if there is no place for it.

    Args:
        workers: how many.
    """
    name = f"{where()}-{os.getpid()}-{started_at()}-{secrets.token_hex(4)}{BOARD}"
    for path in folders():
        with suppress(OSError):
            here = _made(path)
            _sweep(here)
            offer_dumps(here)
            return Board(workers, path=here / name)
    return Board(workers)


def publish(board: Board, description: Description) -> None:
    """Say what a board is of; that goes with the board.

    Args:
        board: of this process.
        description: of what.
    """
    if board.path is None or not board.close.alive:
        return
    with suppress(OSError, ValueError):  # then nobody else finds it
        write_whole(board.path.with_suffix(DESCRIPTION), msgspec.json.encode(description))


def find(pid: int | None = None) -> list[Run]:
    """The running pipelines of this user on this machine, oldest first.

    Args:
        pid: just those that this process drives, or has a worker of.
    """
    runs: list[Run] = []
    paths: list[Path] = []
    for here in folders():
        with suppress(OSError):
            if here.exists():
                _sweep(_made(here))
                paths += here.glob(f"{where()}-*{DESCRIPTION}")
    for path in paths:
        try:
            description = msgspec.json.decode(path.read_bytes(), type=Description)
            file = path.with_suffix(BOARD)
            board = opened(file, len(description.recorded))
        except (OSError, ValueError, msgspec.MsgspecError):  # it ends, or is of another version
            continue
        runs.append(Run(description, board, file))
    runs.sort(key=lambda run: (run.description.began, run.description.rank))
    return [run for run in runs if pid is None or pid in run.pids]


def _sweep(here: Path) -> None:
    """Remove what processes of this machine have left that were killed."""
    for path in here.glob(f"{where()}-*-*-*.*"):
        _, pid, started, _ = path.name.split("-", 3)
        if pid.isdecimal() and started.isdecimal() and not is_alive(int(pid), int(started)):
            with suppress(OSError):
                path.unlink(missing_ok=True)
