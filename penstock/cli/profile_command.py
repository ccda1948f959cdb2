"""`penstock profile`"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.common import (
    Finite,
    devices_option,
    empty_option,
    make_directory,
    microbatch_count,
    model_options,
    parts_of,
    reported,
    show,
    states_option,
    talk,
    width_of_stdout,
    workers_option,
)
from penstock.errors import InputError

if TYPE_CHECKING:
    from penstock.profile import Profile
    from penstock.profile.data import DeviceProfile

_HEAVIEST = 20  # calls that fit a screen
_HEADING = ("call", "what", "forward", "backward", "put off", "share", "holds", "weights")
_FORWARD_HEADING = ("call", "what", "forward", "share", "states", "weights")
_LEFT = (1,)


@click.command("profile")
@model_options
@empty_option
@devices_option
@workers_option
@click.option("--inference", is_flag=True, help="Measure forwards alone, in evaluation mode.")
@states_option
@click.option("--microbatches", default="auto", show_default=True, metavar="N|auto")
@click.option("--seconds", type=Finite(min=0), help="About how long to measure; default: 30.")
@click.option("--no-cache", is_flag=True, help="Measure again even if there is a cached profile.")
@click.option("--calls", is_flag=True, help="List every call instead of the heaviest.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the profile to this file, for penstock.Profile.load(...).",
)
@reported
def command(
    model: str,
    inputs: tuple[str, ...],
    example: str | None,
    seed: int,
    empty: bool,
    devices: str | None,
    workers: str,
    inference: bool,
    states: str | None,
    microbatches: str,
    seconds: float | None,
    no_cache: bool,
    calls: bool,
    output: Path | None,
    as_json: bool,
) -> None:
    """Measure what every call of MODEL costs on these devices, and what sending costs.

    Times are for the largest micro-batch measured on the first device. `put off` is the part
    of a backward that is for weights alone and can come later; `holds` is what a call keeps for
    its backward. With --inference, `states` is what a call leaves in a session, such as keys and
    values.
    """
    import msgspec

    from penstock.capture import capture
    from penstock.capture.states import check_parts
    from penstock.cli.arguments import device_list, load_example
    from penstock.devices.allocator import keep_freed_memory
    from penstock.devices.choice import existing_devices, threads_per_worker
    from penstock.display.progress import callback
    from penstock.planning.overheads import with_overheads
    from penstock.profile.cache import cached_profiles
    from penstock.profile.measure import SECONDS, with_states
    from penstock.workers.kinds import measuring

    module, args, kwargs = load_example(model, inputs, example, seed, empty)
    if output is not None:
        make_directory(output.parent)
    there = existing_devices(device_list(devices))
    count, named = microbatch_count(microbatches), parts_of(states)
    if named and not inference:
        raise InputError(f"--states {states} is about sessions: give --inference as well")
    keep_freed_memory()  # as the pipelines that it is for will
    with callback("capturing") as progress:
        program = capture(module, args, kwargs)
        check_parts(program.train, named)
        (costs,), was_kept = cached_profiles(
            program,
            choices=[([str(device) for device in there], threads_per_worker(there))],
            num_microbatches=count,
            seconds=SECONDS if seconds is None else seconds,
            inference=inference,
            progress=progress,
            fresh=no_cache,
        )
        costs = with_states(costs, program, named)
    with measuring(workers, there) as backend:
        costs = with_overheads(costs, there, backend.probe, fresh=no_cache)
    show(msgspec.to_builtins(costs), _text(costs, calls), as_json)
    if was_kept:
        talk("measured before; --no-cache measures again")
    if output is not None:
        costs.save(output)
        talk(f"wrote {output}")


def _text(costs: Profile, every: bool) -> str:
    """The table of calls, and what else was measured."""
    from penstock.display.tables import aligned

    kind = costs.on(costs.devices[0])
    rows = kind.rows[-1]
    seconds = costs.call_seconds()
    order = sorted(range(costs.num_calls), key=lambda k: -seconds[k])
    chosen = range(costs.num_calls) if every else order[:_HEAVIEST]
    lines = [_cells(costs, [k], str(k), costs.labels[k]) for k in chosen]
    left = order[len(chosen) :]
    if left:
        lines.append(_cells(costs, left, "", f"({len(left)} others)"))
    lines.append(_cells(costs, range(costs.num_calls), "", "total"))
    heading = _FORWARD_HEADING if costs.inference else _HEADING
    return "\n".join(
        [
            *aligned([heading, *lines], _LEFT, width_of_stdout()),
            "",
            f"{rows} rows on {costs.devices[0]}; measured at {', '.join(map(str, kind.rows))} rows",
            f"confidence: {costs.confidence}",
            *_beside(costs),
        ]
    )


def _cells(costs: Profile, calls: Sequence[int], number: str, label: str) -> tuple[str, ...]:
    """A line of the table, for some calls together."""
    from penstock.units import show_bytes

    kind = costs.on(costs.devices[0])
    tables = (kind.forward[-1], kind.backward[-1], kind.weight_seconds(kind.rows[-1]))
    forward, backward, weight = (sum(table[k] for k in calls) for table in tables)
    share = (forward + backward) / max(sum(costs.call_seconds()), 1e-12)
    held = sum(costs.saved[k] for k in calls) * kind.rows[-1] if costs.saved else 0
    weights = sum(costs.weights[k] for k in calls)
    if costs.inference:
        states = sum(costs.states[k] for k in calls) * kind.rows[-1]
        return (
            *(number, label, _milliseconds(forward), f"{share:.1%}"),
            show_bytes(states) if states else "",
            show_bytes(weights) if weights else "",
        )
    return (
        *(number, label, _milliseconds(forward), _milliseconds(backward)),
        _milliseconds(weight) if weight else "",
        f"{share:.1%}",
        show_bytes(held) if held else "",
        show_bytes(weights) if weights else "",
    )


def _beside(costs: Profile) -> list[str]:
    """Lines with the costs of links, of actions, and of whatever else was measured."""
    from penstock.units import show_bytes

    lines = []
    for pair, link in costs.links.items():
        speed = (
            f"{show_bytes(link.bytes_per_second)}/s" if link.bytes_per_second else "by reference"
        )
        lines.append(f"link {pair}: {_microseconds(link.latency_seconds)}, {speed}")
    overheads = (costs.overhead_seconds, "action"), (costs.pass_seconds, "pass")
    lines += [f"overhead: {_microseconds(seconds)} for every {what}" for seconds, what in overheads]
    if costs.adding_seconds:
        replicas = "a parameter's gradients in each micro-batch, with replicas"
        lines.append(f"adding: {_microseconds(costs.adding_seconds)} for {replicas}")
    first = costs.on(costs.devices[0])
    if first.contention:
        ends = sorted({f"{ratio:.2f}" for ratio in (min(first.contention), max(first.contention))})
        longer = f"{' to '.join(ends)} times as long"
        lines.append(f"contention: a micro-batch takes {longer} as on one worker alone")
    if first.launching:
        ends = [f"{first.launched(rows):.0%}" for rows in (first.rows[-1], first.rows[0])]
        share = " to ".join(dict.fromkeys(ends))
        each = _microseconds(first.launching)
        lines.append(f"launching: {each} of the CPU for a micro-batch, {share} of its time")
    lines += _halves(first)
    return lines


def _halves(kind: DeviceProfile) -> list[str]:
    """What it costs to halve backwards, where that was measured."""
    found = []
    for rows in sorted({kind.rows[0], kind.rows[-1]}):
        more = kind.halving_seconds(rows).sum() / sum(map(sum, kind.seconds(rows)))
        if more > 0:
            found.append(f"{more:.1%} (rows: {rows})")
    if not found:
        return []
    return [f"halves: a micro-batch takes {' to '.join(found)} longer with backwards in halves"]


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} us"
