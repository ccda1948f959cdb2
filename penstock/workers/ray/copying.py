"""Which actor has a copy of what another one has, and what copies give when some have died.

Copies are made now and then, before a pass, and sent while it runs. What was done since the last
one that every buddy has is in a log, and is done again after a death. What cannot be in the log,
such as weights that the script has written, is followed by a copy before it counts as done.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from penstock.capture.preserve import own_generators
from penstock.engine.span import Span
from penstock.workers.members import Member
from penstock.workers.pool import Dispatch
from penstock.workers.ray.copies import (
    GRADIENT,
    MEMORY,
    PART,
    STATE,
    UNSENT,
    VALUE,
    Copy,
    Entries,
)
from penstock.workers.ray.pool import ActorPool
from penstock.workers.redo import Work
from penstock.workers.remembering import Found, StateKey
from penstock.workers.ways import modules_of

ModuleChanges = Mapping[StateKey, Found]
"""What forwards have left in a worker's modules."""


_SHARE = 0.04  # of the time, at most, in which copies are made and sent
_LOG = 1 << 26  # bytes that the log may have, however small the model is


class Protection(NamedTuple):
    """How a piece of work is protected from being lost: by a copy after it, or in the log.

    Attributes:
        before: the copy that is made before it, and sent meanwhile.
        after: the copy that is made after it, and sent before it counts as done; if there is none,
            it is noted in the log.
        since: the number of the last copy that does not have it, `before` included.
    """

    before: Copy | None
    after: Copy | None
    since: int


class Copying:
    """Has the actors of a pipeline make copies, and notes what they do in between.

    Args:
        members: the actors, two at least.
        pool: the same.
        timeout: seconds that a buddy has to take a copy.
        patience: seconds that one has to give the copies that it has.
        nbytes: of the model.
    """

    def __init__(
        self,
        members: Sequence[Member],
        pool: ActorPool,
        timeout: float,
        patience: float,
        nbytes: int,
    ) -> None:
        self._timeout, self._patience = timeout, patience
        self._members, self._pool = members, pool
        self._most = max(nbytes, _LOG)
        self._buddies = buddies_of(members)
        self._nothing = self._safe = pool.copies  # when the script still has everything
        self._sending: Copy | None = None  # while work goes on
        self._begun = 0.0  # when the last copy was
        self._log: list[tuple[int, Work]] = []  # with the number of the last copy before each
        pool.pair(self._buddies, len({member.replica for member in members}) > 1)

    # -- while all is well ----------------------------------------------------------------

    def protect(self, can_be_logged: bool, is_pass: bool) -> Protection:
        """How the next piece of work is protected.

        Args:
            can_be_logged: whether it can be done again.
            is_pass: whether it is a pass before which a copy can be made.
        """
        self._note_taken()
        is_first, is_full = self._safe == self._nothing, self._size() > self._most
        may_begin = is_pass and self._sending is None
        if is_first or not can_be_logged or (is_full and not may_begin):
            return Protection(None, self._next(), self._pool.copies)
        before = None
        if may_begin and (is_full or self._is_due()):
            before = self._sending = self._next()
        return Protection(before, None, self._pool.copies)

    def _next(self) -> Copy:
        self._pool.copies += 1
        self._begun = time.monotonic()
        return Copy(self._pool.copies, self._safe, self._timeout)

    def _size(self) -> int:
        return sum(work.nbytes for _, work in self._log)

    def _is_due(self) -> bool:
        """Whether the last copy was so long ago that another one takes its share of the time."""
        seconds = max(taken.seconds for taken in self._pool.taken.values())
        return seconds < _SHARE * (time.monotonic() - self._begun)

    def _note_taken(self) -> None:
        sending, taken = self._sending, self._pool.taken.values()
        if sending is not None and all(each.number >= sending.number for each in taken):
            self._sending = None
            self._is_safe(sending.number)

    def _is_safe(self, number: int) -> None:
        """Every buddy has this copy."""
        self._safe = max(self._safe, number)
        self._log = [(since, work) for since, work in self._log if since >= self._safe]

    def done(self, protection: Protection, work: Work | None) -> None:
        """The work has come to its end, and so has the copy after it; may be said twice.

        Args:
            protection: of it.
            work: what the log has of it, if there is no copy after it.
        """
        if protection.after is not None:
            self._is_safe(protection.after.number)
        elif work is not None and not any(work is other for _, other in self._log[-1:]):
            self._log.append((protection.since, work))

    def undone(self, work: Work | None) -> None:
        """Work has failed that may be in the log already."""
        self._log = [(since, other) for since, other in self._log if other is not work]

    def give_up(self) -> None:
        """A pass has failed: nobody knows who has made the copy before it."""
        self._note_taken()
        self._sending = None

    @property
    def works(self) -> list[Work]:
        """What was done since the last copy that every buddy has."""
        self._note_taken()
        return [work for _, work in self._log]

    def has_forward(self, number: int, training: bool) -> bool:
        """Whether the log has the forward of a batch, without a backward or a copy after it."""
        found = False
        for since, work in self._log:
            order = work.order
            if order is not None and (order.number, order.training) == (number, training):
                found = order.what == "forward" and since == self._pool.copies
        return found

    # -- when some have died --------------------------------------------------------------

    def gathered(self) -> Gathered:
        """What every worker had when the last copy was made that every buddy has.

        Raises:
            WorkerDied: no remaining worker has a copy of what one had.
        """
        self._note_taken()
        pool, number = self._pool, self._safe
        every = {worker: worker for worker in range(len(self._members))}
        own = pool.copies_with(every, number, self._patience)  # which shows who has died
        if number == self._nothing:
            return Gathered(memories=[{} for _ in self._members])
        asked = {w: buddy for w, buddy in enumerate(self._buddies) if w not in own and buddy in own}
        held = pool.copies_with(asked, number, self._patience)
        found = Gathered.of(self._members, own, held)
        if not found.lost:
            return found
        lost = next((worker for worker in found.lost if worker in pool.deaths), found.lost[0])
        buddy, died = self._buddies[lost], pool.death_of(lost)
        who = "all workers with the same stages" if buddy in own else f"its buddy, worker {buddy}"
        died.advise(
            f"No remaining worker has a copy of what worker {lost} had: {who} died as well. So "
            "what was trained since the last checkpoint is lost"
        )
        raise died


