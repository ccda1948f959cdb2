"""What a worker process was sent of the model, to notice what has been replaced since."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import is_
from typing import Any

from torch import nn

from penstock.engine.hooks import hooks_of
from penstock.errors import InputError


class Unchanged:
    """Some modules of a model, of which a process has copies.

    They are looked at before every pass, so what is compared is gathered once, in flat lists.

    Args:
        model: the whole model, for the names.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._registries: list[dict[str, Any]] = []  # where each of these tensors is,
        self._names: list[str] = []  # by its name there
        self._tensors: list[Any] = []
        self._vars: list[dict[str, Any]] = []
        self._hooks: list[int] = []  # of them all

    def add(self, modules: Iterable[nn.Module], is_shared: Callable[[Any], bool]) -> None:
        """Watch these modules too, and those of their tensors that the process shares."""
        for module in modules:
            self._vars.append(vars(module))
            self._hooks += hooks_of([vars(module)])
            for registry in (module._parameters, module._buffers):
                for name, tensor in registry.items():
                    if is_shared(tensor):
                        self._registries.append(registry)
                        self._names.append(name)
                        self._tensors.append(tensor)

    def check(self) -> None:
        """Notice tensors that are other ones now, and hooks that came or went.

        Raises:
            InputError: there is one, which the process does not have.
        """
        now = list(map(dict.get, self._registries, self._names))
        if not all(map(is_, now, self._tensors)):
            pairs = zip(now, self._tensors, strict=True)
            name = self._name_of(next(k for k, (new, old) in enumerate(pairs) if new is not old))
            raise InputError(
                f"{name!r} is another tensor than when the pipeline was "
                "built, and its worker process has the old one. Copy values into it instead "
                "(load_state_dict without assign=True), or build a new pipeline"
            )
        if hooks_of(self._vars) != self._hooks:
            raise InputError(
                "hooks of a module were registered or removed after the pipeline was built, which "
                'its worker process does not see; register them before, or use workers="threads"'
            )

    def _name_of(self, number: int) -> str:
        registry = self._registries[number]
        owners = (
            path
            for path, module in self._model.named_modules()
            if registry is module._parameters or registry is module._buffers
        )
        owner = next(owners, "(of a module that was removed)")
        return f"{owner}.{self._names[number]}".lstrip(".")
