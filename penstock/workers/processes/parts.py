"""The parts of an optimizer that are in worker processes, from the driver's side."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.capture.trees import cloned
from penstock.engine.stage import Before
from penstock.errors import PenstockError
from penstock.links.segment import Segment, fill, place_of
from penstock.workers.common_jobs import FetchOptimizerState, LoadOptimizerState
from penstock.workers.optimizer_parts import (
    Groups,
    State,
    settings_of,
    warn_of_no_gradients,
)
from penstock.workers.pool import Job
from penstock.workers.processes.jobs import Step
from penstock.workers.processes.journal import (
    Adopt,
    Journal,
    Numbered,
    OutlivingStep,
    chunks_of,
    entries_of,
    spans_of,
)
from penstock.workers.processes.shared_model import SharedModel


@dataclass(frozen=True)
class Access:
    """What the parts of an optimizer need of the workers.

    Attributes:
        places: the place of every worker in its replica.
        shared: the tensors that they share.
        run: runs one job on each worker; if its second argument is true, all of them or none. Calls
            `meanwhile` when they have begun, or could not begin.
        ready: raises if the workers are gone, or would update memory that the model has left.
        ran: returns how many micro-batches were given to replicas so far.
        grant: sends a worker a file descriptor; returns the number under which it has it.
    """

    places: Sequence[int]
    shared: SharedModel
    run: Callable[..., list[Any]]
    ready: Callable[[], None]
    ran: Callable[[], Before]
    grant: Callable[[int, int], int]


class RemoteParts:
    """Parts that end with their processes.

    Args:
        number: of the optimizer.
        owners: for every worker the parameters that it updates.
        access: to the workers.
    """

    def __init__(
        self, number: int, owners: Sequence[Sequence[nn.Parameter]], access: Access
    ) -> None:
        self.number = number
        self._owners = owners
        self._access = access
        self._numbers: list[dict[Any, nn.Parameter]] = [
            {access.shared.number(place, parameter): parameter for parameter in owned}
            for place, owned in zip(access.places, owners, strict=True)
        ]  # as they were sent: a place may give up parameters later
        self._kept: State | None = None

    @property
    def updated(self) -> Collection[torch.Tensor]:
        """Empty: if a step does not come to its end, the workers are closed."""
        return ()

    def keep(self) -> None:
        """Copy what the parts remember to this process, as the workers are about to go."""
        kept: State = {}
        self.fetch(kept)
        self._kept = kept

    def step(self, groups: Groups, state: State, redo: Callable[[Groups], None]) -> None:
        """Run the step of every part in its process, all at the same time."""
        settings, shared, ran = settings_of(groups), self._access.shared, self._access.ran
        self._begin(groups)
        self._run_at_places(lambda place: Step(self.number, settings, shared.before(place), ran()))

    def _begin(self, groups: Groups) -> None:
        self._access.ready()
        warn_of_no_gradients(groups)

    def _run_at_places(self, job: Callable[[int], Job]) -> list[Any]:
        """Run a step in every process.

        Args:
            job: makes that of the workers at a place.
        """
        places, shared = self._access.places, self._access.shared
        try:
            steps = [job(place) for place in range(1 + max(places))]
        except BaseException:
            shared.resend()  # what was to be sent to them is lost
            raise

        def note() -> None:
            for place, owned in zip(places, self._owners, strict=True):
                shared.stepped(place, owned)

        return self._access.run([steps[place] for place in places], True, meanwhile=note)

    def fetch(self, state: State) -> None:
        """Bring what the parts remember here."""
        if self._kept is not None:
            state.update(self._kept)
            return
        parts = self._access.run([FetchOptimizerState(self.number)] * len(self._owners))
        state.clear()
        state.update(self._named(parts))

    def _named(self, parts: Sequence[Numbered]) -> State:
        """What all parts remember, by the parameters themselves; of other keys the first's."""
        state: dict[Any, Any] = {}
        for numbers, found in zip(self._numbers, parts, strict=True):
            for key, value in found.items():
                state.setdefault(numbers.get(key, key), value)
        return state

    def load(self, state: State) -> None:
        """Let the parts remember what is in `state`."""
        jobs = []
        for numbers in self._numbers:
            jobs.append(LoadOptimizerState.of(self.number, state, numbers))
        self._access.run(jobs)


