"""SIGTERM is noted, for a run to end at the next point at which it can be saved."""

from __future__ import annotations

import atexit
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

_SAME = 5.0  # seconds in which another SIGTERM says the same: launchers send it to all, and again
_FINAL = 5.0  # seconds after which a process ends that does not run Python code


class Sigterm:
    """Handles SIGTERM until it is removed: the first is noted, a later one ends the process.

    The handler that was there before is called as well. If that one raises `SystemExit`, as Ray's
    does, the process still ends only when the run is saved. If the process is not `leaving` within
    `grace` seconds, or if a SIGTERM comes more than `_SAME` seconds after the first, the signal has
    the effect that it would have without this handler.

    A process in which SIGTERM is ignored goes on ignoring it. In a forked process, the signal has
    the effect that it would have without this handler.

    Args:
        ask: called when the signal comes, at any point of the program, and again after `grace`;
            returns whether there is a run to end. If there is none, the signal is passed on.
        grace: seconds after the first signal within which the process has to be `leaving`.

    Attributes:
        received: whether the signal was noted.
        leaving: whether the run is being saved, and the process ends by itself.
    """

    def __init__(self, ask: Callable[[], bool], grace: float) -> None:
        self.received = False
        self.leaving = False
        self._ask, self._grace = ask, grace
        self._pid, self._since, self._is_late = os.getpid(), 0.0, False
        self._is_removed = False
        self._before = _in_use(signal.getsignal(signal.SIGTERM))
        if self._before == signal.SIG_IGN:
            return
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._handle)
        else:
            warnings.warn(
                "only the main thread can handle signals, so SIGTERM ends this process at once, "
                "and nothing is saved then. Call autosave there, or with on_sigterm=False",
                stacklevel=4,
            )

    def remove(self) -> None:
        """Have SIGTERM do what it did before, unless somebody else has a handler by now."""
        self._ask, self._is_removed = lambda: False, True
        is_ours = signal.getsignal(signal.SIGTERM) == self._handle
        if is_ours and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self._restored)

    def leave(self) -> None:
        """The run is being saved, and the process ends by itself."""
        self.leaving = True
        atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # a late one changes nothing

    def _handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        is_again = self.received and now > self._since + _SAME
        if os.getpid() != self._pid or self._is_late or is_again or not self._ask():
            self._pass_on(number, frame)
            return
        if not self.received:
            self.received, self._since = True, now
            threading.Thread(target=self._watch, name="penstock-sigterm", daemon=True).start()
        if callable(self._before):
            with suppress(SystemExit):  # as of Ray: it will end, but not before it is saved
                self._before(number, frame)

    @property
    def is_over(self) -> bool:
        """Whether it has done its work, in a process that goes on nevertheless, as notebooks do."""
        return self.leaving or self._is_removed

    @property
    def _restored(self) -> Any:
        return signal.SIG_DFL if self._before is None else self._before  # None: it is not Python's

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        """Let the signal do what it would do without this."""
        if callable(self._before):
            self._before(number, frame)
            return
        signal.signal(signal.SIGTERM, self._restored)
        os.kill(os.getpid(), signal.SIGTERM)

    def _watch(self) -> None:
        """End the process when it is time, whatever it does; in a thread of its own."""
        deadline = self._since + self._grace
        while not self.leaving and (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, 1.0))
        if self.leaving or not self._ask():
            return
        self._is_late = True
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_FINAL)
        if self._restored == signal.SIG_DFL and not self.leaving:
            os._exit(128 + signal.SIGTERM)


def _in_use(handler: Any) -> Any:
    """A handler, without those around it that have done their work."""
    owner = getattr(handler, "__self__", None)
    return _in_use(owner._before) if isinstance(owner, Sigterm) and owner.is_over else handler
