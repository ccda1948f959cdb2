"""Requests to running pipelines: for stacks, a timeline of the next step, or a report."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from penstock.account.history import History
from penstock.account.record import StepRecord
from penstock.board.memory import Log
from penstock.board.phases import timeline_of
from penstock.board.served import Remote, RunView
from penstock.board.status import News
from penstock.errors import PenstockError
from penstock.observe.trace import require_perfetto, save_trace
from penstock.plan.plan import Plan
from penstock.schedule import Timeline

PATIENCE = 60.0
"""Seconds to wait for a step that can be recorded."""

_T = TypeVar("_T")
_PAUSE = 0.1  # seconds between looks whether there is one
_SOON, _ANSWER = 1.5, 5.0  # seconds for an answer, and for one that is long


class Task:
    """Does something in a thread of its own, and has a line about it.

    Args:
        waiting: the line until it is done.
        work: what is done; returns the line to show afterwards. An error that it raises is shown
            instead.

    Attributes:
        text: the line.
        is_done: whether it is done.
    """

    def __init__(self, waiting: str, work: Callable[[], str]) -> None:
        self.text, self.is_done, self._work = waiting, False, work
        threading.Thread(target=self._run, name="penstock-task", daemon=True).start()

    def _run(self) -> None:
        try:
            self.text = self._work()
        except PenstockError as error:
            self.text = str(error)
        except Exception as error:
            self.text = f"{type(error).__name__}: {error}"
        finally:
            self.is_done = True


def free_path(folder: Path, name: str, suffix: str) -> Path:
    """The path of a file that does not exist yet: `name`, or else `name-2`, `name-3`, ..."""
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    return next(path for n in names if not (path := folder / f"{n}{suffix}").exists())


def stacks_of(runs: Sequence[RunView]) -> Mapping[str, str]:
    """What the threads of their workers are doing, by process and worker."""
    found: dict[str, str] = {}
    for run in runs:
        title = _name(run)
        try:
            stacks = msgspec.convert(run.ask("stacks", _ANSWER), dict[str, str])
            found |= {f"{title}, {name}": stack for name, stack in stacks.items()}
        except TimeoutError as error:
            try:
                found[title] = f"it cannot run Python now\n\n{run.dumped(_SOON)}"
            except OSError:
                found[title] = f"no answer: {error}"
        except (OSError, ValueError) as error:
            found[title] = f"no answer: {error}"
    return found


def news_of(run: RunView) -> News:
    """What a pipeline has to say of itself besides its board; nothing if it does not answer."""
    try:
        return msgspec.convert(run.ask("news", _SOON), News)
    except (OSError, ValueError):
        return News()


def history_of(run: RunView) -> History:
    """What a running pipeline knows of its run.

    Raises:
        PenstockError: it does not answer.
    """
    return _converted(run, "history", History)


class Recorded(NamedTuple):
    """A step that was recorded.

    Attributes:
        plan: by which it ran.
        records: one record; under torchrun one of every rank that can be reached.
    """

    plan: Plan
    records: Sequence[StepRecord]

    @property
    def step(self) -> int:
        """The number of the recorded step, from 1."""
        return self.records[0].step

    def timelines(self) -> dict[str, Timeline]:
        """What was measured, and what the plan predicts, each from when its first worker began."""
        logs: dict[int, Log] = {}
        if len({record.step for record in self.records}) == 1:
            for record in self.records:
                logs |= record.logs
            measured = {"measured": timeline_of(logs, self.records[0].num_workers)}
        else:  # some ranks had begun the step already when they were asked
            measured = {
                f"measured, step {record.step} of rank {rank}": timeline_of(
                    record.logs, record.num_workers
                )
                for rank, record in enumerate(self.records)
            }
        return {**measured, "predicted": self.plan.timeline()}


def record_step(runs: Sequence[RunView], patience: float = PATIENCE) -> Recorded:
    """Have the next step recorded, and wait for it.

    Args:
        runs: a pipeline, or the ranks of one.
        patience: seconds to wait.

    Raises:
        PenstockError: a process does not answer or ends, or there is no step in time.
    """
    steps = [run.board.counted().steps for run in runs]
    before = [_converted(run, "record", int) for run in runs]
    end = time.monotonic() + patience
    found: dict[int, tuple[Plan, StepRecord]] = {}
    while len(found) < len(runs):
        if time.monotonic() > end:
            raise PenstockError(
                f"no timeline: no training step began and ended within {patience:.0f} s"
            )
        time.sleep(_PAUSE)
        for number, run in enumerate(runs):
            if not _is_there(run):
                raise PenstockError(f"no timeline: the pipeline of {_name(run)} was closed")
            if number in found or run.board.counted().steps == steps[number]:
                continue
            history = history_of(run)
            if history.records and history.records[-1].step > before[number]:
                found[number] = history.about.plan, history.records[-1].later(run.ahead)
    records = [found[number][1] for number in range(len(runs))]
    return Recorded(found[0][0], records)


@contextmanager
def _believing_nothing(runs: Sequence[RunView]) -> Iterator[None]:
    """While open, errors from senseless answers of other machines become a `PenstockError`."""
    try:
        yield
    except PenstockError:
        raise
    except Exception as error:
        if not any(isinstance(run, Remote) for run in runs):
            raise
        raise PenstockError(
            f"what {_name(runs[0])} answers makes no sense: {type(error).__name__}: {error}"
        ) from error


def save_timeline(
    runs: Sequence[RunView],
    path: Path | Callable[[int], Path],
    patience: float = PATIENCE,
) -> tuple[int, Path]:
    """Have the next step recorded, and write its timeline, beside the predicted one.

    Args:
        runs: a pipeline, or the ranks of one.
        path: of the file, or what gives it for the number of the step.
        patience: seconds to wait for the step.

    Returns:
        the number of the step, and the path.

    Raises:
        PenstockError: perfetto is not installed, there is no such step, or the file cannot be
            written.
    """
    require_perfetto()
    with _believing_nothing(runs):
        found = record_step(runs, patience)
        path = path(found.step) if callable(path) else path
        save_trace(found.timelines(), path, found.plan)
        return found.step, path


def save_report_of(runs: Sequence[RunView], path: Path) -> None:
    """Write the report of a run so far.

    Args:
        runs: a pipeline, or the ranks of one, of which the first is asked.
        path: of the file.

    Raises:
        PenstockError: the pipeline does not answer, or there can be no report.
    """
    try:
        from penstock.observe.report import save_report
    except ModuleNotFoundError as error:
        raise PenstockError(f"there can be no report without {error.name}") from error
    with _believing_nothing(runs):
        save_report(history_of(runs[0]), path)


def _converted(run: RunView, question: str, kind: type[_T]) -> _T:
    """What a pipeline answers.

    Raises:
        PenstockError: it does not answer in time, or not with a value of this kind.
    """
    try:
        return msgspec.convert(run.ask(question, _ANSWER), kind, str_keys=True)
    except (OSError, ValueError) as error:
        raise PenstockError(f"{_name(run)} does not answer: {error}") from error


def _is_there(run: RunView) -> bool:
    """Whether it can still be asked."""
    return run.is_alive and (isinstance(run, Remote) or run.path is None or run.path.exists())


def _name(run: RunView) -> str:
    where = f" on {run.description.host}" if isinstance(run, Remote) else ""
    return f"process {run.description.pid}{where}"
