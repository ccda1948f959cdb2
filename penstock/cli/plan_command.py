"""`penstock plan`"""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli.options import (
    empty_option,
    make_directory,
    model_options,
    pipeline_options,
    reported,
    show,
    talk,
)


@click.command("plan")
@model_options
@empty_option
@pipeline_options
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the plan to this file, for Pipeline(plan=penstock.Plan.load(...)).",
)
@reported
def command(
    model: str,
    inputs: tuple[str, ...],
    example: str | None,
    seed: int,
    empty: bool,
    devices: str | None,
    microbatches: str,
    schedule: str,
    cuts: str | None,
    output: Path | None,
    as_json: bool,
) -> None:
    """Profile MODEL and say how to run it on these devices.

    The example's batch size is the one that is planned for.
    """
    import msgspec

    from penstock.capture import capture
    from penstock.cli.arguments import cut_list, device_list, load_example, microbatch_count
    from penstock.observe.progress import callback
    from penstock.plan.request import Request
    from penstock.planning import plan_for
    from penstock.workers.devices import existing_devices

    module, args, kwargs = load_example(model, inputs, example, seed, empty)
    if output is not None:
        make_directory(output.parent)
    stages = existing_devices(device_list(devices))
    request = Request(
        num_microbatches=microbatch_count(microbatches), schedule=schedule, cuts=cut_list(cuts)
    )
    with callback("capturing") as progress:
        found = plan_for(
            capture(module, args, kwargs),
            devices=stages,
            request=request,
            progress=progress,
        )
    show(msgspec.to_builtins(found), str(found), as_json)
    if output is not None:
        found.save(output)
        talk(f"wrote {output}")
