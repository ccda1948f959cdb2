"""Runs that are killed end with the same bits; 50 of them where there is time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.storage.folder import INDEX
from tests.resume.killing import differing, is_torn

ROOT = Path(__file__).parents[2]


def resume(runs: int) -> str:
    """Run the command, in a process that has never computed anything, and so may fork."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH')}"}
    command = [sys.executable, "-m", "tests.resume", "--runs", str(runs)]
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


def test_two_runs() -> None:
    assert "2 of 2 runs were right" in resume(2)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_fifty_runs() -> None:
    assert "50 of 50 runs were right" in resume(50)
