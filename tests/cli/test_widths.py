"""What commands print is no wider than the terminal, and progress says nothing twice."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from rich.console import Console
from torch import nn

from penstock.cli import main
from penstock.display import progress
from penstock.display.tables import aligned
from tests.cli.test_simulate_command import COSTS, PLAN

MODEL = ["tests.cli.test_widths:named_at_length", "--input", "6x4"]
TWO = ["--devices", "cpu,cpu", "--microbatches", "2"]
SWEEP = ["--workers", "1,2,64", "--schedule", "1f1b,interleaved", "--bandwidth", "1GB/s,25GB/s"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.projection_of_the_attention = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.projection_of_the_attention(x).relu_()


def named_at_length() -> nn.Module:
    """A model whose names do not fit."""
    model = nn.Sequential()
    for number in range(3):
        model.add_module(f"layers_of_the_encoder_{number}", nn.Sequential(Block(), nn.Dropout()))
    return model


def tables(monkeypatch: pytest.MonkeyPatch, columns: int | None, *arguments: str) -> list[str]:
    """The lines of what a command prints that are of tables: they have gaps."""
    if columns is not None:
        monkeypatch.setenv("COLUMNS", str(columns))
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == 0, result.output
    return [line for line in result.stdout.splitlines() if "  " in line or ", " not in line]


@pytest.mark.parametrize("columns", [80, 200])
@pytest.mark.parametrize(
    "command",
    [
        ["plan", *MODEL, *TWO, "--no-output"],
        ["profile", *MODEL, *TWO, "--seconds", "0"],
        ["inspect", *MODEL, "--no-time"],
        ["inspect", *MODEL, "--no-time", "--calls"],
        ["simulate", "plan.json"],
        ["simulate", "plan.json", *SWEEP],
        ["simulate", "plan.json", *SWEEP, "--latency", "10us,1ms"],
    ],
    ids=lambda command: " ".join(word for word in command if word.islower() and "." not in word),
)
def test_tables_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, columns: int, command: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    PLAN.save("plan.json")
    COSTS.save("plan.profile.json")
    lines = tables(monkeypatch, columns, *command)
    assert lines
    assert [line for line in lines if len(line) > columns] == []


def test_what_all_predictions_share_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    PLAN.save("plan.json")
    COSTS.save("plan.profile.json")
    whole = tables(monkeypatch, None, "simulate", "plan.json")
    monkeypatch.setenv("COLUMNS", "80")
    common, _, heading, line = (
        CliRunner().invoke(main, ["simulate", "plan.json"]).stdout.splitlines()
    )
    assert common == "schedule 1f1b, workers 2, stages 2, micro-batches 4, batch 16"
    assert whole[0].endswith(heading.strip())
    assert whole[1].split() == re.findall(r"\S+(?=,|$)", common) + line.split()


CELLS = [
    ("name", "what it is", "micro-batches", "a"),
    ("a_long_name_that_ends_with_one", "some words, and more of them than fit", "12", "3"),
    ("short", "", "1", ""),
]


def test_a_narrow_table_loses_nothing_but_the_middle_of_names() -> None:
    assert aligned(CELLS, (0, 1), 54) == [
        "name                      what it is        micro-  a",
        "                                           batches",
        "a_long_name_…ds_with_one  some words, and       12  3",
        "                          more of them",
        "                          than fit",
        "short                                            1",
    ]


def test_columns_that_do_not_fit_stand_below() -> None:
    numbers = [("key", *"abcdef"), *((f"row{k}", *["12345678"] * 6) for k in range(2))]
    lines = aligned(numbers, width=30)
    assert max(map(len, lines)) <= 30
    assert [line.split() for line in lines[:3]] == [
        ["key", "a", "b"],
        ["row0", "12345678", "12345678"],
        ["row1", "12345678", "12345678"],
    ]
    assert [line.split()[:1] for line in lines] == [["key"], ["row0"], ["row1"], []] * 2 + [
        ["key"],
        ["row0"],
        ["row1"],
    ]


def test_a_table_that_fits_is_as_ever() -> None:
    assert aligned(CELLS, (0, 1), 200) == aligned(CELLS, (0, 1))


def test_a_log_is_told_once_of_a_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    log = io.StringIO()
    with progress.callback("starting", Console(file=log)) as say:
        for turn in range(3):
            for what in ("measuring gpipe", "measuring 1f1b"):
                say(turn, 3, what)
    assert log.getvalue().splitlines() == ["0/3  measuring gpipe", "0/3  measuring 1f1b"]
