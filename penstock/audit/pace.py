"""When a pass is worth an audit."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Literal

from penstock.cadence import is_power_of_two
from penstock.errors import InputError

Setting = int | Literal["auto"] | None
"""Audit every n-th pass (a number); as many as cost little time (`"auto"`); or none (`None`)."""

_FIRST = 20  # passes in which mistakes are likeliest to show
_FIRST_SECONDS = (
    3.0  # that may be spent on those; after that, only the powers of two among them count
)
_SHARE = 0.005  # of the time of all passes, from then on


class Pace:
    """Decides which passes are audited, so that it costs little.

    With `"auto"`, each of the first twenty passes is audited until audits have taken three seconds,
    and the 1st, 2nd, 4th, 8th and 16th in any case. After these, audits may take half a percent of
    the time of passes. An audit is due when it fits into that budget, if it takes as long as the
    latest one. If something is new (another mode, another way through the model), an audit is due
    as soon as the earlier ones fit.

    Args:
        setting: which passes are audited.

    Raises:
        InputError: the setting is not one of `Setting`.
    """

    def __init__(self, setting: Setting) -> None:
        whole = isinstance(setting, int) and not isinstance(setting, bool) and setting > 0
        if not (whole or setting in ("auto", None)):
            raise InputError(
                f'audit={setting!r} is unknown: give "auto", a number n to audit every n-th pass, '
                "or None"
            )
        self._setting = setting
        self._passes = 0
        self._latest = self._spent = self._later = self._worked = 0.0
        self._situation: Hashable = None
        self._is_other = False

    def is_due(self, situation: Hashable) -> bool:
        """Whether the pass that is about to run is to be audited.

        Args:
            situation: describes the pass; if it differs from that of the pass before, the audit is
                due sooner.
        """
        self._passes += 1
        if isinstance(self._setting, int):
            return (self._passes - 1) % self._setting == 0
        if self._setting is None:
            return False
        self._is_other |= situation != self._situation
        self._situation = situation
        return self._is_worth_it()

    def _is_worth_it(self) -> bool:
        if self._passes <= _FIRST:
            return self._spent < _FIRST_SECONDS or is_power_of_two(self._passes)
        ahead = 0.0 if self._is_other else self._latest
        return self._later + ahead <= _SHARE * self._worked

    def spend(self, seconds: float) -> None:
        """Count the seconds that an audit has taken."""
        self._is_other = False
        self._latest = seconds
        self._spent += seconds
        if self._passes > _FIRST:
            self._later += seconds

    def work(self, seconds: float) -> None:
        """Count the seconds that a pass has taken."""
        if self._passes >= _FIRST:
            self._worked += seconds

    def expect_changes(self) -> None:
        """Audit the next pass as soon as earlier audits are paid for."""
        self._is_other = True
