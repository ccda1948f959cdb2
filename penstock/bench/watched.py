"""What watching costs: steps with and without the board, and with and without being recorded.

    python -m penstock.bench watched [--models gpt,tiny] [--workers threads,processes]
        [--seconds 60] [--json FILE] [--record]

One pipeline takes steps of three kinds in turns: as always; with workers that note nothing on their
records; and recorded, as a few steps are for reports, with everything that is done for it. The
ratios are medians of pairs, with the interval in which 95 % of the medians of resampled pairs lie.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import penstock as ps
from penstock.bench import record
from penstock.bench.guarded import interval
from penstock.bench.subjects import Subject, subjects
from penstock.board.memory import Record
from penstock.workers.processes.worker_state import WorkerState

_WARM_UP = 5  # turns
_FEWEST = 5  # turns, however long they take
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
        """Meanwhile, nothing is noted."""
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


def cost(subject: Subject, seconds: float, workers: Any) -> dict[str, Any]:
    """Train for a while, and say what each kind of step took.

    Args:
        subject: what is trained.
        seconds: how long; a few turns at least.
        workers: of which kind.
    """
    x, y = subject.data()
    model = subject.build()
    spent: dict[str, list[float]] = {"as always": [], "silent": [], "recorded": []}
    with ps.Pipeline(
        model, (x,), devices=["cpu", "cpu"], workers=workers, replicas=1, audit=None
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
    }


def _ratios(ones: Sequence[float], others: Sequence[float]) -> list[float]:
    """The median of the ratios of pairs, and the interval of it."""
    found = [one / other for one, other in zip(ones, others, strict=True)]
    return [statistics.median(found), *interval(found)]


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    parser = record.parser("watched", __doc__)
    parser.add_argument("--models", default="gpt,tiny")
    parser.add_argument("--workers", default="threads,processes")
    parser.add_argument("--seconds", type=float, default=60.0, help="for each of them")
    parser.add_argument("--quick", action="store_true", help="small models")
    options = parser.parse_args(arguments)
    found = []
    for name in options.models.split(","):
        for workers in options.workers.split(","):
            each = cost(subjects(options.quick)[name], options.seconds, workers)
            found.append(each)
            board, recorded = each["board"], each["recorded"]
            print(
                f"{each['model']}, {workers}: board {board[0]:.4f} ({board[1]:.4f} to "
                f"{board[2]:.4f}), recorded {recorded[0]:.4f} ({recorded[1]:.4f} to "
                f"{recorded[2]:.4f}); {each['turns']} turns, {each['milliseconds']:.2f} ms a step",
                flush=True,
            )
    record.save("watched", {"costs": found}, options)
    return 0
