"""A plan: everything that was decided, as a file that a person can read and commit, and as text."""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec

from penstock.errors import PlanError, ScheduleError
from penstock.files import read_whole, readable, save_whole, version_of, what_is
from penstock.plan import text
from penstock.plan.checks import mistakes
from penstock.plan.decisions import VERSION, Decisions


class Plan(Decisions, frozen=True, kw_only=True):
    """What was decided, and what is predicted of it; `str(plan)` explains it.

    `Decisions` describes the attributes.
    """

    @property
    def rates(self) -> dict[str, float]:
        """What a plan for inference says besides: how many batches there are in a second."""
        if not self.inference:
            return {}
        return {
            "batches_per_second": self.batches_per_second,
            "microbatches_per_second": self.microbatches_per_second,
        }

    def encode(self) -> bytes:
        """JSON with a line for everything that was decided, and for every candidate."""
        return readable({**msgspec.to_builtins(self), **self.rates})

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the plan as JSON; an existing file is replaced in one move.

        Raises:
            InputError: it cannot be written there.
        """
        save_whole(path, self.encode(), "plan")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            PlanError: the file is not a plan, or one of another version.
            InputError: it cannot be read.
        """
        content = read_whole(path, "plan")
        if what_is(content) == "profile":
            raise PlanError(f"{path} is a profile; give a plan that was made from it")
        try:
            version = version_of(content)
            if version != VERSION:
                raise PlanError(
                    f"{path} is a plan of version {version}, this Penstock reads version "
                    f"{VERSION}; plan again"
                )
            found = msgspec.json.decode(content, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, ScheduleError) as error:
            raise PlanError(f"{path} is not a plan that Plan.save wrote: {error}") from error
        if wrong := next(mistakes(found), None):
            raise PlanError(f"{path} is not a plan that can be followed: {wrong}")
        return found

    def check_fits(self, fingerprint: str, devices: Sequence[str], calls: int) -> None:
        """Raise unless the plan was made for this program and this many devices.

        Args:
            fingerprint: of the program.
            devices: that there are.
            calls: of the program.

        Raises:
            PlanError: it was made for another.
        """
        if fingerprint != self.fingerprint:
            raise PlanError(
                f"the plan was made for another model (its program is {self.fingerprint}, this "
                f"one is {fingerprint}); its stages began with "
                f"{', '.join(stage.first for stage in self.stages)}. Plan again for this model"
            )
        if self.stages[-1].calls[1] != calls:
            raise PlanError(
                f"the plan's last stage ends with call {self.stages[-1].calls[1] - 1}, and the "
                f"program has {calls} calls; plan again"
            )
        if len(devices) != len(self.devices):
            raise PlanError(
                f"the plan is for {len(self.devices)} devices and there are {len(devices)}; "
                f"give it {len(self.devices)} devices or plan again"
            )

    def __str__(self) -> str:
        return text.whole(self)

    @property
    def summary(self) -> str:
        """What wins, the configuration, and what is predicted of it."""
        return text.summary(self)
