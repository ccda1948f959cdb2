"""A run that saves by itself, ends at any moment, and goes on with no batch lost or repeated."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import penstock as ps
from penstock.checkpoint.autosave import Autosave
from penstock.checkpoint.contents import generators_now, use_generators
from penstock.storage.folder import INDEX
from tests.checkpoint.autosaving import (
    EPOCHS,
    ROWS,
    Run,
    StoppedError,
    shuffled,
    with_a_generator,
    with_workers,
)
from tests.workers.ranks.test_torchrun import assert_equal

pytestmark = pytest.mark.usefixtures("pool")


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
    assert_equal("weights", second.weights, whole.weights)


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


Clears = Callable[[Any, Callable[[], None]], None]


def clears_before_backward(optimizer: Any, backward: Callable[[], None]) -> None:
    optimizer.zero_grad()
    backward()
    optimizer.step()


def clears_to_zero_before_backward(optimizer: Any, backward: Callable[[], None]) -> None:
    optimizer.zero_grad(set_to_none=False)
    backward()
    optimizer.step()


@pytest.mark.parametrize("style", [clears_before_backward, clears_to_zero_before_backward])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_gradients_that_an_optimizer_has_used_are_no_obstacle(
    tmp_path: Path, style: Clears, own: bool, kind: Any
) -> None:
    """`zero_grad()` between forward and backward is as usual as after the step."""

    def go(folder: Path, steps: int) -> dict[str, torch.Tensor]:
        run = Run(folder, workers=kind)
        optimizer = torch.optim.Adam(run.pipe.parameters(), lr=0.1)
        things = {"optimizer": run.optimizer if own else optimizer}
        with run.pipe as pipe:
            done = ps.load(folder).batches if ps.resume(folder, pipe, **things) == {} else 0
            pipe.autosave(folder, every=2, **things)
            for k in range(done, steps):
                x = torch.full((2, 4), float(k))
                loss = F.mse_loss(pipe(x), x)
                style(things["optimizer"], loss.backward)
            return {n: t.detach().clone() for n, t in pipe.state_dict().items()}

    go(tmp_path / "run", 5)
    assert ps.load(tmp_path / "run").batches == 4
    assert_equal("weights", go(tmp_path / "run", 7), go(tmp_path / "whole", 7))


def test_gradients_of_what_no_optimizer_has_are_no_obstacle(tmp_path: Path) -> None:
    """As with a head that is trained on a body whose parameters nobody froze."""
    run = Run(tmp_path)
    *body, head = run.pipe.model.children()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    with run.pipe as pipe:
        pipe.autosave(tmp_path, every=1, optimizer=optimizer)
        for k in range(3):
            x = torch.full((2, 4), float(k))
            pipe.train_step(x, target=x, loss_fn=F.mse_loss)
            optimizer.step()
            optimizer.zero_grad()
        assert any(p.grad is not None for part in body for p in part.parameters())
    assert ps.load(tmp_path).batches == 2


def test_gradients_of_a_second_optimizer_are_one(tmp_path: Path) -> None:
    """One that makes a step less often."""
    run = Run(tmp_path)
    first, *others = run.pipe.model.children()
    often = torch.optim.SGD(first.parameters(), lr=0.1)
    seldom = torch.optim.SGD([p for part in others for p in part.parameters()], lr=0.1)
    with run.pipe as pipe:
        pipe.autosave(tmp_path, every=1, often=often, seldom=seldom)
        for k in range(6):
            x = torch.full((2, 4), float(k))
            pipe.train_step(x, target=x, loss_fn=F.mse_loss)
            for optimizer, each in ((often, 1), (seldom, 3)):
                if k % each == each - 1:
                    optimizer.step()
                    optimizer.zero_grad()
    assert ps.load(tmp_path).batches == 3


def test_a_run_that_cannot_be_saved_is_told_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.checkpoint.autosave._MANY", 3)
    run = Run(tmp_path)
    x = torch.ones(2, 4)
    with run.pipe as pipe:
        pipe.autosave(tmp_path, every=1)
        for _ in range(4):
            pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        with pytest.warns(UserWarning, match="has not saved since pass 0 of 4") as said:
            pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        for _ in range(4):
            pipe.train_step(x, target=x, loss_fn=F.mse_loss)  # it is said once
    assert said[0].filename == __file__


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
    with pytest.raises(ps.InputError, match="must be a positive integer"):
        Autosave(tmp_path, every, {})


def test_it_can_be_ended(tmp_path: Path) -> None:
    run = Run(tmp_path)
    saved: list[int] = []
    auto = Autosave(tmp_path, 3, {}, trained=4)
    with run.pipe:
        for trained in range(4, 13):
            save = partial(_noted, saved, trained)
            auto.before_step(trained, lambda found: False, run.pipe._workers, save)
            if trained == 10:
                auto.remove()
    assert saved == [6, 9]


def _noted(saved: list[int], trained: int, folder: Path, background: bool) -> None:
    assert background
    saved.append(trained)


def test_a_position_that_was_restored_is_saved_again_before_it_is_used() -> None:
    torch.manual_seed(1)
    batches = ps.Batches(shuffled())
    seen, state, generators = [], {}, generators_now()
    for number, batch in enumerate(batches):
        seen.append(batch)
        if number == 0:
            state, generators = batches.state_dict(), generators_now()
    for _ in range(2):  # restored, and saved as it is
        batches = ps.Batches(shuffled())
        batches.load_state_dict(state)
        state = batches.state_dict()
        assert batches.undone.state_dict() == state
    use_generators(generators)  # as a checkpoint does
    assert all(map(torch.equal, batches, seen[1:]))


@pytest.mark.parametrize("names", [("outer", "inner"), ("inner", "outer")])
def test_of_nested_batches_the_innermost_says_where_generators_were(
    tmp_path: Path, names: Sequence[str]
) -> None:
    nested = {"outer": ps.Batches([1, 2]), "inner": ps.Batches([1, 2, 3])}
    generator = torch.Generator().manual_seed(1)
    auto = Autosave(tmp_path, 1, {n: nested[n] for n in names} | {"generator": generator})
    saved: list[torch.Tensor] = []
    with Run(tmp_path).pipe as pipe:
        for _ in nested["outer"]:
            torch.rand(3, generator=generator)
            for _ in nested["inner"]:
                before = generator.get_state()
                torch.rand(2, generator=generator)
                auto.before_step(
                    len(saved) + 1,
                    lambda found: False,
                    pipe._workers,
                    lambda folder, background, **things: saved.append(
                        things["generator"].get_state()
                    ),
                )
                assert torch.equal(saved[-1], before)
    assert len(saved) == 6


def test_batches_that_cannot_be_left_out_leave_the_position_and_the_generators() -> None:
    batches = ps.Batches([1, 2, 3])
    state: dict[str, Any] = {}
    for number in batches:
        if number == 2:
            state = batches.state_dict()
    shorter = ps.Batches([1])
    shorter.load_state_dict(state)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    with pytest.raises(ps.InputError, match="the loader has 1"):
        list(shorter)
    assert torch.equal(torch.get_rng_state(), before)
    assert shorter.state_dict() == state


def test_the_last_save_is_tried_again_if_an_earlier_one_had_failed(tmp_path: Path) -> None:
    run = Run(tmp_path)
    auto = Autosave(tmp_path, 100, {})
    asked: list[bool] = []

    def save(folder: Path, background: bool) -> None:
        asked.append(background)
        if len(asked) == 1:
            raise ps.CheckpointError("the quota was reached")

    with run.pipe:
        auto.on_sigterm(lambda: True, grace=60.0)
        run.pipe._workers.request_stop()
        with (
            pytest.warns(UserWarning, match="the quota was reached. It is saved once more"),
            pytest.raises(SystemExit),
        ):
            auto.before_step(7, lambda found: False, run.pipe._workers, save)
    assert asked == [False, False]


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
