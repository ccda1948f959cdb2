"""Runs of worker processes and actors through random events, which end with one device's bits.

python -m tests.elastic.processes [--workers ray] [--model gpt] [--runs 1] [--seed 0] [--events 20]
    [--steps 200]

A run has two or three workers, as stages, replicas or whatever is predicted to be fastest. Its
events come at random moments of random steps: a worker is killed, or two of them at once; one gets
SIGTERM; one is stopped; one more joins; one leaves. In every other run those that are left go on,
in the others they are replaced. Two actors of a Ray cluster are not killed at once: one may be the
buddy of the other.

A step with an event does something else as well, which may be what the event hits: it evaluates,
runs batches ahead, clips, saves, or reads weights or the state of the optimizer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

import penstock as ps
from tests.elastic.training import MICROBATCHES, RATE, STEPS, TASKS, Task, reference
from tests.support.actors import have_room

EVENTS = 20
_GONE = 30.0  # seconds until Ray has ended the actors of a pipeline that is closed
MOST = 3  # workers

_ACTIONS = ("eval_step", "map", "clip_grad_norm_", "save", "state_dict", "optimizer.state_dict")
_UNREACHED = 1e9  # a norm that no gradient has, so clipping multiplies by 1

_KINDS = ("SIGKILL", "SIGKILL", "SIGKILL", "two SIGKILL", "SIGTERM", "SIGSTOP", "joins", "leaves")


@dataclass
class Event:
    """Something that has happened to a run.

    Attributes:
        what: it was.
        step: in which it came, or before which.
        workers: that there were before.
        now: those that there were after it.
        seconds: that the steps from then to the next event took longer than the median step, those
            that took more than twice as long. What is done besides is part of its step.
    """

    what: str
    step: int
    workers: int
    now: int = 0
    seconds: float = 0.0


@dataclass
class Outcome:
    """What has become of a run.

    Attributes:
        workers: their kind.
        model: that was trained.
        seed: of what was left to chance.
        steps: of the run.
        on_failure: of the pipeline.
        replicas: likewise.
        seconds: that it took.
        step_seconds: of the median step.
        events: in order.
        problems: what is not as it should be.
    """

    workers: Literal["processes", "ray"]
    model: str
    seed: int
    steps: int
    on_failure: Literal["replace", "continue"]
    replicas: int | Literal["auto"]
    seconds: float = 0.0
    step_seconds: float = 0.0
    events: list[Event] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def line(self) -> str:
        """All of it but single events, as JSON."""
        found = {
            "workers": self.workers,
            "model": self.model,
            "seed": self.seed,
            "steps": self.steps,
            "on_failure": self.on_failure,
            "replicas": self.replicas,
            "events": len(self.events),
            "seconds": round(self.seconds, 1),
            "step_seconds": round(self.step_seconds, 4),
            "same_bits": not self.problems,
            "problems": self.problems,
        }
        return json.dumps(found)


def run(
    model: str,
    seed: int,
    expected: dict[str, Any],
    steps: int,
    events: int,
    workers: Literal["processes", "ray"] = "processes",
) -> Outcome:
    """Let random events happen to a run, and compare its end with an undisturbed one's.

    Args:
        model: one of `TASKS`.
        seed: of what is left to chance.
        expected: how it has to end.
        steps: of the run.
        events: how many.
        workers: their kind.
    """
    rng = random.Random(f"{model} {seed}")
    outcome = Outcome(
        *(workers, model, seed, steps, "replace" if seed % 2 == 0 else "continue"),
        replicas="auto" if seed % 3 == 0 and workers == "processes" else 1,
    )
    if workers == "ray":
        have_room()
    began = time.monotonic()
    try:
        found = _Happening(outcome, rng, TASKS[model]).train(events)
    except Exception as error:  # of any kind: it is told, and the next run begins
        outcome.problems.append(f"{type(error).__name__}: {error}")
    else:
        wrong = [name for name in expected if not torch.equal(found[name], expected[name])]
        outcome.problems += [f"{name} differs" for name in wrong]
    outcome.seconds = time.monotonic() - began
    return outcome


class _Happening:
    """Trains, and has events happen meanwhile.

    Args:
        outcome: where they are noted.
        rng: decides.
        task: what is trained.
    """

    def __init__(self, outcome: Outcome, rng: random.Random, task: Task) -> None:
        self._outcome, self._rng, self._task = outcome, rng, task
        self._pids: set[int] = set()
        self._gone: set[int] = set()  # that were killed, or asked to end, or soon will be
        self._times: list[float] = []

    def train(self, events: int) -> dict[str, torch.Tensor]:
        """Train all steps; returns the state dict."""
        outcome, task, steps = self._outcome, self._task, self._outcome.steps
        due = sorted(self._rng.sample(range(2, steps), events))
        model = task.model()
        with (
            tempfile.TemporaryDirectory() as folder,
            ps.Pipeline(
                model,
                (task.batch(0)[0],),
                devices=["cpu"] * self._rng.choice([2, MOST]),
                num_microbatches=MICROBATCHES,
                workers=ps.Ray(cpus=1) if outcome.workers == "ray" else "processes",
                replicas=outcome.replicas,
                on_failure=outcome.on_failure,
            ) as pipe,
        ):
            optimizer = pipe.optimizer(torch.optim.Adam, lr=RATE)
            for step in range(steps):
                began = time.monotonic()
                event = self._event(pipe, step) if step in due else None
                action = self._rng.choice(_ACTIONS) if event else ""
                x, target = task.batch(step)
                optimizer.zero_grad()
                pipe.train_step(x, target=target, loss_fn=task.loss)
                if action == "clip_grad_norm_":
                    pipe.clip_grad_norm_(_UNREACHED)
                optimizer.step()
                self._act(action, pipe, optimizer, step, Path(folder))
                self._pids.update(member.pid for member in pipe.members)
                self._times.append(time.monotonic() - began)
                if event is not None:
                    event.now = len(pipe.members)
            found = {name: value.clone() for name, value in pipe.state_dict().items()}
        outcome.step_seconds = usual = statistics.median(self._times)
        ends = [event.step for event in outcome.events[1:]]
        for event, end in zip(outcome.events, [*ends, steps], strict=True):
            late = [t - usual for t in self._times[event.step : end] if t > 2 * usual]
            event.seconds = sum(late)
        deadline = time.monotonic() + _GONE
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.1)
        outcome.problems += [f"these processes are left: {left}"] if left else []
        return found

    def _act(
        self,
        action: str,
        pipe: ps.Pipeline,
        optimizer: torch.optim.Optimizer,
        step: int,
        folder: Path,
    ) -> None:
        """Do something after a step that changes no weight."""
        batches = [self._task.batch(step + ahead) for ahead in range(3)]
        if action in ("eval_step", "map"):
            pipe.eval()
            with torch.no_grad():
                if action == "map":
                    list(pipe.map(x for x, _ in batches))
                else:
                    pipe.eval_step(batches[0][0], target=batches[0][1], loss_fn=self._task.loss)
            pipe.train()
        elif action == "save":
            try:
                pipe.save(folder / "run", optimizer=optimizer)
            except ps.CheckpointError:  # a worker has died that was writing
                pipe.save(folder / "run", optimizer=optimizer)
        elif action == "state_dict":
            pipe.state_dict()
        elif action == "optimizer.state_dict":
            optimizer.state_dict()

    def _left(self) -> list[int]:
        """The workers' processes that have not ended."""
        return [pid for pid in self._pids if Path(f"/proc/{pid}").exists()]

    def _event(self, pipe: ps.Pipeline, step: int) -> Event | None:
        """Have something happen, now or in a moment, if anything can."""
        rng, count = self._rng, len(pipe.members)
        members = [member for member in pipe.members if member.pid not in self._gone]
        kinds = [kind for kind in _KINDS if self._is_possible(kind, count, len(members))]
        if not kinds:
            return None
        what = rng.choice(kinds)
        event = Event(what, step, count)
        self._outcome.events.append(event)
        if what in ("joins", "leaves"):
            more = 1 if what == "joins" else -1
            pipe.resize(["cpu"] * (count + more), progress=None)
            return event
        victims = rng.sample(members, 2 if what.startswith("two") else 1)
        self._gone.update(member.pid for member in victims)
        number = signal.Signals[what.split()[-1]]
        moment = rng.uniform(0.0, 2.0) * statistics.median(self._times[-20:] or [0.01])
        timer = threading.Timer(moment, self._send, ([m.pid for m in victims], number))
        timer.start()
        return event

    def _is_possible(self, kind: str, count: int, safe: int) -> bool:
        """Whether something can happen to so many workers, of whom so many are not to end yet."""
        if kind == "joins":
            return count < MOST
        if kind == "leaves":
            return safe > 1
        if kind.startswith("two") and self._outcome.workers == "ray":
            return False
        others = self._outcome.on_failure == "continue" or self._outcome.workers == "ray"
        return safe >= (2 if kind.startswith("two") else 1) + others

    def _send(self, pids: Sequence[int], number: signal.Signals) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):  # it was replaced meanwhile
                os.kill(pid, number)


def table(outcomes: Sequence[Outcome]) -> str:
    """What each kind of event has cost in these runs, as a table in Markdown."""
    lines = [
        "| model | on_failure | event | times | median seconds | most |",
        "|---|---|---|---|---|---|",
    ]
    costs: dict[tuple[str, str, str], list[float]] = {}
    for outcome in outcomes:
        for event in outcome.events:
            key = outcome.model, outcome.on_failure, event.what
            costs.setdefault(key, []).append(event.seconds)
    for key, own in sorted(costs.items()):
        cells = [*key, len(own), f"{statistics.median(own):.2f}", f"{max(own):.2f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run them; 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", choices=["processes", "ray"], default="processes")
    parser.add_argument("--model", choices=TASKS, action="append")
    parser.add_argument("--runs", type=int, default=1, help="of each model")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--events", type=int, default=EVENTS)
    options = parser.parse_args()
    outcomes = []
    for model in options.model or TASKS:
        expected = reference(model, options.steps)
        for seed in range(options.seed, options.seed + options.runs):
            asked = options.steps, options.events, options.workers
            outcomes.append(run(model, seed, expected, *asked))
            print(outcomes[-1].line(), flush=True)
    print(table(outcomes))
    return int(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
