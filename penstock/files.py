"""Files that are written whole or not at all, errors that name the file, and memory. No torch."""

from __future__ import annotations

import errno
import fcntl
import os
import tempfile
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from penstock.errors import InputError
from penstock.forks import disown_in_forks

_MARKS = {"plan": "stages", "profile": "kinds"}  # a key that only this kind of file has
_NESTED = (list, tuple, dict)
_NO_LOCKS = {errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.ENOLCK, errno.EINVAL, errno.EBADF}
"""What `flock` says of a folder where it cannot lock; NFS takes it for a file that is only read."""
_SHORT = 180  # characters; an entry of a list gets a line if it is no longer


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file under another name and move it into place, so that nobody reads half of it.

    A link stays a link to what is written; a device or a pipe is written to, not replaced.

    Raises:
        OSError: it cannot be written; an existing file is as it was.
    """
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(content)
        return
    scratch = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        scratch.write_bytes(content)
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


class FolderLock:
    """A lock that gives this process a folder for itself, until `release` or its end.

    Forks of the process let go of the lock. Otherwise a data loader's worker that outlives a killed
    process would keep others out.

    Args:
        path: the folder.

    Attributes:
        without: why others are not kept out, if the file system has no locks; else empty.

    Raises:
        BlockingIOError: another process has locked the folder.
        OSError: there is no such folder.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.without = ""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                os.close(self._descriptor)
                raise
            self.without = str(error.strerror)
        disown_in_forks(self)

    def release(self) -> None:
        """Let others have it."""
        if self._descriptor >= 0:
            with suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            self.disown()

    def disown(self) -> None:
        """In a fork: let go of the lock, which is still the original's."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def save_whole(path: str | os.PathLike[str], content: bytes, what: str) -> None:
    """`write_whole`, to a file that the user named.

    Args:
        path: the file.
        content: of it.
        what: what it is, `"profile"`, for the message.

    Raises:
        InputError: it cannot be written.
    """
    try:
        write_whole(path, content)
    except OSError as error:
        raise InputError(f"cannot write the {what} to {path}: {error.strerror}") from error


def read_whole(path: str | os.PathLike[str], what: str) -> bytes:
    """The content of a file that the user named.

    Args:
        path: the file.
        what: what it should be, `"profile"`, for the message.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise InputError(f"cannot read the {what} {path}: {error.strerror}") from error


def profile_beside(path: Path) -> Path:
    """Where the profile is that a plan was made from: `plan.profile.json` for `plan.json`."""
    return path.with_name(f"{path.stem}.profile.json")


def is_inside(folder: Path, name: str, others: Sequence[Path] = ()) -> bool:
    """Whether a file, with all links followed, is in a folder or below it.

    Args:
        folder: the folder.
        name: the path of the file relative to `folder`; absolute paths and `..` are never inside.
        others: other folders in or below which the file may be after following links.
    """
    if os.path.isabs(name) or ".." in Path(name).parts or "\0" in name:
        return False
    file = (folder / name).resolve()
    return any(file.is_relative_to(root.resolve()) for root in (folder, *others))


class _Versioned(msgspec.Struct):
    """The field that plans and profiles of all versions have."""

    version: int


def version_of(content: bytes) -> int:
    """The version of a plan or profile, whatever else it has.

    Raises:
        msgspec.DecodeError: it says none.
    """
    return msgspec.json.decode(content, type=_Versioned).version


def what_is(content: bytes) -> str | None:
    """`"plan"` or `"profile"`, by what the file has in it; `None` for anything else."""
    try:
        found = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    keys = found if isinstance(found, dict) else {}
    return next((what for what, mark in _MARKS.items() if mark in keys), None)


def readable(value: object) -> bytes:
    """JSON with a line for every entry of a dictionary, and for every list or dictionary in a list.

    Plain lists are on one line, and so are short dictionaries in lists.
    """
    return (_text(value) + "\n").encode()


def _text(value: object, margin: str = "") -> str:
    inner = margin + "  "
    if isinstance(value, dict) and value:
        entries = (f"{_json(key)}: {_text(item, inner)}" for key, item in value.items())
        return _block("{", entries, "}", margin)
    if isinstance(value, (list, tuple)) and any(isinstance(item, _NESTED) for item in value):
        return _block("[", (_item(item, inner) for item in value), "]", margin)
    return _json(value)


def _item(value: object, margin: str) -> str:
    line = _json(value)
    is_short = isinstance(value, dict) and len(line) <= _SHORT
    return line if is_short else _text(value, margin)


def _block(start: str, entries: Iterable[str], end: str, margin: str) -> str:
    lines = ",\n".join(f"{margin}  {entry}" for entry in entries)
    return f"{start}\n{lines}\n{margin}{end}"


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


def anonymous_memory(size: int) -> int:
    """A file descriptor of new, unnamed memory, which is freed when nobody has or maps it."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("penstock")
    else:  # a file that is deleted already
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, size)
    except BaseException:
        os.close(fd)
        raise
    return fd
