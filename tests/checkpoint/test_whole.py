"""What is in a folder is whole: whoever is killed, interrupted, refused or lied to meanwhile."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.checkpoint import saver
from penstock.checkpoint.checkpoint import Checkpoint
from penstock.storage import folder as storage
from penstock.storage import part
from penstock.storage.folder import INDEX, SAVING, Folder
from penstock.storage.part import Part
from tests.checkpoint.steps import Run
from tests.workers.ranks.test_torchrun import assert_equal


class Killed(BaseException):
    """Ends a save wherever it is, like a signal."""


@pytest.fixture
def run() -> Iterator[Run]:
    found = Run(workers="threads", devices=["cpu"] * 2)
    with found.pipe:
        found.go(1)
        yield found


def check(path: Path) -> int:
    """There is one checkpoint, all of it, and nothing else; which save it is."""
    checkpoint = ps.load(path)
    checkpoint.model_state()
    checkpoint.optimizer_state()
    assert {each.name for each in path.iterdir()} == {INDEX, *checkpoint._files}
    return checkpoint.number


def test_what_safetensors_has_left_when_it_was_killed_is_removed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It writes to a temporary file, with a name of its own, beside the one that it makes."""

    def killed(tensors: Any, path: str, metadata: Any) -> None:
        Path(path).with_name(".tmpVxqV6A").write_bytes(b"half of the weights")
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(part, "save_file", killed)
        for _ in range(2):
            with pytest.raises(Killed):
                run.save(tmp_path)
    run.save(tmp_path)
    check(tmp_path)


def test_a_file_that_safetensors_still_writes_grows(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a part that takes long would be given up as one that nobody writes."""
    sizes: list[int] = []
    alone = threading.Lock()  # workers write at the same time

    def slow(tensors: Any, path: str, metadata: Any) -> None:
        one = Part(str(tmp_path), 1, 0, 2)
        temporary = Path(path).with_name(".tmpVxqV6A")
        with alone:
            for size in (1000, 2000):
                temporary.write_bytes(bytes(size))
                sizes.append(saver._size_of(one))
        raise OSError("that is enough")

    monkeypatch.setattr(part, "save_file", slow)
    with pytest.raises(ps.CheckpointError, match="that is enough"):
        Run.save(run, tmp_path)
    assert sizes[1] >= sizes[0] + 1000


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ps.WorkerTimeout])
def test_an_error_just_when_the_rest_is_begun_leaves_the_rest_alone(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    """The thread that finishes the save has the folder then: nobody removes what it commits."""
    run.save(tmp_path)
    raised, workers, notes = threading.Event(), run.pipe._runner.workers, saver._notes

    def patient(*given: Any) -> Any:
        found = notes(*given)
        raised.wait(20)
        return found

    @contextmanager
    def operation(what: str, seconds: float) -> Iterator[None]:
        yield
        if what == "the end of a save":
            raise kind("just now")

    with monkeypatch.context() as patch:
        patch.setattr(saver, "_notes", patient)
        patch.setattr(workers, "operation", operation)
        with pytest.raises(kind):
            run.save(tmp_path, background=True)
        with pytest.raises(ps.CheckpointError, match=r"another save to .* is under way"):
            Folder(tmp_path).begin(lambda number: [])
        raised.set()
        for thread in threading.enumerate():
            if thread.name == "penstock-save":
                thread.join(20)
    assert check(tmp_path) == 2
    run.save(tmp_path)
    assert check(tmp_path) == 3


def test_what_is_interrupted_before_the_rest_is_begun_lets_go_of_the_folder(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: threading.Thread) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(saver.threading.Thread, "start", interrupted)  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            run.save(tmp_path, background=True)
    run.save(tmp_path)
    check(tmp_path)


def test_what_is_gone_is_not_committed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run may have removed it, where the file system has no locks."""
    run.save(tmp_path)
    commit = Folder.commit

    def robbed(self: Folder, index: Any) -> None:
        next(tmp_path.glob("model-000002-00001-*")).unlink()
        commit(self, index)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "commit", robbed)
        with pytest.raises(
            ps.CheckpointError, match=r"model-000002-00001.* was removed or changed"
        ):
            run.save(tmp_path)
    assert ps.load(tmp_path).number == 1
    ps.load(tmp_path).model_state()


def test_what_cannot_be_removed_does_not_make_a_save_fail(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save(tmp_path)
    unlink = Path.unlink

    def refused(self: Path, missing_ok: bool = False) -> None:
        if self.name == "plan-000001.json":
            raise PermissionError(1, "Operation not permitted", str(self))
        unlink(self, missing_ok)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refused)
        with pytest.warns(UserWarning, match=r"is saved, but files of the one before .*plan-00000"):
            run.save(tmp_path)
    assert ps.load(tmp_path).number == 2
    assert "plan-000001.json" in json.loads((tmp_path / SAVING).read_text())["files"]
    run.save(tmp_path)
    assert check(tmp_path) == 3


@pytest.mark.parametrize("name", ["_NEW_INDEX", "_NEW_LIST"])
def test_nothing_is_written_through_links(run: Run, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "precious.txt"
    outside.write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / getattr(storage, name)).symlink_to(outside)
    run.save(tmp_path / "run")
    assert outside.read_text() == "mine"
    check(tmp_path / "run")


