"""`penstock serve`"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Literal

import click

from penstock.cli.common import (
    Finite,
    listed,
    memory_option,
    planned_devices_option,
    reported,
    show,
    talk,
)
from penstock.errors import InputError, PenstockError
from penstock.names import target_of

_LONGEST = 1e6  # seconds; beyond what poll() can wait, a pass could not be waited for


@click.command("serve")
@click.argument("build", metavar="MODEL")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="The port; 0 takes a free one.",
)
@click.option("--name", default="", help="The model's name for clients; default: its class.")
@planned_devices_option
@click.option(
    "--workers",
    type=click.Choice(["auto", "threads", "processes"]),
    default="auto",
    show_default=True,
    help="Who runs the stages; auto: processes on CPUs, which are replaced if they die, and "
    "threads on GPUs.",
)
@click.option(
    "--plan",
    "plan_path",
    type=click.Path(path_type=Path),
    help="Plan file to use; its devices are used unless --devices is given.",
)
@click.option("--cuts", metavar="LIST", help="Modules to cut before: layer2,layer4; default: auto.")
@memory_option
@click.option(
    "--replicas",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Replicas of all stages, which share the requests (on CPUs).",
)
@click.option(
    "--in-flight",
    type=click.IntRange(min=1),
    metavar="N",
    help="Sequences in flight at a time, for which the plan has room; default: one more than it "
    "takes to keep all stages busy.",
)
@click.option(
    "--queue",
    type=click.IntRange(min=0),
    default=64,
    show_default=True,
    help="Further sequences that may wait; beyond them requests get status 429.",
)
@click.option(
    "--kinds",
    type=click.IntRange(0, 31),
    default=16,
    show_default=True,
    help="Kinds of inputs, such as other sizes, that POST /predict accepts besides the example's: "
    "each is recorded and kept in memory.",
)
@click.option(
    "--timeout",
    type=Finite(0, _LONGEST, min_open=True),
    default=300.0,
    show_default=True,
    help="Seconds that a request may take, waiting included.",
)
@click.option(
    "--grace",
    type=Finite(0, _LONGEST),
    default=30.0,
    show_default=True,
    help="Seconds that requests may go on for after SIGTERM or Ctrl-C.",
)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=1024,
    show_default=True,
    help="The most tokens that a request may ask for.",
)
@click.option(
    "--max-prompt",
    type=click.IntRange(min=1),
    default=8192,
    show_default=True,
    help="The most tokens that a prompt may have, if the model's context is not shorter.",
)
@click.option(
    "--origin",
    "origins",
    multiple=True,
    metavar="URL",
    help="Origin of pages elsewhere that may use the server, such as https://app.example. "
    "Repeatable.",
)
@click.option(
    "--input",
    "inputs",
    multiple=True,
    metavar="SPEC",
    help="For models without generate(): one argument, such as 1x3x224x224. Repeatable.",
)
@click.option(
    "--example",
    metavar="MODULE:CALLABLE",
    help="For models without generate(): returns a tuple of arguments, a dict of keywords, or both "
    "as a pair.",
)
@reported
def command(
    build: str,
    host: str,
    port: int,
    name: str,
    devices: str | None,
    workers: Literal["auto", "threads", "processes"],
    plan_path: Path | None,
    cuts: str | None,
    memory_limit: str | None,
    replicas: int,
    inputs: tuple[str, ...],
    example: str | None,
    as_json: bool,
    **limits: Any,
) -> None:
    """Serve MODEL over HTTP, with OpenAI's interface for completions.

    MODEL is package.module:callable or file.py:callable, and returns a module, a pair of a module
    and its tokenizer, or a penstock.serving.Served. Models without generate() are called by POST
    /predict.
    """
    target_of(build)
    if inputs and example is not None:
        raise InputError("--input and --example both say what to call the model with; give one")
    from dataclasses import replace

    from penstock.cli.arguments import device_list, load_served, made_inputs, parsed_inputs
    from penstock.plan import Plan

    try:
        from penstock.serving.server import Server, Settings
    except ModuleNotFoundError as error:
        raise PenstockError(
            f"penstock serve needs {error.name}: pip install 'penstock[serve]'"
        ) from error

    served = load_served(build)
    if inputs:
        args, kwargs = parsed_inputs(inputs)
        served = replace(served, args=args, kwargs=kwargs)
    elif example is not None:
        args, kwargs = made_inputs(example)
        served = replace(served, args=args, kwargs=kwargs)
    settings = Settings(
        host=host,
        port=port,
        workers=workers,
        devices=None if devices is None else device_list(devices),
        plan=None if plan_path is None else Plan.load(plan_path),
        cuts=None if cuts is None else listed(cuts),
        memory_limit=memory_limit,
        replicas=replicas,
        **limits,
    )
    server = Server(replace(served, name=name or served.name), settings)
    try:
        plan = server.pipe.plan
        about = {"url": server.url, "model": name or served.name, "plan": plan.summary}
        show(about, f"serving {about['model']} at {server.url}", as_json)
        came = server.run()
    finally:
        server.close()
    talk("stopped")
    if came == signal.SIGINT:
        raise KeyboardInterrupt
