"""What to say of mistakes that a user of PyTorch makes first: the name, or the form, that works."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.errors import CaptureError, InputError

_INSTEAD = {
    "module": "the model itself is pipe.model",
    "forward": "call the pipeline itself, pipe(x)",
    "backward": "call loss.backward() on a loss of pipe(x), or use pipe.train_step",
    "step": "optimizer = pipe.optimizer(torch.optim.AdamW, lr=...) has it, and pipe.train_step "
    "runs forward and backward",
    "no_sync": "gradients add up over several train_step without it",
    "compile": "Pipeline(model, ..., inference=True, compile=True) compiles its stages; to train, "
    "compile submodules of the model before the pipeline is built, and each stays whole",
    **dict.fromkeys(
        ("to", "cuda", "cpu", "xpu", "to_empty"),
        "where the stages run is said when it is built, Pipeline(model, ..., devices=[...]), and "
        "inputs may be on any device",
    ),
    **dict.fromkeys(
        ("half", "bfloat16", "float", "double", "type"),
        "convert the model before the pipeline is built, or use torch.autocast around its calls",
    ),
    **dict.fromkeys(
        (
            *("register_forward_hook", "register_forward_pre_hook"),
            *("register_full_backward_hook", "register_full_backward_pre_hook"),
        ),
        "register hooks of the whole model before the pipeline is built",
    ),
    "save_pretrained": "pipe.model.save_pretrained(folder, state_dict=pipe.state_dict())",
}
_NOT_DIVIDED = ("LBFGS", "Optimizer")  # of the classes of torch.optim
_TARGETS = ("targets", "labels", "label", "y", "tgt", "targ")
_LOSSES = ("loss", "criterion", "loss_function", "lossfn")
_OPTIONS = ("loss_fn", "target", "weight", "loss_kwargs", "metrics", "outputs", "scaler")


def no_attribute(pipeline: object, model: nn.Module | None, name: str) -> AttributeError:
    """The error for what a module has and a pipeline does not.

    Args:
        pipeline: which.
        model: its model, if it has one already.
        name: of the attribute.
    """
    text = f"a Pipeline has no attribute {name!r}"
    if name in _INSTEAD:
        text = f"{text}: {_INSTEAD[name]}"
    elif model is not None and name in dir(model):
        text = f"{text}, its model has: pipe.model.{name}"
    else:
        known = [n for n in (*dir(type(pipeline)), *vars(pipeline)) if not n.startswith("_")]
        close = difflib.get_close_matches(name, known, 1, 0.75)
        text += f"; did you mean {close[0]!r}?" if close else ""
    return AttributeError(text, name=name, obj=None)


def optimizer_class(kind: object) -> type[Optimizer]:
    """The class of an optimizer.

    Raises:
        InputError: it is something else: an optimizer, its name, parameters.
    """
    if isinstance(kind, type) and issubclass(kind, Optimizer):
        return kind
    example = "pipe.optimizer(torch.optim.AdamW, lr=1e-3)"
    if isinstance(kind, Optimizer):
        name, lr = type(kind).__name__, kind.defaults.get("lr", 1e-3)
        is_known = getattr(torch.optim, name, None) is type(kind) and name not in _NOT_DIVIDED
        where = f"torch.optim.{name}" if is_known else "its class"
        raise InputError(
            f"pipe.optimizer was given an {name} that exists already; it needs the class, to "
            f"create a part for every worker: pipe.optimizer({where}, lr={lr})"
        )
    if isinstance(kind, str):
        known = {n.lower(): n for n, v in vars(torch.optim).items() if isinstance(v, type)}
        known = {short: n for short, n in known.items() if n not in _NOT_DIVIDED}
        found = known.get(kind.lower(), "AdamW")
        raise InputError(
            f"pipe.optimizer was given the string {kind!r}, not a class: "
            f"pipe.optimizer(torch.optim.{found}, lr=1e-3)"
        )
    what = kind.__name__ if isinstance(kind, type) else f"a {type(kind).__name__}"
    raise InputError(
        f"pipe.optimizer was given {what} first, not an optimizer class; parameters come second, "
        f"and are all of the model's by default: {example}"
    )


@contextmanager
def explaining(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any
) -> Iterator[None]:
    """Say first what is wrong with a step's arguments, if the model cannot take them.

    Raises:
        InputError: an error came, and the arguments are not those of the model's forward.
    """
    try:
        yield
    except (InputError, CaptureError) as error:
        if text := _about_arguments(model, args, kwargs, target):
            raise InputError(f"{text} ({error})") from error
        raise


def _about_arguments(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], target: Any
) -> str:
    """What is wrong with the arguments of a training step that the model cannot take.

    Args:
        model: whose forward.
        args: its positional arguments.
        kwargs: its keyword arguments, and what was taken for them.
        target: of the loss.

    Returns:
        a sentence, or nothing if they are what the forward takes.
    """
    try:
        parameters = inspect.signature(model.forward).parameters
    except (TypeError, ValueError):
        return ""
    kinds = [p.kind for p in parameters.values()]
    takes = f"{type(model).__name__}.forward takes ({', '.join(parameters)})"
    unknown = [name for name in kwargs if name not in parameters]
    if unknown and inspect.Parameter.VAR_KEYWORD not in kinds:
        meant = _meant(unknown[0], target)
        hint = f"; did you mean {meant}=?" if meant else ""
        return f"{unknown[0]}= is no argument of train_step, and {takes}{hint}"
    most = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters.values())
    if len(args) > most and inspect.Parameter.VAR_POSITIONAL not in kinds:
        return (
            f"{takes}, and {len(args)} positional arguments were given; the target and the loss "
            "are given by name: train_step(x, target=y, loss_fn=loss_fn)"
        )
    return ""


def _meant(name: str, target: Any) -> str:
    """The argument of `train_step` that was meant by one that it does not have."""
    if name in _TARGETS and target is None:
        return "target"
    if name in _LOSSES:
        return "loss_fn"
    close = difflib.get_close_matches(name, _OPTIONS, 1)
    return close[0] if close else ""
