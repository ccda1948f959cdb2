"""The command line: data on stdout, talk on stderr, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.cli import main
from tests.models import mlp


def small() -> object:
    """A model that the commands are given."""
    return mlp(4, 4, 4)


SMALL = ["tests.cli.test_cli:small", "--input", "6x4"]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def test_inspect() -> None:
    result = run("inspect", *SMALL)
    assert result.exit_code == 0, result.output
    assert "float32[Bx4]" in result.stdout
    assert "Sequential: 3 calls" in result.stdout
    assert "captured in" in result.stderr
    assert "captured in" not in result.stdout


def test_inspect_as_json() -> None:
    data = json.loads(run("inspect", *SMALL, "--json").stdout)
    assert [row["label"] for row in data["rows"]] == ["0", "1", "2"]
    assert data["batch_size"] == 6
    assert data["closed"] == {}


def example() -> tuple[object, ...]:
    """Arguments, as --example wants them."""
    import torch

    return (torch.zeros(5, 4),), {}


def test_an_example_from_a_function() -> None:
    result = run("inspect", SMALL[0], "--example", "tests.cli.test_cli:example", "--json")
    assert json.loads(result.stdout)["batch_size"] == 5


def test_plan_writes_a_file(tmp_path: Path) -> None:
    import penstock as ps

    path = tmp_path / "plan.json"
    result = run("plan", *SMALL, "--devices", "cpu,cpu", "--output", str(path), "--json")
    assert result.exit_code == 0, result.output
    assert len(ps.Plan.load(path).stages) == 2
    assert json.loads(result.stdout)["schedule"] == ps.Plan.load(path).schedule


def test_verify() -> None:
    result = run("verify", *SMALL, "--microbatches", "3", "--devices", "cpu,cpu,cpu")
    assert result.exit_code == 0, result.output
    assert "Sequential in 3 stages, 3 micro-batches" in result.stdout
    assert "exact" in result.stdout
    assert "taking the mean of the squares" in result.stderr


def unstable() -> object:
    """A model that no split can reproduce."""
    from torch import nn

    from tests.test_exactness import Counting

    return nn.Sequential(nn.Linear(4, 4), Counting(), nn.Linear(4, 4))


def test_verify_that_fails() -> None:
    result = run("verify", "tests.cli.test_cli:unstable", "--input", "6x4", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["ok"] is False


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["inspect", "nowhere", "--input", "2x2"], 2, "write package.module:callable"),
        (["inspect", SMALL[0]], 2, "needs an example"),
        (["inspect", SMALL[0], "--input", "2xx"], 2, "is no input"),
        (["plan", *SMALL, "--devices", "cpu,tpu"], 2, "'tpu' is not a device"),
        (["plan", *SMALL, "--schedule", "best"], 2, "choose naive, gpipe"),
        (["plan", *SMALL, "--microbatches", "many"], 2, "neither a number"),
        (["plan", *SMALL, "--devices", "cpu,cpu,cpu,cpu"], 1, "3 at most"),
        (["inspect"], 2, "Missing argument"),
        (["inspectt"], 2, "No such command"),
    ],
)
def test_mistakes(arguments: list[str], code: int, words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert words in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_as_a_program() -> None:
    command = Path(sys.executable).with_name("penstock")
    shown = subprocess.run([command, "--help"], capture_output=True, text=True, check=True)
    assert "inspect" in shown.stdout
    arguments = [command, "inspect", "torch.nn:Identity", "--input", "2x2"]
    result = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout + result.stderr
