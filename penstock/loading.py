"""Models and inputs by name, as the command line and the benchmarks are given them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from penstock.errors import InputError
from penstock.names import input_of, is_kind, target_of

_KEPT: list[torch.library.Library] = []  # torch forgets operators whose library is collected


def load(target: str) -> Any:
    """What `package.module:name` or `file.py:name` names, or returns: `package.module:Net(32)`.

    The working directory, or that of the file, is searched first, like `python -m` does.

    Raises:
        InputError: the text is not of that form, or names nothing.
    """
    wanted = target_of(target)
    if wanted.folder is not None and wanted.folder not in sys.path:
        sys.path.insert(0, wanted.folder)  # where worker processes find it, too
    tolerate_missing_torchvision_operators()
    try:
        found: Any = importlib.import_module(wanted.module)
    except ModuleNotFoundError as error:
        raise InputError(f"{target!r}: there is no module {error.name!r} to import") from error
    for part in wanted.name.split("."):
        if not hasattr(found, part):
            public = ", ".join(n for n in dir(found) if not n.startswith("_"))[:200]
            raise InputError(f"{target!r}: {wanted.module} has no {wanted.name!r}; it has {public}")
        found = getattr(found, part)
    return found if wanted.args is None else found(*wanted.args, **wanted.kwargs)


def load_model(target: str) -> torch.nn.Module:
    """The module that a name is, or returns when it is called without arguments.

    A configuration of transformers, or the name of one (`gpt2`), is a model of that kind with
    random weights.

    Raises:
        InputError: it is no module and does not return one.
    """
    found = _configuration(target) if is_kind(target) else load(target)
    if not isinstance(found, torch.nn.Module):
        if _is_configuration(found):
            return _of_transformers(found)
        if not isinstance(found, Callable):  # type: ignore[arg-type]
            raise InputError(f"{target!r} is a {type(found).__name__}, neither module nor callable")
        found = found()
    if _is_configuration(found):
        return _of_transformers(found)
    if not isinstance(found, torch.nn.Module):
        raise InputError(f"{target!r} returned a {type(found).__name__}, not an nn.Module")
    return found


def _configuration(kind: str) -> Any:
    """The default configuration of a kind of transformers' models."""
    tolerate_missing_torchvision_operators()
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[kind]()


def _is_configuration(found: object) -> bool:
    return (
        hasattr(found, "model_type")
        and "transformers" in sys.modules
        and hasattr(found, "to_diff_dict")
    )


def _of_transformers(config: Any) -> torch.nn.Module:
    """A model of this configuration of transformers, or class of one, with random weights.

    Raises:
        InputError: transformers has no model for it.
    """
    import transformers

    if isinstance(config, type):
        config = config()
    config.use_cache = False
    heads = ["AutoModelForCausalLM", "AutoModel"]
    if getattr(config, "is_encoder_decoder", False):
        heads = ["AutoModelForSeq2SeqLM", "AutoModel"]
    for head in heads:
        try:
            model: torch.nn.Module = getattr(transformers, head).from_config(config)
        except ValueError:  # there is no such head
            continue
        return model
    raise InputError(f"transformers has no model for a {type(config).__name__}")


def parse_input(text: str) -> tuple[str | None, torch.Tensor]:
    """An example input: `8x3x224x224`, `float32[8,10]` or `ids=int64[8,64]<256`.

    Floats are standard normal; integers are uniform below the bound, or below 2 without one.

    Returns:
        the keyword, if there is one, and the tensor.

    Raises:
        InputError: the text is none of these, or there can be no such tensor.
    """
    wanted = input_of(text)
    dtype: torch.dtype = getattr(torch, wanted.dtype)
    try:
        if dtype.is_floating_point or dtype.is_complex:
            return wanted.name, torch.randn(wanted.shape, dtype=dtype)
        return wanted.name, torch.randint(wanted.below, wanted.shape, dtype=dtype)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise InputError(
            f"{text!r}: torch cannot make this tensor ({str(error).splitlines()[0]}): give a shape "
            f"for which there is memory, and a bound from 1 to one above what {wanted.dtype} can "
            "hold"
        ) from error


def tolerates_missing_torchvision_operators() -> bool:
    """Whether `tolerate_missing_torchvision_operators` had to define operators in this process."""
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
