"""`penstock bench`"""

from __future__ import annotations

from pathlib import Path

import click

from penstock.bench.experiments import BenchSettings, run_bench
from penstock.cli.options import device_list, load_example, reported, show, talk
from penstock.loading import load
from penstock.observe.progress import callback

_RESNET = "torchvision.models:resnet50"


@click.command("bench")
@click.argument("model", metavar="[MODEL]", default=_RESNET)
@click.option("--input", "inputs", multiple=True, metavar="SPEC", help="As in penstock inspect.")
@click.option("--example", metavar="MODULE:CALLABLE", help="As in penstock inspect.")
@click.option("--loss", metavar="MODULE:CALLABLE", help="loss(output); default: mean of squares.")
@click.option("--devices", metavar="LIST", default=None, help="Two or more; default: all.")
@click.option("--quick", is_flag=True, help="Small batches: done within two minutes on two cores.")
@click.option(
    "--output", type=click.Path(path_type=Path), default=Path("out/bench"), show_default=True
)
@click.option("--seed", type=int, default=0, show_default=True)
@reported
def command(
    model: str,
    inputs: tuple[str, ...],
    example: str | None,
    loss: str | None,
    devices: str | None,
    quick: bool,
    output: Path,
    seed: int,
    as_json: bool,
) -> None:
    """Measure one device, two devices and pipelines of MODEL, and draw the figures.

    Without MODEL: ResNet-50 on 128x128 images, the experiment of PyTorch's tutorial.
    """
    given = None
    if inputs or example or model != _RESNET:
        given = load_example(model, inputs, example, seed)
    settings = BenchSettings(
        model=model,
        given=given,
        loss_fn=load(loss) if loss else None,
        devices=tuple(device_list(devices)),
        quick=quick,
        output=output,
    )
    with callback("bench") as progress:
        report = run_bench(settings, progress)
    show(report.to_dict(), str(report), as_json)
    talk(f"figures and raw times are in {output}")
