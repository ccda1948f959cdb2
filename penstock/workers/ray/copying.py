"""When actors make copies of what only they have, and what these give when some have died."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.workers.copies import Copies
from penstock.workers.members import Member
from penstock.workers.ray.buddies import Gathered, buddies_of
from penstock.workers.ray.jobs import MakeCopy, News, WaitForCopy
from penstock.workers.ray.model import DriverModel
from penstock.workers.ray.pool import ActorPool


class Copying:
    """Has the actors of a pipeline make copies.

    One that is due is made by the next pass, right before it begins, and sent meanwhile. If the
    script itself has done something to tensors before other work than a pass, or to modules or
    settings before a pass, one is made at once and waited for: what was done before could not be
    done again after that.

    Args:
        model: the script's.
        members: the actors.
        pool: the same.
        timeout: seconds that a copy may take.
        run: runs a job on every actor.

    Attributes:
        copies: how far they are.
        is_due: whether one is to be made before the next pass.
    """

    def __init__(
        self,
        model: DriverModel,
        members: Sequence[Member],
        pool: ActorPool,
        timeout: float,
        run: Callable[..., list[Any]],
    ) -> None:
        self.copies = Copies()
        self.is_due = False
        self._is_fresh = False  # whether the latest is to be made by what is under way
        self._model, self._members, self._pool = model, members, pool
        self._timeout, self._run = timeout, run

    def before_pass(self, news: Sequence[News], told: bool) -> Sequence[News]:
        """Have copies made that are due before a pass begins; see `number` for that of the pass.

        Args:
            news: of tensors, for every place.
            told: whether workers are to be told more of modules and settings than they know.

        Returns:
            what is new of tensors since then.
        """
        if not self.copies.made or (told and self.copies.is_behind):
            return self._copy(news)
        if told or self._is_wanted(news):
            self._settle()
        return news

    def before_work(self, news: Sequence[News], changes: bool) -> Sequence[News]:
        """Likewise before other work.

        Args:
            news: of tensors, for every place.
            changes: whether the workers have something else after the work.
        """
        return self._copy(news) if any(news) or (changes and not self.copies.made) else news

    def number(self, news: Sequence[News]) -> int:
        """The number of the copy that a pass with these news makes; 0 if it makes none."""
        return self._made(news) if self._is_wanted(news) else 0

    def now(self) -> None:
        """Have a copy made, and wait until it is safe."""
        self._copy(self._model.news(1 + max(member.place for member in self._members)))

    def passed(self, goes_back: bool, arrived: int) -> None:
        """A pass has come to its end.

        Args:
            goes_back: whether it has left gradients.
            arrived: the number of the latest copy that every buddy has.
        """
        self._is_fresh = False
        self.is_due |= goes_back or self.copies.is_far_behind
        self.copies.arrived(arrived)

    def failed(self) -> None:
        """Work has failed: if it was to make a copy, some may have made that, and others not."""
        if self._is_fresh:
            self.copies.unmake()
            self._is_fresh, self.is_due = False, True

    def _is_wanted(self, news: Sequence[News]) -> bool:
        return self.is_due or any(news)

    def _made(self, news: Sequence[News]) -> int:
        """The number of a copy that the next work makes."""
        self.is_due, self._is_fresh = False, True
        return self.copies.make(self._model.again(news) if any(news) else None)

    def _copy(self, news: Sequence[News]) -> Sequence[News]:
        """Have all make a copy, and wait until all have arrived; nothing is new after that."""
        self._settle()
        number = self._made(news)
        self._run([MakeCopy(number, news[m.place], self._timeout) for m in self._members])
        self._is_fresh = False
        self.copies.arrived(number)
        return [News() for _ in news]

    def _settle(self) -> None:
        """Wait until all copies have arrived that were made."""
        copies = self.copies
        if copies.safe < copies.made:
            jobs = [WaitForCopy(copies.made, self._timeout)] * len(self._members)
            self._run(jobs, confirms=False)  # what is new of tensors is still to be sent
            copies.arrived(copies.made)

    def go_back(self) -> Gathered:
        """Let the script have what the last safe copies have, as some of the actors have died.

        What the script has done to tensors since the last work is kept, to be done again.

        Returns:
            what the copies have.

        Raises:
            WorkerDied: nobody that is left has a copy of what somebody had.
        """
        copies = self.copies
        found = self._gathered(copies.safe)
        news = self._model.news(1 + max(member.place for member in self._members))
        copies.note(self._model.again(news), copies.made)
        self._model.go_back(found.values, found.gradients)
        return found

    def _gathered(self, number: int) -> Gathered:
        """What the copies of this number have; the script itself has what number 0 has."""
        if not number:
            return Gathered(memories=[{}] * len(self._members))
        found = Gathered.of(self._members, self._pool.copies(number))
        if not found.lost:
            return found
        deaths = self._pool.deaths
        lost = next((worker for worker in found.lost if worker in deaths), min(deaths))
        died, buddy = deaths[lost], buddies_of(self._members)[lost]
        who = "there is no other" if buddy is None else f"its buddy, worker {buddy}, has died, too"
        died.advise(
            f"Nobody that is left has a copy of what worker {lost} had ({who}), so what was "
            "trained since the last checkpoint is lost"
        )
        raise died
