"""A hook that sees when the state of a model is read, and that copies of the model do not have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Check = Callable[[nn.Module, bool], None]
"""Called with a module whose state is read, and whether it is a part of what is read."""


class StateHook:
    """A hook that calls `check` when the state of a module is read, by `state_dict()` or pickling.

    Args:
        model: the whole model, which is read when the hook is pickled together with it.
        check: raises if the tensors in this process are not current.
    """

    def __init__(self, model: nn.Module, check: Check) -> None:
        self._model = model
        self._check = check

    def __call__(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        """Called by `state_dict()`; with `keep_vars` the live tensors are wanted, not a state."""
        if not keep_vars:
            self._check(module, bool(prefix))

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> Any:
        self._check(self._model, False)  # `torch.save(model)`
        return _hook_of_copy, ()


def _hook_of_copy() -> Callable[..., None]:
    return _nothing


def _nothing(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """The hook of a copy."""
