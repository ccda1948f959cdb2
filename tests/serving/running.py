"""A server in a process of its own, as the command starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from penstock.board.runs import find

HOME = Path(__file__).parents[2]
TIMEOUT = 90.0


class Running:
    """A server that runs.

    Attributes:
        process: of the server.
        url: where it serves.
        client: of it.
    """

    def __init__(self, *options: str) -> None:
        command = [sys.executable, "-W", "ignore", "-m", "penstock", "serve", *options]
        self.process = subprocess.Popen(
            [*command, "--port", "0", "--json", "--devices", "cpu,cpu"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=HOME,
            env={**os.environ, "PYTHONPATH": str(HOME)},
        )
        self.said: list[str] = []
        assert self.process.stderr is not None
        self._reading = threading.Thread(target=self.said.extend, args=(self.process.stderr,))
        self._reading.start()
        about = self._about()
        self.url = str(about["url"])
        self.client = httpx.Client(base_url=self.url, timeout=TIMEOUT)

    def _about(self) -> dict[str, Any]:
        """What the command prints when it is ready."""
        lines = []
        assert self.process.stdout is not None
        for line in self.process.stdout:
            lines.append(line)
            if line == "}\n":
                found: dict[str, Any] = json.loads("".join(lines))
                return found
        code = self.end()
        raise RuntimeError(f"it did not start, and ended with {code}: {''.join(self.said)}")

    def complete(self, prompt: Any, **options: Any) -> httpx.Response:
        """POST /v1/completions."""
        return self.client.post("/v1/completions", json={"prompt": prompt, **options})

    def children(self) -> list[int]:
        """The processes that the server has started, and theirs."""
        found, waiting = [], [self.process.pid]
        while waiting:
            pid = waiting.pop()
            for path in Path(f"/proc/{pid}/task").glob("*/children"):
                with suppress(OSError):  # it has ended, or its thread
                    waiting += map(int, path.read_text().split())
            found.append(pid)
        return found[1:]

    def workers(self) -> list[int]:
        """The processes that run the stages now: those that have a stage on the board."""
        (run,) = find(self.process.pid)
        return [worker.pid for worker in run.description.workers]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and wait for the end; returns the exit code."""
        self.process.send_signal(number)
        return self.end()

    def end(self) -> int:
        """Wait for the end; returns the exit code."""
        code = self.process.wait(TIMEOUT)
        self._reading.join(TIMEOUT)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return code


@contextmanager
def running(*options: str) -> Iterator[Running]:
    """A server, which is killed at the end if it still runs."""
    server = Running(*options)
    try:
        yield server
    finally:
        server.client.close()
        if server.process.poll() is None:
            server.process.kill()
        server.end()
