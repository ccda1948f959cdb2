"""What commands share: options and what is wrong with them, output, errors. No torch here."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

import click

from penstock.errors import InputError, PenstockError, WorkerError
from penstock.names import input_of, is_kind, target_of
from penstock.schedule import SCHEDULES

_DEVICE = re.compile(r"^(cpu|cuda(:\d+)?)$")
RESNET50 = "torchvision.models:resnet50"
"""The model of the tutorial that `penstock bench` repeats."""
_NO_MODELS = ("rpc", "data-parallel")  # what `penstock bench` takes instead of a model

Command = Callable[..., None]
"""The function of a command, before or after options were added to it."""


class Finite(click.FloatRange):
    """A number in a range that is neither infinite nor NaN."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number that a text means; anything else ends the command."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a finite number.", param, ctx)
        return number


def model_options(function: Command) -> Command:
    """Add the argument MODEL and the options of `example_options` to a command."""
    return click.argument("model", metavar="MODEL")(example_options(function))


def example_options(function: Command) -> Command:
    """Add the options --input, --example and --seed to a command."""
    return _decorated(
        function,
        click.option(
            "--input",
            "inputs",
            multiple=True,
            metavar="SPEC",
            help="One argument: 8x3x128x128, int64[8,512]<50257 or name=float32[8,10]. Repeatable.",
        ),
        click.option(
            "--example",
            metavar="MODULE:CALLABLE",
            help="Returns a tuple of arguments, a dict of keywords, or both as a pair.",
        ),
        click.option(
            "--seed", type=int, default=0, show_default=True, help="Seed for torch.manual_seed."
        ),
    )


def pipeline_options(function: Command) -> Command:
    """Add --devices and the options that `pipeline_arguments` takes to a command."""
    return _decorated(
        function,
        planned_devices_option,
        click.option("--microbatches", default="auto", show_default=True, metavar="N|auto"),
        click.option(
            "--schedule",
            default="auto",
            show_default=True,
            metavar="NAME|auto",
            help=f"{', '.join(SCHEDULES)}.",
        ),
        click.option(
            "--cuts", metavar="LIST", help="Modules to cut before: layer2,layer4; default: auto."
        ),
        recompute_option,
        memory_option,
        stages_option,
        replicas_option,
    )


recompute_option = click.option(
    "--recompute",
    default="auto",
    show_default=True,
    metavar="auto|none|all|boundaries|LIST",
    help="Activations to recompute in the backward; auto: as few as the memory allows; or only "
    "those of these modules: layer1,encoder.layers.0.",
)

memory_option = click.option(
    "--memory-limit",
    metavar="SIZE",
    help="Memory of each worker, such as 8GiB; default: that of its device, if known.",
)

replicas_option = click.option(
    "--replicas",
    default="auto",
    show_default=True,
    metavar="N|auto",
    help="Replicas of all stages that share the micro-batches; auto: on CPUs the fastest plan of "
    "all kinds, one device alone included.",
)

stages_option = click.option(
    "--stages-per-worker",
    type=click.IntRange(min=1),
    metavar="N",
    help="Stages per worker, for schedules that take any number; default: 2.",
)

workers_option = click.option(
    "--workers",
    type=click.Choice(["threads", "processes"]),
    default="threads",
    show_default=True,
    help="Run the stages in threads of one process, or in processes of this machine.",
)

in_flight_option = click.option(
    "--in-flight",
    type=click.IntRange(min=1),
    metavar="N",
    help="With --inference: groups of sequences in flight that there is memory for; default: one "
    "more than it takes to keep all stages busy.",
)

states_option = click.option(
    "--states",
    metavar="LIST",
    help="With --inference: parts of the result that are states, by position or name: 1,hidden.",
)

optimizer_option = click.option(
    "--optimizer-state",
    type=Finite(min=0),
    default=2.0,
    show_default=True,
    metavar="FACTOR",
    help="Bytes of optimizer state per byte of weights: 2 for Adam, 1 for SGD with momentum.",
)

figure_option = click.option(
    "--figure",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Save a figure to this file: step.png, step.svg or step.pdf.",
)

empty_option = click.option(
    "--empty", is_flag=True, help="Build MODEL without weights, for models that do not fit."
)

planned_devices_option = click.option(
    "--devices",
    metavar="LIST",
    help="Devices: cpu,cpu or cuda:0,cuda:1; default: all GPUs, or as many CPU workers as are "
    "fastest.",
)

devices_option = click.option(
    "--devices",
    metavar="LIST",
    help="Devices: cpu,cpu or cuda:0,cuda:1; default: all GPUs if several, or a worker per core.",
)


def recompute_of(text: str) -> str | list[str]:
    """The word of --recompute, or the modules that it lists."""
    from penstock.plan.cutting import RECOMPUTE

    return text if text in RECOMPUTE else listed(text)


def parts_of(text: str | None) -> list[int | str]:
    """The parts of a result that --states lists."""
    return [int(part) if part.isdecimal() else part for part in listed(text or "")]


def listed(text: str) -> list[str]:
    """The entries of a comma-separated list, without empty ones."""
    return [entry for entry in map(str.strip, text.split(",")) if entry]


