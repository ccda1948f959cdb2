"""The commits that pages and data name exist, so that anybody can look at what was run."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
DATA = sorted((ROOT / "docs").rglob("*.json"))
_NAMED = re.compile(r"\bcommits?\b[^.:;|]*")
_COMMIT = re.compile(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,40}\b")
_FIELD = re.compile(r'"commit": "([0-9a-f]{7,40})')


def _git(*words: str) -> str:
    ran = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return ran.stdout.strip() if ran.returncode == 0 else ""


@cache
def known() -> list[str]:
    """All commits that led to this one; none without git, or without its history."""
    is_whole = _git("rev-parse", "--is-shallow-repository") == "false"
    return _git("rev-list", "HEAD").split() if is_whole else []


def unknown(names: set[str]) -> list[str]:
    return sorted(name for name in names if not any(c.startswith(name) for c in known()))


@pytest.mark.parametrize("path", [*PAGES, *DATA], ids=lambda path: str(path.relative_to(ROOT)))
def test_commits_that_are_named_exist(path: Path) -> None:
    if not known():
        pytest.skip("git and the whole history are needed")
    text = path.read_text()
    if path.suffix == ".json":
        named = set(_FIELD.findall(text))
    else:
        words = (" ".join(said.split()) for said in _NAMED.findall(text))
        named = {name for said in words for name in _COMMIT.findall(said)}
    assert unknown(named) == []


def test_what_is_no_commit_is_found() -> None:
    said = _NAMED.findall("Run (at commits 0123abc and\n9e8d7c6b), then")
    assert [_COMMIT.findall(each) for each in said] == [["0123abc", "9e8d7c6b"]]
    if known():
        assert unknown({known()[-1][:9], "0123abc0123abc"}) == ["0123abc0123abc"]
