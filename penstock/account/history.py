"""What is known of a run: its plan, every step's time, what some steps did, and what happened.

A pipeline keeps this in memory, and with `Pipeline(run=...)` in a folder as well. A report,
`penstock top` or a colleague may read the folder while the run goes on.
"""

from __future__ import annotations

import itertools
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.account.record import StepRecord
from penstock.board.runs import Description
from penstock.board.status import Happened
from penstock.errors import InputError
from penstock.files import FolderLock, is_inside, save_whole, write_whole
from penstock.plan.plan import Plan
from penstock.profile.data import Profile

ABOUT = "run.json"
"""The file of a run's folder that says what was run; `*.jsonl` have a line for each item."""

PROFILE = "profile.json"
"""The file of a run's folder with the profile from which the plan was made, if that is known."""

_VERSION = 1
_EARLIER = "earlier-"  # before the number of a folder with an earlier run
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError)


class StepTimes(NamedTuple):
    """How long a step took, or several that followed each other.

    Attributes:
        step: the number of the last of these steps, from 1.
        at: when that step ended, in seconds since 1970.
        steps: how many steps these are.
        seconds: their total time, each counted from the end of the step before.
        pass_seconds: the part of `seconds` in which workers ran passes.
        slowest: the number of the slowest step.
        slowest_seconds: the time that the slowest step took.
        rows: the total number of rows of their batches.
    """

    step: int
    at: float
    steps: int
    seconds: float
    pass_seconds: float
    slowest: int
    slowest_seconds: float
    rows: int


class Sample(NamedTuple):
    """What every worker held at a moment between two steps, and had done by then.

    Attributes:
        at: when the sample was taken, in seconds since 1970.
        step: the number of steps completed by then.
        memory: for every worker the bytes in use on its device, or by its process on a CPU; 0
            where that is not known.
        most_memory: for every worker the peak of `memory` so far.
        worked: for every worker the seconds that it has worked in passes.
        waited: for every worker the seconds that it has waited for others in passes.
    """

    at: float
    step: int
    memory: tuple[int, ...]
    most_memory: tuple[int, ...]
    worked: tuple[float, ...]
    waited: tuple[float, ...]


class About(msgspec.Struct, frozen=True, kw_only=True):
    """What was run, and where.

    Attributes:
        description: the pipeline and its workers.
        plan: the plan by which it runs now.
        environment: versions of packages and facts about the machine, by name.
        since: the number of the last step that ran by an earlier plan; 0 if there was none.
        version: the version of the folder's format.
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
        samples: what workers held now and then, in order.
        events: what happened, in order.
        notes: remarks on the folder that this was read from, such as lines that are not whole.
    """

    about: About
    steps: Sequence[StepTimes] = ()
    records: Sequence[StepRecord] = ()
    samples: Sequence[Sample] = ()
    events: Sequence[Happened] = ()
    notes: Sequence[str] = ()

    @property
    def latest_steps(self) -> list[StepTimes]:
        """The times of the steps that were run by the plan in use."""
        return [steps for steps in self.steps if steps.step > self.about.since]


Item = StepTimes | StepRecord | Sample | Happened
"""What a run's folder has a file of, with one line of JSON per item."""

_FILES: Mapping[type, str] = {
    StepTimes: "steps.jsonl",
    StepRecord: "records.jsonl",
    Sample: "samples.jsonl",
    Happened: "events.jsonl",
}


class RunFolder:
    """The folder of a run, which this process writes line by line.

    A folder has one run. The files of an earlier run, or of an earlier plan of this run, are moved
    to its subfolders `earlier-1`, `earlier-2`, ..., each of which can be read as a run as well.

    Args:
        path: the folder, which is created if needed.
        about: what is run.
        profile: the profile from which the plan was made; `None` if it is not known.

    Attributes:
        path: the absolute path of the folder.
        close: unlocks the folder for other writers; called as well when this object is collected.

    Raises:
        InputError: the folder cannot be written; or it has files that are not those of a run; or
            another run is being written there, as far as the file system can say.
    """

    def __init__(
        self, path: str | os.PathLike[str], about: About, profile: Profile | None = None
    ) -> None:
        self.path = Path(path).absolute()
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            names = [p.name for p in self.path.iterdir()]
        except OSError as error:
            raise InputError(f"run={str(path)!r} cannot be a folder: {error}") from error
        others = [name for name in names if not name.startswith(f".{ABOUT}.")]  # half of one
        if others and ABOUT not in others:
            raise InputError(
                f"run={str(path)!r} is a folder with other files, such as {sorted(others)[0]}; "
                "give a new folder, or that of an earlier run"
            )
        self.close = weakref.finalize(self, self._lock().release)
        try:
            self._put_aside([*_FILES.values(), PROFILE])
            self._write(about, profile)
        except OSError as error:
            self.close()
            raise InputError(f"run={str(path)!r} cannot be written: {error}") from error
        except InputError:
            self.close()
            raise

    def go_on(self, about: About, profile: Profile | None = None) -> None:
        """The run goes on with another plan: what was recorded by the old one is put aside.

        Raises:
            OSError: it cannot be written.
        """
        self._put_aside([_FILES[StepRecord], _FILES[Sample], PROFILE])
        self._write(about, profile)

    def _lock(self) -> FolderLock:
        """A lock by which nobody else writes here.

        Raises:
            InputError: somebody does.
        """
        try:
            return FolderLock(self.path)
        except BlockingIOError:
            raise InputError(
                f"run={str(self.path)!r} is being written by a pipeline that is not closed"
                f"{self._by_whom()}: close() it, or give every run a folder of its own"
            ) from None
        except OSError as error:
            raise InputError(f"run={str(self.path)!r} cannot be a folder: {error}") from error

    def _by_whom(self) -> str:
        try:
            found = _about(self.path).description
        except InputError:
            return ""
        return f" (process {found.pid} on {found.host})"

    def _put_aside(self, names: Iterable[str]) -> None:
        """Move these files to a subfolder, with a copy of the `ABOUT` that they belong to.

        A kill in the midst of this leaves a few of them here; the next start moves them as well.

        Raises:
            OSError: they cannot be moved.
        """
        names = [name for name in names if (self.path / name).exists()]
        if not names:
            return
        content = (self.path / ABOUT).read_bytes()
        every = (self.path / f"{_EARLIER}{number}" for number in itertools.count(1))
        folder = next(path for path in every if _takes(path, content, names))
        folder.mkdir(exist_ok=True)
        write_whole(folder / ABOUT, content)
        for name in names:
            (self.path / name).rename(folder / name)

    def _write(self, about: About, profile: Profile | None) -> None:
        save_whole(self.path / ABOUT, msgspec.json.format(msgspec.json.encode(about)), "run")
        if profile is not None:
            profile.save(self.path / PROFILE)

    def add(self, item: Item) -> None:
        """Append something to the file of its kind.

        Raises:
            OSError: it cannot be written.
        """
        with (self.path / _FILES[type(item)]).open("ab") as file:
            file.write(msgspec.json.encode(item) + b"\n")


