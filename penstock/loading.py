"""Models and inputs by name, as the command line and the benchmarks are given them."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from penstock.errors import InputError

_INPUT = re.compile(
    r"^(?:(?P<name>[A-Za-z_]\w*)=)?"
    r"(?:(?P<dtype>[a-z0-9]+)\[(?P<inner>[\d,\s]+)\](?:<(?P<below>\d+)>?)?|(?P<plain>\d+(?:x\d+)*))$"
)
_KEPT: list[torch.library.Library] = []  # torch forgets operators whose library is collected


def load(target: str) -> Any:
    """What `package.module:name` names; the working directory is searched first, like `python -m`.

    Raises:
        InputError: the text is not of that form, or names nothing.
    """
    module_name, colon, name = target.partition(":")
    if not colon or not module_name or not name:
        raise InputError(f"{target!r} names no callable: write package.module:callable")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    tolerate_missing_torchvision_operators()
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise InputError(f"{target!r}: there is no module {error.name!r} to import") from error
    for part in name.split("."):
        if not hasattr(found, part):
            public = ", ".join(n for n in dir(found) if not n.startswith("_"))[:200]
            raise InputError(f"{target!r}: {module_name} has no {name!r}; it has {public}")
        found = getattr(found, part)
    return found


def load_model(target: str) -> torch.nn.Module:
    """The module that `package.module:callable` is or, called without arguments, returns.

    Raises:
        InputError: it is no module and does not return one.
    """
    found = load(target)
    if not isinstance(found, torch.nn.Module):
        if not isinstance(found, Callable):  # type: ignore[arg-type]
            raise InputError(f"{target!r} is a {type(found).__name__}, neither module nor callable")
        found = found()
    if not isinstance(found, torch.nn.Module):
        raise InputError(f"{target!r} returned a {type(found).__name__}, not an nn.Module")
    return found


def parse_input(text: str) -> tuple[str | None, torch.Tensor]:
    """An example input: `8x3x224x224`, `float32[8,10]` or `ids=int64[8,64]<256`.

    Floats are standard normal; integers are uniform below the bound, or below 2 without one.

    Returns:
        the keyword, if there is one, and the tensor.

    Raises:
        InputError: the text is none of these.
    """
    match = _INPUT.match(text)
    dtype = getattr(torch, (match["dtype"] or "float32") if match else "", None)
    if not match or not isinstance(dtype, torch.dtype):
        raise InputError(
            f"{text!r} is no input: write a shape (8x3x224x224), a dtype with a shape "
            "(float32[8,10]), an integer dtype with a bound (int64[8,512]<50257), each with "
            "name= before it for a keyword argument"
        )
    sizes = match["plain"].split("x") if match["plain"] else match["inner"].split(",")
    shape = [int(size) for size in sizes]
    if dtype.is_floating_point or dtype.is_complex:
        return match["name"], torch.randn(shape, dtype=dtype)
    return match["name"], torch.randint(int(match["below"] or 2), shape, dtype=dtype)


def tolerates_missing_torchvision_operators() -> bool:
    """Whether that was done and needed in this process."""
    return bool(_KEPT)


def tolerate_missing_torchvision_operators() -> None:
    """Let torchvision be imported beside a torch that it was not compiled for.

    Its compiled operators do not load then, and registering their meta kernels fails for want of
    a definition. Its models do not use these operators, so a definition is all that is needed.
    (transformers imports torchvision too, where it is installed.)
    """
    try:
        importlib.import_module("torchvision")
    except ModuleNotFoundError:
        return
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        importlib.import_module("torchvision")
