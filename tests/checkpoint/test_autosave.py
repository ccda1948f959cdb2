"""A run that saves by itself, ends at any moment, and goes on with no batch lost or repeated."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler

import penstock as ps
from penstock.checkpoint.autosave import Autosave
from penstock.storage.folder import INDEX
from tests.support.models import mlp, uniform_plan

pytestmark = pytest.mark.usefixtures("pool")
EPOCHS, ROWS = 2, 12  # of which a batch has two


class Augmented(Dataset[torch.Tensor]):
    """Rows to which random numbers of all three generators are added."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = torch.rand(()) + random.random() + float(np.random.rand())
        return torch.full((4,), float(index)) + 0.1 * drawn


def shuffled() -> DataLoader[torch.Tensor]:
    return DataLoader(Augmented(), batch_size=2, shuffle=True)


def with_a_generator() -> DataLoader[torch.Tensor]:
    sampler = RandomSampler(Augmented(), generator=torch.Generator().manual_seed(3))  # type: ignore[arg-type]
    return DataLoader(Augmented(), batch_size=2, sampler=sampler)


def with_workers() -> DataLoader[torch.Tensor]:
    return DataLoader(Augmented(), batch_size=2, shuffle=True, num_workers=1)


class StoppedError(Exception):
    """The run ends here."""


class Run:
    """A run of a few epochs, as a script would have it."""

    def __init__(
        self, folder: Path, loader: Callable[[], Any] = shuffled, every: int = 2, parts: int = 1
    ) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.folder, self.every, self.parts = folder, every, parts
        model = mlp(4, 8, 4)
        program = ps.capture(model, (torch.ones(2, 4),))
        options = {"plan": uniform_plan(program, 2, 2), "devices": ["cpu"] * 2, "audit": None}
        self.pipe = ps.Pipeline(model, program=program, **options)
        self.optimizer = self.pipe.optimizer(torch.optim.Adam, lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        self.batches = ps.Batches(loader())
        self.seen: list[torch.Tensor] = []

    @property
    def things(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer, "scheduler": self.scheduler, "data": self.batches}

    def go(self, stop: int | None = None) -> dict[str, Any] | None:
        """Begin or go on, and end as so many batches were seen, with the step done or not."""
        with self.pipe:
            found = ps.resume(self.folder, self.pipe, **self.things)
            self.pipe.autosave(self.folder, every=self.every, **self.things)
            for _ in self.batches.epochs(EPOCHS):
                for drawn in self.batches:
                    x = drawn + torch.rand(())  # as a script does that mixes samples
                    if len(self.seen) == stop:
                        raise StoppedError
                    for part in x.chunk(self.parts):
                        self.pipe.train_step(part, target=part, loss_fn=F.mse_loss)
                    self.optimizer.step()
                    self.optimizer.zero_grad()
                    self.scheduler.step()
                    self.seen.append(x)
        return found

    @property
    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().flatten() for p in self.pipe.model.parameters()])


@pytest.mark.parametrize("loader", [shuffled, with_a_generator, with_workers])
@pytest.mark.parametrize("stop", [3, 4, 8])
def test_no_batch_is_lost_or_repeated(tmp_path: Path, loader: Callable[[], Any], stop: int) -> None:
    whole = Run(tmp_path / "whole", loader)
    assert whole.go() is None
    first = Run(tmp_path / "run", loader)
    with pytest.raises(StoppedError):
        first.go(stop)
    saved = (stop - 1) // 2 * 2  # as the step after these began
    second = Run(tmp_path / "run", loader)
    assert second.go() == {}
    seen = [*first.seen[:saved], *second.seen]
    assert len(seen) == len(whole.seen) == EPOCHS * ROWS // 2
    assert all(torch.equal(a, b) for a, b in zip(seen, whole.seen, strict=True))
    assert torch.equal(second.weights, whole.weights)


def test_not_while_gradients_are_accumulated(tmp_path: Path) -> None:
    """The third pass is the first of a batch, though it is time at the second already."""
    run = Run(tmp_path, every=1, parts=2)
    with pytest.raises(StoppedError):
        run.go(3)
    saved = ps.load(tmp_path)
    assert saved.batches == 4
    again = Run(tmp_path, every=1, parts=2)
    assert again.go() == {}
    assert len(again.seen) == EPOCHS * ROWS // 2 - 2


