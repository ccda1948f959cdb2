"""The parts of an optimizer that are in actors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from penstock.workers.optimizer_parts import (
    Groups,
    State,
    settings_of,
    warn_of_no_gradients,
)
from penstock.workers.processes.jobs import FetchState, LoadState
from penstock.workers.ray.jobs import Step
from penstock.workers.ray.model import DriverModel


class ActorParts:
    """The parts of an optimizer, as the script sees them.

    Args:
        number: of the optimizer.
        owners: for every worker the parameters that it updates.
        places: of the workers.
        model: the script's.
        run: runs a job on every worker.

    Attributes:
        number: of the optimizer.
        updated: none: a step that does not come to its end closes the workers.
    """

    updated: Collection[torch.Tensor] = ()

    def __init__(
        self,
        number: int,
        owners: Sequence[Sequence[nn.Parameter]],
        places: Sequence[int],
        model: DriverModel,
        run: Callable[..., list[Any]],
    ) -> None:
        self.number = number
        self._owners = owners
        self._places = places
        self._model = model
        self._run = run
        self._kept: State | None = None

    def keep(self) -> None:
        """Have here what the parts remember, as the workers are about to go."""
        kept: State = {}
        self.fetch(kept)
        self._kept = kept

    def step(self, groups: Groups, state: State) -> None:
        """Run the step of every part in its actor, all at the same time."""
        settings = settings_of(groups)
        warn_of_no_gradients(groups)
        news = self._model.news(1 + max(self._places))
        steps = [Step(self.number, settings, each) for each in news]
        try:
            self._run([steps[place] for place in self._places], True)
        finally:  # some may have, whatever happened
            for owned in self._owners:
                self._model.has_changed(p for p in owned if p.grad is not None)

    def fetch(self, state: State) -> None:
        """Bring what the parts remember here."""
        if self._kept is not None:
            state.update(self._kept)
            return
        parts = self._run([FetchState(self.number)] * len(self._owners))
        state.clear()
        for owned, found in zip(self._owners, parts, strict=True):
            numbers = {self._model.number(parameter): parameter for parameter in owned}
            state.update({numbers.get(key, key): value for key, value in found.items()})

    def load(self, state: State) -> None:
        """Let the parts remember what is in `state`."""
        jobs = []
        for owned in self._owners:
            own = {self._model.number(p): state[p] for p in owned if p in state}
            jobs.append(LoadState(self.number, own))  # type: ignore[arg-type]
        self._run(jobs)
