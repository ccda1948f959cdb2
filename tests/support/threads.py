"""Threads that a test starts, told from those that other tests of the process have left."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest

NewThreads = Callable[[], list[threading.Thread]]


@pytest.fixture
def new_threads() -> NewThreads:
    """A function that lists the running threads that were not there when the test began.

    Ask for it before the fixtures whose threads count. A pipeline that an earlier test did not
    close ends whenever Python collects it, so the threads of others may end meanwhile.
    """
    gc.collect()
    before = set(threading.enumerate())
    return lambda: [thread for thread in threading.enumerate() if thread not in before]
