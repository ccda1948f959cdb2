"""Lets the script run the model itself while no worker of this process is inside a module.

When the script looks at the model, it puts other tensors into the modules. Threads of workers that
run the same modules must not be amid a forward then, but they may be waiting for values.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from weakref import WeakKeyDictionary

from torch import nn

from penstock.errors import WorkerTimeout


class BusyError(Exception):
    """Somebody is inside for too long; never reaches a user."""


class Gate:
    """Lets many workers in at a time, or else the script alone.

    While the script waits for all workers to come out, more of them may still go in, as those
    inside may wait for these. The wait ends because no more passes are started meanwhile.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._inside: dict[int, int] = {}  # by thread, how often it has entered
        self._is_alone = False
        self._scripts = threading.RLock()  # of several threads of the script one is alone
        self._depth = 0

    def __enter__(self) -> None:
        with self._lock:
            while self._is_alone:
                self._changed.wait()
            me = threading.get_ident()
            self._inside[me] = self._inside.get(me, 0) + 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._lock:
            me = threading.get_ident()
            left = self._inside.pop(me, 1) - 1
            if left:
                self._inside[me] = left
            if not self._inside:
                self._changed.notify_all()

    def leave(self) -> None:
        """Note that the calling thread is not inside, even if a Ctrl-C came as it left."""
        with self._lock:
            self._inside.pop(threading.get_ident(), None)
            if not self._inside:
                self._changed.notify_all()

    @contextmanager
    def alone(self, timeout: float) -> Iterator[None]:
        """While open, no worker is inside. One thread at a time may open it, and again within.

        Args:
            timeout: seconds to wait for the workers inside.

        Raises:
            BusyError: the wait took longer.
        """
        deadline = time.monotonic() + timeout
        if not self._scripts.acquire(timeout=timeout):
            raise BusyError
        try:
            with self._changed:
                while self._inside:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise BusyError
                    self._changed.wait(left)
                self._is_alone = True
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1
                with self._changed:
                    self._is_alone = self._depth > 0
                    self._changed.notify_all()
        finally:
            self._scripts.release()


def busy(timeout: float) -> WorkerTimeout:
    """The user's error for `BusyError`; the worker may belong to another pipeline of the model."""
    return WorkerTimeout(
        f"a forward of this model is under way in a worker of this process for more than "
        f"{timeout:g} s, and the script has to run it by itself now; give Pipeline a larger "
        "timeout= if it takes longer than that"
    )


_GATES: WeakKeyDictionary[nn.Module, Gate] = WeakKeyDictionary()
_finding = threading.Lock()


def gate_of(model: nn.Module) -> Gate:
    """The gate of all pipelines of this process that run modules of this model."""
    modules = list(model.modules())
    with _finding:
        known = (_GATES[module] for module in modules if module in _GATES)
        gate = next(known, None) or Gate()
        for module in modules:
            _GATES.setdefault(module, gate)
    return gate