class OutlivingParts(RemoteParts):
    """Parts whose state the driver has as well, so that others can take over at any time.

    After the first step what a part remembers is moved to memory that the driver shares, and from
    then on the part goes through its parameters in chunks, with a journal, see `journal`. The steps
    before that, and all steps of a class that does not keep what it remembers in tensors, start
    from copies in the driver.
    """

    def __init__(
        self, number: int, owners: Sequence[Sequence[nn.Parameter]], access: Access
    ) -> None:
        super().__init__(number, owners, access)
        self._state: State = {}  # in shared memory, if it was adopted
        self._journals: list[Journal] = []
        self._adopted: set[int] = set()  # parameters, by id
        self._is_steady = True  # as far as is known
        self._is_proven = False  # whether a step has left everything in shared memory
        self._copies: _Copies | None = None  # of what the step that is under way changes
        self._is_under_way = False
        self._is_torn = False  # whether a worker has changed what it shares for something else

    def keep(self) -> None:
        """Do nothing: this process has what the parts remember anyway."""

    def step(self, groups: Groups, state: State, redo: Callable[[Groups], None]) -> None:
        """Run the step of every part in its process, all at the same time."""
        settings, shared, ran = settings_of(groups), self._access.shared, self._access.ran
        self._begin(groups)
        updated = [p for owned in self._owners for p in owned if p.grad is not None]
        chunked = self._is_steady and all(id(p) in self._adopted for p in updated)
        for journal in self._journals:
            journal.clear()
        if not (chunked and self._is_proven):
            self._copies = _Copies(updated, self._state)
        self._is_under_way = True
        found = self._run_at_places(
            lambda place: OutlivingStep(self.number, settings, shared.before(place), ran(), chunked)
        )
        if not chunked:
            self._adopt(_owned(self._named(found)), updated)
        elif any(each is not None for each in found):
            self._forsake(found)
        else:
            self._is_proven = True
        self._is_under_way, self._copies = False, None

    def _forsake(self, found: Sequence[Numbered | None]) -> None:
        """Use copies from now on: a step has replaced tensors of the state in shared memory."""
        self._is_steady, self._is_torn = False, True
        every = self._access.run([FetchOptimizerState(self.number)] * len(self._owners))
        self._state = _owned(self._named(every))
        self._is_torn, self._adopted, self._journals = False, set(), []

    def _adopt(self, state: State, updated: Iterable[nn.Parameter] = ()) -> bool:
        """Keep this state in shared memory, if possible; otherwise in this process.

        Args:
            state: what the parts remember, or are to remember.
            updated: parameters that a step has updated, some of which may have no state.

        Returns:
            whether it is in shared memory, where the workers have it as well.
        """
        every = [entries_of(state, owned) for owned in self._owners]
        owned = {id(p) for own in self._owners for p in own}
        has_others = any(id(key) not in owned for key in state)
        self._state = state
        if not self._is_steady or has_others or any(entries is None for entries in every):
            self._is_steady = False
            return False
        jobs = [self._adopted_by(k, entries or []) for k, entries in enumerate(every)]
        self._access.run(jobs)
        self._adopted |= {id(p) for p in (*updated, *state)}
        return True

    def _adopted_by(self, worker: int, entries: Sequence[tuple[nn.Parameter, str, Any]]) -> Adopt:
        """The job by which a worker has its share of the state in shared memory."""
        place = self._access.places[worker]
        spots, end = [], 0
        for _, _, tensor in entries:
            spots.append(place_of(tensor, end))
            end = spots[-1].end
        segment = Segment(max(1, end))
        memory = segment.tensors(spots)
        state: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        for (parameter, name, tensor), own in zip(entries, memory, strict=True):
            fill(own, tensor)
            state.setdefault(parameter, {})[name] = own
        self._state.update(state)
        chunks = chunks_of(self._owners[worker])
        tensors = [[*c, *(t for p in c for t in state.get(p, {}).values())] for c in chunks]
        memories = self._access.shared.memories
        homes = [
            [memories[id(t)].segment if id(t) in memories else segment for t in chunk]
            for chunk in tensors
        ]
        spans = list(map(spans_of, tensors, homes))
        journal = Segment(Journal.size_of(spans))
        if worker == 0:
            self._journals = []
        self._journals.append(Journal(journal, tensors, spans))
        numbers = partial(self._access.shared.numbers, place)
        named = zip(numbers([p for p, *_ in entries]) or [], entries, spots, strict=True)
        job = Adopt(
            number=self.number,
            state=(self._access.grant(segment.fd, worker), segment.size),
            entries=[(number, name, spot) for number, (_, name, _), spot in named],
            journal=(self._access.grant(journal.fd, worker), journal.size),
            chunks=[numbers(chunk) or [] for chunk in chunks],
            spans=spans,
        )
        segment.close()
        journal.close()
        return job

    @property
    def updated(self) -> Collection[torch.Tensor]:
        """The parameters that were updated by a step that did not come to its end.

        What this step has left half done is undone first.

        Raises:
            PenstockError: what an optimizer remembered is lost.
        """
        if not self._is_under_way:
            return ()
        if self._is_torn:
            raise PenstockError(
                "a worker ended when its optimizer had just begun to keep something else than "
                "tensors of one shape and dtype, so its state is lost: resume from a checkpoint"
            )
        self._is_under_way = False
        if self._copies is not None:
            self._copies.put_back(self._state)
            return ()
        done: list[torch.Tensor] = []
        for journal, owned in zip(self._journals, self._owners, strict=True):
            for chunk in chunks_of(owned)[: journal.put_back()]:
                done += chunk
        return done

    def fetch(self, state: State) -> None:
        """Copy what the parts remember to `state`."""
        state.clear()
        state.update(_owned(self._state))

    def load(self, state: State) -> None:
        """Let the parts remember what is in `state`."""
        self._is_proven, self._journals, self._adopted = False, [], set()
        if not self._adopt(_owned(state)):
            super().load(self._state)


class _Copies:
    """Parameters and what is remembered of them, as they were before a step.

    Args:
        parameters: those that the step updates.
        state: what the optimizer remembers before the step.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], state: Mapping[Any, Any]) -> None:
        self._parameters = [(p, p.detach().clone()) for p in parameters]
        self._state = _owned(state)

    @torch.no_grad()
    def put_back(self, state: State) -> None:
        """Restore the parameters, and replace `state` by what was remembered before."""
        for parameter, before in self._parameters:
            parameter.copy_(before)
        state.clear()
        state.update(self._state)


def _owned(state: Mapping[Any, Any]) -> State:
    """A copy in memory of this process."""
    return {
        key: {name: cloned(value) for name, value in own.items()}
        if isinstance(own, Mapping)
        else cloned(own)
        for key, own in state.items()
    }
