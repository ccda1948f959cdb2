"""Who the workers of a running pipeline are."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch


@dataclass(frozen=True)
class Member:
    """A worker's identity in a running pipeline.

    Attributes:
        number: its number in this membership, from 0, in the order of the plan.
        device: its own, as its machine names it.
        place: which of its replica's workers it is, as the plan numbers them.
        replica: the number of its replica.
        pid: the id of its process; for a thread, of the process that it belongs to.
        host: the name of its machine.
        kind: whether it is a thread, a process, a rank or an actor.
        since: the step at whose end it joined; 0 for the first workers.
        node: the id that Ray has for its node, if it is an actor of a Ray cluster.
    """

    number: int
    device: torch.device
    place: int
    replica: int
    pid: int
    host: str
    kind: Literal["thread", "process", "rank", "actor"] = "rank"
    since: int = 0
    node: str = ""


def members_here(
    devices: Sequence[torch.device], pids: Sequence[int] = (), per_replica: int = 0
) -> list[Member]:
    """The members of a pipeline whose workers are all on this machine.

    Args:
        devices: of every worker, replica after replica.
        pids: of every worker's process; all are threads of this one if there are none.
        per_replica: how many workers each replica has; all of them if it is 0.
    """
    host = socket.gethostname()
    kind: Literal["thread", "process"] = "process" if pids else "thread"
    pids, count = pids or [os.getpid()] * len(devices), per_replica or len(devices)
    return [
        Member(number, device, number % count, number // count, pid, host, kind)
        for number, (device, pid) in enumerate(zip(devices, pids, strict=True))
    ]


@dataclass(frozen=True)
class Membership:
    """The workers of a pipeline from one change to the next; iterating over it gives the members.

    Attributes:
        number: how many changes there were before.
        since: the step at whose end these workers took over; 0 for the first ones.
        members: the workers, by number.
    """

    number: int
    since: int
    members: tuple[Member, ...]

    def __iter__(self) -> Iterator[Member]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)

    def __getitem__(self, number: int) -> Member:
        return self.members[number]

    def changed(self, members: Sequence[Member], step: int) -> Membership:
        """The next membership.

        Args:
            members: its workers.
            step: the step at whose end they take over.
        """
        return Membership(self.number + 1, step, tuple(replace(m, since=step) for m in members))

    def difference_from(self, before: Membership) -> str:
        """What is different from an earlier one, in words: who has joined, and who has left."""
        now, then = (Counter(str(m.device) for m in own) for own in (self, before))
        changes = [
            f"{', '.join(sorted(found.elements()))} {what}"
            for found, what in ((now - then, "joined"), (then - now, "left"))
            if found
        ]
        numbers = f"{len(self)} workers" if len(self) != 1 else "1 worker"
        instead = f" instead of {len(before)}" if len(self) != len(before) else ""
        changed = f": {'; '.join(changes)}" if changes else ""
        return f"membership {self.number}, {numbers}{instead}{changed}"
