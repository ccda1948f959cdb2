"""Which actor has a copy of what another one has, and what copies give when some have died."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.capture.preserve import own_generators
from penstock.engine.span import Span
from penstock.workers.following import AttributeChanges
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
from penstock.workers.remembering import Found, StateKey
from penstock.workers.ways import modules_of

ModuleChanges = Mapping[StateKey, Found]
"""What forwards have left in a worker's modules."""


class Copying:
    """Has the actors of a pipeline make copies.

    A piece of work counts as done when every buddy has the copy that was made after it. So when an
    actor dies, only the work that was under way has to be done again.

    Args:
        members: the actors, two at least.
        pool: the same.
        timeout: seconds that a buddy has to take a copy.
        patience: seconds that one has to give the copies that it has.

    Attributes:
        timeout: as given.
    """

    def __init__(
        self, members: Sequence[Member], pool: ActorPool, timeout: float, patience: float
    ) -> None:
        self.timeout, self._patience = timeout, patience
        self._members, self._pool = members, pool
        self._buddies = buddies_of(members)
        self._nothing = self._safe = pool.copies  # when the script still has everything
        pool.pair(self._buddies, len({member.replica for member in members}) > 1)

    def next(self) -> Copy:
        """The copy that is made after the next work."""
        self._pool.copies += 1
        return Copy(self._pool.copies, self._safe, self.timeout)

    def done(self, copy: Copy) -> None:
        """Every buddy has it; copies are made, sent and done in the order of their numbers."""
        self._safe = max(self._safe, copy.number)

    def gathered(self) -> Gathered:
        """What every worker had when the last work was done, as some have died.

        Raises:
            WorkerDied: no remaining worker has a copy of what one had.
        """
        pool, number = self._pool, self._safe
        every = {worker: worker for worker in range(len(self._members))}
        own = pool.copies_with(every, number, self._patience)
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
        gradients: likewise.
        states: by the number of an optimizer and the worker that has the part, what that remembers.
        memories: for every worker what forwards have left in its modules.
        lost: the workers of which nothing is left that has all they had.
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


def without(attributes: AttributeChanges, memory: ModuleChanges) -> ModuleChanges:
    """What forwards have left in modules, but for attributes that the script has set since."""
    return {
        key: found
        for key, found in memory.items()
        if key.kind != "module" or key.registry or key.name not in attributes.get(key.number, {})
    }
