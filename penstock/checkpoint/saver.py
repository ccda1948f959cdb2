"""Saving: every worker writes its part; then the leading process makes them the checkpoint."""

from __future__ import annotations

import io
import os
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from penstock.checkpoint.contents import Contents, copies_of, generators_now, keeps_more
from penstock.errors import CheckpointError
from penstock.runner import Runner
from penstock.storage.folder import Folder, Index, entry, sync
from penstock.storage.part import WHOLE, Note, Part, compact, names_of_save
from penstock.workers.backend import Workers
from penstock.workers.saving import TIMEOUT, SaveOrder

_STALLED = 600.0  # seconds in which no part grows; one that is large may wait for the disk
_LOST = 5.0  # the same if a worker has ended; those that are left go on writing
_PAUSE = 0.01  # seconds between two looks


class _PartLostError(CheckpointError):
    """A worker has ended before its part was written."""


class Save:
    """A save, which may still be under way.

    Args:
        path: of the checkpoint.
        workers: who write it.

    Attributes:
        path: of the checkpoint.
    """

    def __init__(self, path: Path, workers: Workers) -> None:
        self.path = path
        self._workers = workers
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._ended = False
        self._begun = threading.Lock()  # held once the thread has begun, or is kept from it

    @property
    def done(self) -> bool:
        """Whether the save has ended, well or not.

        Under torchrun only rank 0 knows before `wait` whether a save in the background has ended;
        on the other ranks this is `False` until then.
        """
        return self._ended or (self._thread is not None and not self._thread.is_alive())

    @property
    def lost(self) -> bool:
        """Whether it has failed because a worker has ended before its part was written."""
        return isinstance(self._error, _PartLostError)

    def wait(self) -> None:
        """Wait until the checkpoint is on the disk. Under torchrun all ranks do.

        Raises:
            CheckpointError: it could not be written; the checkpoint before is still there.
        """
        if not self._ended:
            try:
                with self._workers.operation("the wait for a checkpoint", TIMEOUT):
                    self.end()
            except Exception as error:
                self._error = error
            self._ended = True
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """Wait for what this process does of it, and raise its error, if that was not done yet."""
        if self._ended:
            return
        if self._thread is not None:
            self._thread.join()
            self._ended = True
        if self._error is not None:
            raise self._error

    def end_within(self, seconds: float) -> None:
        """Wait at most so long until it has ended, well or not."""
        if self._thread is not None:
            self._thread.join(seconds)

    def run(self, finish: Callable[[], None], background: bool) -> None:
        """Do what is left to do, now or in a thread of its own."""
        if background:
            self._thread = threading.Thread(target=self._try, args=(finish,), name="penstock-save")
            self._thread.start()
        else:
            finish()

    def revoke(self) -> bool:
        """Try to keep its thread from beginning; returns whether that succeeded.

        A Ctrl-C, or an error of another rank, may come just when the thread has been started.
        """
        return self._begun.acquire(blocking=False)

    def _try(self, finish: Callable[[], None]) -> None:
        if not self._begun.acquire(blocking=False):
            return
        try:
            finish()
        except BaseException as error:
            self._error = error


