"""Saving by itself every so many steps, and going on from the newest checkpoint that is whole."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import IterableDataset, Sampler

from penstock.cadence import wait_until
from penstock.checkpoint.batches import Batches
from penstock.checkpoint.checkpoint import Checkpoint, Restorable, load
from penstock.checkpoint.saver import Save
from penstock.checkpoint.sigterm import Sigterm
from penstock.errors import CheckpointError, InputError
from penstock.storage.folder import INDEX
from penstock.workers.backend import Workers
from penstock.workers.saving import TIMEOUT

_Save = Callable[..., object]
_IsAmidStep = Callable[[Sequence[Optimizer]], bool]
_MANY = 100  # passes after a save was due, at least, before a warning that none was possible
_PAUSE = 0.05  # seconds between two looks
_HEARS = 5.0  # seconds within which a launcher's SIGTERM has reached all of its processes


class Autosave:
    """Saves between two steps, before every n-th; see `Pipeline.autosave`.

    Args:
        folder: of the checkpoint.
        every: steps.
        things: what is saved with the model.
        trained: passes that have trained so far.

    Raises:
        InputError: `every` is no number of steps, or one of the things is a loader with a state of
            its own.
    """

    def __init__(
        self, folder: Path, every: int, things: Mapping[str, Any], trained: int = 0
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InputError(
                f"every={every!r} must be a positive integer: the number of steps between two saves"
            )
        self._folder, self._every, self._things = folder, every, things
        _check_loaders(things)
        self._batches = {n: thing for n, thing in things.items() if isinstance(thing, Batches)}
        self._generators = {n: t for n, t in things.items() if isinstance(t, torch.Generator)}
        for batches in self._batches.values():
            batches.watch(self._generators.values())
        self._positions = self._now()
        self._last = trained
        self._save: object = None  # the latest
        self._sigterm: Sigterm | None = None
        self._is_on = True
        self._is_said = False  # that nothing is saved

    def on_sigterm(self, ask: Callable[[], bool], grace: float) -> None:
        """Save and end the run on SIGTERM.

        Args:
            ask: requests the end of the run from the workers; returns whether the pipeline still
                exists.
            grace: seconds within which a save has to begin; if none does, the process ends without.

        Raises:
            InputError: that is no time.
        """
        if isinstance(grace, bool) or not isinstance(grace, (int, float)) or not grace > 0:
            raise InputError(f"grace={grace!r} must be a positive number of seconds")
        self._sigterm = Sigterm(ask, grace)

    def remove(self) -> None:
        """Save no more, also on SIGTERM, which then does what it did before."""
        self._is_on = False
        if self._sigterm is not None and not self._sigterm.leaving:
            self._sigterm.remove()

    def _now(self) -> list[tuple[int, int]]:
        """Where the batches are."""
        return [(batches.epoch, batches.batch) for batches in self._batches.values()]

    def before_step(
        self, trained: int, is_amid_step: _IsAmidStep, workers: Workers, save: _Save
    ) -> None:
        """Save if it is time, unless something is half done that a checkpoint does not have.

        It is time at once if the save before was lost with a worker for which others took over.
        If a position of `Batches` is saved, a restored run repeats the batch that was taken last.
        So the run is saved only before the first pass on a batch: before a later pass, an earlier
        one has used it already. All processes that run the script make the same decision, from
        numbers that all of them have.

        Args:
            trained: passes that have trained and ended well so far.
            is_amid_step: returns whether there are gradients that one of the given optimizers, or
                one that has made a step before, has not used yet, or a backward is still to come.
            workers: the workers that train the model.
            save: `Pipeline.save`.

        Raises:
            SystemExit: SIGTERM has come, and the run is saved.
            CheckpointError: the run could not be saved.
        """
        before, self._positions = self._positions, self._now()
        is_first = not self._batches or before != self._positions
        stops = workers.is_stopping and self._sigterm is not None
        is_lost = isinstance(self._save, Save) and self._save.lost
        is_time = trained // self._every != self._last // self._every or is_lost
        if not self._is_on or not (is_time or stops):
            return
        optimizers = [thing for thing in self._things.values() if isinstance(thing, Optimizer)]
        is_amid = not is_first or is_amid_step(optimizers)
        if any(workers.all_gather("autosave", is_amid)):
            self._warn_if_late(trained)
            return
        self._last = trained
        if stops and self._sigterm is not None:
            self._sigterm.leave()
        undone = {**self._things, **{n: batches.undone for n, batches in self._batches.items()}}
        if self._batches:  # of several, the innermost has taken its batch last
            latest = max(self._batches.values(), key=lambda batches: batches.in_hand)
            undone |= zip(self._generators, latest.watched_before(), strict=False)
        try:
            self._save = save(self._folder, background=not stops, **undone)
        except CheckpointError as error:
            if not stops:
                raise
            warnings.warn(f"{error}. It is saved once more, as the run ends", stacklevel=2)
            save(self._folder, background=False, **undone)
        if stops:
            self._end(trained, workers)

    def _warn_if_late(self, trained: int) -> None:
        """Say once that nothing has been saved for long."""
        if self._is_said or trained < self._last + self._every + max(self._every, _MANY):
            return
        self._is_said = True
        warnings.warn(
            f"autosave(every={self._every}) has not saved since pass {self._last} of {trained}: "
            "before every pass since there were gradients that no optimizer has used, or results "
            "whose backward may come, which a checkpoint does not have. It saves after a step of "
            "the optimizer, or where gradients are cleared; with Batches before the first pass of "
            "a batch",
            stacklevel=6,
        )

    def _end(self, trained: int, workers: Workers) -> NoReturn:
        """End this process: with code 0 if its launcher sent SIGTERM, else with an error."""
        saved = f"the run is saved in {self._folder} after {trained} steps, and ends"
        if not wait_until(lambda: workers.was_asked_to_stop, _HEARS, _PAUSE):
            raise SystemExit(f"penstock: another machine was asked to stop by SIGTERM: {saved}")
        if workers.role.leads:
            print(f"penstock: SIGTERM: {saved}", file=sys.stderr, flush=True)
        raise SystemExit(0)


def _check_loaders(things: Mapping[str, Any]) -> None:
    """Raise if a loader's own state is among these; that of a sampler may be, beside `Batches`.

    Raises:
        InputError: it is.
    """
    has_batches = any(isinstance(thing, Batches) for thing in things.values())
    for name, thing in things.items():
        is_sampler = isinstance(thing, Sampler)
        if _is_loader(thing) and not (is_sampler and has_batches):
            of = "ps.Batches(...) of the loader" if is_sampler else f"{name}=ps.Batches(...) of it"
            raise InputError(
                f"{name}= is a {type(thing).__name__}, whose state says that the batch in hand is "
                f"done, and autosave saves before that is trained: give {of} and iterate these, "
                "or call pipe.save after steps"
            )


def _is_loader(thing: object) -> bool:
    """Whether a thing gives batches, or numbers of rows, and has a state of its own.

    A loader has no items by number, as a list has, unless it is a dataset that is iterated itself.
    """
    if not isinstance(thing, Iterable) or not hasattr(thing, "state_dict"):
        return False
    is_list = isinstance(thing, Sized) and hasattr(thing, "__getitem__")
    is_known = isinstance(thing, (Batches, nn.Module, Mapping))
    return not is_known and (not is_list or isinstance(thing, IterableDataset))


def resume(
    folder: str | os.PathLike[str], target: Restorable, /, **things: Any
) -> dict[str, Any] | None:
    """Go on from the newest checkpoint that is whole, if there is one.

    It is in the folder itself, as `Pipeline.autosave` writes it, or in a folder in it. One that is
    damaged is left out, with a warning. Nothing is deleted.

    Args:
        folder: of the checkpoint, or of several.
        target: a pipeline, or a model.
        **things: as in `Checkpoint.restore`.

    Returns:
        the plain data that was saved; `None` if there is no checkpoint: the run begins.

    Raises:
        InputError: the newest one is of another model, or of other things; or the folder is a file.
        CheckpointError: none of those that are there is whole.
    """
    if os.path.isfile(folder):
        raise InputError(f"{os.fspath(folder)} is a file: a checkpoint is a folder")
    running = target if isinstance(target, Restorable) else None
    workers = None if running is None else running._runner.workers
    why: CheckpointError | None = None
    for path in _found(Path(folder), workers):
        try:
            with nullcontext() if workers is None else workers.operation("resume", TIMEOUT):
                found: dict[str, Any] = load(path).restore(target, **things)
        except CheckpointError as error:
            warnings.warn(f"{error}. An older one is looked for", stacklevel=2)
            why = why or error
        else:
            return found
    if why is not None:
        raise why
    return None


def _found(folder: Path, workers: Workers | None) -> list[Path]:
    """The folders to be tried, in order: the same in all processes that run the script."""
    if workers is None:
        return _newest_first(folder)
    with workers.operation("the search for checkpoints"):
        names = None
        if workers.role.leads:
            names = [os.path.relpath(path, folder) for path in _newest_first(folder)]
        return [folder / name for name in workers.broadcast(names, "leader")]


def _newest_first(folder: Path) -> list[Path]:
    """The folders that have checkpoints, by how much had been trained, and when they were saved."""
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [path for path in (folder, *inside) if (path / INDEX).is_file()]
    return sorted(found, key=_progress, reverse=True)


def _progress(path: Path) -> tuple[int, float]:
    try:
        trained = Checkpoint(path).batches
    except CheckpointError:  # it is tried, and said, in its turn
        trained = sys.maxsize
    return trained, (path / INDEX).stat().st_mtime
