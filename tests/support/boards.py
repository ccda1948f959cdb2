"""Boards of a test's own: pipelines of other processes are not seen."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def boards(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder where they are; it is made with the first."""
    for name in ("run", "tmp"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path / "run" / "penstock"
