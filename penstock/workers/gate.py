"""Lets the script run the model itself while no worker of this process is amid a module.

When it looks at the model, the script puts other tensors into the modules, so threads of workers
that run the same modules must not be amid a forward then. Those that wait for values are not.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from weakref import WeakKeyDictionary

from torch import nn


class BusyError(Exception):
    """Somebody is inside for too long; never reaches a user."""


class Gate:
    """Many workers may be inside at a time, or else the script alone.

    A worker may go in while the script waits, so workers that wait for each other inside do so as
    ever. It waits until all are out, which comes about as nobody starts more passes meanwhile.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._is_alone = False

    def __enter__(self) -> None:
        with self._changed:
            while self._is_alone:
                self._changed.wait()
            self._inside += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._inside -= 1
            if not self._inside:
                self._changed.notify_all()

    @contextmanager
    def alone(self, timeout: float) -> Iterator[None]:
        """While open, nobody is inside; for one thread at a time.

        Args:
            timeout: seconds that those inside may take.

        Raises:
            BusyError: somebody takes longer.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._inside:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise BusyError
                self._changed.wait(left)
            self._is_alone = True
        try:
            yield
        finally:
            with self._changed:
                self._is_alone = False
                self._changed.notify_all()


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
