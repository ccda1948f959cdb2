"""What watching costs: steps with and without the board, and with and without being recorded.

    python -m penstock.bench watched [--models gpt,tiny] [--workers threads,processes]
        [--seconds 60] [--json FILE] [--record]

One pipeline takes steps of three kinds in turns: as always; with workers that note nothing on their
records; and recorded, as a few steps are for reports, with everything that is done for it. Then it
takes steps for half a second each in turns with and without requests: at the beginning of a turn
with requests a thread of this process scrapes the metrics over HTTP, and `pipe.status()` is called.
The ratios are medians of pairs, with the interval in which 95 % of the medians of resampled pairs
lie. In the end it is measured how long it takes to get the stack of a worker that hangs.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import penstock as ps
from penstock.bench import record
from penstock.bench.guarded import interval
from penstock.bench.subjects import Subject, gpt2_like, subjects, tokens
from penstock.board.memory import Record
from penstock.board.runs import find
from penstock.observe.on_demand import stacks_of
from penstock.workers.processes.worker_state import WorkerState

_WARM_UP = 5  # turns
_FEWEST = 5  # turns, however long they take
_ASKED = 5  # times that the stack of a worker that hangs is fetched
_BLOCK = 0.5  # seconds of steps in a turn with or without requests
_TIMEOUT = 60.0  # seconds


class _Silent(Record):
    """A record on which nothing is noted.

    Args:
        instead: the record that a worker has otherwise.
    """

    def __init__(self, instead: Record) -> None:
        super().__init__()
        self.instead = instead

    def note(self, code: int) -> None:
        """Do nothing."""

    def enter(self, part: int) -> int:
        """Do nothing."""
        return 0


class _Silence:
    """Makes the workers of a pipeline note nothing, and note again.

    Args:
        pipe: of threads or processes.
    """

    def __init__(self, pipe: ps.Pipeline) -> None:
        self._workers: Any = pipe._workers
        self._is_here = pipe._workers.role.calls_loss
        self._records = self._workers.board.records
        self._silent = [_Silent(each) for each in self._records]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """While open, the workers note nothing."""
        if self._is_here:
            self._workers.board.records = self._silent
        else:
            self._workers._pool.run([_silence] * len(self._records), _TIMEOUT)
        try:
            yield
        finally:
            if self._is_here:
                self._workers.board.records = self._records
            else:
                self._workers._pool.run([_note_again] * len(self._records), _TIMEOUT)


def _silence(own: WorkerState) -> None:
    """In a worker process: note nothing."""
    own.record = _Silent(own.record)


def _note_again(own: WorkerState) -> None:
    """In a worker process: note again."""
    if isinstance(own.record, _Silent):
        own.record = own.record.instead


def _gpt() -> Subject:
    """A language model of which a step takes some tens of milliseconds: many pairs in a minute."""
    layers, width, rows, length = 6, 128, 8, 64
    return replace(
        subjects(False)["gpt"],
        name=f"{layers} layers like GPT-2, width {width}, {rows} rows of {length} tokens",
        build=partial(gpt2_like, layers, width, 4, length),
        data=partial(tokens, rows, length),
    )


def cost(subject: Subject, seconds: float, workers: Any) -> dict[str, Any]:
    """Train for a while, and say what each kind of step took.

    Args:
        subject: what is trained.
        seconds: how long each of the two measurements takes; a few turns at least.
        workers: of which kind.
    """
    x, y = subject.data()
    model = subject.build()
    spent: dict[str, list[float]] = {"as always": [], "silent": [], "recorded": []}
    with ps.Pipeline(
        model, (x,), devices=["cpu", "cpu"], workers=workers, replicas=1, audit=None, metrics=0
    ) as pipe:
        steps, silence = pipe._runner.steps, _Silence(pipe)

        def step(kind: str) -> float:
            quiet: AbstractContextManager[None] = silence() if kind == "silent" else nullcontext()
            with quiet:
                steps.is_asked = kind == "recorded"
                begun = time.perf_counter()
                pipe.train_step(x, target=y, loss_fn=subject.loss)
                taken = time.perf_counter() - begun
            steps.is_asked = False
            model.zero_grad()
            return taken

        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(spent["silent"]) < _WARM_UP + _FEWEST:
            for kind in random.sample([*spent], len(spent)):
                spent[kind].append(step(kind))
        asked = _asked(pipe, lambda: step("as always"), seconds)
    always = spent["as always"][_WARM_UP:]
    board = _ratios(always, spent["silent"][_WARM_UP:])
    recorded = _ratios(spent["recorded"][_WARM_UP:], always)
    return {
        "model": subject.name,
        "workers": workers,
        "turns": len(always),
        "milliseconds": 1e3 * statistics.median(always),
        "board": board,
        "recorded": recorded,
        "asked": asked,
    }


def _asked(pipe: ps.Pipeline, step: Callable[[], float], seconds: float) -> list[float]:
    """How many times as long steps take with requests for the status and the metrics."""
    spent: dict[bool, list[float]] = {False: [], True: []}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(spent[True]) < _WARM_UP + _FEWEST:
        for is_asked in random.sample([False, True], 2):
            asking = threading.Thread(target=_scrape, args=(pipe.metrics,))
            begun, count = time.perf_counter(), 0
            if is_asked:
                asking.start()
                pipe.status()
            while time.perf_counter() - begun < _BLOCK:
                step()
                count += 1
            if is_asked:
                asking.join()
            spent[is_asked].append((time.perf_counter() - begun) / count)
    return _ratios(spent[True][_WARM_UP:], spent[False][_WARM_UP:])


def _scrape(url: str) -> None:
    with urlopen(url, timeout=_TIMEOUT) as answer:
        answer.read()


_HANGS = """
import re, sys, torch, penstock as ps
from torch import nn

