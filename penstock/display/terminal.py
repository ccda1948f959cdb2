"""What is shown while a pipeline is built, unless the user has said how. No torch here."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TextIO

from penstock.errors import InputError

Progress = Callable[[int, int, str], None]
"""Called with steps done, steps in all, and what is being done."""

_PATIENCE = 2.0  # seconds that nobody minds


@contextmanager
def showing(progress: Progress | Literal["auto"] | None) -> Iterator[Progress | None]:
    """Gives the function that is called with progress while this is open; `None` for none.

    Args:
        progress: the user's function; `None` for no progress; or `"auto"` for a line on stderr, if
            that is a terminal or this is a notebook. The line appears after two seconds and is
            erased at the end.

    Raises:
        InputError: it is something else.
    """
    if progress != "auto":
        if not (progress is None or callable(progress)):
            raise InputError(
                f'progress={progress!r} is neither "auto", nor None, nor a function of steps done, '
                "steps in all, and what is done"
            )
        yield progress
    elif is_watched():
        line = _Line(sys.stderr)
        try:
            yield line.update
        finally:
            line.close()
    else:
        yield None


def is_watched() -> bool:
    """Whether a person looks at what this process writes; of several ranks the first writes."""
    if os.environ.get("RANK", "0") != "0":
        return False
    return sys.stderr.isatty() or "ipykernel" in sys.modules


class _Line:
    """One line that is written again and again."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text = ""
        self._width = 0
        self._lock = threading.Lock()
        self._over = False
        self._due = time.monotonic() + _PATIENCE
        self._timer = threading.Timer(_PATIENCE, self._draw)
        self._timer.daemon = True
        self._timer.start()

    def update(self, done: int, total: int, what: str) -> None:
        self._text = f"{what} ({done}/{total})" if total > 1 else what
        if time.monotonic() >= self._due:
            self._draw()

    def _draw(self) -> None:
        with self._lock:
            if self._text and not self._over:
                columns = shutil.get_terminal_size().columns - 1
                text = f"penstock: {self._text}"[:columns]
                self._file.write(f"\r{text.ljust(self._width)}")
                self._file.flush()
                self._width = len(text)

    def close(self) -> None:
        """Stop the timer and erase the line."""
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._width:
                self._file.write(f"\r{' ' * self._width}\r")
                self._file.flush()
