"""A rank that an actor is: it runs its part of passes, and the script hears of that part only."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from penstock.board.activity import UPDATING
from penstock.board.memory import Board, Reading, Record, moved
from penstock.board.runs import new_board
from penstock.engine.orders import Order, Outcome
from penstock.plan import Plan
from penstock.workers.assembly import Assembly
from penstock.workers.pool import Dispatch
from penstock.workers.ranks.operations import GivenUp
from penstock.workers.ranks.rendezvous import Launch
from penstock.workers.ranks.workers import RankTicket, RankWorkers


class ActorRank(RankWorkers):
    """A rank whose operations an actor calls, as the jobs of the script say.

    Args:
        launch: the ranks.
        plan: what they run.
        model: the modules that are here.
        threads: intra-op threads.
        timeout: seconds that an operation may take.
        board: where the script's board is, if that is on this machine.
    """

    def __init__(
        self,
        launch: Launch,
        plan: Plan,
        model: nn.Module,
        threads: int,
        timeout: float,
        board: Path | None,
    ) -> None:
        self._path = board
        self._count = len(launch.entries)
        self._is_given_up = False
        self._around: deque[AbstractContextManager[None]] = deque()
        super().__init__(launch, plan, model, range(self._count), threads, timeout)

    def _noted(self) -> tuple[Board, Record]:
        """The script's board, so that it sees what this rank does; one of its own elsewhere."""
        if self._path is not None:
            with suppress(OSError, ValueError):
                there = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
                board = Board(self._count, there)
                return board, board.records[self._launch.ranks.rank]
        board = new_board(1)
        return board, board.records[0]

    @property
    def has_replicas(self) -> bool:
        """Whether there are others that run the same stages."""
        return self._ring is not None

    def start_within(self, around: AbstractContextManager[None], order: Order) -> RankTicket:
        """As `start`; the rank's thread enters a context for this rank's part of the pass."""
        self._around.append(around)
        return self.start(order)

    def _run(self, order: Order, number: int, timeout: float, is_checked: bool) -> Outcome:
        with self._around.popleft():
            return super()._run(order, number, timeout, is_checked)

    def assembly(self, training: bool) -> Assembly:
        """The stages of this rank in this mode."""
        return self._assemblies[training]

    def interrupt(self) -> None:
        """Have the pass that is waited for given up; called from another thread."""
        self._is_given_up = True
        self._thread.wake()

    def _own(self, current: Dispatch) -> Outcome:
        """What has come of this rank's part.

        What a module raises to end the process ends the pass only.
        """
        self._is_given_up = False
        try:
            self._ranks.wait_for(self._thread.wakeup, lambda: self._is_done(current), self._doing)
            found: Outcome = self._thread.finish(current)[0]
        except BaseException as error:
            self._thread.give_up(error)
            raise
        return found

    def _is_done(self, current: Dispatch) -> bool:
        if self._is_given_up:
            raise GivenUp
        return self._thread.is_done(current)

    def in_thread(self, work: Callable[[], Any]) -> Any:
        """Have the rank's thread do something, after the passes that were started."""
        return self._thread.finish(self._thread.start([work]))[0]

    def update(self, work: Callable[[], None], owned: Sequence[nn.Parameter]) -> None:
        """Have the rank's thread update parameters; then replicas have each other's new ones.

        It ends the operation.

        Args:
            work: does it.
            owned: the parameters that it updates.
        """

        def run() -> Outcome:
            self._record.note(UPDATING)
            try:
                work()
            finally:
                self._record.note(0)
            return self._share(owned, number, self._ranks.timeout)

        try:
            number = self._ranks.number
            self._own(self._thread.start([run]))
            self._ranks.end(None)
        except BaseException:
            self._passes.clear()  # some may have new weights, so the next pass looks at them
            raise

    def give_up(self, why: BaseException) -> None:
        """Stop what is under way, and put back what passes have changed that did not end."""
        super().give_up(why)
        self._around.clear()

    def _for_others(self, own: Outcome, ahead: int) -> Outcome:
        """What has to be the same for several; the rest goes to the script alone."""
        return Outcome(targets=own.targets, weights_before=own.weights_before)

    def _whole(self, own: Outcome, parts: Sequence[Outcome | None], ahead: int) -> Outcome:
        """This rank's part, with times of rank 0's clock."""
        return replace(own, logs=moved(own.logs, ahead))

    def reading(self) -> Reading:
        """What this rank is doing."""
        return self.board.readings()[self._me if len(self.board.records) > 1 else 0]
