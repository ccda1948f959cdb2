"""`penstock simulate`"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from penstock.cli.common import (
    figure_option,
    in_flight_option,
    make_directory,
    memory_option,
    optimizer_option,
    recompute_of,
    recompute_option,
    reported,
    show,
    stages_option,
    talk,
    width_of_stdout,
)
from penstock.errors import InputError, PenstockError
from penstock.schedule import SCHEDULES

if TYPE_CHECKING:
    from penstock.plan.plan import Plan
    from penstock.plan.request import Request
    from penstock.plan.whatif import Predicted, WhatIf
    from penstock.profile.data import Profile

D = TypeVar("D")
T = TypeVar("T")

_HEADING = (
    *("schedule", "workers", "replicas", "stages", "micro-batches", "bandwidth", "latency"),
    *("batch", "step", "samples/s", "efficiency", "of bound", "memory", ""),
)
_LEFT = (0, 13)


@click.command("simulate")
@click.argument("source", metavar="PLAN", type=click.Path(path_type=Path))
@click.option(
    "--profile",
    "profile_path",
    type=click.Path(path_type=Path),
    help="The profile; default: the one next to PLAN.",
)
@click.option("--workers", metavar="LIST", help="Numbers of workers; default: as in PLAN.")
@click.option(
    "--microbatches", metavar="LIST", help="Micro-batches of each replica; default: as in PLAN."
)
@click.option(
    "--schedule",
    "schedules",
    metavar="LIST",
    help=f"{', '.join(SCHEDULES)}, or all; default: as in PLAN.",
)
@click.option(
    "--bandwidth", metavar="LIST", help="Bandwidth of links, such as 25GB/s; default: as measured."
)
@click.option(
    "--latency",
    metavar="LIST",
    help="One-way latency of links, such as 10us; default: as measured.",
)
@click.option(
    "--speed",
    type=float,
    default=1.0,
    metavar="FACTOR",
    help="Speed of devices; 20 is 20 times as fast as measured.",
)
@click.option(
    "--microbatch-size",
    type=click.IntRange(min=1),
    metavar="ROWS",
    help="Rows of a micro-batch; default: as in PLAN.",
)
@click.option(
    "--batch",
    type=click.IntRange(min=1),
    metavar="ROWS",
    help="Rows of a batch, over all replicas, instead of --microbatch-size.",
)
@click.option(
    "--replicas",
    default="auto",
    show_default=True,
    metavar="N|auto",
    help="Replicas of the pipeline; auto: as in PLAN, or, for a profile and with --workers or "
    "--schedule, as few as the places to cut allow.",
)
@click.option(
    "--inference",
    is_flag=True,
    help="Predict a steady flow of forwards, as it is done for plans and profiles for inference.",
)
@in_flight_option
@stages_option
@memory_option
@optimizer_option
@recompute_option
@figure_option
@reported
def command(
    source: Path,
    profile_path: Path | None,
    figure: Path | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Predict the step, or the flow, of a model on machines that you do not have.

    PLAN is a plan, or a profile. A plan's own profile is read from the file beside it. With a
    profile the model is cut anew for the given number of workers, all alike. A LIST may have
    several values, separated by commas: all combinations are simulated.

    The batch grows with the micro-batches and replicas, as their size stays; --batch keeps it.
    Efficiency compares with as many workers that each work alone and wait for nothing. Of plans and
    profiles for inference it is a steady flow of forwards that is predicted, from batch to batch.
    """
    plan, profile = _loaded(source, profile_path)
    cases = _cases(plan, profile, _Options(**options))
    if figure is not None:
        from penstock.display.figures import require_figure

        require_figure(figure)
        make_directory(figure.parent)
    outcomes = _outcomes(plan, profile, cases)
    text = _text(outcomes, width_of_stdout())
    show({"outcomes": [_data(outcome) for outcome in outcomes]}, text, as_json)
    if figure is not None:
        from penstock.observe.sweep import save_sweep

        save_sweep(outcomes, figure, f"What if: {source.name}")
        talk(f"drew {figure}")


# -- what is given --------------------------------------------------------------------------


