"""What is known of a run: its plan, every step's time, what some steps did, and what happened.

It is in the memory of a pipeline, and with `Pipeline(run=...)` in a folder as well, which a report,
`penstock top` or a colleague may read while the run goes on.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from penstock.account.record import StepRecord
from penstock.board.runs import Description
from penstock.errors import InputError
from penstock.files import save_whole
from penstock.plan.plan import Plan

ABOUT = "run.json"
"""The file of a run's folder that says what was run; the others have a line for each item."""

_VERSION = 1
T = TypeVar("T")


class StepTime(NamedTuple):
    """How long a step took, or several that followed each other.

    Attributes:
        step: the number of the last of them, from 1.
        at: when it ended, in seconds since 1970.
        steps: how many.
        seconds: that they took in all, each from the end of the step before.
        pass_seconds: the part of it in which workers ran passes.
        slowest: the number of the slowest of them.
        slowest_seconds: that it took.
        rows: of their batches, in all.
    """

    step: int
    at: float
    steps: int
    seconds: float
    pass_seconds: float
    slowest: int
    slowest_seconds: float
    rows: int


class Happened(NamedTuple):
    """Something that happened in a run.

    Attributes:
        at: when, in seconds since 1970.
        step: after so many steps.
        what: in words.
    """

    at: float
    step: int
    what: str


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What was run, and where.

    Attributes:
        description: of the pipeline and its workers.
        plan: by which it runs.
        environment: versions and machine, by name.
        since: by this plan it runs since the end of this step; 0 if there was no other one.
        version: of the folder's format.
    """

    description: Description
    plan: Plan
    environment: Mapping[str, str]
    since: int = 0
    version: int = _VERSION


class History(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a run.

    Attributes:
        about: what was run, and where.
        steps: the times of all steps, as far as they are kept, in order.
        records: what some steps did, in order.
        events: what happened, in order.
    """

    about: About
    steps: Sequence[StepTime] = ()
    records: Sequence[StepRecord] = ()
    events: Sequence[Happened] = ()

    @property
    def latest_steps(self) -> list[StepTime]:
        """The times of the steps that were run by the plan in use."""
        return [steps for steps in self.steps if steps.step > self.about.since]


_FILES: Mapping[type, str] = {
    StepTime: "steps.jsonl",
    StepRecord: "records.jsonl",
    Happened: "events.jsonl",
}


class RunFolder:
    """The folder of a run, which this process writes. Every line is whole when it is there.

    Args:
        path: of the folder, which is made; a run that was there before is continued.
        about: what is run.

    Raises:
        InputError: it cannot be written, or it has other files than those of a run.
    """

    def __init__(self, path: str | os.PathLike[str], about: About) -> None:
        self.path = Path(path)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            others = [p.name for p in self.path.iterdir()]
        except OSError as error:
            raise InputError(f"run={str(path)!r} cannot be a folder: {error}") from error
        if others and ABOUT not in others:
            raise InputError(
                f"run={str(path)!r} is a folder with other files, such as {sorted(others)[0]}; "
                "give a new folder, or that of an earlier run"
            )
        self._write(about)

    def go_on(self, about: About) -> None:
        """The run goes on with another plan: what was recorded by the old one is put aside.

        Raises:
            OSError: it cannot be written.
        """
        records = self.path / _FILES[StepRecord]
        if records.exists():
            numbers = itertools.count(1)
            names = (self.path / f"earlier-{n}-{records.name}" for n in numbers)
            records.rename(next(name for name in names if not name.exists()))
        self._write(about)

    def _write(self, about: About) -> None:
        save_whole(self.path / ABOUT, msgspec.json.format(msgspec.json.encode(about)), "run")

    def add(self, item: StepTime | StepRecord | Happened) -> None:
        """Append something to the file of its kind.

        Raises:
            OSError: it cannot be written.
        """
        with (self.path / _FILES[type(item)]).open("ab") as file:
            file.write(msgspec.json.encode(item) + b"\n")


def read_run(path: str | os.PathLike[str]) -> History:
    """What a run's folder says; also while it is written.

    Args:
        path: of the folder.

    Raises:
        InputError: it is none, or one of another version.
    """
    folder = Path(path)
    try:
        about = msgspec.json.decode((folder / ABOUT).read_bytes(), type=About)
    except OSError as error:
        raise InputError(
            f"{path} is not the folder of a run: {error.strerror}: {ABOUT}. Pipeline(run=...) "
            "writes one"
        ) from error
    except msgspec.DecodeError as error:
        raise InputError(f"{folder / ABOUT} is not what Pipeline(run=) writes: {error}") from error
    if about.version != _VERSION:
        raise InputError(
            f"{path} is a run of version {about.version}; this Penstock reads version {_VERSION}"
        )
    return History(
        about=about,
        steps=_items(folder, StepTime),
        records=_items(folder, StepRecord),
        events=_items(folder, Happened),
    )


def _items(folder: Path, kind: type[T]) -> list[T]:
    """The items of one kind; the last line of a file may not be whole yet.

    Raises:
        InputError: another line is none.
    """
    path = folder / _FILES[kind]
    try:
        *lines, _ = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    try:
        return [msgspec.json.decode(line, type=kind) for line in lines]
    except msgspec.DecodeError as error:
        raise InputError(f"{path} is not what Pipeline(run=) writes: {error}") from error
