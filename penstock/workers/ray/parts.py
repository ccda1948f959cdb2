"""The parts of an optimizer that are in actors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.workers.common_jobs import FetchOptimizerState, LoadOptimizerState
from penstock.workers.optimizer_parts import (
    Groups,
    State,
    as_they_are,
    settings_of,
    warn_of_no_gradients,
)
from penstock.workers.ray.jobs import Step, TensorChanges
from penstock.workers.ray.model import DriverModel


class ActorParts:
    """The parts of an optimizer, as the script sees them.

    Args:
        number: of the optimizer.
        owners: for every worker the parameters that it updates.
        places: of the workers.
        model: the script's.
        run: runs a job on every worker.
        changes: gives for every place what the script has done to tensors.

    Attributes:
        number: of the optimizer.
        updated: none: a step that does not come to its end closes the workers, or is undone.
    """

    updated: Collection[torch.Tensor] = ()

    def __init__(
        self,
        number: int,
        owners: Sequence[Sequence[nn.Parameter]],
        places: Sequence[int],
        model: DriverModel,
        run: Callable[..., list[Any]],
        changes: Callable[[], Sequence[TensorChanges]],
    ) -> None:
        self.number = number
        self._owners = owners
        self._places = places
        self._model = model
        self._run, self._changes = run, changes
        self._kept: State | None = None

    def keep(self) -> None:
        """Have here what the parts remember, as the workers are about to go."""
        kept: State = {}
        self.fetch(kept)
        self._kept = kept

    def step(self, groups: Groups, state: State, redo: Callable[[Groups], None]) -> None:
        """Run the step of every part in its actor, all at the same time."""
        settings = settings_of(groups)
        warn_of_no_gradients(groups)
        self._kept = None
        as_now = as_they_are(groups)
        steps = [Step(self.number, settings, changes) for changes in self._changes()]
        jobs = [steps[place] for place in self._places]
        try:
            self._run(jobs, changes=True, whole=True, redo=lambda _: redo(as_now))
        finally:  # some may have, whatever happened
            for owned in self._owners:
                self._model.has_changed(p for p in owned if p.grad is not None)

    def go_back(self, states: Mapping[tuple[int, int], Mapping[Any, Any]]) -> None:
        """Have here what a copy has, as the workers are about to go.

        Args:
            states: by the number of an optimizer and of the worker what its part remembers.
        """
        workers = range(len(self._owners))
        self._kept = self._named([states.get((self.number, worker), {}) for worker in workers])

    def fetch(self, state: State) -> None:
        """Bring what the parts remember here."""
        found = self._kept
        if found is None:
            jobs = [FetchOptimizerState(self.number)] * len(self._owners)
            found = self._named(self._run(jobs, changes=True))  # who asks may go on from that
        state.clear()
        state.update(found)

    def _named(self, parts: Sequence[Mapping[Any, Any]]) -> State:
        """What all parts remember, by the parameters themselves; of other keys the first's."""
        state: State = {}
        for owned, found in zip(self._owners, parts, strict=True):
            numbers = {self._model.number(parameter): parameter for parameter in owned}
            for key, value in found.items():
                state.setdefault(numbers.get(key, key), value)
        return state

    def load(self, state: State) -> None:
        """Let the parts remember what is in `state`."""
        self._kept = None
        jobs = []
        for owned in self._owners:
            own = dict(zip(self._model.numbers(owned), owned, strict=True))
            jobs.append(LoadOptimizerState.of(self.number, state, own))
        self._run(jobs, changes=True)
