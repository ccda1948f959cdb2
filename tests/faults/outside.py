"""One fault: a driver of its own, on a terminal of its own, watched from outside."""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import pty
import random
import select
import signal
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tests.faults.kinds import KINDS, Kind
from tests.faults.session import SOON, Session, children, command_of

_HANGS = 120.0  # seconds after which a driver hangs; four workers take long to start
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class Outcome:
    """What became of a fault.

    Attributes:
        name: the kind.
        seed: of the run.
        error: what the driver was told.
        seconds: until then, or until everything was gone.
        limit: how many that may be; 0 if any.
        problems: what is not as it should be, however long it took.
        screen: what the driver wrote.
    """

    name: str
    seed: int
    error: str = ""
    seconds: float = 0.0
    limit: float = 0.0
    problems: list[str] = field(default_factory=list)
    screen: str = ""

    @property
    def is_late(self) -> bool:
        """Whether it took longer than it may."""
        return bool(self.limit) and self.seconds > self.limit


def adopt_orphans() -> None:
    """Processes whose parents have ended become children of this one, so it sees them."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def run(name: str, seed: int) -> Outcome:
    """Let a fault happen. In the driver that this forks, it ends with the interpreter."""
    kind, rng = KINDS[name], random.Random(f"{name} {seed}")
    master, slave = pty.openpty()
    sane = termios.tcgetattr(slave)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        os.close(master)
        _drive(kind, rng, slave, write)
    os.close(write)
    watch = _Watch(Outcome(name, seed), kind, rng, pid, master, slave, read)
    watch.until_the_end()
    if kind.deed != "hang up" and termios.tcgetattr(slave) != sane:
        watch.outcome.problems.append("the terminal is not as it was")
    for fd in (slave, read, *([master] if kind.deed != "hang up" else [])):
        os.close(fd)
    return watch.outcome


def _drive(kind: Kind, rng: random.Random, terminal: int, write: int) -> NoReturn:
    """Be a driver, as if started in a terminal."""
    os.setsid()
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for fd in (0, 1, 2):
        os.dup2(terminal, fd)
    os.close(terminal)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # whoever runs this may ignore it, as nohup does

    def tell(what: str, **more: Any) -> None:
        line = json.dumps({"what": what, "time": time.monotonic(), **more})
        os.write(write, line.encode() + b"\n")

    session = Session(rng, tell)
    kind.script(session)
    tell("done", problems=session.problems)
    sys.exit()


class _Watch:
    """What is known of a driver from outside."""

    def __init__(
        self,
        outcome: Outcome,
        kind: Kind,
        rng: random.Random,
        pid: int,
        master: int,
        slave: int,
        read: int,
    ) -> None:
        self.outcome = outcome
        self._kind = kind
        self._pid = pid
        self._master = master
        self._read = read
        self._delay = rng.uniform(0.0, kind.when[1])
        self._act_at: float | None = None
        self._acted_at: float | None = None
        self._spared: list[int] = []
        self._done = False
        self._status: int | None = None

    def until_the_end(self) -> None:
        """Watch, act when the time has come, and judge."""
        limit = time.monotonic() + _HANGS
        buffer = b""
        while self._status is None:
            if time.monotonic() > limit:
                self.outcome.problems.append("it hangs")
                os.kill(self._pid, signal.SIGKILL)
                limit += 10
            ready, _, _ = select.select(self._open(), [], [], 0.01)
            if self._master in ready:
                self._hear_screen()
            if self._read in ready:
                buffer += os.read(self._read, 65536)
                *lines, buffer = buffer.split(b"\n")
                for line in lines:
                    self._hear(json.loads(line))
            self._act()
            done, status = os.waitpid(self._pid, os.WNOHANG)
            if done:
                self._status = os.waitstatus_to_exitcode(status)
                rest = os.read(self._read, 65536) if self._has_more() else b""
                for line in (buffer + rest).splitlines():
                    self._hear(json.loads(line))
        self._hear_rest()
        self._judge(time.monotonic())

    def _open(self) -> list[int]:
        hung_up = self._kind.deed == "hang up" and self._acted_at is not None
        return [self._read] if hung_up else [self._read, self._master]

    def _has_more(self) -> bool:
        return bool(select.select([self._read], [], [], 0)[0])

    def _hear_rest(self) -> None:
        while self._master in self._open() and select.select([self._master], [], [], 0)[0]:
            if not self._hear_screen():
                return

    def _hear_screen(self) -> bool:
        try:
            data = os.read(self._master, 65536)
        except OSError:
            return False
        self.outcome.screen = (self.outcome.screen + data.decode(errors="replace"))[-20_000:]
        return bool(data)

    def _hear(self, word: dict[str, Any]) -> None:
        what, outcome = word["what"], self.outcome
        if what == self._kind.when[0] and self._kind.deed:
            self._act_at = word["time"] + self._delay
        elif what == "raised":
            outcome.error = word["error"]
        elif what == "took":
            outcome.seconds, outcome.limit = word["seconds"], word["limit"]
        elif what == "over":
            outcome.seconds = word["time"] - (self._acted_at or word["time"])
        elif what == "forked":
            self._spared.append(word["pid"])
        elif what == "done":
            outcome.problems += word["problems"]
            self._done = True

    def _act(self) -> None:
        """Do the deed, once it is time."""
        now = time.monotonic()
        if self._act_at is None or now < self._act_at:
            return
        deed = self._kind.deed
        self._acted_at = self._acted_at or now
        self._act_at = now + 0.1 if deed == "two ctrl-c" and now == self._acted_at else None
        if deed in ("ctrl-c", "two ctrl-c"):
            os.write(self._master, b"\x03")
        elif deed == "hang up":
            os.close(self._master)
        elif deed == "terminate":
            os.kill(self._pid, signal.SIGTERM)
        else:
            if deed == "kill, one stopped":
                os.kill(children(self._pid)[0], signal.SIGSTOP)
            os.kill(self._pid, signal.SIGKILL)

    def _judge(self, ended: float) -> None:
        """What is not as it should be, now that the driver has ended."""
        kind, outcome = self._kind, self.outcome
        if kind.exit_code is not None and self._status != kind.exit_code:
            outcome.problems.append(f"the driver ended with {self._status}")
        if kind.survives and not self._done and not kind.exit_code:
            outcome.problems.append("the driver did not report")
        if kind.deed and kind.survives:
            outcome.limit = SOON
        if kind.last not in outcome.screen[-1500:]:
            outcome.problems.append(f"the screen does not end with {kind.last!r}")
        outcome.error = outcome.error or f"the driver ends with {self._status}"
        for left in self._gone(ended):
            outcome.problems.append(f"left behind: {left}")
        if not kind.survives:
            outcome.seconds = time.monotonic() - (self._acted_at or ended)

    def _gone(self, ended: float) -> Iterator[str]:
        """Wait for the driver's orphans to end; those that do not."""
        while found := [p for p in children() if p not in self._spared]:
            for pid in found:
                done, _ = os.waitpid(pid, os.WNOHANG)
                if not done and time.monotonic() > ended + SOON:
                    yield command_of(pid)
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        for pid in self._spared:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
