"""Autosave saves where nothing is half done: the resumed run has the bits of one that went on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import penstock as ps

X = torch.arange(40.0).repeat_interleave(4).reshape(40, 4) / 40
Y = torch.arange(40) % 3


class Stopped(Exception):  # noqa: N818 - a run that is killed here
    pass


class Run:
    """A script that trains on all batches twice, and may be stopped after some updates."""

    def __init__(self, folder: Path | None, stop: int, **loader: Any) -> None:
        torch.manual_seed(0)
        layers = nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3)
        self.model = nn.Sequential(*layers)
        options: dict[str, Any] = {"num_microbatches": 2, "replicas": 1}
        self.pipe = ps.Pipeline(self.model, (X[:4],), devices=["cpu"] * 2, **options)
        torch.manual_seed(5)
        data = DataLoader(TensorDataset(X, Y), batch_size=4, shuffle=True, **loader)
        self.batches = ps.Batches(data)
        self._folder, self._stop, self._updates = folder, stop, 0

    def begin(self, **things: Any) -> None:
        if self._folder is not None:
            ps.resume(self._folder, self.pipe, batches=self.batches, **things)
            self.pipe.autosave(
                self._folder, every=1, on_sigterm=False, batches=self.batches, **things
            )

    def step(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.pipe.train_step(x, target=y, loss_fn=F.cross_entropy)
        return loss

    def updated(self) -> None:
        self._updates += 1
        if self._updates == self._stop:
            raise Stopped


def with_lbfgs(run: Run) -> None:
    optimizer = torch.optim.LBFGS(run.model.parameters(), lr=0.1, max_iter=3)
    run.begin(optimizer=optimizer)
    for _ in run.batches.epochs(2):
        for batch in run.batches:

            def closure(batch: Any = batch) -> torch.Tensor:
                optimizer.zero_grad()
                return run.step(*batch)

            optimizer.step(closure)
            run.updated()


def two_forwards(run: Run) -> None:
    optimizer = run.pipe.optimizer(torch.optim.Adam, lr=1e-2)
    run.begin(optimizer=optimizer)
    for _ in run.batches.epochs(2):
        losses: list[torch.Tensor] = []
        for x, y in run.batches:
            losses.append(F.cross_entropy(run.pipe(x), y))
            if len(losses) == 2:
                optimizer.zero_grad()
                torch.stack(losses).sum().backward()
                losses = []
                optimizer.step()
                run.updated()


def perturbed(run: Run) -> None:
    """Sharpness-aware minimisation: the second pass of a batch sees other weights."""
    parameters = list(run.model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    run.begin(optimizer=optimizer)
    for _ in run.batches.epochs(2):
        for batch in run.batches:
            run.step(*batch)
            moved = [p.grad * 0.5 for p in parameters if p.grad is not None]
            with torch.no_grad():
                torch._foreach_add_(parameters, moved)
            optimizer.zero_grad()
            run.step(*batch)
            with torch.no_grad():
                torch._foreach_sub_(parameters, moved)
            optimizer.step()
            optimizer.zero_grad()
            run.updated()


def by_turns(run: Run) -> None:
    """Two optimizers, as of a generator and a discriminator."""
    one = run.pipe.optimizer(torch.optim.Adam, run.model[0].parameters(), lr=1e-2)
    other = run.pipe.optimizer(torch.optim.Adam, run.model[3].parameters(), lr=1e-2)
    run.begin(one=one, other=other)
    for _ in run.batches.epochs(2):
        for batch in run.batches:
            for optimizer in (one, other):
                run.step(*batch)
                optimizer.step()
                run.pipe.zero_grad()
            run.updated()


def augmented(run: Run) -> None:
    optimizer = run.pipe.optimizer(torch.optim.Adam, lr=1e-2)
    generator = torch.Generator().manual_seed(3)
    run.begin(optimizer=optimizer, generator=generator)
    for _ in run.batches.epochs(2):
        for x, y in run.batches:
            run.step(x + torch.randn(x.shape, generator=generator) * 0.1, y)
            optimizer.step()
            optimizer.zero_grad()
            run.updated()


SCRIPTS = [with_lbfgs, two_forwards, perturbed, by_turns, augmented]


def weights_of(
    script: Callable[[Run], None], folder: Path | None, stop: int = 0, **loader: Any
) -> list[torch.Tensor]:
    run = Run(folder, stop, **loader)
    with run.pipe:
        try:
            script(run)
        except Stopped:
            assert stop
    return [tensor.clone() for tensor in run.model.state_dict().values()]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_run_that_is_stopped_goes_on(script: Callable[[Run], None], tmp_path: Path) -> None:
    whole = weights_of(script, None)
    weights_of(script, tmp_path, stop=4)
    assert ps.load(tmp_path).batches > 0
    assert all(map(torch.equal, weights_of(script, tmp_path), whole))


@pytest.mark.parametrize("uses", [False, True])
def test_gradients_of_parameters_that_were_added_are_still_to_be_used(
    uses: bool, tmp_path: Path
) -> None:
    run = Run(None, 0)
    with run.pipe as pipe:
        optimizer = torch.optim.SGD(run.model[0].parameters(), lr=0.1)
        pipe.autosave(tmp_path, every=1, on_sigterm=False, optimizer=optimizer)
        run.step(X[:4], Y[:4])
        optimizer.step()
        optimizer.add_param_group({"params": list(run.model[3].parameters())})
        if uses:
            optimizer.step()
        run.step(X[:4], Y[:4])
    assert any(tmp_path.iterdir()) == uses  # what closes a pipeline waits for its saves


def test_workers_of_a_loader_that_stay(tmp_path: Path) -> None:
    """The loader draws as it starts them, in the first epoch and never again."""
    options = {"num_workers": 1, "persistent_workers": True}
    whole = weights_of(by_turns, None, **options)
    weights_of(by_turns, tmp_path, stop=13, **options)
    assert all(map(torch.equal, weights_of(by_turns, tmp_path, **options), whole))


def test_a_file_is_no_folder_of_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(ps.InputError, match="is a file: a checkpoint is a folder"):
        ps.resume(tmp_path / "run", nn.Linear(2, 2))
