"""What becomes of a checkpoint's folder, whatever happens to who writes it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.storage import part
from penstock.storage.folder import INDEX, SAVING, Folder
from penstock.storage.part import Part, names_of_save
from tests.checkpoint.steps import Run


class Killed(BaseException):
    """Ends a save wherever it is, like a signal."""


@pytest.fixture
def run() -> Run:
    return Run(workers="threads", devices=["cpu"] * 2)


def number_of(path: Path) -> int:
    """Of the checkpoint there, all of which is read."""
    checkpoint = ps.load(path)
    checkpoint.model_state()
    checkpoint.optimizer_state()
    assert len(checkpoint.data["data"]["losses"]) == checkpoint.batches
    return checkpoint.batches


def test_killed_at_every_moment(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after everything that is done to the disk, the old checkpoint or the new one."""
    done, limit, lock = 0, -1, threading.Lock()

    def at_moment() -> None:
        nonlocal done
        with lock:
            done += 1
            if done == limit:
                raise Killed

    def watched(work: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            at_moment()
            result = work(*args, **kwargs)
            at_moment()
            return result

        return act

    for name in ("fsync", "replace", "unlink"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    monkeypatch.setattr(part, "save_file", watched(part.save_file))
    with run.pipe:
        run.go(1)
        run.save(tmp_path)
        done = 0
        run.go(1)
        run.save(tmp_path)
        moments = done
        assert moments > 20
        found = set()
        old = 2
        for moment in range(1, moments + 1):
            limit = -1
            Folder(tmp_path).clean()
            run.go(1)
            done, limit = 0, moment
            with pytest.raises(Killed):
                run.save(tmp_path)
            now = number_of(tmp_path)
            assert now in (old, len(run.losses))
            found.add(now == old)
            old = now
        assert found == {True, False}
        limit = -1
        run.save(tmp_path)
        assert {p.name for p in tmp_path.iterdir()} == {INDEX, *ps.load(tmp_path)._files}


def test_the_first_save_is_killed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(self: Folder, index: Any) -> None:
        raise Killed

    with run.pipe:
        with monkeypatch.context() as patch:
            patch.setattr(Folder, "commit", kill)
            with pytest.raises(Killed):
                run.save(tmp_path)
        with pytest.raises(ps.CheckpointError, match="no save to it was completed"):
            ps.load(tmp_path)
        run.save(tmp_path)
    assert number_of(tmp_path) == 0


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ps.CheckpointError, match=r"no checkpoint .*/a: there is no such folder"):
        ps.load(tmp_path / "a")
    for name in ("", SAVING):  # killed before or after it has listed its files
        (folder := tmp_path / f"begun{name}").mkdir()
        if name:
            (folder / name).write_text("")
        with pytest.raises(ps.CheckpointError, match="no save to it was completed"):
            ps.load(folder)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ps.CheckpointError, match=f"it has no {INDEX}"):
        ps.load(tmp_path)
    (tmp_path / INDEX).write_text("[1]")
    with pytest.raises(ps.CheckpointError, match="is not an index of weights"):
        ps.load(tmp_path)
    (tmp_path / INDEX).write_text('{"weight_map": {}}')
    with pytest.raises(ps.CheckpointError, match="not a checkpoint of Penstock"):
        ps.load(tmp_path)


@pytest.mark.parametrize("what", ["model", "optimizer", "training", "random", "plan"])
def test_torn_and_missing_files(run: Run, tmp_path: Path, what: str) -> None:
    with run.pipe:
        run.go(1)
        run.save(tmp_path)
        path = next(tmp_path.glob(f"{what}-*"))
        content = bytearray(path.read_bytes())
        content[-3] ^= 1
        path.write_bytes(content)
        before = {name: value.clone() for name, value in run.pipe.state_dict().items()}
        with pytest.raises(ps.CheckpointError, match=f"{path.name} is not as it was written"):
            _ = ps.load(tmp_path).plan if what == "plan" else run.restore(tmp_path)
        assert all(torch.equal(v, before[n]) for n, v in run.pipe.state_dict().items())
    path.write_bytes(content[:-1])
    with pytest.raises(
        ps.CheckpointError, match=rf"incomplete: {path.name} has {len(content) - 1}"
    ):
        ps.load(tmp_path)
    path.unlink()
    with pytest.raises(ps.CheckpointError, match=f"incomplete: {path.name} is missing"):
        ps.load(tmp_path)


