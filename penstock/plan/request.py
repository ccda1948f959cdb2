"""What is asked of a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from penstock.errors import InputError
from penstock.plan.by_name import Cut, check_modules, positions, spans
from penstock.plan.cutting import RECOMPUTE
from penstock.plan.layout import Memory, Span
from penstock.plan.plan import HALF
from penstock.profile.data import check_count
from penstock.schedule import SCHEDULES
from penstock.units import parse_bytes

Auto = Literal["auto"]

Recompute = str | Sequence[str]
"""What is recomputed: a word, or the names of modules; see `Request`."""


@dataclass(frozen=True)
class Request:
    """What is asked of a plan; the rest is chosen.

    Attributes:
        num_microbatches: how many, or `"auto"` for the best of those whose size was measured.
        schedule: a name of `penstock.schedule.SCHEDULES`, or `"auto"` for the best.
        cuts: cut before just these, instead of choosing: modules by their qualified names, or
            calls by their numbers.
        recompute: `"none"`; `"all"`: of every stage only what enters is held; `"boundaries"`: what
            enters pieces of it, which are computed again one at a time; `"auto"`: what is needed
            to fit the memory, and no more. Or a list of modules by their qualified names, of which
            just the calls of each are computed again, each module's as a whole.
        memory_limit: bytes that every worker may hold, or a text like `"8GiB"`. By default what
            the devices have, as far as that is known.
        optimizer_state: bytes of optimizer state for every byte of weights; 2 for Adam.
        stages_per_worker: for schedules that take any number; `"auto"` is two for those.
        any_order: whether the devices may be put into another order.
        boundary_dtype: `"bfloat16"` or `"float16"`, for boundary values to travel in it.

    Raises:
        InputError: there is no such schedule, recomputation or limit.
    """

    num_microbatches: int | Auto = "auto"
    schedule: str = "auto"
    cuts: Sequence[Cut] | None = None
    recompute: Recompute = "auto"
    memory_limit: int | str | None = None
    optimizer_state: float = 2.0
    stages_per_worker: int | Auto = "auto"
    any_order: bool = False
    boundary_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.schedule != "auto" and self.schedule not in SCHEDULES:
            raise InputError(
                f'schedule={self.schedule!r} is unknown; choose {", ".join(SCHEDULES)} or "auto"'
            )
        if not isinstance(self.recompute, str):
            check_modules(self.recompute)
        elif self.recompute not in RECOMPUTE:
            known = ", ".join(f'"{name}"' for name in RECOMPUTE)
            raise InputError(
                f"recompute={self.recompute!r} is unknown; choose {known}, or a list of modules"
            )
        per_worker = self.stages_per_worker
        if per_worker != "auto" and not (isinstance(per_worker, int) and per_worker > 0):
            raise InputError(f'stages_per_worker={per_worker!r}; give a number from 1, or "auto"')
        if self.boundary_dtype not in (None, *HALF):
            raise InputError(
                f"boundary_dtype={self.boundary_dtype!r}: boundary values can travel in "
                f"{' or '.join(HALF)}, or as they are (None)"
            )
        if not 0 <= self.optimizer_state < float("inf"):
            raise InputError(f"optimizer_state={self.optimizer_state} is below 0, or no number")
        if self.memory.limit is not None and self.memory.limit <= 0:
            raise InputError(f"memory_limit={self.memory_limit!r} leaves nothing to hold")

    @property
    def memory(self) -> Memory:
        """What training holds besides activations, and may hold."""
        limit = None if self.memory_limit is None else parse_bytes(self.memory_limit)
        return Memory(self.optimizer_state, limit)

    def check_count(self, batch_size: int) -> None:
        """Raise unless a batch can be split into as many micro-batches.

        Raises:
            InputError: it has fewer rows.
        """
        if self.num_microbatches != "auto":
            check_count(self.num_microbatches, batch_size)

    def recomputed(
        self, labels: Sequence[str], forbidden: Mapping[int, str]
    ) -> str | tuple[Span, ...]:
        """What is asked to be recomputed: one of `RECOMPUTE`, or spans of calls.

        Raises:
            PlanError: a module that was named has no calls, or none that can be recomputed.
        """
        if isinstance(self.recompute, str):
            return self.recompute
        return spans(labels, forbidden, self.recompute)

    def positions(
        self, labels: Sequence[str], forbidden: Mapping[int, str], devices: int
    ) -> tuple[int, ...] | None:
        """The calls before which the cuts that are asked for are.

        Raises:
            PlanError: one is not possible, or they do not fit the devices and the schedule.
            InputError: they are no list of names and numbers.
        """
        if self.cuts is None:
            return None
        stages = devices
        if self.schedule != "auto" and isinstance(self.cuts, (list, tuple)):
            given = len(self.cuts) + 1
            stages = given if SCHEDULES[self.schedule].takes(given, devices) else devices
        return positions(labels, forbidden, stages, self.cuts)
