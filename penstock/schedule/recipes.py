"""The schedules by name: what each can be built for, and how."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType

from penstock.errors import ScheduleError
from penstock.schedule.actions import Schedule, check_size
from penstock.schedule.costs import Costs
from penstock.schedule.fitted import Rules, fitted
from penstock.schedule.gpipe import gpipe, naive
from penstock.schedule.looped import breadth_first, interleaved, on_a_loop
from penstock.schedule.one_f_one_b import eager_one_f_one_b, one_f_one_b
from penstock.schedule.zero_bubble import in_a_v, zero_bubble, zero_bubble_v


class StagesPerWorker(StrEnum):
    """How many stages a schedule gives every worker."""

    ONE = "exactly one stage"
    TWO = "exactly two stages"
    ANY = "equally many stages"


@dataclass(frozen=True)
class _Options:
    """What only some schedules take; see `build`."""

    warmup: int | Sequence[int] | None = None
    costs: Costs | None = None
    placement: Sequence[int] | None = None
    rules: Rules | None = None

    def given(self) -> list[str]:
        """The names of those that are not None."""
        return [name for name, value in vars(self).items() if value is not None]


Make = Callable[[int, int, int, _Options], Schedule]


@dataclass(frozen=True)
class Recipe:
    """How to make a schedule.

    Attributes:
        name: its name in `SCHEDULES`.
        stages_per_worker: how many stages it gives every worker.
        splits_backward: whether its backwards come in halves. (A fitted schedule's rules decide.)
        place: from the numbers of stages and workers, the worker of every stage.
        make: from the numbers of stages, micro-batches and workers, and the options, the schedule.
        options: the names of the `_Options` that it takes.
    """

    name: str
    stages_per_worker: StagesPerWorker
    splits_backward: bool
    place: Callable[[int, int], tuple[int, ...]]
    make: Make
    options: tuple[str, ...] = ()

    def workers(self, num_stages: int, num_workers: int | None) -> int:
        """The number of workers, checked; for `None` one per stage, or one per two for `TWO`.

        Raises:
            ScheduleError: the stages cannot be shared out like that.
        """
        natural = num_stages // 2 if self.stages_per_worker is StagesPerWorker.TWO else num_stages
        workers = natural if num_workers is None else num_workers
        if self.takes(num_stages, workers):
            return workers
        raise ScheduleError(
            f"{self.name} gives every worker {self.stages_per_worker}, which does not work out "
            f"for {num_stages} stages on {workers} workers; {self._advice(num_stages)}"
        )

    def takes(self, num_stages: int, num_workers: int) -> bool:
        """Whether so many stages can be shared out over so many workers."""
        per_worker, rest = divmod(num_stages, num_workers) if num_workers > 0 else (0, 1)
        if rest or not per_worker:
            return False
        wanted = {StagesPerWorker.ONE: 1, StagesPerWorker.TWO: 2}.get(self.stages_per_worker)
        return wanted in (None, per_worker)

    def _advice(self, num_stages: int) -> str:
        fitting = [w for w in range(1, num_stages + 1) if self.takes(num_stages, w)]
        if not fitting:
            return f"give an even number of stages, {num_stages + 1} for example"
        return f"these numbers of workers do: {', '.join(map(str, fitting))}"


def _one_each(num_stages: int, num_workers: int) -> tuple[int, ...]:
    return tuple(range(num_stages))


def _simple(name: str, make: Callable[[int, int], Schedule], *, splits: bool = False) -> Recipe:
    """A schedule of one stage per worker that takes no options."""
    return Recipe(
        name, StagesPerWorker.ONE, splits, _one_each, lambda p, m, workers, options: make(p, m)
    )


def _looped(name: str, make: Callable[[int, int, int], Schedule]) -> Recipe:
    return Recipe(
        name, StagesPerWorker.ANY, False, on_a_loop, lambda p, m, workers, _: make(p, m, workers)
    )


def _make_eager(p: int, m: int, workers: int, options: _Options) -> Schedule:
    return eager_one_f_one_b(p, m, 2 if options.warmup is None else options.warmup)


def _make_fitted(p: int, m: int, workers: int, options: _Options) -> Schedule:
    """Without costs for equal stages, whose backward takes twice as long as the forward."""
    costs = options.costs or Costs.equal(p, 1.0, 1.0, 1.0)
    placement = on_a_loop(p, workers) if options.placement is None else options.placement
    if costs.num_stages != p:
        raise ScheduleError(f"the costs are of {costs.num_stages} stages, but num_stages={p}")
    return fitted(costs, m, placement, options.rules)


_RECIPES = (
    _simple("naive", naive),
    _simple("gpipe", gpipe),
    _simple("1f1b", one_f_one_b),
    Recipe("eager-1f1b", StagesPerWorker.ONE, False, _one_each, _make_eager, ("warmup",)),
    _looped("interleaved", interleaved),
    _looped("breadth-first", breadth_first),
    _simple("zero-bubble", zero_bubble, splits=True),
    Recipe(
        "zero-bubble-v",
        StagesPerWorker.TWO,
        True,
        in_a_v,
        lambda p, m, workers, _: zero_bubble_v(p, m, workers),
    ),
    Recipe(
        "fitted",
        StagesPerWorker.ANY,
        False,
        on_a_loop,
        _make_fitted,
        ("costs", "placement", "rules"),
    ),
)

SCHEDULES: Mapping[str, Recipe] = MappingProxyType({recipe.name: recipe for recipe in _RECIPES})
"""Every known schedule, by name."""


def build(
    name: str,
    num_stages: int,
    num_microbatches: int,
    *,
    num_workers: int | None = None,
    warmup: int | Sequence[int] | None = None,
    costs: Costs | None = None,
    placement: Sequence[int] | None = None,
    rules: Rules | None = None,
) -> Schedule:
    """The schedule called `name`.

    Args:
        name: one of `SCHEDULES`.
        num_stages: the number of stages, `p`.
        num_microbatches: the number of micro-batches, `m`.
        num_workers: how many workers share the stages. By default one per stage, or one per two
            where the schedule gives every worker two.
        warmup: for eager-1f1b, how deep: a factor, or the forwards before the first backward,
            stage by stage.
        costs: for fitted, what the stages take. By default they are all equal.
        placement: for fitted, the worker of every stage. By default in a loop.
        rules: for fitted, what to prefer.

    Raises:
        ScheduleError: no schedule has that name, there is no stage or no micro-batch, the stages
            cannot be shared out over the workers, or an argument is not for this schedule.
    """
    recipe = _recipe(name)
    check_size(name, num_stages, num_microbatches)
    options = _Options(warmup, costs, placement, rules)
    for given in options.given():
        if given not in recipe.options:
            takers = [other.name for other in _RECIPES if given in other.options]
            raise ScheduleError(f"{name} takes no {given}; {', '.join(takers)} does")
    if placement is not None:
        num_workers = 1 + max(placement, default=0)
        return recipe.make(num_stages, num_microbatches, num_workers, options)
    workers = recipe.workers(num_stages, num_workers)
    return recipe.make(num_stages, num_microbatches, workers, options)


def placement_of(name: str, num_stages: int, num_workers: int | None = None) -> tuple[int, ...]:
    """The worker of every stage in the schedule called `name`.

    Raises:
        ScheduleError: no schedule has that name, there is no stage, or the stages cannot be shared
            out over the workers.
    """
    recipe = _recipe(name)
    check_size(name, num_stages, 1)
    return recipe.place(num_stages, recipe.workers(num_stages, num_workers))


def _recipe(name: str) -> Recipe:
    if name not in SCHEDULES:
        raise ScheduleError(f"unknown schedule {name!r}; the known ones are {', '.join(SCHEDULES)}")
    return SCHEDULES[name]