def test_a_later_format(run: Run, tmp_path: Path) -> None:
    with run.pipe:
        run.save(tmp_path)
    index = json.loads((tmp_path / INDEX).read_text())
    index["metadata"]["penstock"]["version"] = 2
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(ps.CheckpointError, match="later version of Penstock, in format 2"):
        ps.load(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", INDEX])
def test_the_weights_of_others_are_left_alone(run: Run, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('{"weight_map": {"a": "b"}, "metadata": {"total_size": 1}}')
    with run.pipe, pytest.raises(ps.CheckpointError, match="another model's weights"):
        run.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_two_saves_to_the_same_folder(run: Run, tmp_path: Path) -> None:
    other = Folder(tmp_path)
    other.begin(partial(names_of_save, 2))
    with run.pipe:
        with pytest.raises(ps.CheckpointError, match=r"another save to .* is under way"):
            run.save(tmp_path)
        other.end()
        run.save(tmp_path)


def full_disk(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


def test_errors_of_a_writer(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Are raised at once; in the background, by `wait`, by the next save or by `close`."""
    message = r"part 1 of 2 .* cannot be written: OSError: .*No space left"
    with run.pipe:
        run.go(1)
        run.save(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(part, "save_file", full_disk)
            with pytest.raises(ps.CheckpointError, match=message):
                run.save(tmp_path)
            there = {p.name for p in tmp_path.iterdir()}
            assert there == {INDEX, SAVING, *ps.load(tmp_path)._files}
            save = run.save(tmp_path, background=True)
            for _ in range(2):
                with pytest.raises(ps.CheckpointError, match="No space left"):
                    save.wait()
            run.save(tmp_path, background=True)
            run.go(1)
            with pytest.raises(ps.CheckpointError, match="No space left"):
                run.save(tmp_path)
        assert number_of(tmp_path) == 1
        run.save(tmp_path)
        assert number_of(tmp_path) == 2
        with monkeypatch.context() as patch:
            patch.setattr(part, "save_file", full_disk)
            run.save(tmp_path, background=True)
            with pytest.raises(ps.CheckpointError, match="No space left"):
                run.pipe.close()
    assert number_of(tmp_path) == 2


def test_a_disk_that_is_full_of_what_optimizers_remember(tmp_path: Path) -> None:
    """torch.save says `unexpected pos 704 vs 598`."""
    one = Part(str(tmp_path), 1, 0, 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        one.save({}, {"optimizer": {"a": torch.zeros(10_000)}}, background=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "the disk may be full, or a quota reached. A checkpoint before" in one.note.read_text()


def test_a_worker_that_never_writes(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run.pipe:
        monkeypatch.setattr(Part, "_try", lambda *args: None)
        monkeypatch.setattr("penstock.checkpoint.saver._STALLED", 0.1)
        with pytest.raises(ps.CheckpointError, match=r"nothing was written .* workers \[0, 1\]"):
            run.save(tmp_path, background=True).wait()
        with monkeypatch.context() as patch:
            gone = "penstock.checkpoint.saver._size_of"
            patch.setattr(gone, lambda part: shutil.rmtree(tmp_path, ignore_errors=True))
            with pytest.raises(ps.CheckpointError, match="the folder was removed before the parts"):
                run.save(tmp_path, background=True).wait()
        monkeypatch.setattr(run.pipe._runner.workers, "all_alive", lambda: False)
        with pytest.raises(ps.CheckpointError, match="a worker has ended before the parts"):
            run.save(tmp_path, background=True).wait()
