"""The kinds of faults: what is done to a training script, and what must come of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tests.faults.session import Session

ROUNDS = 400  # of the script, while it waits for something to happen
A_WHILE = 0.3  # seconds of the script, within which it does
MUST_TELL = "the line that tracebacks must show"

Deed = Literal["kill", "terminate", "ctrl-c", "two ctrl-c", "hang up", "kill, one stopped"]


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        name: of it.
        script: what the driver does, and checks.
        deed: what is done to the driver from outside, if anything.
        when: after which of the driver's words, at a random moment within so many seconds.
        survives: whether the driver goes on, and reports.
        exit_code: of the driver, if that is known.
        last: what the driver's terminal shows in the end.
    """

    name: str
    script: Callable[[Session], None]
    deed: Deed | None = None
    when: tuple[str, float] = ("ready", A_WHILE)
    survives: bool = True
    exit_code: int | None = 0
    last: str = ""


KINDS: dict[str, Kind] = {}


def kind(name: str, **options: Any) -> Callable[[Callable[[Session], None]], Any]:
    """Note a kind."""

    def note(script: Callable[[Session], None]) -> Callable[[Session], None]:
        KINDS[name] = Kind(name, script, **options)
        return script

    return note


def arm(session: Session, operation: str, trap: Callable[[], None]) -> None:
    """Arm a trap just before the next operation of this kind."""
    do = session.do

    def armed(now: str) -> None:
        if now == operation:
            session.do = do  # type: ignore[method-assign]
            trap()
            session.moment = time.monotonic()
        do(now)

    session.do = armed  # type: ignore[method-assign]


def nothing_is_left(session: Session) -> None:
    """After an error in the constructor, or wherever it came."""
    pipe = getattr(session, "pipe", None)
    if pipe is not None:
        pipe.close()
    session.error = None
    session.nothing_is_left_of_processes()
