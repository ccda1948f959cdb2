"""The folder of a checkpoint, in which one file decides what counts.

    model.safetensors.index.json              what there is; replaced last, and at once
    model-000007-00001-of-00002.safetensors   weights, a file for each worker
    optimizer-000007-00001-of-00002.pt        what optimizers remember, the same
    training-000007.pt                        everything else
    random-000007.pt                          the states of random generators
    plan-000007.json                          the plan

Every save has a number, and writes files that are new. The index names the files of one save; it is
moved into place when they are all on the disk, and only then are those of the save before removed.
So a save that is killed leaves the checkpoint that was there, and files that no index names, which
the next save removes. The index is the one that transformers and `Pipeline(weights=...)` read.
"""

from __future__ import annotations

import fcntl
import os
import re
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import CheckpointError
from penstock.profile.files import readable

INDEX = "model.safetensors.index.json"
VERSION = 1
_OURS = re.compile(r"(?:model|optimizer|part|training|random|plan)-(\d{6,})[-.].*")
_SCRATCH = re.compile(r"\.(?:part|plan)-\d{6,}.*|" + re.escape(f".{INDEX}.new"))
_BLOCK = 1 << 22  # bytes that are read at once


class Folder:
    """One checkpoint's place, as seen by who writes it.

    Args:
        path: of the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        self._lock = -1

    def begin(self, after: int = 0) -> int:
        """Make the folder, keep others from saving there, and remove what killed saves have left.

        Args:
            after: a number that was used, and whose files may yet come.

        Returns:
            the number of the save that begins.

        Raises:
            CheckpointError: it cannot be made, another process is saving there, or it belongs to
                something else.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            try:
                self._check_is_free()
                self.clean()
                names = [path.name for path in self.path.iterdir()]
            except BaseException:
                self.end()
                raise
        except OSError as error:
            above = (self.path, *self.path.parents)
            file = next((path for path in above if os.path.isfile(path)), None)
            why = error.strerror if file is None else f"{file} is a file, and not a folder"
            raise CheckpointError(f"cannot save a checkpoint to {self.path}: {why}") from error
        numbers = [int(found[1]) for name in names if (found := _OURS.fullmatch(name))]
        return 1 + max([after, *numbers])

    def _take_lock(self) -> None:
        lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise CheckpointError(
                f"another save to {self.path} is under way, from here or from another process; "
                "wait for it, or give every run a folder of its own"
            ) from None
        except OSError:  # a file system that has no locks
            pass
        self._lock = lock

    def _check_is_free(self) -> None:
        single, index = self.path / "model.safetensors", self.path / INDEX
        foreign = single if single.exists() else index
        if foreign.exists() and (foreign is single or read_index(index).get("penstock") is None):
            raise CheckpointError(
                f"{self.path} holds another model's weights, {foreign.name}, which a checkpoint "
                "would take the place of; save to another folder"
            )

    def clean(self) -> None:
        """Remove the files that no index names, those of saves only."""
        kept = {INDEX}
        if (self.path / INDEX).exists():
            kept |= read_index(self.path / INDEX)["penstock"]["files"].keys()
        for path in list(self.path.iterdir()):
            if _is_ours(path.name) and path.name not in kept:
                path.unlink(missing_ok=True)

    def commit(self, index: dict[str, Any]) -> None:
        """Let these files be the checkpoint, instead of those before.

        Raises:
            OSError: they cannot; those before still are.
        """
        scratch = self.path / f".{INDEX}.new"
        scratch.write_bytes(readable(index))
        sync(scratch)
        sync(self.path)  # the names of the files that it refers to
        scratch.replace(self.path / INDEX)
        sync(self.path)
        self.clean()

    def end(self, failed: bool = False) -> None:
        """Let others save there, if they could not before; after a failure remove what it left."""
        if self._lock >= 0:
            if failed:
                with suppress(OSError, CheckpointError):
                    self.clean()
            with suppress(OSError):
                fcntl.flock(self._lock, fcntl.LOCK_UN)  # forks have it as well
            os.close(self._lock)
            self._lock = -1


def is_begun(path: Path) -> bool:
    """Whether a folder has what a save leaves that is killed: some of its files, or none yet."""
    names = [file.name for file in path.iterdir()]
    return not names or any(map(_is_ours, names))


def _is_ours(name: str) -> bool:
    return bool(_OURS.fullmatch(name) or _SCRATCH.fullmatch(name))


def read_index(path: Path) -> dict[str, Any]:
    """The index of a checkpoint: `"weight_map"`, and under `"penstock"` what else there is.

    Raises:
        CheckpointError: it is none.
    """
    try:
        found = msgspec.json.decode(path.read_bytes())
        weights, metadata = found["weight_map"], found.get("metadata") or {}
        return {"weight_map": dict(weights), "penstock": metadata.get("penstock")}
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no index of weights: {error!r}") from error


def checked(path: Path, expected: dict[str, int]) -> Path:
    """A file that is as it was written.

    Args:
        path: of the file.
        expected: its size and checksum.

    Raises:
        CheckpointError: it has others, or is not there.
    """
    try:
        found = entry(path)
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {error.strerror}. If the checkpoint was replaced since it was "
            "loaded, load it again"
        ) from error
    if found != expected:
        raise CheckpointError(
            f"{path} is not as it was written: it has {found['size']} bytes with checksum "
            f"{found['crc32']:08x} instead of {expected['size']} with {expected['crc32']:08x}. "
            "Take another checkpoint"
        )
    return path


def entry(path: Path) -> dict[str, int]:
    """Size and checksum of a file."""
    checksum = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
        return {"size": file.tell(), "crc32": checksum}


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
