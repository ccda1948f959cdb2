"""A job of torchrun's agents, each of which is a machine that may come and go; here all on one."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from torch.distributed import TCPStore

from tests.workers.ranks.launching import ROOT, environment

_RENDEZVOUS = {
    "is_host": 0,  # the store is in this process, so any agent may go
    "last_call_timeout": 1,
    "join_timeout": 120,
    "keep_alive_interval": 1,
}


class Line(NamedTuple):
    """A line of the log that the script writes.

    Attributes:
        time: by the machine's clock, in seconds.
        rank: which rank has written it.
        world: how many there were.
        pid: of its process.
        what: it does.
    """

    time: float
    rank: int
    world: int
    pid: int
    what: str

    @classmethod
    def of(cls, text: str) -> Line:
        """A line as it was read."""
        moment, rank, world, pid, what = text.split(" ", 4)
        return cls(float(moment), int(rank), int(world), int(pid), what)

    @property
    def step(self) -> int:
        """The step that begins; -1 if none does."""
        return int(self.what.split()[1]) if self.what.startswith("step ") else -1


class Job:
    """Agents that train the same run together, `tests.elastic.script`.

    Args:
        folder: an empty one.
        arguments: of the script, after the folder.
        restarts: that every agent may make.

    Attributes:
        folder: of the run.
        agents: all that were started.
    """

    def __init__(self, folder: Path, arguments: Sequence[str] = (), restarts: int = 100) -> None:
        self.folder = folder
        self.agents: list[subprocess.Popen[bytes]] = []
        self._arguments, self._restarts, self._job = arguments, restarts, 0
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        self.end()

    # -- agents ---------------------------------------------------------------------------

    def start(self, ranks: int) -> subprocess.Popen[bytes]:
        """Start one more agent, with so many ranks; at most two can be there.

        torchrun lets nobody join a job any more of which an agent has ended well. So where none is
        left, there is another job, as a scheduler would have it.
        """
        self._job += not self.running
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self._store.port}"]
        conf = ",".join(f"{name}={value}" for name, value in _RENDEZVOUS.items())
        command += [
            "--rdzv-id",
            f"job-{self._job}",
            "--rdzv-conf",
            conf,
            "--monitor-interval",
            "0.1",
        ]
        command += ["--max-restarts", str(self._restarts), "--nproc-per-node", str(ranks)]
        command += [str(ROOT / "tests/elastic/script.py"), str(self.folder), *self._arguments]
        own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PENSTOCK_CACHE": str(self.folder.parent)}
        with self.errors(len(self.agents)).open("wb") as errors:
            agent = subprocess.Popen(
                command, env={**environment(), **own}, stdout=errors, stderr=errors, cwd=ROOT
            )
        self.agents.append(agent)
        return agent

    def errors(self, number: int) -> Path:
        """What an agent and its ranks have printed."""
        return self.folder / f"agent-{number}.err"

    @property
    def running(self) -> list[subprocess.Popen[bytes]]:
        """The agents that have not ended."""
        return [agent for agent in self.agents if agent.poll() is None]

    def ranks_of(self, agent: subprocess.Popen[bytes]) -> list[int]:
        """The processes that an agent has started and that have not ended."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, parent = stat.read_text().rpartition(")")[2].split()[:2]
                if int(parent) == agent.pid and state != "Z":
                    found.append(int(stat.parent.name))
        return sorted(found)

    def lose(self, agent: subprocess.Popen[bytes]) -> None:
        """Kill an agent with all its ranks, as a machine that loses its power."""
        os.kill(agent.pid, signal.SIGSTOP)  # or it would start others
        for pid in [*self.ranks_of(agent), agent.pid]:
            send(pid, signal.SIGKILL)
        agent.wait()

    def end(self) -> None:
        """Kill whatever is there."""
        for agent in self.running:
            self.lose(agent)
        for pid in self.left():
            send(pid, signal.SIGKILL)

    def left(self) -> list[int]:
        """The ranks that have not ended, whoever has started them."""
        pids = {line.pid for line in self.log()}
        marks = {pid: Path(f"/proc/{pid}/cmdline") for pid in pids}
        name, found = str(self.folder).encode(), []
        for pid, path in marks.items():
            with contextlib.suppress(OSError):
                if name in path.read_bytes():
                    found.append(pid)
        return sorted(found)

    # -- the run --------------------------------------------------------------------------

    def log(self) -> list[Line]:
        """What the ranks have noted."""
        path = self.folder / "log"
        return [Line.of(text) for text in path.read_text().splitlines()] if path.exists() else []

    @property
    def step(self) -> int:
        """The latest step that has begun; -1 if none has."""
        return max((line.step for line in self.log()), default=-1)

    @property
    def is_done(self) -> bool:
        """Whether the run has come to its end."""
        return (self.folder / "end.pt").exists()

    def until(self, is_so: Callable[[], bool], seconds: float = 120) -> None:
        """Wait until something is so.

        Raises:
            TimeoutError: it is not; with what agents and ranks have printed last.
        """
        deadline = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing has happened for {seconds:.0f} s\n{self.printed()}")
            time.sleep(0.02)

    def printed(self) -> str:
        """The end of what each agent and its ranks have printed."""
        files = [self.errors(k) for k in range(len(self.agents))]
        return "\n".join(f"{file.name}:\n{file.read_text()[-3000:]}" for file in files)


def send(pid: int, number: int) -> None:
    """Send a signal to a process, if it is still there."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