def buddies_of(members: Sequence[Member]) -> list[int]:
    """For every worker the one that has a copy of what it has; there are two workers at least.

    It is on another node, if there is one, and of those the one that has the fewest copies.
    """
    held = dict.fromkeys((member.number for member in members), 0)
    found: list[int] = []
    for member in members:
        others = [other for other in members if other.number != member.number]
        away = [other for other in others if other.node != member.node]
        count = len(members)
        best = min(
            away or others,
            key=lambda other: (held[other.number], (other.number - member.number) % count),
        )
        held[best.number] += 1
        found.append(best.number)
    return found


@dataclass
class Gathered:
    """What copies of one number have.

    Attributes:
        values: of tensors, by number.
        gradients: of parameters, by number.
        states: what the part of an optimizer remembers, by the optimizer's number and the worker.
        memories: for every worker what forwards have left in its modules.
        lost: the workers of whose state no complete copy is left.
    """

    values: dict[int, torch.Tensor] = field(default_factory=dict)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    states: dict[tuple[int, int], dict[Any, dict[str, Any]]] = field(default_factory=dict)
    memories: list[ModuleChanges] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls, members: Sequence[Member], own: Mapping[int, Entries], held: Mapping[int, Entries]
    ) -> Gathered:
        """What these copies have.

        Args:
            members: all workers.
            own: what those that are left have of themselves.
            held: what they have of others. Replicas have the same tensors, and send only parts of
                optimizers.
        """
        found = cls()
        for member in members:
            part = own.get(member.number, held.get(member.number))
            twins = [m.number for m in members if m.place == member.place]
            alive = [twin for twin in twins if twin in own]
            shared = own[alive[0]] if alive else part if len(twins) == 1 else None
            if part is None or shared is None:
                found.lost.append(member.number)
                found.memories.append({})
                continue
            found._take_states(member.number, part)
            found.values |= {key[1]: value for key, value in shared.items() if key[0] == VALUE}
            found.gradients |= {key[1]: g for key, g in shared.items() if key[0] == GRADIENT}
            found.memories.append(part.get((MEMORY,), {}))
        return found

    def _take_states(self, worker: int, part: Entries) -> None:
        for key, value in part.items():
            if key[0] == PART:
                self.states.setdefault((key[1], worker), {})
            elif key[0] == STATE:
                _, number, of, name = key
                remembered = self.states.setdefault((number, worker), {}).setdefault(of, {})
                if name is not None:
                    remembered[name] = value
        for key, names in part.items():
            if key[0] == STATE and key[3] is None:  # in the order in which they were
                remembered = self.states[key[1], worker][key[2]]
                self.states[key[1], worker][key[2]] = {name: remembered[name] for name in names}


def is_done(current: Dispatch, count: int) -> bool:
    """Whether all of so many workers have done a job."""
    return len(current.results) == count and not current.failures()


def may_be_done(current: Dispatch | None, error: BaseException) -> bool:
    """Whether a worker may have done work that was interrupted, or failed elsewhere.

    Args:
        current: the jobs; `None` if the interrupt came as they were given out.
        error: what has come.
    """
    if current is None:
        return not isinstance(error, Exception)
    ends = [result.error for result in current.results.values()]
    return any(end is None or UNSENT in end.args for end in ends)


def leaves_traces(span: Span) -> bool:
    """Whether forwards leave something in modules, as far as recordings have shown."""
    modules = modules_of([span])
    return bool(span.changing or any(span.memories)) or any(any(own_generators(m)) for m in modules)
