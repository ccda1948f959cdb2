"""`penstock init`: what it writes, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.cli import main

SCRIPT = """\
import torch

model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for x, y in loader:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
"""


def init(*args: object) -> Result:
    return CliRunner().invoke(main, ["init", *map(str, args)])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def test_writes_a_copy_beside_the_script_and_prints_the_diff(script: Path) -> None:
    result = init(script, "--devices", "cpu,cpu", "--microbatches", 2)
    assert result.exit_code == 0, result.stderr
    changed = script.with_name("train_penstock.py").read_text()
    assert 'ps.Pipeline(model, (x,), devices=["cpu", "cpu"], num_microbatches=2)' in changed
    assert script.read_text() == SCRIPT
    before, after = (
        [line[1:] for line in result.stdout.splitlines()[2:] if line[:1] in f"{sign} "]
        for sign in "-+"
    )
    assert set(before) - {"@"} <= set(SCRIPT.splitlines())
    assert set(after) <= set(changed.splitlines())
    assert "line 8" in result.stderr or "line 7" in result.stderr


def test_does_not_overwrite_unless_it_is_told_to(script: Path) -> None:
    other = script.with_name("train_penstock.py")
    other.write_text("mine\n")
    refused = init(script)
    assert refused.exit_code == 2
    assert "--force" in refused.stderr
    assert other.read_text() == "mine\n"
    assert init(script, "--force").exit_code == 0
    assert "train_step" in other.read_text()
    itself = init(script, "--output", script, "--force")
    assert itself.exit_code == 2
    assert script.read_text() == SCRIPT


def test_a_diff_alone_writes_nothing(script: Path) -> None:
    result = init(script, "--diff")
    assert result.exit_code == 0
    assert result.stdout.startswith("--- ")
    assert [path.name for path in script.parent.iterdir()] == ["train.py"]


def test_data(script: Path) -> None:
    data = json.loads(init(script, "--diff", "--json").stdout)
    assert data["style"] == "train_step"
    assert data["output"] is None
    assert {note["kind"] for note in data["notes"]} <= {"changed", "left", "check"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("x = (\n", "1"),
        ("print('nothing')\n", "no call of backward"),
        ("import penstock\n", "already"),
        ("from accelerate import Accelerator\n", "frameworks.md"),
        (SCRIPT.replace("model", "self.model"), "self.model"),
        ("", "no call of backward"),
    ],
)
def test_what_cannot_be_changed_is_said(script: Path, content: str, said: str) -> None:
    script.write_text(content)
    result = init(script)
    assert result.exit_code == 2
    assert said in result.stderr
    assert [path.name for path in script.parent.iterdir()] == ["train.py"]


def test_encodings_and_line_ends_stay(script: Path) -> None:
    text = "# -*- coding: latin-1 -*-\n" + SCRIPT.replace("model(x), y)", "model(x), y)  # Größe")
    script.write_bytes(text.replace("\n", "\r\n").encode("latin-1"))
    assert init(script).exit_code == 0
    changed = script.with_name("train_penstock.py").read_bytes()
    assert "Größe".encode("latin-1") in changed
    assert changed.count(b"\n") == changed.count(b"\r\n")


def test_files_that_are_none(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.py", tmp_path, tmp_path / "a.ipynb"):
        result = init(path)
        assert result.exit_code == 2
        assert str(path) in result.stderr
