"""A rank's own copy of the model, read as a whole where most of it may be old.

Under torchrun a rank trains the parameters of its own stages; those of the others are as they were
when `pipe.state_dict()` last brought them up to date. Whatever writes `model.state_dict()` to a
file would save a mixture that never was. To fetch the others' from within would wait for ranks that
are not asked for anything, so it is an error that says what to call before.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from penstock.errors import InputError
from penstock.workers.state_hook import StateHook


class StaleCopy:
    """Watches over a rank's copy of the model.

    Args:
        model: the copy.
        own: gives the tensors that this rank keeps up to date.
    """

    def __init__(self, model: nn.Module, own: Callable[[], Sequence[torch.Tensor]]) -> None:
        self._model = model
        self._own = own
        self._closed = False
        self._trained = False
        self._tensors: list[torch.Tensor] = []  # there are others before the first pass
        self._fresh: list[int] = []  # how often each was changed when all were up to date
        self._before: list[int] = []  # and before the last pass
        hook = StateHook(model, self.check)
        for module in model.modules():
            module.register_state_dict_pre_hook(hook)
        self._watched = weakref.WeakSet(model.modules())

    def refreshed(self) -> None:
        """All of it is up to date now."""
        self._trained = False
        self._tensors = [*self._model.parameters(), *self._model.buffers()]
        self._fresh = self._before = self._versions()

    def trained(self) -> None:
        """A pass begins in which the other ranks may change theirs."""
        if not self._tensors:
            self.refreshed()
        self._trained = True
        self._before = self._versions()

    def close(self) -> None:
        """There will be no more training, and no way to have the others' tensors."""
        self._closed = True

    def check(self, module: nn.Module, is_part: bool = False) -> None:
        """Raise if what other ranks have may be newer; nothing if the module is not this model's.

        After `close()` it is a warning.

        Args:
            module: whose state is read.
            is_part: whether it is read as a part of a larger module, which makes no difference.

        Raises:
            InputError: other ranks may have newer values.
        """
        if module not in self._watched or not self.is_old():
            return
        text = (
            "under torchrun this rank's copy of the model has current weights of its own stages "
            "only, so its state_dict() would be a mixture. Call pipe.state_dict() on all ranks "
            "instead, or before, which brings this copy up to date; or save with pipe.save()"
        )
        if not self._closed:
            raise InputError(text)
        warnings.warn(f"{text}. The pipeline is closed: it had to be done before", stacklevel=2)

    def is_old(self) -> bool:
        """Whether what other ranks have may be newer."""
        if not self._tensors:
            return False
        now, own = self._versions(), {id(tensor) for tensor in self._own()}
        places = [k for k, tensor in enumerate(self._tensors) if id(tensor) in own]
        if not self._trained and all(now[k] == self._fresh[k] for k in places):
            return False
        rest = set(range(len(now))).difference(places)
        if all(now[k] != self._before[k] for k in rest):  # or there are none
            self.refreshed()  # a state has been loaded since
            return False
        return True

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in self._tensors]
