"""Nothing of the user's is removed, replaced or read that Penstock was not asked for."""

from __future__ import annotations

import errno
import fcntl
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import penstock as ps
from penstock.storage import part
from penstock.storage.folder import INDEX, SAVING, Folder
from tests.checkpoint.steps import Run

MINE = {
    name: f"the user's {name}".encode()
    for name in (
        "training-20241122.log",
        "model-20250101.pt",
        "plan-202501.md",
        "random-000001.txt",
        "optimizer-123456-best.pt",
        "part-000001.csv",
        ".part-000001-0",
        ".plan-000001.json.bak",
        ".model.safetensors.index.json.new",
        "model-000001-00001-of-00002.safetensors",  # the name that the first save would take
        "training-000002.pt",  # and one of the second's
        "notes.txt",
    )
}


class Killed(BaseException):
    """Ends a save wherever it is, like a signal."""


@pytest.fixture
def run() -> Run:
    return Run(workers="threads", devices=["cpu"] * 2)


def put(folder: Path, files: Mapping[str, bytes] = MINE) -> None:
    """Have the user's files there."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


def check(folder: Path, files: Mapping[str, bytes] = MINE) -> None:
    """The user's files are as they were, and besides them there is one checkpoint, all of it."""
    for name, content in files.items():
        assert (folder / name).read_bytes() == content, name
    checkpoint = ps.load(folder)
    checkpoint.model_state()
    checkpoint.optimizer_state()
    there = {path.name for path in folder.iterdir()}
    assert there == {INDEX, *files, *checkpoint._files}


def test_files_of_the_user_stay_in_a_new_folder(run: Run, tmp_path: Path) -> None:
    put(tmp_path)
    with run.pipe:
        for _ in range(3):
            run.save(tmp_path)
            check(tmp_path)


def test_files_that_come_between_two_saves_stay(run: Run, tmp_path: Path) -> None:
    with run.pipe:
        run.save(tmp_path)
        names = [*MINE, "plan-000002.json", "model-000009-x.pt"]
        later = {name: b"mine" for name in names if not (tmp_path / name).exists()}
        put(tmp_path, later)
        for _ in range(2):
            run.save(tmp_path, background=True).wait()
            check(tmp_path, later)


def test_files_stay_whenever_a_save_is_killed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the next save removes what the killed ones have left."""
    done, limit = 0, -1

    def watched(work: Callable[..., Any]) -> Callable[..., Any]:
        def act(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            for _ in range(2):  # before and after
                done += 1
                if done == limit:
                    raise Killed
                result = work(*args, **kwargs) if done % 2 else None
            return result

        return act

    for name in ("fsync", "replace", "unlink"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    monkeypatch.setattr(part, "save_file", watched(part.save_file))
    monkeypatch.setattr(torch, "save", watched(torch.save))
    put(tmp_path)
    with run.pipe:
        run.go(1)
        killed = 0
        for moment in range(1, 200, 3):
            done, limit = 0, moment
            try:
                run.save(tmp_path)
            except Killed:
                killed += 1
            for name, content in MINE.items():
                assert (tmp_path / name).read_bytes() == content, name
        assert killed > 10
        limit = -1
        run.save(tmp_path)
        check(tmp_path)


def test_what_a_killed_save_was_to_write_is_listed_first(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []

    def killed(self: Folder, index: Any) -> None:
        listed = set(json.loads((tmp_path / SAVING).read_text())["files"])
        there = {path.name for path in tmp_path.iterdir()}
        seen.extend([there - listed, listed - there])
        raise Killed

    with run.pipe, monkeypatch.context() as patch:
        run.go(1)
        patch.setattr(Folder, "commit", killed)
        with pytest.raises(Killed):
            run.save(tmp_path)
        not_listed, not_written = seen
        assert not_listed == {SAVING}
        assert all("of-00003" in name or name.startswith(".") for name in not_written)


def test_a_file_that_a_failed_save_wrote_late_is_removed_by_the_next(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another rank, say, that was still writing."""

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with run.pipe:
        with monkeypatch.context() as patch:
            patch.setattr(part, "save_file", full)
            with pytest.raises(ps.CheckpointError, match="No space left"):
                run.save(tmp_path)
        (tmp_path / "optimizer-000001-00002-of-00002.pt").write_text("late")
        run.save(tmp_path)
    check(tmp_path, {})


def test_a_list_that_is_none_is_no_reason_to_remove_anything(run: Run, tmp_path: Path) -> None:
    for content in ("{", '{"number": 1, "files": ["../precious.txt"]}'):
        (tmp_path / SAVING).write_text(content)
        with run.pipe, pytest.raises(ps.CheckpointError, match=r"not a list of|not in its folder"):
            run.save(tmp_path)


def test_only_names_of_saves_are_taken_over_from_an_index(run: Run, tmp_path: Path) -> None:
    """An index that was edited, to have a checksum of more files, does not hand them over."""
    with run.pipe:
        run.save(tmp_path)
        index = json.loads((tmp_path / INDEX).read_text())
        index["metadata"]["penstock"]["files"]["config.json"] = {"size": 2, "crc32": 0}
        (tmp_path / INDEX).write_text(json.dumps(index))
        put(tmp_path, mine := {"config.json": b"{}"})
        run.save(tmp_path)
    check(tmp_path, mine)


