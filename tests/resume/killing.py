"""One run: started, killed at a random moment, started again, until it has come to its end."""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from penstock.storage.folder import INDEX
from tests.resume.training import fork

_HANGS = 120.0  # seconds after which a run hangs
_TRIES = 5  # to kill it before its end
KINDS = ("threads", "processes")
MOMENTS = ("any", "save")
"""When a run is killed: at any time in training, or soon after a save has begun."""


@dataclass
class Outcome:
    """What became of a run.

    Attributes:
        workers: of its first start; later ones may have others.
        moment: when it was killed.
        seed: of what was left to chance.
        kills: how often it was killed; one that never was is not right.
        torn: how often a save was under way, as its files show.
        resumed: from which steps it went on.
        problems: what is not as it should be.
    """

    workers: str
    moment: str
    seed: int
    kills: int = 0
    torn: int = 0
    resumed: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def run(workers: str, moment: str, seed: int, expected: dict[str, Any], folder: Path) -> Outcome:
    """Let it be killed once or twice, and compare its end with an uninterrupted one's.

    Args:
        workers: of the first start.
        moment: one of `MOMENTS`.
        seed: of what is left to chance.
        expected: how an uninterrupted run ends.
        folder: an empty one; it is removed if all is well.
    """
    rng = random.Random(f"{workers} {moment} {seed}")
    outcome = Outcome(workers, moment, seed)
    kind, stages, tries = workers, 2, 0
    for attempt in range(20):
        kills = rng.choice([1, 1, 2])
        delay = None
        if outcome.kills < kills:
            delay = rng.uniform(0, 0.4) if moment == "any" else rng.uniform(0, 0.04)
        watch = Watch(folder, kind, stages, seed + attempt)
        watch.until_the_end(moment, delay, rng.randrange(1, 6 if moment == "save" else 9))
        outcome.resumed += watch.resumed
        if watch.killed:
            outcome.kills += 1
            outcome.torn += is_torn(folder / "run")
        elif watch.code != 0:
            outcome.problems.append(f"attempt {attempt} ended with {watch.code}")
            break
        if (folder / "end.pt").exists() and outcome.kills:
            break
        if (folder / "end.pt").exists():  # before its moment had come: another one is tried
            tries += 1
            if tries == _TRIES:
                outcome.problems.append(f"nobody killed it, in {tries} tries")
                break
            emptied(folder)
            continue
        kind, stages = rng.choice(KINDS), rng.choice([2, 2, 3]) if kind == "threads" else 2
    outcome.problems += differing(folder / "end.pt", expected)
    if not outcome.problems:
        shutil.rmtree(folder)
    return outcome


def emptied(folder: Path) -> None:
    """Remove all that a run has left."""
    shutil.rmtree(folder)
    folder.mkdir()


class Watch:
    """A start of the run, watched from outside.

    Attributes:
        killed: whether it was.
        code: with which it has ended.
        resumed: the step from which it went on.
    """

    def __init__(self, folder: Path, workers: str, stages: int, seed: int) -> None:
        self._read, write = os.pipe()
        self._pid = fork(folder, workers, stages, seed, write)
        os.close(write)
        self.killed = False
        self.code = 0
        self.resumed: list[int] = []

    def until_the_end(self, moment: str, delay: float | None, nth: int) -> None:
        """Kill it so many seconds after the nth step or save; `None` lets it go on."""
        what = "step" if moment == "any" else "save"
        act_at, limit, heard = None, time.monotonic() + _HANGS, b""
        while True:
            now = time.monotonic()
            if (act_at is not None and now >= act_at) or now >= limit:
                self.killed = act_at is not None
                os.killpg(self._pid, signal.SIGKILL)
                act_at, limit = None, now + _HANGS
            pause = 1.0 if act_at is None else max(0.0, act_at - now)
            if not select.select([self._read], [], [], pause)[0]:
                continue
            data = os.read(self._read, 65536)
            if not data:
                break
            *lines, heard = (heard + data).split(b"\n")
            for line in lines:
                moment_of, word, *rest = line.decode().split()
                if word == "from":
                    self.resumed.append(int(rest[0]))
                nth -= word == what
                if word == what and nth == 0 and delay is not None:
                    act_at = float(moment_of) + delay
        os.close(self._read)
        self.code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def is_torn(folder: Path) -> bool:
    """Whether files are there that no checkpoint has: those of a save that was killed."""
    index = folder / INDEX
    named = index.read_text() if index.exists() else ""
    return folder.is_dir() and any(
        path.name != INDEX and path.name not in named for path in folder.iterdir()
    )


def differing(path: Path, expected: dict[str, Any]) -> list[str]:
    """What at the end of a run is not as expected."""
    if not path.exists():
        return ["it has not come to its end"]
    found = torch.load(path, weights_only=True)
    return [f"{name} differ" for name in expected if found[name] != expected[name]]
