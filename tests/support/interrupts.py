"""Ctrl-C at the worst moment."""

from __future__ import annotations

import _thread
import operator
import signal
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def drop_interrupted(held: list[Any]) -> None:
    """Empty a list just after a Ctrl-C that no Python has seen: from here on, all is in C.

    Python that runs because something in the list dies would see it first, and lose it.

    Raises:
        KeyboardInterrupt: always, unless it was lost.
    """
    deque(map(operator.call, (_thread.interrupt_main, held.clear)), maxlen=0)


@contextmanager
def interrupting(seconds: float, again: float = 20.0) -> Iterator[None]:
    """Somebody presses Ctrl-C after so many seconds, and again if nothing comes of it for long.

    For torch has finalizers written in Python, which may lose one.
    """
    over = threading.Event()

    def press() -> None:
        wait = seconds
        while not over.wait(wait):
            signal.raise_signal(signal.SIGINT)
            wait = again

    thread = threading.Thread(target=press)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
