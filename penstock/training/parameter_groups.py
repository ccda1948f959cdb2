"""Parameter groups by name or by filter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from penstock.errors import InputError

_Filter = Callable[[str, nn.Parameter], bool]


def parameter_groups(model: nn.Module, params: Any) -> Any:
    """What an optimizer is to be given.

    Args:
        model: whose parameters.
        params: `None` for all of them; or what `torch.optim` takes; or groups whose `"params"` are
            a pattern of names (`"*.bias"`), several patterns, or a function of the name and the
            parameter that says whether it belongs there. Of such groups the first that fits takes
            a parameter; those that ask for no gradient are left out where none fits.

    Raises:
        InputError: a pattern fits no parameter, or a parameter that asks for a gradient is in no
            group.
    """
    if params is None:
        return model.parameters()
    groups = _listed(model, params)
    if not any(isinstance(group, Mapping) and _filter_of(group) for group in groups):
        return groups
    named = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in named.items()}
    left = dict(named)
    chosen = []
    for group in groups:
        wanted = _filter_of(group)
        if wanted is None:
            given = group["params"]
            taken = [given] if isinstance(given, nn.Parameter) else list(given)
        else:
            taken = [parameter for name, parameter in left.items() if wanted(name, parameter)]
            _check_taken(group, taken, named)
        for parameter in taken:
            left.pop(names.get(id(parameter), ""), None)
        chosen.append({**group, "params": taken})
    _check_left([name for name, parameter in left.items() if parameter.requires_grad])
    return chosen


def _listed(model: nn.Module, params: Any) -> list[Any]:
    """What was given, as a list of parameters, of pairs of names and parameters, or of groups.

    Raises:
        InputError: it is none, or has a parameter that is not the model's, which no worker would
            update.
    """
    if isinstance(params, (str, torch.Tensor)) or not isinstance(params, Iterable):
        raise InputError(
            f"params is {params if isinstance(params, (str, float)) else type(params).__name__}, "
            "not parameters or groups of them, like "
            '[{"params": "*.bias", "weight_decay": 0.0}, {"params": "*"}]; options are given by '
            "name, lr=0.1"
        )
    given = []
    own = set(map(id, model.parameters()))
    for each in params:
        if isinstance(each, Mapping) and "params" not in each:
            raise InputError(f'a group has {", ".join(map(repr, each))} and no "params"')
        if isinstance(each, Mapping) and isinstance(each["params"], Iterator):
            each = {**each, "params": list(each["params"])}
        for parameter in _tensors(each):
            if id(parameter) not in own:
                raise not_of_the_model(parameter)
        given.append(each)
    return given


def not_of_the_model(parameter: torch.Tensor) -> InputError:
    """The error for a parameter that no worker would update."""
    return InputError(
        f"a parameter of shape {tuple(parameter.shape)} is not one of the model's, so no worker "
        "has it; give it to a plain optimizer beside this one"
    )


def _tensors(given: Any) -> Iterable[torch.Tensor]:
    """The tensors in a parameter, a pair of a name and one, or a group of them that can be seen."""
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, Mapping) and isinstance(given["params"], (list, tuple, torch.Tensor)):
        params = given["params"]
        for each in [params] if isinstance(params, torch.Tensor) else params:
            yield from _tensors(each)
    elif isinstance(given, tuple):
        yield from (each for each in given if isinstance(each, torch.Tensor))


def _filter_of(group: Mapping[str, Any]) -> _Filter | None:
    """The filter that a group has; `None` if it lists parameters."""
    params = group["params"]
    if isinstance(params, str):
        params = [params]
    if callable(params) and not isinstance(params, nn.Module):
        return lambda name, parameter: bool(params(name, parameter))
    if isinstance(params, Sequence) and params and all(isinstance(p, str) for p in params):
        return lambda name, parameter: any(fnmatchcase(name, pattern) for pattern in params)
    return None


def _check_taken(
    group: Mapping[str, Any], taken: Sequence[nn.Parameter], named: Mapping[str, nn.Parameter]
) -> None:
    if not taken:
        raise InputError(
            f"the group {group['params']!r} matches no parameter that is not in an earlier group; "
            f"the model has {_some(named)}"
        )


def _check_left(names: Sequence[str]) -> None:
    if names:
        raise InputError(
            f"{len(names)} parameters are in no group, {_some(names)}; add a last group with "
            '"params": "*", or freeze them'
        )


def _some(names: Iterable[str]) -> str:
    names = list(names)
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
