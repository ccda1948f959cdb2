"""One job that trains in turns, with and without strangers, and what became of it."""

from __future__ import annotations

import json
import os
import random
import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.bench.guarded import interval
from tests.fuzz.attack import Attack
from tests.fuzz.messages import Hostile
from tests.fuzz.sockets import Listening

ROOT = Path(__file__).parents[2]
KINDS = {"processes": 1, "ranks": 3, "ranks apart": 2}
"""The jobs, and how many processes run the script."""
CONNECTS, CONNECTS_FAR = "start of ranks, Unix socket", "start of ranks, TCP"
METRICS, QUESTIONS = "metrics, TCP", "questions, Unix socket"
GLOO, STORE = "torch: gloo, TCP", "torch: store of torchrun, TCP"
OWN = {
    "processes": {METRICS, QUESTIONS},
    "ranks": {CONNECTS, METRICS, QUESTIONS},
    "ranks apart": {CONNECTS, CONNECTS_FAR, METRICS, QUESTIONS},
}
"""What of Penstock's own listens in each job."""

_PATIENCE = 300.0  # seconds for a turn


@dataclass
class Outcome:
    """What became of a job.

    Attributes:
        kind: of the job.
        sent: messages, by what the socket is for.
        kinds: messages, by what they were.
        crashes: what was wrong, in words.
        unpickled: how many pickles were read.
        quiet: what was measured in turns without strangers, rank by rank.
        hostile: the same in turns with them.
    """

    kind: str
    sent: dict[str, int] = field(default_factory=dict)
    kinds: dict[str, int] = field(default_factory=dict)
    crashes: list[str] = field(default_factory=list)
    unpickled: int = 0
    quiet: list[list[dict[str, Any]]] = field(default_factory=list)
    hostile: list[list[dict[str, Any]]] = field(default_factory=list)

    @property
    def ratio(self) -> list[float]:
        """Of the median step of each turn with strangers and the one before, with its interval."""
        return _ratio(self.quiet, self.hostile, lambda rank: statistics.median(rank["steps"]))

    @property
    def connecting(self) -> tuple[float, float]:
        """Seconds in which a rank that comes late is connected: without and with strangers."""
        return (
            statistics.median(rank["connecting"] for turn in self.quiet for rank in turn[1:]),
            statistics.median(rank["connecting"] for turn in self.hostile for rank in turn[1:]),
        )

    @property
    def slowest(self) -> float:
        """The most seconds that this took with strangers."""
        return max(rank["connecting"] for turn in self.hostile for rank in turn[1:])

    @property
    def problems(self) -> list[str]:
        """What is not as it should be; nothing of it is a matter of time."""
        found = [*self.crashes]
        if self.unpickled:
            found.append(f"{self.unpickled} pickles were read")
        if missing := OWN[self.kind] - self.sent.keys():
            found.append(f"nothing was sent to {', '.join(sorted(missing))}")
        turns = [*self.quiet, *self.hostile]
        if len({str([rank["losses"] for rank in turn]) for turn in turns}) > 1:
            found.append("the losses differ")
        for what in ("threads", "sockets"):
            first, last = ([rank[what] for rank in self.quiet[k]] for k in (0, -1))
            if any(more > before for before, more in zip(first, last, strict=True)):
                found.append(f"{what} are left: {first} before, {last} after")
        return found


def _ratio(
    ones: Sequence[Sequence[Any]], others: Sequence[Sequence[Any]], of: Callable[[Any], float]
) -> list[float]:
    found = [of(b[0]) / of(a[0]) for a, b in zip(ones, others, strict=False)]
    return [statistics.median(found), *interval(found)] if found else []


