"""Optimizers for weights in half precision, which step on copies in float32: master weights.

(Micikevicius et al. 2018, arXiv:1710.03740, section 3.1: an update that is small beside its weight
is lost if it is added in half precision.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.errors import InputError
from penstock.workers.optimizer_parts import parameters_of, settings_of, step_part

HALF = (torch.float16, torch.bfloat16)
_MASTER = "master"
"""Under this name a parameter's state has its copy in float32."""


class MasterWeights(Optimizer):
    """An optimizer of any class that steps on float32 copies of parameters in half precision.

    In every step gradients are cast to float32, the copies are updated, and the parameters are
    rounded from them. Parameters of other dtypes are updated as they are. A weight that was changed
    by somebody else since (`load_state_dict` of the model, say) is where its copy goes on from.
    The copies are made when a parameter has its first gradient.

    `state` has for every parameter what the class remembers, in float32, and its copy.

    Args:
        params: parameters, or parameter groups.
        master_of: the optimizer's class.
        **options: its arguments.

    Raises:
        InputError: there are no parameters.
    """

    def __init__(self, params: Iterable[Any], master_of: type[Optimizer], **options: Any) -> None:
        given = list(params)
        if not given:
            raise InputError("the optimizer is given no parameters")
        groups = given if given and isinstance(given[0], dict) else [{"params": given}]
        groups = [{**group, "params": _listed(group["params"])} for group in groups]
        self._class: Callable[..., Optimizer] = master_of
        self._options = options
        self._inner: Optimizer | None = None
        self._masters: dict[torch.Tensor, torch.Tensor] = {}
        stand_ins = [{**g, "params": list(map(_stand_in, g["params"]))} for g in groups]
        made = master_of(stand_ins, **options)
        pairs = zip(made.param_groups, groups, strict=True)
        super().__init__([{**g, "params": own["params"]} for g, own in pairs], made.defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        parameters = parameters_of(self)
        if any(p.grad is not None and p not in self._masters for p in parameters):
            self._inner = self._made()
        if self._inner is None:
            return loss
        self._inner.state.clear()
        for parameter, master in self._masters.items():
            self._bring(parameter, master)
        step_part(self._inner, settings_of(self.param_groups))
        for parameter, master in self._masters.items():
            self._take(parameter, master)
        return loss

    def _made(self) -> Optimizer:
        """The optimizer of the copies; of parameters without one it has an empty stand-in."""
        groups = []
        for group in self.param_groups:
            masters = []
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._masters.setdefault(parameter, _copied(parameter))
                masters.append(self._masters.get(parameter, _stand_in(parameter)))
            groups.append({**group, "params": masters})
        made = self._class(groups, **self._options)
        for parameter, master in self._masters.items():
            if parameter not in self.state and master in made.state:  # what Adagrad begins with
                self.state[parameter] = dict(made.state[master])
        return made

    def _bring(self, parameter: torch.Tensor, master: torch.Tensor) -> None:
        """Set a copy, and what the inner optimizer remembers of it, to what `state` has."""
        state = dict(self.state.get(parameter, ()))
        kept = state.pop(_MASTER, None)
        if state and self._inner is not None:
            self._inner.state[master] = state
        if master is parameter:
            return
        if kept is not None and kept.data_ptr() != master.data_ptr():  # it was loaded
            master.data = kept.to(master)
        changed = master.to(parameter.dtype) != parameter
        master.copy_(torch.where(changed, parameter.to(master.dtype), master))
        master.grad = None if parameter.grad is None else parameter.grad.to(master.dtype)

    def _take(self, parameter: torch.Tensor, master: torch.Tensor) -> None:
        """Round a parameter from its copy, and let `state` say what is remembered now."""
        state = dict(self._inner.state.get(master, ())) if self._inner is not None else {}
        if master is not parameter:
            master.grad = None
            parameter.copy_(master)
            state[_MASTER] = master.detach()
        if state:
            self.state[parameter] = state


def restore_float32(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Put loaded states back in float32, which torch has cast to the parameters' dtype.

    Args:
        optimizer: has loaded `state_dict`.
        state_dict: what was loaded.
    """
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = parameters_of(optimizer)
    for number, parameter in zip(numbers, parameters, strict=True):
        if parameter.dtype not in HALF:
            continue
        for name, value in state_dict["state"].get(number, {}).items():
            if name != "step" and isinstance(value, torch.Tensor) and value.is_floating_point():
                exact = value.detach().to(parameter.device, torch.float32, copy=True)
                optimizer.state[parameter][name] = exact


def _listed(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _copied(parameter: torch.Tensor) -> torch.Tensor:
    """The parameter's copy in float32, or itself if it needs none."""
    if parameter.dtype not in HALF:
        return parameter
    return nn.Parameter(parameter.detach().to(torch.float32))


def _stand_in(parameter: torch.Tensor) -> torch.Tensor:
    """What has the shape of a copy, and next to no memory."""
    if parameter.dtype not in HALF:
        return parameter
    zero = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return nn.Parameter(zero.expand(parameter.shape))
