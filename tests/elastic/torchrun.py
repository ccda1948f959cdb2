"""Runs of torchrun through random events, which end with the bits of one device.

python -m tests.elastic.torchrun [--model gpt] [--seed 0] [--events 20] [--steps 200]

A run has one agent or two, each with one rank or two. Its events are at random steps: a rank is
killed, or two of them; a rank or an agent gets SIGTERM; a rank is stopped for a while; another
agent joins; one is lost with all its ranks. Some come while ranks still start after the one before.
Where nobody is left another agent is started, as a scheduler would.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tests.elastic.job import Job, Line, send
from tests.elastic.training import STEPS, TASKS, reference

EVENTS = 20
PAUSE = 0.2  # seconds between two steps, for events to come at many of them


@dataclass
class Event:
    """Something that has happened to a run.

    Attributes:
        what: it was.
        step: that had begun before.
        ranks: that trained before.
        now: ranks that trained afterwards.
        resumed: from which step; `None` if nobody was started again.
        seconds: until a step began; `None` if another event came first.
    """

    what: str
    step: int
    ranks: int
    now: int = 0
    resumed: int | None = None
    seconds: float | None = None

    @property
    def is_pause(self) -> bool:
        """Whether ranks may go on without being started again."""
        return self.what.startswith("SIGSTOP")

    @property
    def is_join(self) -> bool:
        """Whether ranks go on until others are there."""
        return "joins" in self.what


@dataclass
class Outcome:
    """What has become of a run.

    Attributes:
        model: that was trained.
        seed: of what was left to chance.
        steps: of the run.
        seconds: that it took.
        events: in order.
        problems: what is not as it should be.
    """

    model: str
    seed: int
    steps: int
    seconds: float = 0.0
    events: list[Event] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def line(self) -> str:
        """All of it but single events, as JSON."""
        found = {
            "workers": "torchrun",
            "model": self.model,
            "seed": self.seed,
            "steps": self.steps,
            "events": len(self.events),
            "seconds": round(self.seconds, 1),
            "same_bits": not self.problems,
            "problems": self.problems,
        }
        return json.dumps(found)


def run(model: str, seed: int, folder: Path, steps: int = STEPS, events: int = EVENTS) -> Outcome:
    """Let random events happen to a run, and compare its end with an undisturbed one's.

    Args:
        model: one of `TASKS`.
        seed: of what is left to chance.
        folder: an empty one; profiles are kept beside it.
        steps: of the run.
        events: how many.
    """
    outcome, began = Outcome(model, seed, steps), time.monotonic()
    arguments = ["--model", model, "--steps", str(steps), "--pause", str(PAUSE)]
    with Job(folder, arguments) as job:
        try:
            _Happening(job, outcome, random.Random(f"{model} {seed}")).all(events)
        except TimeoutError as error:
            outcome.problems.append(str(error))
        if job.left():
            outcome.problems.append(f"these processes are left: {job.left()}")
    outcome.seconds = time.monotonic() - began
    if not outcome.problems:
        found = torch.load(folder / "end.pt", weights_only=True)
        expected = reference(model, steps)
        wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
        outcome.problems += [f"{name} differs" for name in wrong]
    return outcome


class _Happening:
    """Has events happen to a job, and waits until it trains again.

    Args:
        job: which.
        outcome: where they are noted.
        rng: decides.
    """

    def __init__(self, job: Job, outcome: Outcome, rng: random.Random) -> None:
        self._job, self._outcome, self._rng = job, outcome, rng
        self._since, self._lines = 0.0, 0  # the last event, and the lines of the log before it

    def all(self, count: int) -> None:
        """That many events, then the end of the run."""
        job, rng = self._job, self._rng
        job.start(rng.choice([1, 2]))
        for left in range(count, 0, -1):
            if self._ends_ranks and rng.random() < 0.25:
                time.sleep(rng.uniform(0.0, 8.0))  # others start meanwhile
            else:
                self._train_on(partial(self._is_over, left, patient=rng.random() < 0.4))
                most = (self._outcome.steps - job.step) // (left + 1)
                moment = job.step + rng.randint(1, max(1, most))
                self._train_on(partial(self._has_begun, moment))
            time.sleep(rng.uniform(0.0, 2 * PAUSE))
            self._close_last()
            if job.is_done:
                self._outcome.problems.append(f"it has ended {left} events too early")
                break
            self._happens()
        self._train_on(lambda: job.is_done)
        self._close_last()
        job.until(lambda: not job.running or len(job.agents) > 1, 60)
        for agent in job.running:  # one may wait for another that is gone
            agent.send_signal(signal.SIGTERM)
        job.until(lambda: not job.running and not job.left(), 60)

    def _train_on(self, is_far: Callable[[], bool]) -> None:
        """Wait until the run is that far, and start an agent where there is none."""
        job = self._job

        def is_so() -> bool:
            if not job.running and not job.is_done:
                job.start(self._rng.choice([1, 2]))
            return is_far() or job.is_done

        job.until(is_so, 400)  # ranks wait 300 s for one that is lost before it has said a word

    def _since_last(self) -> tuple[Line | None, Line | None]:
        """Since the last event: where ranks have gone on that were started again, and a step."""
        lines = self._job.log()[self._lines :]
        starts = [line for line in lines if line.what.startswith("from ")]
        start = starts[-1] if starts else None
        pids = {line.pid for line in starts}
        steps = [line for line in lines if line.step >= 0 and line.time > self._since]
        steps = [line for line in steps if line.pid in pids or not starts]
        return start, steps[0] if steps else None

    def _has_begun(self, step: int) -> bool:
        return self._job.step >= step

    @property
    def _ends_ranks(self) -> bool:
        """Whether the last event is one after which ranks cannot go on."""
        events = self._outcome.events
        return bool(events) and not events[-1].is_pause and not events[-1].is_join

    def _is_over(self, left: int, patient: bool) -> bool:
        """Whether ranks train again after the last event.

        They also train until one more has joined, which takes as long as a new start, and is not
        always waited for.

        Args:
            left: events that are to come.
            patient: whether to wait for those that join, if there are steps enough.
        """
        if not self._outcome.events:
            return True
        start, step = self._since_last()
        last = self._outcome.events[-1]
        if last.is_join and not (patient and self._outcome.steps - self._job.step > 4 * left):
            return True
        return step is not None and (start is not None or last.is_pause)

    def _close_last(self) -> None:
        """Note what the last event has cost."""
        if not self._outcome.events:
            return
        last, (start, step) = self._outcome.events[-1], self._since_last()
        if start is not None:
            last.resumed = int(start.what.split()[1])
        if step is not None and (start is not None or last.is_pause):
            last.now, last.seconds = step.world, step.time - self._since

    def _happens(self) -> None:
        job, rng = self._job, self._rng
        log = job.log()
        kinds: list[Callable[[], str]] = [
            *(self._kill, self._kill, self._kill_two, self._stop, self._terminate_agent),
            *((self._lose, self._lose) if len(job.running) == 2 else (self._join, self._join)),
            *([self._terminate] if len(job.running) == 1 else []),
        ]
        event = Event("", job.step, log[-1].world if log else 0)
        self._since, self._lines = time.time(), len(log)
        event.what = rng.choice(kinds)() if job.running else self._join()
        self._outcome.events.append(event)
        print(f"  after step {event.step}: {event.what}", file=sys.stderr, flush=True)

    def _ranks(self) -> list[int]:
        job = self._job
        return [pid for agent in job.running for pid in job.ranks_of(agent)]

    def _victims(self, count: int) -> Sequence[int]:
        ranks = self._ranks()
        return self._rng.sample(ranks, min(count, len(ranks)))

    def _kill(self) -> str:
        for pid in self._victims(1):
            send(pid, signal.SIGKILL)
        return "SIGKILL to a rank"

    def _kill_two(self) -> str:
        for pid in self._victims(2):
            send(pid, signal.SIGKILL)
        return "SIGKILL to two ranks"

    def _terminate(self) -> str:
        for pid in self._victims(1):
            send(pid, signal.SIGTERM)
        return "SIGTERM to a rank"

    def _stop(self) -> str:
        victims = self._victims(1)
        for pid in victims:
            send(pid, signal.SIGSTOP)
        seconds = self._rng.choice([0.5, 2.0, 8.0])
        time.sleep(seconds)
        for pid in victims:
            send(pid, signal.SIGCONT)
        return f"SIGSTOP to a rank, for {seconds} s"

    def _terminate_agent(self) -> str:
        self._rng.choice(self._job.running).send_signal(signal.SIGTERM)
        return "SIGTERM to an agent"

    def _lose(self) -> str:
        self._job.lose(self._rng.choice(self._job.running))
        return "an agent is killed with its ranks"

    def _join(self) -> str:
        self._job.start(self._rng.choice([1, 2]))
        return "an agent joins"


def table(outcomes: Sequence[Outcome]) -> str:
    """The events of these runs, as a table in Markdown."""
    lines = [
        "| model | event | after step | ranks | resumed from step | seconds until a step began |",
        "|---|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        for event in outcome.events:
            resumed = "not interrupted" if event.resumed is None else str(event.resumed)
            ranks = f"{event.ranks} → {event.now}" if event.now else str(event.ranks)
            took = "another event came first" if event.seconds is None else f"{event.seconds:.1f}"
            cells: list[Any] = [outcome.model, event.what, event.step, ranks, resumed, took]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run them; 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=TASKS, action="append")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--events", type=int, default=EVENTS)
    options = parser.parse_args()
    outcomes = []
    scratch = Path(tempfile.mkdtemp())
    for model in options.model or TASKS:
        folder = scratch / model
        folder.mkdir()
        outcomes.append(run(model, options.seed, folder, options.steps, options.events))
        print(outcomes[-1].line(), flush=True)
    print(table(outcomes))
    problems = any(outcome.problems for outcome in outcomes)
    if not problems:
        shutil.rmtree(scratch)
    return int(problems)


if __name__ == "__main__":
    sys.exit(main())
