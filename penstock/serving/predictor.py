"""Calls of a model, several at a time, so that all stages are busy."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import is_tensor

from penstock.capture.trees import tree_leaves
from penstock.errors import ClosedError, StatesLost
from penstock.generation.generate import Tokens
from penstock.serving.refusal import Refusal
from penstock.sessions.session import SessionPass, Sessions

_MOST_BEGINNINGS = 5


class Prediction:
    """A call of the model, or one that is to come.

    Args:
        args, kwargs: of the call.

    Attributes:
        args, kwargs: as given.
        result: what the model has returned, when it has.
        error: why it has not; `None` if it has not failed.
        is_over: whether it has ended, in either way.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.args, self.kwargs = args, kwargs
        self.result: Any = None
        self.error: Exception | None = None
        self.is_over = False

    def new_tokens(self) -> Iterator[Tokens]:
        """No tokens come of a call."""
        return iter(())


@dataclass(eq=False)
class _Started:
    job: Prediction
    under_way: SessionPass
    begun: int


class Predictor:
    """Calls the model, each call one pass, of which several are under way.

    It implements `penstock.serving.engine.Work`, as `penstock.generation.generate.Generator` does.

    Args:
        sessions: of the pipeline.
        most: how many calls are under way at a time.
        kinds: how many kinds of inputs there may be besides that of the example: the forward is
            recorded for each, and recordings stay.
    """

    def __init__(self, sessions: Sessions, most: int, kinds: int) -> None:
        self._sessions = sessions
        self._kinds = kinds
        self._most = most
        self._waiting: deque[tuple[Prediction, int]] = deque()
        self._running: deque[_Started] = deque()

    def add(self, job: Prediction) -> None:
        """Make this call as well, as soon as there is room."""
        self._waiting.append((job, 1))

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self._waiting and not self._running

    def step(self) -> Sequence[Prediction]:
        """Begin what there is room for, and wait for the pass that was started first.

        Returns:
            the calls that may have ended.
        """
        touched = []
        while self._waiting and len(self._running) < self._most:
            job, begun = self._waiting.popleft()
            touched.append(job)
            self._start(job, begun)
        if self._running:
            first = self._running.popleft()
            touched.append(first.job)
            self._finish(first)
        return touched

    def cancel(self, job: Prediction) -> None:
        """End a call, whether it has begun or not."""
        self._waiting = deque(each for each in self._waiting if each[0] is not job)
        for one in [one for one in self._running if one.job is job]:
            self._running.remove(one)
            if not self._give_up(one):
                self._again(self._taken_back())
        job.is_over = True

    def close(self) -> None:
        """End all calls."""
        for job in [*(each for each, _ in self._waiting), *(one.job for one in self._running)]:
            job.is_over = True
        self._waiting.clear()
        self._taken_back()
        with suppress(ClosedError):  # workers that are gone have let go of everything
            self._sessions.drop()

    def _start(self, job: Prediction, begun: int) -> None:
        try:
            self._check(job)
            started = self._sessions.start(self._sessions.open(), job.args, job.kwargs)
        except Exception as error:
            job.error, job.is_over = error, True
        else:
            self._running.append(_Started(job, started, begun))

    def _check(self, job: Prediction) -> None:
        """Raise if a call would be one kind of inputs too many.

        Raises:
            Refusal: it would.
        """
        is_known, count = self._sessions.kinds(job.args, job.kwargs)
        if not is_known and count > self._kinds:
            shapes = [list(x.shape) for x in tree_leaves((job.args, job.kwargs)) if is_tensor(x)]
            raise Refusal(
                400,
                f"inputs of the shapes {shapes} are new, and {count} kinds of inputs were recorded "
                "before, which is as many as this server keeps: rows may vary, but give inputs "
                "that are padded to one of the sizes before. Start it with a larger --kinds, or "
                'let build return Served(pipeline={"dynamic": ...}) with the dimensions that vary',
                code="too_many_kinds",
            )

    def _finish(self, one: _Started) -> None:
        job = one.job
        try:
            result = self._sessions.finish(one.under_way)
            job.result = one.under_way.session.fetch(result)
        except Exception as error:
            again = self._taken_back()
            if isinstance(error, StatesLost) and one.begun < _MOST_BEGINNINGS:
                again.insert(0, replace(one, begun=one.begun + 1))
            else:
                job.error = error
            self._again(again)
        job.is_over = not any(job is waiting for waiting, _ in self._waiting)

    def _taken_back(self) -> list[_Started]:
        """Give up all passes that are under way; returns their calls."""
        running, self._running = list(self._running), deque()
        for one in running:
            self._give_up(one)
        return running

    def _again(self, those: Sequence[_Started]) -> None:
        """Put calls whose passes were given up, as one failed, at the head of the queue again."""
        self._waiting.extendleft((one.job, one.begun) for one in reversed(those))

    def _give_up(self, one: _Started) -> bool:
        """Wait for a pass that nobody wants any more; whether it has ended well."""
        try:
            self._sessions.finish(one.under_way)
        except Exception:
            return False
        return True
