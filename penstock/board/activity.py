"""What a worker is doing, as one integer and in words."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schedule import Action, Kind

STARTING, UPDATING, EXCHANGING = -1, -2, -3
LOSS, RECOMPUTATION, SENDING = range(4, 7)
"""Parts of an action, which its worker notes as well: see `within`."""

_KINDS = tuple(Kind)
_WHAT = ("forward", "backward", "backward", "backward", "loss", "recomputation", "send")
_OTHER = {
    0: "",
    STARTING: "start",
    UPDATING: "optimizer step",
    EXCHANGING: "exchange with other replicas",
}


_STARTED, _WAITS, _AMID = 1, 2, 4  # bits of the code of an action


def code(action: Action, waits: bool) -> int:
    """An action as a number, and whether the worker still waits for its values."""
    place = (action.microbatch << 16 | action.stage) << 3 | _KINDS.index(action.kind)
    return place << 3 | (_WAITS if waits else 0) | _STARTED


def waiting(code: int) -> int:
    """The code of a worker that waits for others amid this action, such as for its turn."""
    return code | _WAITS | _AMID if code > 0 and not code & _WAITS else code


def within(code: int, part: int) -> int:
    """The code of a worker that does a part of this action: `LOSS`, for instance."""
    return code & ~(7 << 3) | part << 3 if code > 0 else code


def is_waiting(code: int) -> bool:
    """Whether a worker with this code waits for other workers."""
    return code > 0 and bool(code & _WAITS)


@dataclass(frozen=True)
class Activity:
    """What a worker is doing.

    Attributes:
        stage: which of its stages is at work; `None` between passes.
        microbatch: on which one.
        what: `"forward"`, `"backward"`, or what it does amid one: `"loss"` (with the metrics),
            `"recomputation"`, `"send"`; otherwise `"start"`, `"optimizer step"`, `"exchange with
            other replicas"`, or nothing.
        waits: whether it waits for other workers.
        amid: whether that is amid the action, such as for its turn among replicas, and not for the
            values that it begins with.
    """

    stage: int | None
    microbatch: int | None
    what: str
    waits: bool = False
    amid: bool = False

    @classmethod
    def of(cls, code: int) -> Activity:
        """What a worker with this code is doing."""
        if code <= 0:
            return cls(None, None, _OTHER.get(code, ""))
        what = _WHAT[code >> 3 & 7]
        stage, microbatch = code >> 6 & 0xFFFF, code >> 22
        return cls(stage, microbatch, what, bool(code & _WAITS), bool(code & _AMID))

    @staticmethod
    def action_of(code: int) -> Action | None:
        """The action that a worker with this code is at; `None` for a part of one, or for none."""
        kind = code >> 3 & 7
        if code <= 0 or kind >= len(_KINDS):
            return None
        return Action(_KINDS[kind], code >> 6 & 0xFFFF, code >> 22)

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
        if self.amid:
            return f"waiting for other workers in {place}"
        return f"waiting for values for {place}" if self.waits else f"in {place}"
