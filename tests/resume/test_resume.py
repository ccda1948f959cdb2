"""Runs that are killed end with the same bits; 50 of them where there is time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.storage.folder import INDEX
from tests.resume import killing
from tests.resume.killing import Watch, differing, is_torn

ROOT = Path(__file__).parents[2]


def resume(runs: int, seed: int = 0) -> str:
    """Run the command, in a process that has never computed anything, and so may fork."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH')}"}
    command = [sys.executable, "-m", "tests.resume", "--runs", str(runs), "--seed", str(seed)]
    found = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_what_differs_is_seen(tmp_path: Path) -> None:
    assert differing(tmp_path / "end.pt", {}) == ["it has not come to its end"]
    torch.save({"losses": [1.0], "model": {}}, tmp_path / "end.pt")
    assert differing(tmp_path / "end.pt", {"losses": [1.1], "model": {}}) == ["losses differ"]
    folder = tmp_path / "run"
    assert not is_torn(folder)
    folder.mkdir()
    (folder / INDEX).write_text('{"weight_map": {"a": "model-1"}}')
    (folder / "model-1").write_text("")
    assert not is_torn(folder)
    (folder / "model-2").write_text("")
    assert is_torn(folder)


def test_a_run_that_nobody_killed_is_not_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However right its end is; another moment is tried before."""
    tries = []

    class Unhurt(Watch):
        """Comes to its end, as nobody does anything."""

        def __init__(self, folder: Path, *rest: Any) -> None:
            self.killed, self.code, self.resumed = False, 0, []
            torch.save({"losses": [1.0]}, folder / "end.pt")

        def until_the_end(self, *rest: Any) -> None:
            tries.append(rest)

    monkeypatch.setattr(killing, "Watch", Unhurt)
    outcome = killing.run("threads", "any", 0, {"losses": [1.0]}, tmp_path)
    assert outcome.problems == ["nobody killed it, in 5 tries"]
    assert len({moment for _, _, moment in tries}) > 1
    assert len(tries) == 5


def test_two_runs() -> None:
    assert "2 of 2 runs were right" in resume(2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 3, 6, 9])
def test_many_runs(seed: int) -> None:
    assert "12 of 12 runs were right" in resume(12, seed)