def test_a_save_of_ones_own_is_after_the_batch_in_hand(tmp_path: Path) -> None:
    run = Run(tmp_path / "auto", every=100)
    with run.pipe:
        for drawn in run.batches:
            x = drawn + torch.rand(())
            run.pipe.train_step(x, target=x, loss_fn=F.mse_loss)
            run.optimizer.step()
            run.optimizer.zero_grad()
            run.scheduler.step()
            run.seen.append(x)
            if len(run.seen) == 2:
                run.pipe.save(tmp_path / "own", **run.things)
                break
    assert (run.batches.epoch, run.batches.batch) == (1, 0)  # nobody has taken more
    again = Run(tmp_path / "own")
    again.go()
    whole = Run(tmp_path / "whole")
    whole.go()
    assert len(again.seen) == len(whole.seen) - 2
    assert all(torch.equal(a, b) for a, b in zip(again.seen, whole.seen[2:], strict=True))


def test_the_newest_that_is_whole(tmp_path: Path) -> None:
    run = Run(tmp_path / "none")
    with run.pipe:
        for name in ("a", "b", "c"):
            x = torch.ones(2, 4)
            run.pipe.train_step(x, target=x, loss_fn=F.mse_loss)
            run.pipe.save(tmp_path / "all" / name, **run.things, name=name)
        (tmp_path / "all" / "notes").mkdir()
        assert ps.resume(tmp_path / "all", run.pipe, **run.things) == {"name": "c"}
        (file,) = (tmp_path / "all" / "c").glob("training-*")
        file.write_bytes(b"")
        with pytest.warns(UserWarning, match="An older one is looked for"):
            assert ps.resume(tmp_path / "all", run.pipe, **run.things) == {"name": "b"}
        with pytest.raises(ps.InputError, match="also has data="):
            ps.resume(tmp_path / "all" / "b", run.pipe, optimizer=None, scheduler=None)
        for name in ("a", "b"):
            (tmp_path / "all" / name / INDEX).write_text("{")
        broken = pytest.warns(UserWarning, match="is looked for")
        with broken, pytest.raises(ps.CheckpointError):
            ps.resume(tmp_path / "all", run.pipe, **run.things)
        assert ps.resume(tmp_path / "nowhere", run.pipe, **run.things) is None
    shutil.rmtree(tmp_path / "all")


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "10"])
def test_every_is_a_number_of_steps(tmp_path: Path, every: Any) -> None:
    with pytest.raises(ps.InputError, match="is no number of steps"):
        Autosave(tmp_path, every, {})


def test_it_can_be_ended(tmp_path: Path) -> None:
    run = Run(tmp_path)
    saved: list[int] = []
    auto = Autosave(tmp_path, 3, {}, trained=4)
    with run.pipe:
        for trained in range(4, 13):
            save = partial(_noted, saved, trained)
            auto.before_step(trained, run.pipe.model, run.pipe._workers, save)
            if trained == 10:
                auto.remove()
    assert saved == [6, 9]


def _noted(saved: list[int], trained: int, folder: Path, background: bool) -> None:
    assert background
    saved.append(trained)


def test_mistakes_with_batches() -> None:
    with pytest.raises(ps.InputError, match="give the DataLoader or the list itself"):
        ps.Batches(iter([1, 2]))
    batches = ps.Batches([1, 2, 3])
    assert len(batches) == 3
    with pytest.raises(ps.InputError, match="no batch of epoch 0 was taken"):
        list(batches.epochs(2))
    taken = [(epoch, list(batches)) for epoch in batches.epochs(2)]
    assert taken == [(0, [1, 2, 3]), (1, [1, 2, 3])]

    def part() -> Iterator[int]:
        for number in batches:
            yield number
            if number == 2:
                state.update(batches.state_dict())

    state: dict[str, Any] = {}
    list(part())
    shorter = ps.Batches([1])
    shorter.load_state_dict(state)
    with pytest.raises(ps.InputError, match="after 2 batches of epoch 2, and the loader has 1"):
        list(shorter)