def loss(output):
    print("hangs", flush=True)
    re.match(r"(a+)+$", "a" * 60 + "b")  # for ages, with Python's lock

if __name__ == "__main__":
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    given = {"cuts": ["1"], "schedule": "1f1b", "num_microbatches": 2, "workers": sys.argv[1]}
    x = torch.ones(4, 3)
    pipe = ps.Pipeline(model, (x,), devices=["cpu"] * 2, audit=None, progress=None, **given)
    pipe.train_step(x, loss_fn=loss)
"""


def hung(workers: str) -> list[float]:
    """How long it takes to get the stack of a worker that hangs while it holds the GIL.

    Args:
        workers: of which kind.

    Returns:
        the seconds of each attempt.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "hangs.py"
        script.write_text(_HANGS)
        command = [sys.executable, "-W", "ignore", str(script), workers]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        try:
            assert child.stdout is not None
            child.stdout.readline()
            (run,) = find(child.pid)
            found = []
            for _ in range(_ASKED):
                begun = time.perf_counter()
                stacks = stacks_of([run])
                found.append(time.perf_counter() - begun)
                if not any("in loss" in stack for stack in stacks.values()):
                    raise RuntimeError(f"the stack of the worker that hangs is not there: {stacks}")
            return found
        finally:
            child.kill()
            child.wait()


def _ratios(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """The median of the ratios of pairs, and the ends of its 95 % interval."""
    found = [one / other for one, other in zip(ones, others, strict=True)]
    return [statistics.median(found), *interval(found)]


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    parser = record.parser("watched", __doc__)
    parser.add_argument("--models", default="gpt,tiny")
    parser.add_argument("--workers", default="threads,processes")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    options = parser.parse_args(arguments)
    record.check_whole(parser, options, "models", "workers")
    found = []
    for name in options.models.split(","):
        for workers in options.workers.split(","):
            subject = _gpt() if name == "gpt" else subjects(False)[name]
            each = cost(subject, options.seconds, workers)
            found.append(each)
            ratios = ", ".join(
                f"{what} {each[what][0]:.4f} ({each[what][1]:.4f} to {each[what][2]:.4f})"
                for what in ("board", "asked", "recorded")
            )
            print(
                f"{each['model']}, {workers}: {ratios}; {each['turns']} turns, "
                f"{each['milliseconds']:.2f} ms a step",
                flush=True,
            )
    hanging = {workers: hung(workers) for workers in options.workers.split(",")}
    for workers, seconds in hanging.items():
        print(f"stacks of a worker that hangs, {workers}: {statistics.median(seconds):.2f} s")
    record.save("watched", {"costs": found, "hung": hanging}, options)
    return 0
