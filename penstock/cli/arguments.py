"""What the options' texts mean: models, example inputs, devices. Imports torch."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal, TypedDict

import torch

from penstock.cli.common import (
    check_example,
    listed,
    microbatch_count,
    recompute_of,
    replica_count,
)
from penstock.devices.kinds import accelerator
from penstock.errors import InputError, PenstockError
from penstock.loading import load, load_model, parse_input
from penstock.profile.hardware import Hardware
from penstock.serving import Served
from penstock.weights import empty_weights

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""

Example = tuple[torch.nn.Module, tuple[Any, ...], dict[str, Any]]
"""A model, and the positional and keyword arguments to call it with."""


class PipelineArguments(TypedDict):
    """Arguments of `Request` and of `penstock.verify`."""

    num_microbatches: int | Literal["auto"]
    schedule: str
    cuts: list[str] | None
    recompute: str | list[str]
    memory_limit: str | None
    stages_per_worker: int | Literal["auto"]
    replicas: int | Literal["auto"]


def load_example(
    model: str, inputs: Sequence[str], example: str | None, seed: int, empty: bool = False
) -> Example:
    """The module, and the arguments to call it with.

    Args:
        model: the name of the model, such as `package.module:callable`.
        inputs: the specifications of its arguments, such as `8x3x128x128`.
        example: the name of a callable that returns its arguments, instead of `inputs`.
        seed: the seed of torch's generator.
        empty: whether to build the model without weights.

    Raises:
        InputError: the model, an input or the example is not what it must be.
    """
    check_example(model, inputs, example)
    torch.manual_seed(seed)
    with empty_weights() if empty else nullcontext():
        module = _made(model, lambda: load_model(model))
    if example is not None:
        return module, *made_inputs(example)
    return module, *parsed_inputs(inputs)


def made_inputs(example: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments that the function of this name returns; its errors come with the name.

    Args:
        example: the name of a function without arguments.

    Raises:
        InputError: the name means nothing, or the function fails or returns something else.
    """
    return as_inputs(example, _made(example, lambda: load(example)()))


def load_loss(target: str) -> Callable[..., torch.Tensor]:
    """The loss of this name; an error that it raises comes with its name.

    Args:
        target: the name of a function, or of a class like `torch.nn:MSELoss` whose instances can be
            called.

    Raises:
        InputError: the name means nothing that can be called.
    """
    loss = load(target)
    if isinstance(loss, type):
        loss = _made(target, loss)
    if not callable(loss):
        raise InputError(f"--loss {target} is a {type(loss).__name__}, which cannot be called")

    @functools.wraps(loss, updated=())
    def loss_fn(*args: Any) -> torch.Tensor:
        try:
            result: torch.Tensor = loss(*args)
        except Exception as error:
            raise InputError(f"--loss {target} raised {type(error).__name__}: {error}") from error
        return result

    return loss_fn


def load_weight(text: str) -> Any:
    """The `weight` of `Pipeline.train_step` that --weight means.

    Raises:
        InputError: the name means nothing that can be called.
    """
    if text in ("rows", "sum"):
        return "rows" if text == "rows" else None
    if ":" not in text:
        raise InputError(f"--weight {text} is neither rows nor sum nor package.module:callable")
    weight = load(text)
    if not callable(weight):
        raise InputError(f"--weight {text} is a {type(weight).__name__}, which cannot be called")
    return weight


def load_optimizer(name: str) -> type[torch.optim.Optimizer]:
    """The class of optimizers of this name: `AdamW`, or `package.module:Class`.

    Raises:
        InputError: there is none.
    """
    found = load(name) if ":" in name else getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        known = [n for n in sorted(vars(torch.optim)) if n[:1].isupper() and n != "Optimizer"]
        raise InputError(
            f"--optimizer {name} is not an optimizer class; give one of torch.optim "
            f"({', '.join(known)}) or package.module:Class"
        )
    return found


def _made(target: str, make: Callable[[], Any]) -> Any:
    """What the user's function returns; its errors become an `InputError` with its name."""
    try:
        return make()
    except PenstockError:
        raise
    except Exception as error:
        raise InputError(
            f"{target!r} raised {type(error).__name__} when it was imported and called without "
            f"arguments: {error}"
        ) from error


def load_served(target: str) -> Served:
    """What `penstock serve` is to serve; an error of the user's function comes with its name.

    Raises:
        InputError: the name means nothing that can be served.
    """

    def made() -> Any:
        found = load(target)
        is_made = isinstance(found, (torch.nn.Module, Served)) or not callable(found)
        return found if is_made else found()

    return Served.of(_made(target, made), target)


def parsed_inputs(inputs: Sequence[str]) -> Inputs:
    """What the options --input mean.

    Raises:
        InputError: one means nothing, or an argument is given twice.
    """
    args: list[torch.Tensor] = []
    kwargs: dict[str, Any] = {}
    for spec in inputs:
        name, tensor = parse_input(spec)
        if name is None:
            args.append(tensor)
        elif name in kwargs:
            raise InputError(f"--input {spec!r}: the argument {name!r} was given before")
        else:
            kwargs[name] = tensor
    return tuple(args), kwargs


def as_inputs(example: str, value: Any) -> Inputs:
    """Arguments out of what an --example returns.

    Raises:
        InputError: it is neither a tuple, nor a dictionary, nor both, nor a tensor.
    """
    if isinstance(value, dict):
        return (), value
    if isinstance(value, torch.Tensor):
        return (value,), {}
    if isinstance(value, (tuple, list)):
        is_pair = len(value) == 2 and isinstance(value[0], (tuple, list))
        if is_pair and isinstance(value[1], dict):
            return tuple(value[0]), value[1]
        return tuple(value), {}
    raise InputError(
        f"--example {example} returned a {type(value).__name__}; it must return a tuple of "
        "arguments, a dict of keyword arguments, or a pair of both"
    )


def device_list(text: str | None) -> list[str]:
    """The devices of --devices; by default all CUDA devices if there are several, or else a CPU
    worker per core, two at least.
    """
    if text is not None:
        return [name.strip() for name in text.split(",")]
    kind = accelerator()
    if kind is not None and kind.count() > 1:
        return [str(device) for device in kind.devices()]
    return ["cpu"] * max(2, len(os.sched_getaffinity(0)))


def described_hardware(text: str | None) -> Hardware | None:
    """The machines of a file that --devices names; `None` if it lists devices.

    Raises:
        InputError: the file cannot be read, or something in it has no meaning.
    """
    return Hardware.load(text) if text is not None and text.endswith(".toml") else None


def pipeline_arguments(
    *,
    microbatches: str,
    schedule: str,
    cuts: str | None,
    recompute: str,
    memory_limit: str | None,
    stages_per_worker: int | None,
    replicas: str,
) -> PipelineArguments:
    """What the options of `pipeline_options` mean.

    Raises:
        InputError: the number of micro-batches is none.
    """
    return {
        "num_microbatches": microbatch_count(microbatches),
        "schedule": schedule,
        "cuts": None if cuts is None else listed(cuts),
        "recompute": recompute_of(recompute),
        "memory_limit": memory_limit,
        "stages_per_worker": stages_per_worker or "auto",
        "replicas": replica_count(replicas),
    }