def _takes(folder: Path, content: bytes, names: Sequence[str]) -> bool:
    """Whether files may be moved to a subfolder: if it is new or empty, or of the same run.

    A subfolder of the same run must not have files of these names yet.

    Args:
        folder: the subfolder.
        content: the content of the file `ABOUT` to which the files belong.
        names: the names of the files.
    """
    if not folder.exists():
        return True
    try:
        is_same = (folder / ABOUT).read_bytes() == content
    except OSError:  # it was only made, or is a file
        is_same = folder.is_dir() and not any(folder.iterdir())
    return is_same and not any((folder / name).exists() for name in names)


def read_run(path: str | os.PathLike[str]) -> History:
    """Read the folder of a run, which may still be being written.

    Args:
        path: the folder.

    Raises:
        InputError: it is not the folder of a run; or one of another version; or a file in it is
            malformed, cannot be read, or is a link that leads out of the folder.
    """
    folder = Path(path)
    for name in (ABOUT, *_FILES.values()):
        if not is_inside(folder, name):
            raise InputError(
                f"{folder / name} is a link to {(folder / name).resolve()}, outside of the run. "
                "Pipeline(run=...) makes no such links; if you trust it, copy the file there"
            )
    about = _about(folder)
    files = steps, records, samples, events = [_items(folder, kind) for kind in _FILES]
    if _about(folder) != about:  # another plan, or another run, has come meanwhile
        return read_run(path)
    return History(
        about=about,
        steps=steps.items,
        records=records.items,
        samples=samples.items,
        events=events.items,
        notes=[note for note in (_earlier(folder), *(f.note for f in files)) if note],
    )


def _about(folder: Path) -> About:
    """What was run.

    Raises:
        InputError: the file is missing or malformed, or of another version.
    """
    try:
        about = msgspec.json.decode((folder / ABOUT).read_bytes(), type=About)
    except OSError as error:
        raise InputError(
            f"{folder} is not the folder of a run: {error.strerror}: {ABOUT}. Pipeline(run=...) "
            "writes one"
        ) from error
    except _MALFORMED as error:
        raise InputError(f"{folder / ABOUT} is not what Pipeline(run=) writes: {error}") from error
    if about.version != _VERSION:
        raise InputError(
            f"{folder} is a run of version {about.version}; this Penstock reads version {_VERSION}"
        )
    return about


def _earlier(folder: Path) -> str:
    """Which earlier runs there are in a folder, in words; empty if there are none."""
    found = [p for p in folder.glob(f"{_EARLIER}*") if p.name[len(_EARLIER) :].isdecimal()]
    if not found:
        return ""
    names = [p.name for p in sorted(found, key=lambda p: int(p.name[len(_EARLIER) :]))]
    return (
        f"Earlier runs, or earlier plans of this run, are in folders in it: {', '.join(names)}. "
        f"penstock report {folder / names[-1]} reports the latest of them."
    )


class _File(NamedTuple):
    """The items of a file, and a remark on the file; empty if there is none."""

    items: list[Any]
    note: str = ""


def _items(folder: Path, kind: type) -> _File:
    """The items of one kind; a line that is not whole is left out.

    The last one may not be whole yet, or never become so, if the process was killed.

    Raises:
        InputError: the file cannot be read, or no line is an item.
    """
    path = folder / _FILES[kind]
    try:
        *lines, rest = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return _File([])
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    found: list[Any] = []
    broken, wrong = int(bool(rest)), None
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=kind))
        except _MALFORMED as error:
            broken, wrong = broken + 1, error
    if broken > bool(rest) and not found:
        raise InputError(f"{path} is not what Pipeline(run=) writes: {wrong}") from wrong
    if not broken:
        return _File(found)
    are = "1 line is" if broken == 1 else f"{broken} lines are"
    return _File(found, f"In {path.name} {are} not whole, and left out.")
