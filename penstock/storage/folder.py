"""The folder of a checkpoint, in which one file decides what counts.

    model.safetensors.index.json              what there is; replaced last, and at once
    model-000007-00001-of-00002.safetensors   weights, a file for each worker
    optimizer-000007-00001-of-00002.pt        what optimizers remember, the same
    training-000007.pt                        everything else
    random-000007.pt                          the states of random generators
    plan-000007.json                          the plan

Every save has a number, and writes files that are new. The index names the files of one save; it is
moved into place when they are all on the disk, and only then are those of the save before removed.
The index is the one that transformers and `Pipeline(weights=...)` read.

A file is never removed because of its name alone, as others may have files with such names. Before
a save writes anything, it lists the files that it may write, and those of the index, in
`.penstock-saving.json`. This list is on the disk before any of the files, and is removed when the
new index is in place. So a save that is killed leaves the old checkpoint and a list of the other
files, which the next save removes.
"""

from __future__ import annotations

import os
import re
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypedDict

import msgspec

from penstock.errors import CheckpointError
from penstock.files import FolderLock, readable

INDEX = "model.safetensors.index.json"
VERSION = 1
SAVING = ".penstock-saving.json"
"""Lists the files that saves may have written, while one is under way or after one has failed."""
_NEW_INDEX = ".penstock-index.json"  # not yet in its place
_NEW_LIST = ".penstock-saving.new.json"
_MALFORMED = (
    msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError, ValueError, RecursionError,
)  # fmt: skip
_OURS = re.compile(r"(?:model|optimizer|training|random|plan)-\d{6,}[-.].*")
_BLOCK = 1 << 22  # bytes that are read at once


class FileEntry(TypedDict):
    """A file's size in bytes and its CRC-32, as the index has them."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Index:
    """What an index says of one save.

    Attributes:
        number: of the save.
        files: all of its files but the index, by name.
        weights: for every tensor the name of its file.
        total_bytes: of all tensors.
    """

    number: int = 0
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    weights: Mapping[str, str] = field(default_factory=dict)
    total_bytes: int = 0

    def encode(self) -> bytes:
        """JSON that transformers and `Pipeline(weights=...)` read as well."""
        penstock = {"version": VERSION, "number": self.number, "files": self.files}
        metadata = {"total_size": self.total_bytes, "penstock": penstock}
        return readable({"metadata": metadata, "weight_map": self.weights})


class _Listed(NamedTuple):
    """The files that saves may have written, and the number of the latest of these saves."""

    number: int
    files: list[str]


class Folder:
    """One checkpoint's place, as seen by who writes it.

    Args:
        path: of the folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        self._lock: FolderLock | None = None

    def begin(self, names: Callable[[int], Sequence[str]], after: int = 0) -> int:
        """Make the folder, keep others from saving there, and remove what killed saves have left.

        Args:
            names: the files that the save of a number may write.
            after: a number that was used, and whose files may yet come.

        Returns:
            the number of the save that begins; no file with one of its names exists.

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
                return self._announce(names, after)
            except BaseException:
                self.end()
                raise
        except OSError as error:
            above = (self.path, *self.path.parents)
            file = next((path for path in above if os.path.isfile(path)), None)
            why = error.strerror if file is None else f"{file} is a file, and not a folder"
            raise CheckpointError(f"cannot save a checkpoint to {self.path}: {why}") from error

    def _announce(self, names: Callable[[int], Sequence[str]], after: int) -> int:
        """Choose a number whose files would take nobody's place, and list them on the disk."""
        saved, listed = self._saved(), self._listed()
        number = 1 + max(after, listed.number, saved.number)
        while any(os.path.lexists(self.path / name) for name in names(number)):
            number += 1
        before = [name for name in saved.files if _OURS.fullmatch(name)]
        ours = dict.fromkeys([*listed.files, *before, *names(number)])
        found = {"version": VERSION, "number": number, "files": list(ours)}
        self._put(SAVING, readable(found), _NEW_LIST)
        return number

    def _put(self, name: str, content: bytes, scratch: str) -> None:
        """Have a file on the disk, all of it or as it was."""
        new = self.path / scratch
        try:
            new.unlink(missing_ok=True)  # what it links to, if it is a link, stays as it is
            new.write_bytes(content)
            sync(new)
            sync(self.path)  # the names of the files that it refers to
            new.replace(self.path / name)
        except OSError:
            with suppress(OSError):
                new.unlink(missing_ok=True)
            raise
        sync(self.path)

    def _saved(self) -> Index:
        """What the index says; of a folder without one, that nothing was saved."""
        path = self.path / INDEX
        return (read_index(path) if path.exists() else None) or Index()

    def _listed(self) -> _Listed:
        """The files that saves have written, or were about to write."""
        path = self.path / SAVING
        if not path.exists():
            return _Listed(0, [])
        try:
            found = msgspec.json.decode(path.read_bytes())
            return _Listed(int(found["number"]), _plain_names(found["files"], path))
        except _MALFORMED as error:
            raise CheckpointError(
                f"{path} is not a list of a save's files: {error!r}. It names the files of an "
                "interrupted save; remove it, and those files, by hand"
            ) from error

    def _take_lock(self) -> None:
        try:
            self._lock = FolderLock(self.path)
        except BlockingIOError:
            raise CheckpointError(
                f"another save to {self.path} is under way, from here or from another process; "
                "wait for it, or give every run a folder of its own"
            ) from None
        if self._lock.without:
            warnings.warn(
                f"{self.path} is on a file system without locks ({self._lock.without}): if another "
                "process saves there at the same time, this cannot be detected, and the "
                "checkpoint may be lost. Give every run a folder of its own",
                stacklevel=2,
            )

    def _check_is_free(self) -> None:
        single, index = self.path / "model.safetensors", self.path / INDEX
        foreign = single if single.exists() else index
        if foreign.exists() and (foreign is single or read_index(index) is None):
            raise CheckpointError(
                f"{self.path} holds another model's weights, {foreign.name}, which a checkpoint "
                "would replace; save to another folder"
            )

    def clean(self) -> None:
        """Remove the files of saves that are no checkpoint, or not any more.

        Their list stays: what writes them may be late.
        """
        kept = self._saved().files
        for name in self._listed().files:
            path = self.path / name
            if name not in kept and os.path.lexists(path):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)

    def commit(self, index: Index) -> None:
        """Make these files the checkpoint, and remove those of the one before.

        Old files that cannot be removed stay listed, and a later save removes them.

        Raises:
            CheckpointError: one of the files is gone or has another size; on a file system without
                locks, another save may have removed it.
            OSError: the index cannot be written; the checkpoint before still counts.
        """
        for name, written in index.files.items():
            path = self.path / name
            if not path.is_file() or path.stat().st_size != written["size"]:
                raise CheckpointError(
                    f"{path} was removed or changed while it was being saved, perhaps by another "
                    "run that saves there; give every run a folder of its own. A checkpoint "
                    "before it is untouched"
                )
        self._put(INDEX, index.encode(), _NEW_INDEX)
        try:
            self.clean()
            (self.path / SAVING).unlink(missing_ok=True)
        except OSError as error:
            warnings.warn(
                f"the checkpoint {self.path} is saved, but files of the one before cannot be "
                f"removed: {error}. The next save tries again",
                stacklevel=2,
            )

    def end(self, failed: bool = False) -> None:
        """Let others save there, if they could not before; after a failure remove what it left."""
        lock, self._lock = self._lock, None
        if lock is not None:
            if failed:
                with suppress(OSError, CheckpointError):
                    self.clean()
            lock.release()


