"""Who the workers of a running pipeline are, and what each of them is doing."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.schedule import Action, Kind

Position = list[int] | memoryview
"""Its first item says what a worker is doing: `code(action, waits)`, 0 for nothing, or one of the
codes below. Others read it without asking the worker."""

STARTING, UPDATING, EXCHANGING = -1, -2, -3

_KINDS = tuple(Kind)
_OTHER = {
    0: "",
    STARTING: "start",
    UPDATING: "optimizer step",
    EXCHANGING: "exchange with other replicas",
}


@dataclass(frozen=True)
class Member:
    """A worker's identity in a running pipeline.

    Attributes:
        number: no other member has it or has had it.
        device: its own, as its machine names it.
        place: which of its replica's workers it is, as the plan numbers them.
        replica: whose stages it runs.
        pid: the process that it is, or that it is a thread of.
        host: the name of its machine.
    """

    number: int
    device: torch.device
    place: int
    replica: int
    pid: int
    host: str


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
    pids, count = pids or [os.getpid()] * len(devices), per_replica or len(devices)
    return [
        Member(number, device, number % count, number // count, pid, host)
        for number, (device, pid) in enumerate(zip(devices, pids, strict=True))
    ]


def code(action: Action, waits: bool) -> int:
    """An action as a number, and whether the worker still waits for its values."""
    kind = _KINDS.index(action.kind)
    return ((action.microbatch << 16 | action.stage) << 3 | kind) << 2 | waits << 1 | 1


def waiting(position: int) -> int:
    """The code of a worker that waits in the midst of this action."""
    return position | 2 if position > 0 else position


@dataclass(frozen=True)
class Activity:
    """What a worker is doing.

    Attributes:
        stage: which of its stages is at work; `None` between passes.
        microbatch: on which one.
        what: `"forward"`, `"backward"`, `"start"`, `"optimizer step"`, `"exchange with other
            replicas"`, or nothing.
        waits: whether it waits for the values of another worker.
    """

    stage: int | None
    microbatch: int | None
    what: str
    waits: bool = False

    @classmethod
    def of(cls, position: int) -> Activity:
        """What a worker with this code in its `Position` is doing."""
        if position <= 0:
            return cls(None, None, _OTHER[position])
        kind = _KINDS[position >> 2 & 7]
        stage, microbatch = position >> 5 & 0xFFFF, position >> 21
        what = "forward" if kind is Kind.FORWARD else "backward"
        return cls(stage, microbatch, what, bool(position & 2))

    @property
    def where(self) -> tuple[int | None, int | None, str]:
        """Stage, micro-batch and action, as errors name them."""
        return self.stage, self.microbatch, self.what

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do."""
        return not self.what

    def __str__(self) -> str:
        if self.stage is None:
            return f"in the {self.what}" if self.what else "idle"
        place = f"the {self.what} of micro-batch {self.microbatch} in stage {self.stage}"
        return f"waiting for values for {place}" if self.waits else f"in {place}"
