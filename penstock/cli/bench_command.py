"""`penstock bench`"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click
from click.core import ParameterSource

from penstock.cli.common import (
    RESNET50,
    devices_option,
    example_options,
    make_directory,
    reported,
    show,
    talk,
    width_of_stdout,
)
from penstock.errors import InputError, PenstockError


@click.command("bench")
@click.argument("model", metavar="[MODEL]", required=False)
@example_options
@click.option(
    "--loss", metavar="MODULE:CALLABLE", help="loss(output); default: the outputs' mean square."
)
@devices_option
@click.option(
    "--quick", is_flag=True, help="Small batches; takes less than two minutes on two cores."
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    default=Path("out/bench"),
    show_default=True,
    help="Directory for the figures and bench.json.",
)
@reported
def command(
    model: str | None,
    inputs: tuple[str, ...],
    example: str | None,
    seed: int,
    loss: str | None,
    devices: str | None,
    quick: bool,
    output: Path,
    as_json: bool,
) -> None:
    """Measure one device and pipelines of MODEL side by side, and draw the figures.

    Without MODEL: ResNet-50 on 128x128 images, the experiments of PyTorch's tutorial. With `rpc`
    in its place: those of the distributed pipeline tutorial, with worker processes. With
    `data-parallel`: those of the nn.DataParallel tutorial, and replicas beside
    DistributedDataParallel.
    """
    _require("matplotlib", "report", "draws figures")
    if model in (None, "rpc", RESNET50):
        _require("torchvision", "models", "trains ResNet-50")
    if model in ("data-parallel", "rpc"):
        given = [*inputs, *filter(None, (example, loss, devices))]
        source = click.get_current_context().get_parameter_source("seed")
        if source is not ParameterSource.DEFAULT:
            given.append(f"--seed {seed}")
        run = _rpc if model == "rpc" else _data_parallel
        run(given, quick, output, as_json)
        return
    tutorial = model in (None, RESNET50) and not inputs and example is None
    if tutorial and loss is not None:
        raise InputError("--loss needs a MODEL with --input; the tutorial has its own loss")
    import torch

    from penstock.bench.experiments import BenchSettings, run_bench
    from penstock.cli.arguments import device_list, load_example, load_loss
    from penstock.display.progress import callback

    torch.manual_seed(seed)
    make_directory(output)
    model = model or RESNET50
    settings = BenchSettings(
        model=model,
        given=None if tutorial else load_example(model, inputs, example, seed),
        loss_fn=load_loss(loss) if loss is not None else None,
        devices=tuple(device_list(devices)),
        quick=quick,
        output=output,
    )
    with callback("starting") as progress:
        report = run_bench(settings, progress, talk)
    show(report.to_dict(), report.text(width_of_stdout()), as_json)
    talk(f"figures and raw times are in {output}")


def _require(package: str, extra: str, why: str) -> None:
    """Raise if a package is missing that this command needs.

    Raises:
        PenstockError: it is.
    """
    if find_spec(package) is None:
        raise PenstockError(
            f"penstock bench {why} and needs {package}: pip install 'penstock[{extra}]' "
            "(all that it needs: 'penstock[cli,report,models]')"
        )


def _rpc(given: list[str], quick: bool, output: Path, as_json: bool) -> None:
    """Run the experiments with a master and two workers, and show what was measured."""
    if given:
        raise InputError(
            f"{', '.join(given)}: `penstock bench rpc` trains ResNet-50 on two worker processes "
            "and takes no input, example, loss, devices or seed"
        )
    from penstock.bench.rpc import RpcSettings, run_rpc
    from penstock.display.progress import callback

    make_directory(output)
    settings = RpcSettings.quick(output) if quick else RpcSettings(output=output)
    with callback("starting") as progress:
        report = run_rpc(settings, progress, talk)
    show(report.to_dict(), report.text(width_of_stdout()), as_json)
    talk(f"the figure and raw times are in {output}")


def _data_parallel(given: list[str], quick: bool, output: Path, as_json: bool) -> None:
    """Run the experiments with replicas, and show what was measured."""
    if given:
        raise InputError(
            f"{', '.join(given)}: `penstock bench data-parallel` trains models of its own on CPU "
            "workers and takes no input, example, loss, devices or seed"
        )
    if not quick:
        _require("transformers", "models", "trains a GPT-2")
    from penstock.bench.data_parallel import DataParallelSettings, run_data_parallel
    from penstock.display.progress import callback

    make_directory(output)
    settings = (DataParallelSettings.quick if quick else DataParallelSettings.full)(output)
    with callback("starting") as progress:
        report = run_data_parallel(settings, progress)
    show(report.to_dict(), report.text(width_of_stdout()), as_json)
    talk(f"figures and raw data are in {output}")
