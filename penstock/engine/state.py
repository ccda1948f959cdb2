"""What modules remember from one forward to the next, so that a forward can be run again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_REGISTRIES = ("_parameters", "_modules", "_buffers")


class State:
    """The buffers and attributes of some modules, as they are now.

    A forward may change a buffer in place, as BatchNorm does, or assign another one, or count its
    calls in an attribute. What attributes refer to is not copied, apart from `changing`.

    Args:
        modules: whose; each once.
        changing: the buffers that are changed in place.
    """

    def __init__(self, modules: Iterable[nn.Module], changing: Iterable[torch.Tensor]) -> None:
        self._attributes = [
            (module, _attributes(module), dict(module._buffers)) for module in modules
        ]
        self._contents = [(buffer, buffer.detach().clone()) for buffer in changing]

    def put_back(self) -> None:
        """Make the modules as they were."""
        for module, attributes, buffers in self._attributes:
            own = vars(module)
            for name in own.keys() - attributes.keys() - set(_REGISTRIES):
                del own[name]
            own.update(attributes)
            module._buffers.clear()
            module._buffers.update(buffers)
        with torch.no_grad():
            for buffer, content in self._contents:
                buffer.data.copy_(content)  # autograd has saved it, but does not use it


def _attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _REGISTRIES}
