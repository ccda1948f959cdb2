"""Saving by itself every so many steps, and going on from the newest checkpoint that is whole."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.checkpoint.batches import Batches
from penstock.checkpoint.checkpoint import Checkpoint, Running, load
from penstock.errors import CheckpointError, InputError
from penstock.storage.folder import INDEX

_Save = Callable[[Path, Mapping[str, Any]], object]


class Autosave:
    """Saves between two steps, before every so-manieth; see `Pipeline.autosave`.

    Args:
        folder: of the checkpoint.
        every: steps.
        things: what is saved with the model.
        trained: passes that have trained so far.

    Raises:
        InputError: `every` is no number of steps.
    """

    def __init__(
        self, folder: Path, every: int, things: Mapping[str, Any], trained: int = 0
    ) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InputError(f"every={every!r} is no number of steps; give 1 or more")
        self._folder, self._every, self._things = folder, every, things
        self._last = trained
        self._is_on = True

    def remove(self) -> None:
        """Save no more."""
        self._is_on = False

    def before_step(self, trained: int, parameters: Iterable[torch.Tensor], save: _Save) -> None:
        """Save, if it is time and no gradients are there, which would not be saved.

        Args:
            trained: passes that have trained so far.
            parameters: of the model.
            save: does it.
        """
        if not self._is_on or trained // self._every == self._last // self._every:
            return
        if any(p.grad is not None and bool(p.grad.any()) for p in parameters):
            return  # they are being accumulated
        self._last = trained
        undone = {n: t.undone if isinstance(t, Batches) else t for n, t in self._things.items()}
        save(self._folder, undone)


def resume(
    folder: str | os.PathLike[str], target: Running, /, **things: Any
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
        InputError: the newest one is of another model, or of other things.
        CheckpointError: none of those that are there is whole.
    """
    why: CheckpointError | None = None
    for path in _newest_first(Path(folder)):
        try:
            found: dict[str, Any] = load(path).restore(target, **things)
        except CheckpointError as error:
            warnings.warn(f"{error}. An older one is looked for", stacklevel=2)
            why = why or error
        else:
            return found
    if why is not None:
        raise why
    return None


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