def is_begun(path: Path) -> bool:
    """Whether a folder is as a killed save leaves it: with a list of its files, or empty."""
    return (path / SAVING).exists() or not any(path.iterdir())


def read_index(path: Path) -> Index | None:
    """The index of a checkpoint; `None` if it is one of weights that Penstock has not saved.

    Raises:
        CheckpointError: it is none, or of a later version, or names files that are elsewhere.
    """
    try:
        found = msgspec.json.decode(path.read_bytes())
        weights = msgspec.convert(found["weight_map"], dict[str, str])
        metadata = found.get("metadata") or {}
        own = metadata.get("penstock")
        if own is None:
            return None
        version = int(own["version"])
        if version > VERSION:
            raise CheckpointError(
                f"{path.parent} was written by a later version of Penstock, in format {version}; "
                f"this one reads {VERSION}"
            )
        files = msgspec.convert(own["files"], dict[str, FileEntry])
        _plain_names(files, path)
        if unknown := set(weights.values()) - files.keys():
            raise KeyError(min(unknown))
        return Index(int(own["number"]), files, weights, int(metadata.get("total_size", 0)))
    except (*_MALFORMED, AttributeError) as error:
        raise CheckpointError(f"{path} is not an index of weights: {error!r}") from error


def _plain_names(names: Iterable[str], source: Path) -> list[str]:
    """Names of files in the folder itself, as all of a checkpoint's are.

    Raises:
        CheckpointError: one leads elsewhere.
    """
    found = list(names)
    for name in found:
        if os.path.basename(name) != name or name in ("", ".", "..") or "\0" in name:
            raise CheckpointError(
                f"{source} names {name!r}, which is not in its folder. No checkpoint of Penstock "
                "does that: do not trust it"
            )
    return found


def checked(path: Path, expected: FileEntry) -> Path:
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
            "Use another checkpoint"
        )
    return path


def entry(path: Path) -> FileEntry:
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
