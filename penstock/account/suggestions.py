"""What to try, with what each is predicted to gain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.account.attribution import Account
from penstock.plan.plan import Plan


@dataclass(frozen=True)
class Suggestion:
    """Something to try.

    Attributes:
        what: in words, with the argument or the command that does it.
        gain: the share of a step's time that it is predicted to save.
        why: where that comes from.
    """

    what: str
    gain: float
    why: str


def suggestions(accounts: Sequence[Account], plan: Plan) -> list[Suggestion]:
    """What to try, what gains most first; nothing that gains less than a hundredth.

    Args:
        accounts: of some steps.
        plan: by which they ran.
    """
    return []