class Saver:
    """Saves a pipeline, again and again.

    Args:
        model: whose weights.
        runner: who runs it, by a plan.

    Attributes:
        newest: the folder of the latest checkpoint that this process has written; `None` if it has
            written none.
    """

    def __init__(self, model: nn.Module, runner: Runner) -> None:
        self._model = model
        self._runner = runner
        self._number = 0
        self._current: Save | None = None
        self.newest: Path | None = None

    def save(
        self, path: str | os.PathLike[str], background: bool, things: Mapping[str, Any]
    ) -> Save:
        """See `Pipeline.save`."""
        workers = self._runner.workers
        if self._current is not None and not self._current._ended:
            self._completed(self._current.wait)  # interrupted, `finish` still waits for it
        folder = Folder(path)
        save = Save(folder.path, workers)
        try:
            with workers.operation("save", TIMEOUT):
                training, parts = self._write(folder, background, things)
                generators = workers.all_gather("save", generators_now())
            with workers.operation("the end of a save", TIMEOUT):
                if workers.role.leads:
                    notes = partial(_notes, parts, workers)
                    plan = self._runner.plan.encode()
                    self._current = save if background else None
                    save.run(
                        lambda: self._finish(folder, parts, training, generators, plan, notes),
                        background,
                    )
        except BaseException as error:
            if save.revoke():  # else its thread has the folder, and lets go of it
                self._current = None
                folder.end(isinstance(error, Exception))
            raise
        self._current = save if background else None
        save._ended = not background
        return save

    def _write(
        self, folder: Folder, background: bool, things: Mapping[str, Any]
    ) -> tuple[bytes, list[Part]]:
        """Order every worker's part; what the index has to say, and the parts under way."""
        runner = self._runner
        for copy in copies_of(self._model, things.values()):  # such as averages of its weights
            runner.workers.state(self._model, copy)
        if keeps_more(self._model, things.values()):
            runner.workers.left().bring()
        found = Contents.of(self._model, runner.workers.ownership, runner.random_state(), things)
        begun = None
        if runner.workers.role.leads:
            count = len(found.portions)
            begun = folder.begin(partial(names_of_save, count), self._number)
        self._number = runner.workers.broadcast(begun, "leader")
        where = os.fspath(folder.path)
        order = SaveOrder(
            where, self._number, found.portions, found.names, found.remote, background
        )
        return found.training, runner.workers.save(order)

    def _finish(
        self,
        folder: Folder,
        parts: Sequence[Part],
        training: bytes,
        generators: Any,
        plan: bytes,
        notes: Callable[[], list[Note]],
    ) -> None:
        """Write the remaining files, wait for all parts, and make this save the checkpoint."""
        number = parts[0].number
        try:
            files = [folder.path / f"{what}-{number:06d}.{ending}" for what, ending in WHOLE]
            buffer = io.BytesIO()
            torch.save(compact(generators), buffer)
            files[0].write_bytes(training)
            files[1].write_bytes(buffer.getvalue())
            files[2].write_bytes(plan)
            for file in files:
                sync(file)
            folder.commit(_index(number, notes(), files))
            self.newest = folder.path
        except OSError as error:
            folder.end(failed=True)
            raise CheckpointError(
                f"the checkpoint {folder.path} cannot be written: {error}. One before it is "
                "untouched"
            ) from error
        except CheckpointError:
            folder.end(failed=True)
            raise
        finally:
            folder.end()

    def _completed(self, wait: Callable[[], None]) -> None:
        """Wait for a save; if others go on without the worker that it needed, it is given up."""
        try:
            wait()
        except _PartLostError as error:
            if self._runner.recovery is None:
                raise
            warnings.warn(f"{error}. This save is given up", stacklevel=2)

    def end_within(self, seconds: float) -> None:
        """Wait at most so long for a save in the background, as a worker that writes is leaving."""
        if self._current is not None:
            self._current.end_within(seconds)

    def finish(self) -> None:
        """Wait for what this process still does, as the pipeline is closed.

        Raises:
            CheckpointError: it could not be done.
        """
        current, self._current = self._current, None
        if current is not None:
            self._completed(current.end)


def _notes(parts: Sequence[Part], workers: Workers) -> list[Note]:
    """What every part says of itself, when all are written.

    Args:
        parts: of a checkpoint.
        workers: that write them; others may have taken over since.

    Raises:
        CheckpointError: one is not.
    """
    notes: dict[int, Note] = {}
    size, grown = -1, time.monotonic()
    while True:
        alive = workers.all_alive()
        for part in parts:
            if part.index not in notes and part.note.exists():
                note = msgspec.json.decode(part.note.read_bytes(), type=Note)
                if note.error is not None:
                    raise CheckpointError(note.error)
                notes[part.index] = note
        missing = [part.index for part in parts if part.index not in notes]
        if not missing:
            return [notes[part.index] for part in parts]
        if (now := _size_of(parts[0])) != size:
            size, grown = now, time.monotonic()
        is_there = os.path.isdir(parts[0].folder)
        patience = _STALLED if alive else _LOST
        if not is_there or time.monotonic() > grown + patience:
            why = f"nothing was written for {_STALLED:.0f} s" if alive else "a worker has ended"
            why = why if is_there else "the folder was removed"
            kind = CheckpointError if alive or not is_there else _PartLostError
            raise kind(
                f"the checkpoint {parts[0].folder} is not complete: {why} before the parts of "
                f"workers {missing} were there. A checkpoint before it is untouched"
            )
        time.sleep(_PAUSE)


def _size_of(part: Part) -> int:
    """Bytes that its save has written so far."""
    total = 0
    for path in Path(part.folder).glob(f"*-{part.number:06d}-*"):
        try:
            files = list(path.iterdir()) if path.is_dir() else [path]
            total += sum(file.stat().st_size for file in files)
        except FileNotFoundError:  # it was moved into place
            total += 1
    return total


def _index(number: int, notes: Sequence[Note], paths: Sequence[Path]) -> Index:
    """The index of a save; `paths` are its files that are not part of a worker's part."""
    files = {name: size for note in notes for name, size in note.files.items()}
    files |= {path.name: entry(path) for path in paths}
    weights = {name: file for note in notes for name, file in note.weights.items()}
    return Index(number, files, weights, sum(note.bytes for note in notes))
