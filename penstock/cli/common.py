"""Options that commands share, how results are shown, and how commands fail. No torch here."""

from __future__ import annotations

import functools
import json
import math
import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from penstock.cli.usage import check_usage
from penstock.errors import InputError, PenstockError, WorkerError
from penstock.schedule import SCHEDULES


def model_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """MODEL, and the options of `example_options`."""
    return click.argument("model", metavar="MODEL")(example_options(function))


def example_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options --input, --example and --seed to a command."""
    return _decorated(
        function,
        click.option(
            "--input",
            "inputs",
            multiple=True,
            metavar="SPEC",
            help="8x3x128x128, int64[8,512]<50257, name=float32[8,10]; once per argument.",
        ),
        click.option(
            "--example",
            metavar="MODULE:CALLABLE",
            help="Returns a tuple of arguments, a dict of keywords, or both as a pair.",
        ),
        click.option("--seed", type=int, default=0, show_default=True, help="For torch."),
    )


def pipeline_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """--devices, and what a pipeline may be asked for: see `asked`."""
    return _decorated(
        function,
        devices_option,
        click.option("--microbatches", default="auto", show_default=True, metavar="N|auto"),
        click.option(
            "--schedule",
            default="auto",
            show_default=True,
            metavar="NAME|auto",
            help=f"{', '.join(SCHEDULES)}.",
        ),
        click.option(
            "--cuts", metavar="LIST", help="Cut before these modules: layer2,layer4; default: auto."
        ),
        recompute_option,
        memory_option,
        stages_option,
    )


recompute_option = click.option(
    "--recompute",
    default="auto",
    show_default=True,
    metavar="auto|none|all|boundaries|LIST",
    help="What is computed again in the backward; auto: as little as the memory allows; or just "
    "these modules: layer1,encoder.layers.0.",
)

memory_option = click.option(
    "--memory-limit",
    metavar="SIZE",
    help="What every worker may hold, 8GiB; default: what its device has, where that is known.",
)

stages_option = click.option(
    "--stages-per-worker",
    type=click.IntRange(min=1),
    metavar="N",
    help="For schedules that take any number; default: 2.",
)

workers_option = click.option(
    "--workers",
    type=click.Choice(["threads", "processes"]),
    default="threads",
    show_default=True,
    help="Who runs the stages: threads of one process, or processes of this machine.",
)

optimizer_option = click.option(
    "--optimizer-state",
    type=click.FloatRange(min=0),
    default=2.0,
    show_default=True,
    metavar="FACTOR",
    help="Bytes for every byte of weights: 2 for Adam, 1 for SGD with momentum.",
)

figure_option = click.option(
    "--figure",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Draw it as a file of this name: step.png, step.svg, step.pdf.",
)

empty_option = click.option(
    "--empty", is_flag=True, help="Build MODEL without weights, for models that do not fit."
)

devices_option = click.option(
    "--devices",
    metavar="LIST",
    help="cpu,cpu or cuda:0,cuda:1; default: all GPUs, or one worker per core.",
)


def recompute_asked(text: str) -> str | list[str]:
    """The word of --recompute, or the modules that it lists."""
    from penstock.plan.cutting import RECOMPUTE

    return text if text in RECOMPUTE else [n for n in map(str.strip, text.split(",")) if n]


def _decorated(
    function: Callable[..., Any], *options: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[..., Any]:
    """`function` with these options, which its help shows in this order."""
    for option in reversed(options):
        function = option(function)
    return function


def reported(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --json and --traceback, and turn errors into messages and exit codes."""

    @click.option("--json", "as_json", is_flag=True, help="Data on stdout, as JSON.")
    @click.option("--traceback", "full", is_flag=True, help="Show where an error came from.")
    @functools.wraps(function)
    def command(*args: Any, full: bool, **kwargs: Any) -> None:
        try:
            check_usage(kwargs)
            function(*args, **kwargs)
        except PenstockError as error:
            _fail(error, full)

    return command


def _fail(error: PenstockError, full: bool) -> NoReturn:
    """Say what went wrong, and end."""
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
    """Say something to the person, on stderr."""
    click.echo(text, err=True)


def width_of_stdout() -> int | None:
    """The columns of the terminal, or what `COLUMNS` says; `None` in a file or a pipe."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdecimal():
        return shutil.get_terminal_size().columns
    return None


def show(data: dict[str, Any], text: str, as_json: bool) -> None:
    """Put the result on stdout."""
    click.echo(json.dumps(_strict(data), indent=2, allow_nan=False) if as_json else text)


def _strict(value: Any) -> Any:
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
