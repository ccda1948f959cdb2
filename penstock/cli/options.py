"""Options that commands share, and how they fail."""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import click
import torch

from penstock.errors import InputError, PenstockError
from penstock.loading import load, load_model, parse_input

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


def model_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """MODEL, --input, --example, --seed."""
    for decorate in (
        click.option("--seed", type=int, default=0, show_default=True, help="Of torch."),
        click.option(
            "--example", metavar="MODULE:CALLABLE", help="Returns args, kwargs, or both as a pair."
        ),
        click.option(
            "--input",
            "inputs",
            multiple=True,
            metavar="SPEC",
            help="8x3x128x128, int64[8,512]<50257, name=float32[8,10]; once per argument.",
        ),
        click.argument("model", metavar="MODEL"),
    ):
        function = decorate(function)
    return function


def pipeline_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """--devices, --microbatches, --schedule."""
    for decorate in (
        click.option("--schedule", default="auto", show_default=True),
        click.option("--microbatches", default="auto", show_default=True, metavar="N|auto"),
        click.option("--devices", metavar="LIST", help="cpu,cpu or cuda:0,cuda:1; default: all."),
    ):
        function = decorate(function)
    return function


def reported(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add --json and --traceback, and turn errors into messages and exit codes."""

    @click.option("--json", "as_json", is_flag=True, help="Data on stdout, as JSON.")
    @click.option("--traceback", "full", is_flag=True, help="Show where an error came from.")
    @functools.wraps(function)
    def command(*args: Any, full: bool, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except PenstockError as error:
            if full:
                traceback.print_exc()
            talk(f"error: {error}")
            if error.__cause__ is not None and not full:
                where = traceback.extract_tb(error.__cause__.__traceback__)[-1:]
                talk("".join(f"  raised at {f.filename}:{f.lineno}: {f.line}" for f in where))
            sys.exit(2 if isinstance(error, InputError) else 1)
        except KeyboardInterrupt:
            sys.exit(130)

    return command


def talk(text: str) -> None:
    """Say something to the person, on stderr."""
    click.echo(text, err=True)


def show(data: dict[str, Any], text: str, as_json: bool) -> None:
    """Put the result on stdout."""
    click.echo(json.dumps(data, indent=2) if as_json else text)


def load_example(model: str, inputs: Sequence[str], example: str | None, seed: int) -> Any:
    """The module, and the arguments to call it with.

    Raises:
        InputError: the model, an input or the example is not what it must be.
    """
    torch.manual_seed(seed)
    module = load_model(model)
    if example is not None:
        return module, *_from_example(load(example)())
    if not inputs:
        raise InputError(f"{model} needs an example: give --input 8x3x224x224 or --example m:f")
    args: list[torch.Tensor] = []
    kwargs: dict[str, torch.Tensor] = {}
    for spec in inputs:
        name, tensor = parse_input(spec)
        if name is None:
            args.append(tensor)
        else:
            kwargs[name] = tensor
    return module, tuple(args), kwargs


def _from_example(value: Any) -> Inputs:
    if isinstance(value, dict):
        return (), value
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], dict):
        args, kwargs = value
        return tuple(args), kwargs
    return (tuple(value) if isinstance(value, (tuple, list)) else (value,)), {}


def device_list(text: str | None) -> list[str]:
    """The devices of --devices; by default all CUDA devices, or else a worker per core."""
    if text:
        return [name.strip() for name in text.split(",")]
    if torch.cuda.device_count() > 1:
        return [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    return ["cpu"] * max(2, len(os.sched_getaffinity(0)))


def microbatch_count(text: str) -> Any:
    """The number of --microbatches, or `"auto"`.

    Raises:
        InputError: neither.
    """
    if text != "auto" and not text.isdigit():
        raise InputError(f'--microbatches {text!r} is neither a number nor "auto"')
    return text if text == "auto" else int(text)
