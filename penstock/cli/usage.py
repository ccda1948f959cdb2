"""What is wrong with a command's arguments that can be known without torch, which takes seconds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import InputError
from penstock.names import input_of, is_kind, target_of
from penstock.schedule import SCHEDULES

_DEVICE = re.compile(r"^(cpu|cuda(:\d+)?)$")
RESNET50 = "torchvision.models:resnet50"
"""The model of the tutorial that `penstock bench` repeats."""
_NO_MODELS = ("rpc",)  # what `penstock bench` takes instead of a model


def check_usage(given: Mapping[str, Any]) -> None:
    """Look at the options that commands share.

    Args:
        given: all arguments of a command, by name.

    Raises:
        InputError: one has no meaning, or two do not fit together.
    """
    model, inputs, example = given.get("model"), given.get("inputs"), given.get("example")
    if model is not None and model not in _NO_MODELS:
        if not is_kind(model):
            target_of(model)
        _check_example(model, inputs or (), example)
    for name in ("example", "loss"):
        if given.get(name) is not None:
            target_of(given[name])
    for text in (*(inputs or ()), *filter(None, [given.get("target")])):
        input_of(text)
    if given.get("target") is not None and given.get("loss") is None:
        raise InputError(f"--target {given['target']} needs a --loss to be given to")
    _check_devices(given.get("devices"))
    counts = given.get("microbatches")
    if counts is not None and "source" not in given:
        microbatch_count(counts)
    schedule = given.get("schedule", "auto")
    if schedule != "auto" and schedule not in SCHEDULES:
        raise InputError(f"--schedule {schedule} is unknown; choose {', '.join(SCHEDULES)} or auto")


def _check_example(model: str, inputs: tuple[str, ...], example: str | None) -> None:
    if inputs and example is not None:
        raise InputError("--input and --example both say what to call the model with; give one")
    if not inputs and example is None and model != RESNET50:
        raise InputError(
            f"{model} needs an example to be called with: give --input 8x3x224x224 for every "
            "argument, or --example package.module:callable"
        )


def _check_devices(text: str | None) -> None:
    """Those of --devices, or the file that it names."""
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


def microbatch_count(text: str) -> Any:
    """The number of --microbatches, or `"auto"`.

    Raises:
        InputError: neither.
    """
    if text != "auto" and not text.isdecimal():
        raise InputError(f'--microbatches {text!r} is neither a number nor "auto"')
    return text if text == "auto" else int(text)
