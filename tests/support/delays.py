"""Workers that are late: what comes of a step must not depend on which of them is faster."""

from __future__ import annotations

import functools
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.engine.stage import Stage


@contextmanager
def slow_stages(seed: int, worker: int | None = None) -> Iterator[None]:
    """Meanwhile, stages that are run in this process now and then take their time.

    Args:
        seed: of when, and of how long.
        worker: just those of this thread; of all by default.
    """
    drawn = random.Random(seed)

    def slow(method: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(method)
        def run(self: Stage, *args: Any) -> None:
            if worker is None or threading.current_thread().name == f"penstock-{worker}":
                time.sleep(drawn.choice([0.0, 0.0, 2e-4, 2e-3]))
            method(self, *args)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("forward", "infer", "backward"):
            patch.setattr(Stage, name, slow(getattr(Stage, name)))
        yield


@contextmanager
def held_up(pid: int, seed: int) -> Iterator[None]:
    """Meanwhile, a process is stopped now and then for some milliseconds."""
    drawn, done = random.Random(seed), threading.Event()

    def stop_and_go() -> None:
        while not done.wait(drawn.uniform(0.0, 0.02)):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(drawn.uniform(0.0, 0.02))
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
