"""`penstock plan`"""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli.options import (
    make_directory,
    model_options,
    pipeline_options,
    reported,
    show,
    talk,
)


@click.command("plan")
@model_options
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

    from penstock.cli.arguments import cut_list, device_list, load_example, microbatch_count
    from penstock.observe.progress import callback
    from penstock.pipeline import Pipeline

    module, args, kwargs = load_example(model, inputs, example, seed)
    if output is not None:
        make_directory(output.parent)
    with callback("capturing") as progress:
        pipe = Pipeline(
            module,
            args,
            kwargs,
            devices=device_list(devices),
            num_microbatches=microbatch_count(microbatches),
            schedule=schedule,
            cuts=cut_list(cuts),
            progress=progress,
        )
    pipe.close()
    show(msgspec.to_builtins(pipe.plan), str(pipe.plan), as_json)
    if output is not None:
        pipe.plan.save(output)
        talk(f"wrote {output}")
