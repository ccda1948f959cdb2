"""Files that are written whole or not at all, and errors that name the file. No torch here."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from penstock.errors import InputError


def write_whole(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file under another name and move it into place, so that nobody reads half of it.

    Raises:
        OSError: it cannot be written; an existing file is as it was.
    """
    target = Path(path)
    scratch = target.with_name(f".{target.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        scratch.write_bytes(content)
        scratch.replace(target)
    finally:
        scratch.unlink(missing_ok=True)


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