def edited(index: dict[str, Any], change: Callable[[dict[str, Any]], Any]) -> bytes:
    change(index["metadata"]["penstock"]["files"])
    return json.dumps(index).encode()


WRONG: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "an entry without a size": lambda i: edited(i, lambda f: f.update({min(f): {"crc32": 1}})),
    "a checksum that is a text": lambda i: edited(i, lambda f: f[min(f)].update(crc32="x")),
    "no checksum": lambda i: edited(i, lambda f: f[min(f)].pop("crc32")),
    "no training": lambda i: edited(i, lambda f: f.pop("training-000001.pt")),
    "no random": lambda i: edited(i, lambda f: f.pop("random-000001.pt")),
    "no plan": lambda i: edited(i, lambda f: f.pop("plan-000001.json")),
    "no weights": lambda i: json.dumps({**i, "weight_map": {}}).encode(),
    "a list of weights": lambda i: json.dumps({**i, "weight_map": []}).encode(),
    "half of it": lambda i: json.dumps(i).encode()[:200],
    "no text": lambda i: b"\xff\xfe\0",
    "nesting without end": lambda i: b"[" * 100_000,
}


def read_all(run: Run, path: Path) -> None:
    checkpoint = ps.load(path)
    assert checkpoint.plan
    checkpoint.restore(run.pipe, **run.things)


@pytest.mark.parametrize("what", list(WRONG))
def test_an_index_that_is_not_what_was_written(run: Run, tmp_path: Path, what: str) -> None:
    """It is named, and neither the model nor the optimizer is changed."""
    run.save(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    (tmp_path / INDEX).write_bytes(WRONG[what](index))
    before = {name: value.clone() for name, value in run.pipe.state_dict().items()}
    with pytest.raises(ps.CheckpointError, match=str(tmp_path)):
        read_all(run, tmp_path)
    after = run.pipe.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


class Phase(Enum):
    """What an optimizer may remember, and no load reads: it would be code."""

    WARM = 1


class Noting(torch.optim.SGD):
    """Remembers something of every parameter."""

    def __init__(self, parameters: Any, note: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.note = note

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["note"] = self.note
        return result


@pytest.mark.parametrize("kind", ["plain", "of the pipeline"])
def test_what_no_load_could_read_is_not_saved(run: Run, tmp_path: Path, kind: str) -> None:
    def made(note: Any) -> torch.optim.Optimizer:
        if kind == "plain":
            return Noting(run.pipe.parameters(), note)
        return run.pipe.optimizer(Noting, note=note)

    good, bad = made(np.float32(0.5)), made(Phase.WARM)
    run.go(1)
    for optimizer in (good, bad):
        optimizer.step()
    run.pipe.save(tmp_path, optimizer=good)
    with pytest.raises(ps.CheckpointError, match=r"remembers more than plain data .*Phase"):
        run.pipe.save(tmp_path, optimizer=bad)
    saved = ps.load(tmp_path)
    assert saved.number == 1
    assert {values["note"] for values in saved.optimizer_state()["state"].values()} == {0.5}
    saved.restore(run.pipe, optimizer=good)


def test_an_interrupted_wait_for_a_save_does_not_forget_it(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, goes_on = saver._notes, threading.Event()

    def slow(*given: Any) -> Any:
        goes_on.wait(60)
        return notes(*given)

    def interrupted(save: ps.Save) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(saver, "_notes", slow)
    run.save(tmp_path / "a", background=True)
    with monkeypatch.context() as patch:
        patch.setattr(saver.Save, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run.save(tmp_path / "b")
    threading.Timer(0.3, goes_on.set).start()
    run.pipe.close()
    assert check(tmp_path / "a") == 1


class Refusing:
    """Has a state that can be loaded, or not."""

    def __init__(self, refuses: bool = False) -> None:
        self.value, self.refuses = 0, refuses

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        if self.refuses:
            raise RuntimeError("not this")


def test_a_thing_that_refuses_its_state_leaves_everything_as_it_was(
    run: Run, tmp_path: Path
) -> None:
    first, second = Refusing(), Refusing()
    run.pipe.save(tmp_path, **run.things, first=first, second=second)
    run.go(1)
    before, first.value, second.value = run.state(), 1, 2
    second.refuses = True
    generator = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="not this"):
        ps.load(tmp_path).restore(run.pipe, **run.things, first=first, second=second)
    assert_equal("everything", run.state(), before)
    assert (first.value, torch.equal(torch.get_rng_state(), generator)) == (1, True)


def test_what_a_checkpoint_gives_is_not_its_own(run: Run, tmp_path: Path) -> None:
    run.save(tmp_path)
    saved = ps.load(tmp_path)
    saved.data["data"]["losses"].append(1.0)
    saved.state("scheduler").clear()
    assert saved.data["data"]["losses"] == run.losses
    assert saved.state("scheduler")


def test_a_save_that_is_committed_while_another_is_read(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run.save(tmp_path)
    look, looked = Checkpoint._check_sizes, []

    def slow(checkpoint: Checkpoint) -> None:
        looked.append(checkpoint.number)
        if len(looked) == 1:
            run.save(tmp_path)
        look(checkpoint)

    monkeypatch.setattr(Checkpoint, "_check_sizes", slow)
    assert ps.load(tmp_path).number == 2
    assert looked == [1, 2]
    next(tmp_path.glob("training-*")).unlink()
    with pytest.raises(ps.CheckpointError, match="is incomplete"):
        ps.load(tmp_path)
