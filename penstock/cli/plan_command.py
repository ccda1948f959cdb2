"""`penstock plan`"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from penstock.cli.common import (
    empty_option,
    figure_option,
    in_flight_option,
    make_directory,
    model_options,
    optimizer_option,
    parts_of,
    pipeline_options,
    reported,
    show,
    states_option,
    talk,
    width_of_stdout,
    workers_option,
)
from penstock.errors import InputError

if TYPE_CHECKING:
    from penstock.cli.arguments import Example
    from penstock.plan import Plan
    from penstock.plan.request import Request
    from penstock.profile import Profile

_STDOUT = Path("-")


@click.command("plan")
@model_options
@empty_option
@pipeline_options
@workers_option
@optimizer_option
@click.option("--inference", is_flag=True, help="Plan for a steady flow of forwards.")
@in_flight_option
@states_option
@click.option("--any-order", is_flag=True, help="Allow the devices to be reordered.")
@click.option("--tune", is_flag=True, help="Measure the best few plans and keep the fastest.")
@click.option("--fresh", is_flag=True, help="Profile again even if there is a cached profile.")
@click.option(
    "--show-schedule",
    is_flag=True,
    help="Draw the schedule in units of time; with --inference, which batch is where.",
)
@figure_option
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False, allow_dash=True),
    default=Path("plan.json"),
    show_default=True,
    help="File of the plan; the profile is written next to it; - prints the plan to stdout.",
)
@click.option("--no-output", is_flag=True, help="Write no files.")
@reported
def command(
    model: str,
    inputs: tuple[str, ...],
    example: str | None,
    seed: int,
    empty: bool,
    devices: str | None,
    workers: str,
    optimizer_state: float,
    inference: bool,
    in_flight: int | None,
    states: str | None,
    any_order: bool,
    tune: bool,
    fresh: bool,
    show_schedule: bool,
    figure: Path | None,
    output: Path,
    no_output: bool,
    as_json: bool,
    **pipeline: Any,
) -> None:
    """Profile MODEL and say how to run it on these devices.

    The example's batch size is the one that is planned for. --devices also takes the name of a
    hardware description, cluster.toml: then the model is measured on the devices of this machine
    that it refers to, and planned for those that it describes.
    """
    import msgspec

    from penstock.cli.arguments import load_example, pipeline_arguments
    from penstock.display.figures import require_figure
    from penstock.plan.request import Request
    from penstock.plan.text import winner

    request = Request(
        **pipeline_arguments(**pipeline),
        optimizer_state=optimizer_state,
        any_order=any_order,
        inference=inference,
        in_flight=in_flight,
        states=parts_of(states),
    )
    if figure is not None:
        require_figure(figure)
    _check(output, as_json, figure, no_output)
    given = load_example(model, inputs, example, seed, empty)
    found, costs = _planned(given, devices, workers, request, tune=tune, fresh=fresh)
    text = _text(found, costs, show_schedule)
    if output == _STDOUT:
        talk(text)
        click.echo(found.encode(), nl=False)
    else:
        about = {"winner": winner(found), "confidence": msgspec.to_builtins(costs.confidence)}
        show({**msgspec.to_builtins(found), **found.rates, **about}, text, as_json)
    if output != _STDOUT and not no_output:
        _write(found, costs, output)
    if figure is not None:
        _draw(found, model, figure)


def _check(output: Path, as_json: bool, figure: Path | None, no_output: bool) -> None:
    """Check before the work that its results can be written; makes their folders.

    Raises:
        InputError: two results would go to stdout, or a folder cannot be made.
    """
    if output == _STDOUT and as_json:
        raise InputError("--output - and --json both want stdout; give one of them")
    if output != _STDOUT and not no_output:
        make_directory(output.parent)
    if figure is not None:
        make_directory(figure.parent)


def _planned(
    given: Example,
    devices: str | None,
    workers: str,
    request: Request,
    *,
    tune: bool,
    fresh: bool,
) -> tuple[Plan, Profile]:
    """The plan, and the profile that was measured for its workers."""
    from dataclasses import replace

    from penstock.capture import capture
    from penstock.cli.arguments import described_hardware, device_list
    from penstock.devices.allocator import keep_freed_memory
    from penstock.display.progress import callback
    from penstock.plan.request import Limits
    from penstock.plan.search import plans_on_any
    from penstock.planning.planner import (
        TUNED,
        check_possible,
        limits_of,
        profile_of,
        profiles_of_choices,
        tuned,
    )
    from penstock.workers.kinds import measuring

    hardware = described_hardware(devices)
    if hardware is not None and tune:
        raise InputError(
            f"--tune measures plans on devices that are here; --devices {devices} describes others"
        )
    keep_freed_memory()  # as the pipeline that is planned for will
    names = None if devices is None else device_list(devices)
    if hardware is not None:
        names = hardware.measured
        talk(f"measuring on {', '.join(names)}, for the machines that {devices} describes")
    least = request.least_workers
    with callback("capturing") as progress, measuring(workers, names, least) as backend:
        program = capture(*given)
        limits, measure = limits_of(backend), request
        if hardware is not None:
            count = sum(machine.count for machine in hardware.machines)
            limits = Limits(all_devices=True, in_one_memory=False)
            check_possible(program, request, limits, count)
            measure = replace(request, cuts=None, replicas=1)  # others are for what is described
        costs = profiles_of_choices(
            program,
            choices=backend.choices,
            request=measure,
            limits=limits,
            fresh=fresh,
            where=backend.probe,
            progress=progress,
        )
        if hardware is not None:
            costs = [hardware.apply(profile) for profile in costs]
        best = plans_on_any(costs, request, TUNED if tune else 1, limits)
        if tune:
            taken = tuned(program, (), None, best, progress=progress)
            best = [plan for _, plan in taken]
    if tune:
        for seconds, plan in taken:
            talk(_measured(seconds, plan))
    return best[0], profile_of(best[0], costs)


def _measured(seconds: float, plan: Plan) -> str:
    from penstock.units import show_seconds

    predicted = show_seconds(plan.predicted_step_seconds)
    replicas = f"{plan.replicas} replicas, " if plan.replicas > 1 else ""
    kind = f"{len(plan.stages)} stages" if plan.inference else plan.schedule
    what = "one device" if plan.way == "one device" else f"{replicas}{kind}"
    each = " a batch" if plan.inference else ""
    return (
        f"measured {what}, {plan.num_microbatches} micro-batches: "
        f"{show_seconds(seconds)}{each}, {predicted} predicted"
    )


def _text(found: Plan, costs: Profile, show_schedule: bool) -> str:
    """What wins, the stages, the step, and what was considered."""
    from penstock.observe.timeline import as_text, legend
    from penstock.plan.text import (
        advice,
        considered,
        flow,
        launches,
        prediction,
        replicas,
        stages,
        verdict,
    )
    from penstock.schedule import draw

    timeline, width = found.timeline(), width_of_stdout()
    hints = [line for line in advice(found) if line.startswith("Worker")]
    parts = [
        [verdict(found), *filter(None, [found.note]), *hints],
        stages(found, width),
        *filter(None, [replicas(found, width)]),
        [as_text(timeline), legend(timeline)],
        [prediction(found), f"confidence: {costs.confidence}", *launches(found, costs)],
        considered(found, width),
    ]
    if show_schedule:
        drawn = (
            flow(found) if found.inference else [draw(found.schedule_for(found.num_microbatches))]
        )
        parts.append(drawn)
    return "\n\n".join("\n".join(part) for part in parts)


def _write(found: Plan, costs: Profile, output: Path) -> None:
    from penstock.files import profile_beside

    beside = profile_beside(output)
    found.save(output)
    costs.save(beside)
    talk(f"wrote {output}, and the profile that it was made from, {beside}")


def _draw(found: Plan, model: str, path: Path) -> None:
    from penstock.observe.timeline import save_figure
    from penstock.plan.text import prediction

    save_figure(found.timeline(), path, f"{model.rpartition(':')[2]}: {prediction(found)}")
    talk(f"drew {path}")