class _Job:
    """The processes of a job.

    Args:
        kind: of the job.
        folder: of its own.
        secret: of its pipelines.
    """

    def __init__(self, kind: str, folder: Path, secret: str) -> None:
        self.kind, self.folder, self.ranks = kind, folder, KINDS[kind]
        self.port = random.Random(secret).randrange(20_000, 30_000)
        start = [sys.executable]
        if kind != "processes":
            start += ["-m", "torch.distributed.run", "--standalone"]
            start += [f"--nproc-per-node={self.ranks}"]
        env = {
            **os.environ,
            "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
            "PYTHONWARNINGS": "ignore",
            "PENSTOCK_CACHE": str(folder / "cache"),
            "PENSTOCK_METRICS": str(self.port),
            "XDG_RUNTIME_DIR": str(folder),
            "FUZZ_SECRET": secret,
            "OMP_NUM_THREADS": "1",
        }
        with (folder / "screen").open("w") as screen:
            self.process = subprocess.Popen(
                [*start, "-m", "tests.fuzz.job", kind, str(folder)],
                cwd=ROOT,
                env=env,
                stdout=screen,
                stderr=screen,
                start_new_session=True,
            )

    def begin(self, number: int, steps: int) -> None:
        """Let a turn begin."""
        new = self.folder / "new"
        new.write_text(str(steps))
        new.rename(self.folder / f"turn-{number}")

    def is_done(self, number: int) -> bool:
        """Whether all ranks have ended the turn."""
        return all((self.folder / f"done-{number}-{k}").exists() for k in range(self.ranks))

    def found(self, number: int) -> list[dict[str, Any]]:
        """What the ranks have measured in the turn."""
        paths = [self.folder / f"done-{number}-{k}" for k in range(self.ranks)]
        return [json.loads(path.read_text()) for path in paths]

    def name(self, one: Listening) -> str:
        """What a socket is for."""
        if one.family == "unix":
            return CONNECTS if one.host.startswith("@penstock-") else QUESTIONS
        if self.port <= one.port < self.port + self.ranks:
            return METRICS
        if (self.folder / f"port-{one.port}").exists():
            return CONNECTS_FAR
        return STORE if one.pid == self.process.pid else GLOO

    def screen(self) -> str:
        """What the processes have said."""
        return (self.folder / "screen").read_text(errors="replace")

    def end(self) -> None:
        """End what is left of it."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)


def run(
    kind: str, messages: int, seed: int, rate: float = 300.0, steps: int = 60, torchs: bool = True
) -> Outcome:
    """Train without and with strangers in turns, until so many messages are sent, or a few more.

    Args:
        kind: of the job.
        messages: how many.
        seed: of the first.
        rate: messages a second.
        steps: of a turn.
        torchs: whether torch's own sockets get some, too.
    """
    outcome, secret = Outcome(kind), secrets.token_hex(32)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name)
        job = _Job(kind, folder, secret)
        hostile = Hostile(str(folder / "marks" / "unpickled"), secret)
        attack = Attack(job.process.pid, folder, hostile, seed, rate, job.name)
        decoy = subprocess.Popen(
            [sys.executable, "-m", "tests.fuzz.decoy"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        elsewhere = Attack(decoy.pid, folder, hostile, seed, rate, lambda one: "decoy")
        try:
            wanted = OWN[kind] | ({GLOO, STORE} if torchs and kind != "processes" else set())
            each = dict.fromkeys(wanted, -(-messages // len(wanted)))
            _turns(job, attack, elsewhere, outcome, each, steps)
        finally:
            attack.end()
            elsewhere.end()
            job.end()
            decoy.communicate()
        outcome.sent, outcome.kinds = dict(+attack.sent), dict(attack.kinds)
        outcome.unpickled = len(list(folder.glob("marks/*")))
        screen = job.screen()
        if job.process.returncode or "Traceback" in screen:
            outcome.crashes.append(f"ended with {job.process.returncode}: {screen[-3000:]}")
    return outcome


def _turns(
    job: _Job,
    attack: Attack,
    elsewhere: Attack,
    outcome: Outcome,
    wanted: Mapping[str, int],
    steps: int,
) -> None:
    """Let the job take turns until as many messages as wanted are sent to each kind of socket.

    In the other turns as many are sent elsewhere, since strangers cost the machine something, too.
    """

    def enough(name: str) -> bool:
        return attack.sent[name] >= wanted.get(name, 0)

    number = -1
    while job.process.poll() is None:
        number += 1
        is_hostile = bool(number % 2)
        end = time.monotonic() + _PATIENCE
        is_last = number > 1 and not is_hostile and all(map(enough, wanted))
        job.begin(number, steps)

        def is_over(number: int = number, end: float = end) -> bool:
            return job.is_done(number) or job.process.poll() is not None or time.monotonic() > end

        with ThreadPoolExecutor(1, initializer=_let_others_go_first) as pool:
            if is_hostile:
                pool.submit(attack.go_on, is_over, enough).result()
            else:
                pool.submit(elsewhere.go_on, is_over, lambda name: False).result()
        attack.end()
        elsewhere.end()
        while not is_over():
            time.sleep(0.02)
        if not job.is_done(number):
            if job.process.poll() is None:
                outcome.crashes.append(f"turn {number} did not end within {_PATIENCE:.0f} s")
            return
        (outcome.hostile if is_hostile else outcome.quiet).append(job.found(number))
        if is_last:
            job.begin(number + 1, 0)
            with suppress(subprocess.TimeoutExpired):
                job.process.wait(60)
            return


def _let_others_go_first() -> None:
    """Strangers take no time of the cores that the job wants; Linux has this for a thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 5)


def as_json(outcome: Outcome) -> Mapping[str, Any]:
    """What is kept of it."""
    found: dict[str, Any] = {
        "job": outcome.kind,
        "sent": outcome.sent,
        "kinds": outcome.kinds,
        "problems": outcome.problems,
        "unpickled": outcome.unpickled,
        "ratio": outcome.ratio,
        "turns": len(outcome.hostile),
    }
    if outcome.kind != "processes":
        found |= {"connecting": outcome.connecting, "slowest": outcome.slowest}
    return found
