"""`Batches`: a data loader that knows how far it is, so that no batch is lost or repeated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from penstock.checkpoint.contents import generators_now, use_generators
from penstock.errors import InputError
from penstock.torch_internals import will_start_workers

T = TypeVar("T")

_TAKEN = count(1)  # batches of all loaders
_HOLDERS = ("sampler", "batch_sampler", "dataset")  # of a loader, which may have a generator


class _Position(NamedTuple):
    """Where to go on.

    Attributes:
        batch: the number of the next batch in its epoch.
        begun: the random generators as the epoch began; `None` if it has not.
        then: as they were before the next batch was taken; `None` if it was not taken.
    """

    batch: int = 0
    begun: dict[str, Any] | None = None
    then: dict[str, Any] | None = None


class Batches(Generic[T]):
    """A data loader that can be saved and restored, in the midst of an epoch as well.

        batches = ps.Batches(DataLoader(...))
        for epoch in batches.epochs(3):
            for x, y in batches:
                ...

    Give it to `Pipeline.save`, `Pipeline.autosave` and `penstock.resume` like an optimizer. To go
    on in the midst of an epoch, the loader begins the epoch again with the random numbers that it
    had, so that a shuffled order is the same, and the batches that are done are left out. They are
    loaded for that, so what takes long to load needs a loader that can start anywhere, such as
    torchdata's `StatefulDataLoader`, which `Pipeline.save` can save without this class.

    What workers of the loader draw is seeded anew in every epoch, unless they stay
    (`persistent_workers=True`): then their random numbers are other ones after a restart. If a loop
    takes the next batch before it has trained on the current one, the saved position is one batch
    too far.

    A loop that is left, by `break` or by an error, ends its epoch. So save within the loop, or by
    `Pipeline.autosave`, and not in an `except` around it.

    Args:
        loader: a `DataLoader`, or anything else that gives the same batches whenever it is iterated
            with the same random numbers of torch, numpy and Python, or of a `torch.Generator` that
            it, its sampler or its dataset has as `generator`.

    Attributes:
        epoch: how many epochs are done.
        batch: how many batches of this epoch were given out.

    Raises:
        InputError: it is an iterator, which cannot begin again.
    """

    def __init__(self, loader: Iterable[T]) -> None:
        if isinstance(loader, Iterator) or not hasattr(loader, "__iter__"):
            raise InputError(
                f"a {type(loader).__name__} cannot be iterated once more, as is necessary to go on "
                "where a run has ended: give the DataLoader or the list itself, not iter() of it"
            )
        self.loader = loader
        self.epoch = 0
        self.batch = 0
        self._begun: dict[str, Any] | None = None
        self._before: dict[str, Any] | None = None
        self._resumed = _Position()
        self._own: Sequence[torch.Tensor] | None = None  # the loader's generators, when resumed
        self._watched: list[torch.Generator] = []
        self._number = 0

    def watch(self, generators: Iterable[torch.Generator]) -> None:
        """Note where these are before each batch is taken: what is drawn for it is drawn again."""
        self._watched = list(generators)

    @property
    def in_hand(self) -> int:
        """The number of the last batch among those of all `Batches`; 0 if it is not in hand."""
        return self._number if self.batch and self._before is not None else 0

    def watched_before(self) -> list[torch.Generator]:
        """Generators with the states that the watched ones had before the last batch was taken."""
        if not self.in_hand or self._before is None:
            return self._watched
        found = [torch.Generator(generator.device) for generator in self._watched]
        for generator, state in zip(found, self._before["watched"], strict=True):
            generator.set_state(state)
        return found

    def __len__(self) -> int:
        """The number of batches of an epoch."""
        return len(self.loader)  # type: ignore[arg-type]

    def epochs(self, count: int) -> Iterator[int]:
        """The numbers of the epochs that are left, from the one under way.

        Args:
            count: how many there are in all.

        Raises:
            InputError: the batches of an epoch were not iterated.
        """
        while self.epoch < count:
            epoch = self.epoch
            yield epoch
            if self.epoch == epoch:
                raise InputError(
                    f"no batch of epoch {epoch} was taken: iterate these Batches in it"
                )

    def __iter__(self) -> Iterator[T]:
        """The batches of an epoch that are left; it is over when no more are taken."""
        position, now = self._resumed, self._generators()
        own = now["own"] if self._own is None else self._own
        if position.begun is None:
            self._begun, self.batch = now, 0
            iterator = iter(self.loader)
        else:
            try:
                if self.epoch and will_start_workers(self.loader):
                    iter(self.loader)  # they were there when this epoch began
                self._use(position.begun)
                iterator = iter(self.loader)
                self._leave_out(iterator, position.batch)
                self._use(position.then or {**now, "own": own})
            except BaseException:  # the position is still that of the checkpoint
                self._use(now)
                raise
            self._begun, self.batch = position.begun, position.batch
            self._resumed = _Position()
        self._own = None
        try:
            while True:
                self._before = {**self._generators(), "watched": self._states_of_watched()}
                self._number = next(_TAKEN)
                try:
                    found = next(iterator)
                except StopIteration:
                    break
                self.batch += 1
                yield found
        finally:
            self.epoch, self.batch, self._begun, self._before = self.epoch + 1, 0, None, None

    def state_dict(self) -> dict[str, Any]:
        """The position after the batch that was given out last, which is taken to be done."""
        is_resumed = self._resumed.begun is not None  # and not iterated since
        return self._state(self._resumed if is_resumed else _Position(self.batch, self._begun))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a position of `state_dict` with the next `for`."""
        self.epoch, self._resumed = state["epoch"], _Position(*state["position"])
        self._own = state.get("own")  # earlier versions did not save it
        if self._resumed.begun is None:  # else the epoch is begun again first
            self._use_own(self._own or ())
            self._own = None
        self.batch = self._resumed.batch

    @property
    def undone(self) -> Undone:
        """An object to save in place of this one, with the position before the last batch."""
        return Undone(self)

    def _state(self, position: _Position) -> dict[str, Any]:
        own = self._generators()["own"] if self._own is None else self._own
        return {"epoch": self.epoch, "position": list(position), "own": list(own)}

    def _leave_out(self, iterator: Iterator[T], count: int) -> None:
        """Take so many batches that are done.

        Raises:
            InputError: there are fewer.
        """
        for number in range(count):
            try:
                next(iterator)
            except StopIteration:
                raise InputError(
                    f"the run was saved after {count} batches of epoch {self.epoch}, and the "
                    f"loader has {number}: give it the same data and the same size of batches"
                ) from None

    def _states_of_watched(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._watched]

    def _generators(self) -> dict[str, Any]:
        """The states of all random generators that batches may depend on."""
        own = [generator.get_state() for generator in self._own_generators()]
        return {"process": generators_now(), "own": own}

    def _use(self, states: Mapping[str, Any]) -> None:
        """Put these generators where they were."""
        use_generators(states["process"])
        self._use_own(states["own"])

    def _use_own(self, states: Iterable[torch.Tensor]) -> None:
        """Put the generators of the loader where they were."""
        for generator, state in zip(self._own_generators(), states, strict=False):
            generator.set_state(state)

    def _own_generators(self) -> list[torch.Generator]:
        """Those of the loader, its samplers and its dataset, each once."""
        holders = [self.loader, *(getattr(self.loader, name, None) for name in _HOLDERS)]
        holders.append(getattr(holders[2], "sampler", None))
        found = [getattr(holder, "generator", None) for holder in holders]
        own = {id(each): each for each in found if isinstance(each, torch.Generator)}
        return list(own.values())


class Undone:
    """The position of `Batches` before the batch that was given out last.

    Args:
        batches: whose.
    """

    def __init__(self, batches: Batches[Any]) -> None:
        self._batches = batches

    def state_dict(self) -> dict[str, Any]:
        """The state for `Batches.load_state_dict`, from which the last batch is given out again."""
        of = self._batches
        if not of.batch or of._before is None:
            return of.state_dict()
        then = {name: states for name, states in of._before.items() if name != "watched"}
        return of._state(_Position(of.batch - 1, of._begun, then))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `Batches.load_state_dict`."""
        self._batches.load_state_dict(state)
