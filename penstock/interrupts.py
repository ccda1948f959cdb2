"""Python's handlers of signals, which may raise anything anywhere in the main thread."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import inspect
import signal
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from threading import get_ident
from types import FrameType
from typing import Any

# Every message passes `interrupts_wait`, and what `signal` wraps around these takes ten times as
# long: it makes numbers of enumerations, and enumerations of numbers.
_SIGINT = int(signal.SIGINT)
_ALL = frozenset(map(int, signal.valid_signals()))
_OTHERS = sorted(_ALL - {_SIGINT})
_handle: Callable[[int, Any], Any] = _signal.signal
_handler: Callable[[int], Any] = _signal.getsignal


@contextmanager
def interrupts_wait() -> Iterator[None]:
    """Inside, a Ctrl-C waits; afterwards, the user's own handler is called.

    So a message is whole, for example, or all parameters are updated.

    A second one does not wait. Outside of the main thread, which no signal interrupts, and where
    the handler is not one of Python's, nothing is done.
    """
    theirs = _handler(_SIGINT)
    if get_ident() != threading.main_thread().ident or not callable(theirs):
        yield
        return
    came: list[FrameType | None] = []

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            _handle(_SIGINT, theirs)
            came.clear()
            theirs(number, frame)
        else:
            came.append(frame)

    _handle(_SIGINT, note)
    try:
        yield
    finally:
        _handle(_SIGINT, theirs)
        if came:
            theirs(signal.SIGINT, came[0])


@contextmanager
def signals_wait() -> Iterator[None]:
    """Inside, all signals wait for which Python has a handler; Ctrl-C as in `interrupts_wait`."""
    if get_ident() != threading.main_thread().ident:
        yield
        return
    theirs = {n: handler for n in _OTHERS if callable(handler := _handler(n))}
    came: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append((number, frame))

    with interrupts_wait():
        try:
            for number in theirs:
                _handle(number, note)
            yield
        finally:
            try:
                _have(theirs)
            finally:  # again, as a second Ctrl-C may have come amid the first time
                _have(theirs)
                _deliver(theirs, came)


def _have(handlers: Mapping[int, Any]) -> None:
    """Have signals, by number, call these handlers."""
    for number, handler in handlers.items():
        _handle(number, handler)


def _deliver(handlers: Mapping[int, Any], came: Sequence[tuple[int, FrameType | None]]) -> None:
    """Call the handlers of the signals that came, each of them even if one before it raises."""
    if came:
        number, frame = came[0]
        try:
            handlers[number](number, frame)
        finally:
            _deliver(handlers, came[1:])


def is_interrupt(error: BaseException) -> bool:
    """Whether an error comes from a signal, and not from the code that the signal has interrupted.

    Args:
        error: was caught in the thread that calls this.
    """
    if get_ident() != threading.main_thread().ident:
        return False
    if isinstance(error, KeyboardInterrupt):
        return callable(_handler(_SIGINT))
    return any(_handles(frame) for frame, _ in traceback.walk_tb(error.__traceback__))


def _handles(frame: FrameType) -> bool:
    """Whether it is a call of a handler: with a number and the frame that was interrupted."""
    code, back = frame.f_code, frame.f_back
    if back is None:
        return False
    count = code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)
    given: list[Any] = []
    for name in code.co_varnames[:count]:
        value = frame.f_locals.get(name)
        given += value if isinstance(value, tuple) else [value]
    return any(b is back and a in _ALL for a, b in pairwise(given) if isinstance(a, int))
