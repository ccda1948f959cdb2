"""JSON in, the model's result out: what `/predict` takes and gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch

from penstock.serving.predictor import Prediction
from penstock.serving.refusal import Refusal, wrong


def prediction(
    body: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Prediction:
    """The call that a request asks for.

    Args:
        body: `{"args": [...], "kwargs": {...}}`; nested lists become tensors of the dtypes of the
            example.
        args, kwargs: the example.

    Raises:
        Refusal: the request does not fit the example.
    """
    unknown = body.keys() - {"args", "kwargs"}
    if unknown:
        name = min(unknown)
        raise wrong(name, f'{name!r} is unknown: give {{"args": [...], "kwargs": {{...}}}}')
    given, named = body.get("args") or [], body.get("kwargs") or {}
    if not isinstance(given, list) or not isinstance(named, dict):
        raise wrong("args", "args must be a list, and kwargs an object of arguments by name")
    if len(given) != len(args):
        raise wrong("args", f"the model is called with {len(args)} args, not {len(given)}")
    if named.keys() != kwargs.keys():
        names = ", ".join(sorted(kwargs)) or "none"
        raise wrong("kwargs", f"the model is called with the kwargs {names}, not {sorted(named)}")
    pairs = zip(given, args, strict=True)
    converted = [_like(value, example, f"args[{k}]") for k, (value, example) in enumerate(pairs)]
    by_name = {name: _like(named[name], kwargs[name], name) for name in kwargs}
    return Prediction(converted, by_name)


def _like(value: Any, example: Any, name: str) -> Any:
    """A value of JSON as the example has it.

    Raises:
        Refusal: it is something else.
    """
    if isinstance(example, torch.Tensor):
        return _tensor(value, example, name)
    if type(example) is dict and isinstance(value, dict) and value.keys() == example.keys():
        return {k: _like(value[k], example[k], f"{name}.{k}") for k in example}
    is_list = isinstance(example, (list, tuple)) and isinstance(value, list)
    if is_list and len(value) == len(example):
        pairs = enumerate(zip(value, example, strict=True))
        parts = [_like(part, other, f"{name}[{k}]") for k, (part, other) in pairs]
        return type(example)(*parts) if hasattr(example, "_fields") else type(example)(parts)
    if isinstance(example, (bool, int, float, str, type(None))):
        return value
    raise wrong(name, f"{name} must be like the example, a {type(example).__name__}")


def _tensor(value: Any, example: torch.Tensor, name: str) -> torch.Tensor:
    """Nested lists as a tensor of the example's dtype.

    Raises:
        Refusal: they are no tensor, or one of another kind.
    """
    wanted = f"numbers in {example.ndim} nested lists, as {example.dtype} has them"
    try:
        found = torch.tensor(value)
        if found.is_floating_point() and not example.is_floating_point():
            raise wrong(name, f"{name} has numbers with fractions; it must be {wanted}")
        found = torch.tensor(value, dtype=example.dtype)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise wrong(name, f"{name} must be {wanted}: {error}") from error
    if found.ndim != example.ndim:
        raise wrong(name, f"{name} has the shape {list(found.shape)}; it must be {wanted}")
    if not found.numel():
        raise wrong(name, f"{name} is empty; it must be {wanted}")
    return found


def as_plain(value: Any) -> Any:
    """A model's result as JSON can have it: tensors are nested lists.

    Raises:
        Refusal: there is something in it that JSON cannot have.
    """
    if isinstance(value, torch.Tensor):
        if value.is_complex():
            value = torch.view_as_real(value)
        return value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): as_plain(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_plain(part) for part in value]
    if is_dataclass(value):
        return {each.name: as_plain(getattr(value, each.name)) for each in fields(value)}
    raise Refusal(
        500, f"the model's result has a {type(value).__name__}, which JSON cannot have", code="json"
    )
