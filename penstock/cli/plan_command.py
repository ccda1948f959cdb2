"""`penstock plan`"""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from penstock.cli.options import (
    device_list,
    load_example,
    microbatch_count,
    model_options,
    pipeline_options,
    reported,
    show,
    talk,
)
from penstock.observe.progress import callback
from penstock.pipeline import Pipeline


@click.command("plan")
@model_options
@pipeline_options
@click.option("--output", type=click.Path(path_type=Path), help="Write the plan to this file.")
@reported
def command(
    model: str,
    inputs: tuple[str, ...],
    example: str | None,
    seed: int,
    devices: str | None,
    microbatches: str,
    schedule: str,
    output: Path | None,
    as_json: bool,
) -> None:
    """Profile MODEL and say how to run it on these devices."""
    module, args, kwargs = load_example(model, inputs, example, seed)
    with callback("profiling") as progress:
        pipe = Pipeline(
            module,
            args,
            kwargs,
            devices=device_list(devices),
            num_microbatches=microbatch_count(microbatches),
            schedule=schedule,
            progress=progress,
        )
    pipe.close()
    show(msgspec.to_builtins(pipe.plan), str(pipe.plan), as_json)
    if output is not None:
        pipe.plan.save(output)
        talk(f"wrote {output}")