def test_a_folder_of_a_later_version_is_left_alone(run: Run, tmp_path: Path) -> None:
    with run.pipe:
        run.save(tmp_path)
        index = json.loads((tmp_path / INDEX).read_text())
        index["metadata"]["penstock"] = {"version": 2, "shards": []}
        (tmp_path / INDEX).write_text(json.dumps(index))
        before = {path.name for path in tmp_path.iterdir()}
        with pytest.raises(ps.CheckpointError, match="later version of Penstock, in format 2"):
            run.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == before


# -- what indexes name ------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["../outside/", "absolute", "sub/", "./"])
def test_indexes_of_checkpoints_name_files_of_their_folder(
    run: Run, tmp_path: Path, place: str
) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    with run.pipe:
        run.save(folder)
        (folder / "sub").mkdir()
        (folder / "training-000001.pt").rename(tmp_path / "training-000001.pt")
        for target in (outside, folder / "sub", folder):
            target.mkdir(exist_ok=True)
            (target / "training-000001.pt").write_bytes(
                (tmp_path / "training-000001.pt").read_bytes()
            )
        prefix = f"{outside}/" if place == "absolute" else place
        text = (folder / INDEX).read_text()
        (folder / INDEX).write_text(text.replace('"training-', f'"{prefix}training-'))
        with pytest.raises(ps.CheckpointError, match=r"training-000001.pt', which is not in its"):
            ps.load(folder)
        with pytest.raises(ps.CheckpointError, match="not in its folder"):
            run.save(folder)
    assert (outside / "training-000001.pt").exists()


def test_links_out_of_a_checkpoint_are_refused(run: Run, tmp_path: Path) -> None:
    with run.pipe:
        run.save(folder := tmp_path / "run")
    name = "random-000001.pt"
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(ps.CheckpointError, match=rf"{name} is a link to .*outside of the check"):
        ps.load(folder)
    (folder / name).unlink()
    (tmp_path / name).rename(folder / "moved")
    (folder / name).symlink_to("moved")
    ps.load(folder)


def weights_by_index(folder: Path, file: str, at: Path) -> tuple[nn.Module, Any]:
    """A model without weights, and a folder whose index says that they are in `file`."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    at.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(dict(model.state_dict()), at)
    index = {"weight_map": dict.fromkeys(model.state_dict(), file)}
    (folder / INDEX).write_text(json.dumps(index))
    with ps.empty_weights():
        empty = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    return empty, dict(model.state_dict())


def built(model: nn.Module, folder: Path) -> dict[str, torch.Tensor]:
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "num_microbatches": 2, "cuts": ["2"]}
    with ps.Pipeline(model, (torch.ones(4, 3),), weights=folder, **options, replicas=1) as pipe:
        return dict(pipe.state_dict())


@pytest.mark.parametrize("kind", ["up", "absolute", "link"])
def test_indexes_of_weights_name_files_of_their_folder(tmp_path: Path, kind: str) -> None:
    outside, folder = tmp_path / "outside.safetensors", tmp_path / "weights"
    names = {"up": "../outside.safetensors", "absolute": str(outside), "link": "w.safetensors"}
    empty, _ = weights_by_index(folder, names[kind], outside)
    if kind == "link":
        (folder / "w.safetensors").symlink_to(outside)
    with pytest.raises(ps.InputError, match="outside of its folder"):
        built(empty, folder)


@pytest.mark.parametrize("kind", ["below", "hub"])
def test_weights_in_folders_below_and_in_the_cache_of_the_hub(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "models--me--mine" / "snapshots" / "1f3c"
    at = folder / "parts/w.safetensors"
    if kind == "hub":
        at = tmp_path / "models--me--mine" / "blobs" / "ab12"
    empty, expected = weights_by_index(folder, "parts/w.safetensors", at)
    if kind == "hub":
        (folder / "parts").mkdir()
        (folder / "parts/w.safetensors").symlink_to(at)
    found = built(empty, folder)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"weight_map": {"a": 1}}'])
def test_an_index_of_weights_that_is_none(tmp_path: Path, content: str) -> None:
    empty, _ = weights_by_index(tmp_path, "w.safetensors", tmp_path / "w.safetensors")
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(ps.InputError, match="is not an index of weights"):
        built(empty, tmp_path)


# -- locks ------------------------------------------------------------------------------------


def test_a_file_system_without_locks(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(code: int) -> Callable[..., None]:
        def flock(*args: Any) -> None:
            raise OSError(code, os.strerror(code))

        return flock

    with run.pipe:
        monkeypatch.setattr(fcntl, "flock", refused(errno.EBADF))  # as NFS says
        with pytest.warns(UserWarning, match="file system without locks"):
            run.save(tmp_path)
        check(tmp_path, {})
        monkeypatch.setattr(fcntl, "flock", refused(errno.EIO))
        with pytest.raises(ps.CheckpointError, match="Input/output error"):
            run.save(tmp_path)
