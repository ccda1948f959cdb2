"""A launcher of ranks that many tests share, and that is replaced when it is of no use any more."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[3]
WATCHDOG = 100.0  # seconds that the ranks of one scenario may take before they are ended


def environment() -> dict[str, str]:
    """For the ranks, and for torchrun itself."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}


def free_port() -> int:
    """One that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def collected(directory: Path, ranks: int) -> list[Any]:
    """What the ranks have left."""
    files = [directory / f"{rank}.pt" for rank in range(ranks)]
    return [torch.load(f, weights_only=False) if f.exists() else None for f in files]


class Launcher:
    """A process of `tests.workers.ranks.launcher`, started when it is needed.

    One that has ended, or that was left in the midst of a scenario (by a test that ran out of
    time), is ended with all its ranks, and the next test gets another: what happens in one test
    does not fail those that follow.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._busy = False

    @property
    def pid(self) -> int | None:
        """The number of its process, if there is one."""
        return self._process.pid if self._process else None

    def run(
        self, scenario: str, directory: Path, ranks: int = 2, seconds: float | None = None
    ) -> list[Any]:
        """What every rank has found; `None` for one that did not get there.

        Args:
            scenario: a function of `tests.workers.ranks.scenarios`, and `:` with its argument.
            directory: an empty one.
            ranks: how many.
            seconds: after which they are ended; `WATCHDOG` by default.

        Raises:
            RuntimeError: the launcher ended, or its ranks did not.
        """
        process = self._usable()
        assert process.stdin is not None
        assert process.stdout is not None
        self._busy = True
        process.stdin.write(f"{scenario} {directory} {ranks} {free_port()}\n".encode())
        process.stdin.flush()
        limit = WATCHDOG if seconds is None else seconds
        if not self._has_answered(process, limit):
            raise RuntimeError(f"the ranks of {scenario} have not ended within {limit:.0f} s")
        if process.poll() is not None:  # its ranks may still hold its output open
            raise RuntimeError(f"the launcher ended during {scenario}: {process.returncode}")
        process.stdout.readline()
        self._busy = False
        return collected(directory, ranks)

    def _has_answered(self, process: subprocess.Popen[bytes], seconds: float) -> bool:
        """Whether it has answered, or has ended, before it is too late."""
        end = os.pidfd_open(process.pid)
        try:
            return bool(select.select([process.stdout, end], [], [], seconds)[0])
        finally:
            os.close(end)

    def _usable(self) -> subprocess.Popen[bytes]:
        if self._process and (self._busy or self._process.poll() is not None):
            self.close()
        if not self._process:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.workers.ranks.launcher"],
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,  # so that its ranks can be ended with it
            )
        return self._process

    def close(self) -> None:
        """End it, and what it has started."""
        process, self._process, self._busy = self._process, None, False
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]
        process.wait(10)
