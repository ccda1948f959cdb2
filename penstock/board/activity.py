"""What a worker is doing, as one integer and in words."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.schedule import Action, Kind

STARTING, UPDATING, EXCHANGING = -1, -2, -3

_KINDS = tuple(Kind)
_OTHER = {
    0: "",
    STARTING: "start",
    UPDATING: "optimizer step",
    EXCHANGING: "exchange with other replicas",
}


def code(action: Action, waits: bool) -> int:
    """An action as a number, and whether the worker still waits for its values."""
    kind = _KINDS.index(action.kind)
    return ((action.microbatch << 16 | action.stage) << 3 | kind) << 2 | waits << 1 | 1


def waiting(code: int) -> int:
    """The code of a worker that waits in the midst of this action."""
    return code | 2 if code > 0 else code


def is_waiting(code: int) -> bool:
    """Whether a worker with this code waits for the values of another."""
    return code > 0 and bool(code & 2)


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
    def of(cls, code: int) -> Activity:
        """What a worker with this code is doing."""
        if code <= 0:
            return cls(None, None, _OTHER.get(code, ""))
        kind = _KINDS[code >> 2 & 7]
        stage, microbatch = code >> 5 & 0xFFFF, code >> 21
        what = "forward" if kind is Kind.FORWARD else "backward"
        return cls(stage, microbatch, what, bool(code & 2))

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
