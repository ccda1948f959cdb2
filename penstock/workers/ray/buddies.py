"""Which actor has a copy of what another one has, and what copies give when some have died."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.workers.members import Member
from penstock.workers.processes.remembering import Found, Key
from penstock.workers.ray.copies import GRADIENT, MEMORY, PART, STATE, VALUE, Entries


def buddies_of(members: Sequence[Member]) -> list[int | None]:
    """For every worker the one that has a copy of what it has; `None` if it is the only one.

    It is on another node, if there is one, and of those the one that has the fewest copies.
    """
    held = dict.fromkeys((member.number for member in members), 0)
    found: list[int | None] = []
    for member in members:
        others = [other for other in members if other.number != member.number]
        away = [other for other in others if other.node != member.node]
        count = len(members)
        best = min(
            away or others,
            key=lambda other: (held[other.number], (other.number - member.number) % count),
            default=None,
        )
        if best is not None:
            held[best.number] += 1
        found.append(None if best is None else best.number)
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
    memories: list[Mapping[Key, Found]] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls, members: Sequence[Member], copies: Mapping[int, Mapping[int | None, Entries]]
    ) -> Gathered:
        """What these copies have, by who has them; every worker's own is under `None`.

        Args:
            members: all workers.
            copies: of those that are left.
        """
        found = cls()
        for member in members:
            own = _copy_of(member.number, copies)
            twins = [m.number for m in members if m.place == member.place]
            has_tensors = next((k for k in twins if None in copies.get(k, {})), None)
            shared = copies[has_tensors][None] if has_tensors is not None else own
            if own is None or shared is None or (len(twins) > 1 and has_tensors is None):
                found.lost.append(member.number)
                found.memories.append({})
                continue
            found._take_states(member.number, own)
            found.values |= {key[1]: value for key, value in shared.items() if key[0] == VALUE}
            found.gradients |= {key[1]: g for key, g in shared.items() if key[0] == GRADIENT}
            found.memories.append(shared.get((MEMORY,), {}))
        return found

    def _take_states(self, worker: int, own: Entries) -> None:
        for key, value in own.items():
            if key[0] == PART:
                self.states.setdefault((key[1], worker), {})
            elif key[0] == STATE:
                _, number, of, name = key
                remembered = self.states.setdefault((number, worker), {}).setdefault(of, {})
                if name is not None:
                    remembered[name] = value
        for key, names in own.items():
            if key[0] == STATE and key[3] is None:  # in the order in which they were
                remembered = self.states[key[1], worker][key[2]]
                self.states[key[1], worker][key[2]] = {name: remembered[name] for name in names}


def _copy_of(worker: int, copies: Mapping[int, Mapping[int | None, Entries]]) -> Entries | None:
    """Its own copy, or that of its buddy."""
    if None in copies.get(worker, {}):
        return copies[worker][None]
    return next((held[worker] for held in copies.values() if worker in held), None)
