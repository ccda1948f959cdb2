"""`penstock verify`"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from penstock.cli.common import (
    Finite,
    model_options,
    pipeline_options,
    reported,
    show,
    talk,
    workers_option,
)
from penstock.errors import InputError

if TYPE_CHECKING:
    import torch


@click.command("verify")
@model_options
@pipeline_options
@workers_option
@click.option(
    "--plan",
    "plan_path",
    type=click.Path(path_type=Path),
    help="Plan file to use; its devices are used unless --devices is given.",
)
@click.option("--target", metavar="SPEC", help="The target for the loss, in the form of --input.")
@click.option("--loss", metavar="MODULE:CALLABLE", help="loss(output, target) or loss(output).")
@click.option(
    "--weight",
    metavar="rows|sum|MODULE:CALLABLE",
    default="rows",
    show_default=True,
    help="How losses of micro-batches add up: a mean over rows, a sum, or weighted by f(target).",
)
@click.option(
    "--optimizer",
    metavar="NAME|MODULE:CLASS",
    default="SGD",
    show_default=True,
    help="A class of torch.optim, or another that treats parameters one by one.",
)
@click.option(
    "--lr",
    type=Finite(min=0),
    default=1e-3,
    show_default=True,
    help="The optimizer's learning rate.",
)
@click.option(
    "--batchnorm",
    type=click.Choice(["microbatch", "deferred"]),
    default="microbatch",
    show_default=True,
    help="Update running statistics with every micro-batch, or once with the whole batch.",
)
@click.option(
    "--boundary-dtype",
    type=click.Choice(["bfloat16", "float16"]),
    help="Round boundary values to this dtype, and report how much that changes.",
)
@click.option("--clip", type=float, metavar="NORM", help="Clip gradients to this norm.")
@reported
def command(
    model: str,
    inputs: tuple[str, ...],
    example: str | None,
    seed: int,
    devices: str | None,
    workers: Literal["threads", "processes"],
    plan_path: Path | None,
    target: str | None,
    loss: str | None,
    weight: str,
    optimizer: str,
    lr: float,
    batchnorm: Literal["microbatch", "deferred"],
    boundary_dtype: str | None,
    clip: float | None,
    as_json: bool,
    **pipeline: Any,
) -> None:
    """Prove that MODEL computes the same bits split as whole; exit code 1 if it does not.

    If it does not, the first call of the forward with a different result is named.
    """
    from dataclasses import asdict

    import torch

    from penstock.cli.arguments import (
        device_list,
        load_example,
        load_loss,
        load_optimizer,
        load_weight,
        pipeline_arguments,
    )
    from penstock.display.progress import callback
    from penstock.plan import Plan
    from penstock.planning.tuning import mean_square
    from penstock.verification import verify

    own = [name for name, value in pipeline.items() if value not in (None, "auto")]
    if plan_path is not None and own:
        raise InputError(f"--plan has its own {', '.join(own)}: give one or the other")
    plan = None if plan_path is None else Plan.load(plan_path)
    module, args, kwargs = load_example(model, inputs, example, seed)
    if loss is None:
        talk("no --loss: taking the mean of the squares of every floating point output")
    with callback("verifying") as progress:
        report = verify(
            module,
            args,
            kwargs,
            target=None if target is None else _target(target),
            loss_fn=load_loss(loss) if loss is not None else mean_square,
            devices=None if devices is None else device_list(devices),
            plan=plan,
            workers=workers,
            weight=load_weight(weight),
            optimizer=load_optimizer(optimizer),
            optimizer_options={"lr": lr},
            clip_norm=clip,
            batchnorm=batchnorm,
            boundary_dtype=getattr(torch, boundary_dtype) if boundary_dtype else None,
            **pipeline_arguments(**pipeline),
            progress=progress,
        )
    show({"ok": report.ok, **asdict(report)}, str(report), as_json)
    sys.exit(0 if report.ok else 1)


def _target(spec: str) -> torch.Tensor:
    """The target that the option describes.

    Raises:
        InputError: the description means nothing, or has a name, which only inputs have.
    """
    from penstock.loading import parse_input

    name, tensor = parse_input(spec)
    if name is not None:
        raise InputError(f"--target {spec}: leave out {name}=; a target has no name")
    return tensor
