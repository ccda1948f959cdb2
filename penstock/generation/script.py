"""A function that runs in a thread of its own, but only while another thread waits for it.

A model's `generate` is a loop that calls the model and waits for the result. `Script` runs such a
loop: `resume` lets it go on until it asks for something. So one thread can have many of them, of
which exactly one runs at any time. (Python's generators do the same for functions that are written
as such.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from penstock.capture.calls import ambient
from penstock.capture.randomness import undisturbed
from penstock.devices.kinds import kind_of
from penstock.devices.streams import Currents

_TIMEOUT = 60.0  # seconds that a script may take to hear that it is cancelled


class Cancelled(BaseException):
    """Ends the function of a script that is not wanted any more."""


@dataclass(frozen=True)
class Request:
    """A script asks for something, and waits.

    Attributes:
        what: the arguments of `Script.ask`.
    """

    what: Any


@dataclass(frozen=True)
class Ended:
    """A script has returned.

    Attributes:
        result: of its function.
    """

    result: Any


@dataclass(frozen=True)
class _Failed:
    error: BaseException


class Script:
    """A function that runs by turns with the thread that resumes it.

    Torch's default generators are the script's own while it runs, so what one draws does not depend
    on when others do. It runs under the autocast, on the current streams and in the context
    variables of whoever has made it.

    Args:
        function: is given the script, and calls its `ask`.
        seed: of torch's default generators.
        threads: intra-op threads.
        devices: other than the CPU that it uses.
    """

    def __init__(
        self,
        function: Callable[[Script], Any],
        seed: int,
        threads: int,
        devices: Sequence[torch.device] = (),
    ) -> None:
        self._function = function
        self._threads = threads
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._events: SimpleQueue[Request | Ended | _Failed] = SimpleQueue()
        self._generators = [torch.default_generator]
        self._generators += [kind_of(device).generator(device) for device in devices]
        own = [torch.Generator(g.device).manual_seed(seed) for g in self._generators]
        self._random = [generator.get_state() for generator in own]
        self._outer = self._random  # the states of the default generators while it does not run
        self._currents = Currents(devices)
        self._modes, self._context = ambient(), copy_context()
        self._thread: threading.Thread | None = None
        self._is_over = False

    def resume(self, answer: Any = None, error: BaseException | None = None) -> Request | Ended:
        """Let it go on until it asks for something, or returns.

        Args:
            answer: what the last `ask` returns.
            error: what it raises instead.

        Raises:
            Exception: what the function raises.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="generate", daemon=True)
            self._thread.start()
        else:
            self._answers.put((answer, error))
        event = self._events.get()
        if isinstance(event, Request):
            return event
        self._is_over = True
        self._thread.join(_TIMEOUT)
        if isinstance(event, _Failed):
            try:
                raise event.error
            finally:
                del event  # which the traceback has, and which has the traceback
        return event

    def cancel(self) -> None:
        """End it, if it has begun and not ended."""
        if self._thread is not None and not self._is_over:
            self._is_over = True
            self._answers.put((None, Cancelled()))
            self._thread.join(_TIMEOUT)

    def ask(self, what: Any) -> Any:
        """Ask whoever has resumed the script for something; called by its function."""
        self._return_generators()
        self._events.put(Request(what))
        answer, error = self._answers.get()
        self._take_generators()
        if error is not None:
            try:
                raise error
            finally:
                del error  # or it and its traceback would keep each other
        return answer

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        event: Ended | _Failed | None = None
        try:
            self._take_generators()
            try:
                with self._currents.taken(), self._modes.autocasting():
                    event = Ended(self._context.run(self._function, self))
            finally:
                self._return_generators()
        except Cancelled:  # nobody waits; kept, its traceback would keep all that the function has
            return
        except BaseException as error:
            event = _Failed(error)
        self._events.put(event)
        del event

    def _take_generators(self) -> None:
        """Take the default generators, which calls of other threads are kept from seeding."""
        undisturbed().__enter__()
        self._outer = self._exchanged(self._random)

    def _return_generators(self) -> None:
        """Give them back as they were."""
        self._random = self._exchanged(self._outer)
        undisturbed().__exit__(None, None, None)

    def _exchanged(self, states: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Let the default generators have these states; returns those that they had."""
        before = [generator.get_state() for generator in self._generators]
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)
        return before