def _loaded(source: Path, profile_path: Path | None) -> tuple[Plan | None, Profile | None]:
    """The plan if it is one, and the profile if there is one.

    Raises:
        InputError: a file that cannot be read, or that is something else.
    """
    from penstock.files import profile_beside, read_whole, what_is
    from penstock.plan.plan import Plan
    from penstock.profile.data import Profile

    what = what_is(read_whole(source, "plan"))
    if what is None:
        raise InputError(f"{source} is neither a plan nor a profile; penstock plan makes both")
    if what == "profile":
        if profile_path is not None:
            raise InputError(f"{source} is a profile itself: give a plan, or leave out --profile")
        return None, Profile.load(source)
    plan, beside = Plan.load(source), profile_beside(source)
    if profile_path is None and not beside.exists():
        talk(f"no profile beside {source} ({beside.name}): taking the plan's own stages")
        return plan, None
    profile = Profile.load(profile_path or beside)
    if profile.fingerprint != plan.fingerprint:
        raise InputError(
            f"{profile_path or beside} is the profile of another model than {source} is for: "
            f"{profile.fingerprint}, not {plan.fingerprint}"
        )
    return plan, profile


@dataclass(frozen=True)
class _Options:
    """The options of the command that say what is simulated, as they were given; see there."""

    workers: str | None
    microbatches: str | None
    schedules: str | None
    bandwidth: str | None
    latency: str | None
    speed: float
    microbatch_size: int | None
    batch: int | None
    replicas: str
    inference: bool
    in_flight: int | None
    stages_per_worker: int | None
    memory_limit: str | None
    optimizer_state: float
    recompute: str

    def check(self, plan: Plan | None) -> None:
        """Raise unless the options fit together, and give what would otherwise come from a plan.

        Args:
            plan: the plan that is simulated; `None` if only a profile is given.

        Raises:
            InputError: two options contradict each other, or one is missing.
        """
        if self.batch is not None and self.microbatch_size is not None:
            raise InputError(
                "--batch says how large micro-batches are: leave out --microbatch-size"
            )
        has_size = (self.microbatch_size or self.batch) is not None
        if plan is None and (self.microbatches is None or not has_size):
            raise InputError(
                "a profile says nothing of micro-batches: give --microbatches, and "
                "--microbatch-size or --batch; or give a plan"
            )
        if self.inference and self.schedules is not None:
            raise InputError(
                f"--schedule {self.schedules} is about backwards or their order, and a flow of "
                "forwards has none: leave it out, or give a plan that is made without --inference"
            )

    def request(self) -> Request:
        """The options that a new plan is made with, as a `Request`."""
        from penstock.plan.request import Request

        return Request(
            recompute=recompute_of(self.recompute),
            memory_limit=self.memory_limit,
            optimizer_state=self.optimizer_state,
            stages_per_worker=self.stages_per_worker or "auto",
            inference=self.inference,
            in_flight=self.in_flight,
        )

    def count_of_replicas(self, plan: Plan | None) -> int | None:
        """How many there are; `None` for as few as the places to cut allow."""
        if self.replicas != "auto":
            try:
                return _whole(self.replicas)
            except InputError:
                raise InputError(
                    f"--replicas: {self.replicas!r} is neither a number nor auto"
                ) from None
        if plan is not None and self.workers is None and self.schedules is None:
            return plan.replicas
        return None