def _decorated(function: Command, *options: Callable[[Command], Command]) -> Command:
    """`function` with these options, which its help shows in this order."""
    for option in reversed(options):
        function = option(function)
    return function


def reported(function: Command) -> Command:
    """Add --json and --traceback, and turn errors into messages and exit codes."""

    @click.option("--json", "as_json", is_flag=True, help="Print the data to stdout as JSON.")
    @click.option("--traceback", "full", is_flag=True, help="Show the traceback of an error.")
    @functools.wraps(function)
    def command(*args: Any, full: bool, **kwargs: Any) -> None:
        try:
            _check_usage(**kwargs)
            function(*args, **kwargs)
        except PenstockError as error:
            _fail(error, full)

    return command


def _fail(error: PenstockError, full: bool) -> NoReturn:
    """Write the error to stderr and exit: 2 if the command was used wrongly, else 1."""
    if full:
        talk("".join(traceback.format_exception(error)).rstrip())
    else:
        talk(f"error: {error}")
        if isinstance(error, WorkerError) and error.__cause__ is not None:
            for frame in traceback.extract_tb(error.__cause__.__traceback__)[-1:]:
                talk(f"  {frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}")
            talk("  --traceback shows all of it")
    sys.exit(2 if isinstance(error, InputError) else 1)


def talk(text: str) -> None:
    """Write a line to stderr, which is for people; stdout is for data."""
    click.echo(text, err=True)


def width_of_stdout() -> int | None:
    """The columns of the terminal, or what `COLUMNS` says; `None` in a file or a pipe."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return shutil.get_terminal_size().columns
    return None


def show(data: Mapping[str, object], text: str, as_json: bool) -> None:
    """Write the result to stdout, as JSON or as text."""
    click.echo(json.dumps(_strict(data), indent=2, allow_nan=False) if as_json else text)


def _strict(value: object) -> object:
    """The same data as strict JSON can hold it: numbers that are not finite become `null`."""
    if isinstance(value, dict):
        return {str(key): _strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def make_directory(path: Path) -> None:
    """Make the directory that results will go to, before the work that makes them.

    Raises:
        InputError: there can be no directory of this name.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot write to {path}: {error.strerror}") from error


# -- what is wrong with arguments ---------------------------------------------------------


def _check_usage(
    *,
    model: str | None = None,
    inputs: tuple[str, ...] = (),
    example: str | None = None,
    target: str | None = None,
    loss: str | None = None,
    devices: str | None = None,
    microbatches: str | None = None,
    schedule: str = "auto",
    source: Path | None = None,
    **_: object,
) -> None:
    """Check what the options that commands share mean, as far as that needs no torch.

    Raises:
        InputError: one has no meaning, or two do not fit together.
    """
    if model is not None and model not in _NO_MODELS:
        if not is_kind(model):
            target_of(model)
        if model != RESNET50 or inputs or example is not None:  # the tutorial has its own
            check_example(model, inputs, example)
    for name in (example, loss):
        if name is not None:
            target_of(name)
    for text in (*inputs, target):
        if text is not None:
            input_of(text)
    if target is not None and loss is None:
        raise InputError(f"--target {target} needs a --loss to be given to")
    _check_devices(devices)
    if microbatches is not None and source is None:  # of a plan they are a list
        microbatch_count(microbatches)
    if schedule != "auto" and schedule not in SCHEDULES:
        raise InputError(f"--schedule {schedule} is unknown; choose {', '.join(SCHEDULES)} or auto")


def check_example(model: str, inputs: Sequence[str], example: str | None) -> None:
    """Raise unless there is one way to call the model.

    Raises:
        InputError: neither inputs nor an example are given, or both.
    """
    if inputs and example is not None:
        raise InputError("--input and --example both say what to call the model with; give one")
    if not inputs and example is None:
        raise InputError(
            f"{model} needs an example to be called with: give --input 8x3x224x224 for every "
            "argument, or --example package.module:callable"
        )


def _check_devices(text: str | None) -> None:
    """Check the devices of --devices, or that the file exists that it names.

    Raises:
        InputError: a name is not that of a device, or there is no such file.
    """
    if text is None:
        return
    if text.endswith(".toml"):
        if not Path(text).is_file():
            raise InputError(f"cannot read the hardware description {text}: there is no such file")
        return
    for name in text.split(","):
        if not _DEVICE.match(name.strip()):
            raise InputError(
                f"--devices: {name.strip()!r} is not a device; write cpu,cpu or cuda:0,cuda:1"
            )


def replica_count(text: str) -> int | Literal["auto"]:
    """The number of --replicas, or `"auto"`.

    Raises:
        InputError: neither.
    """
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise InputError(f'--replicas {text!r} is neither a number nor "auto"')
    return int(text)


def microbatch_count(text: str) -> int | Literal["auto"]:
    """The number of --microbatches, or `"auto"`.

    Raises:
        InputError: neither.
    """
    if text == "auto":
        return "auto"
    if not text.isdecimal():
        raise InputError(f'--microbatches {text!r} is neither a number nor "auto"')
    return int(text)