def _cases(plan: Plan | None, profile: Profile | None, options: _Options) -> list[WhatIf]:
    """Every combination of what the options say, of which some are lists.

    Raises:
        InputError: an option means nothing, or is missing without a plan.
    """
    from penstock.plan.whatif import WhatIf
    from penstock.units import parse_seconds, parse_speed

    is_flow = any(found is not None and found.inference for found in (plan, profile))
    options = replace(options, inference=options.inference or is_flow)
    options.check(plan)
    request, replicas = options.request(), options.count_of_replicas(plan)
    each = -(-plan.num_microbatches // (replicas or 1)) if plan else 1
    devices = plan.devices if plan is not None else profile.devices if profile else ()
    every = product(
        _list("--workers", options.workers, _whole, len(devices)),
        _list("--microbatches", options.microbatches, _whole, each),
        _schedules(options.schedules, plan.schedule if plan else "1f1b"),
        _list("--bandwidth", options.bandwidth, parse_speed, None),
        _list("--latency", options.latency, parse_seconds, None),
    )
    return [
        WhatIf(
            workers=count,
            num_microbatches=m,
            schedule=schedule,
            bandwidth=link_speed,
            latency=link_latency,
            microbatch_size=options.microbatch_size or (plan.microbatch_size if plan else 1),
            batch=options.batch,
            replicas=replicas,
            stages_per_worker=options.stages_per_worker,
            speed=options.speed,
            memory=request.memory,
            recompute=request.recompute,
            inference=options.inference,
            in_flight=options.in_flight,
        )
        for count, m, schedule, link_speed, link_latency in every
    ]


def _list(option: str, text: str | None, parsed: Callable[[str], T], default: D) -> list[T | D]:
    """The entries of a list with commas.

    Raises:
        InputError: one of them means nothing; the message names the option.
    """
    if text is None:
        return [default]
    try:
        return list(dict.fromkeys(parsed(entry.strip()) for entry in text.split(",")))
    except InputError as error:
        raise InputError(f"{option}: {error}") from None


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise InputError(f"{text!r} is not a number; write a list like 1,2,4,8")
    return int(text)


def _schedules(text: str | None, default: str) -> list[str]:
    return list(SCHEDULES) if text == "all" else _list("--schedule", text, str, default)


# -- what comes of it -----------------------------------------------------------------------


def _outcomes(
    plan: Plan | None, profile: Profile | None, cases: Sequence[WhatIf]
) -> list[Predicted]:
    """What is predicted of every case; in a sweep, one that is not possible says why.

    Raises:
        PenstockError: none is possible.
    """
    from penstock.plan.whatif import Predicted, what_if, what_if_planned

    outcomes, failed = [], None
    for case in cases:
        try:
            if profile is not None:
                outcomes.append(what_if(profile, case))
            elif plan is not None:
                outcomes.append(what_if_planned(plan, case))
        except PenstockError as error:
            failed = error
            outcomes.append(Predicted(case, 0, 0, 0, None, note=str(error)))
    if failed is not None and all(not outcome.stages for outcome in outcomes):
        raise failed
    return outcomes


def _data(outcome: Predicted) -> dict[str, object]:
    """An outcome as plain data, with what follows from it."""
    return {
        **asdict(outcome),
        "samples_per_second": outcome.samples_per_second,
        "efficiency": outcome.efficiency,
    }


def _text(outcomes: Sequence[Predicted], width: int | None) -> str:
    """The table; where that is too wide, what all lines have in common is said once above it."""
    from penstock.display.tables import aligned

    rows = [_row(outcome) for outcome in outcomes]
    of_flow = any(outcome.case.inference for outcome in outcomes)
    heading = tuple("per batch" if of_flow and name == "step" else name for name in _HEADING)
    lines = aligned([heading, *rows], _LEFT)
    if width is None or max(map(len, lines)) <= width:
        return "\n".join(lines)
    settings = range(_HEADING.index("step"))
    common = [k for k in settings if rows[0][k] and len({row[k] for row in rows}) == 1]
    in_common = ", ".join(f"{_HEADING[k]} {rows[0][k]}" for k in common)
    kept = [k for k in range(len(_HEADING)) if k not in common]
    cells = [[row[k] for k in kept] for row in (heading, *rows)]
    left = [place for place, k in enumerate(kept) if k in _LEFT]
    return "\n".join([*([in_common, ""] if in_common else []), *aligned(cells, left, width)])


def _row(outcome: Predicted) -> tuple[str, ...]:
    """A line of the table; settings that do not apply or were not given are empty cells."""
    from penstock.units import show_bytes, show_seconds

    case, seconds = outcome.case, outcome.step_seconds
    settings = (
        *(
            "" if case.inference else case.schedule,
            f"{case.workers}",
            f"{outcome.replicas}" if outcome.replicas > 1 else "",
        ),
        *(f"{outcome.stages}" if outcome.stages else "-", f"{case.num_microbatches}"),
        f"{show_bytes(case.bandwidth)}/s" if case.bandwidth else "",
        show_seconds(case.latency) if case.latency is not None else "",
        f"{outcome.batch_size}" if outcome.batch_size else "-",
    )
    if seconds is None:
        return (*settings, "-", "-", "-", "-", "-", outcome.note)
    return (
        *settings,
        show_seconds(seconds),
        f"{outcome.samples_per_second:.4g}",
        f"{outcome.efficiency:.1%}",
        f"{outcome.bound_seconds / seconds:.1%}",
        show_bytes(outcome.memory_bytes),
        outcome.note,
    )
