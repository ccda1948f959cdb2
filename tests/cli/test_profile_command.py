"""`penstock profile`: what was measured, on stdout; the file; the cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from torch import nn

import penstock as ps
from penstock.cli import main
from penstock.profile import measure
from penstock.profile.timing import Timing
from tests.support.models import mlp

HERE = "tests.cli.test_profile_command"


def small() -> nn.Module:
    """A model that the command is given."""
    return mlp(4, 4, 4)


class Remembering(nn.Module):
    """Returns a part that is a state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.layer(x)
        return state.tanh(), state


def remembering() -> nn.Module:
    """A model with a state."""
    return Remembering()


def long() -> nn.Module:
    """More calls than the table shows."""
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(25)))


def run(*arguments: str, model: str = "small") -> Result:
    fixed = ("--devices", "cpu,cpu", "--microbatches", "1")
    given = ("profile", f"{HERE}:{model}", "--input", "6x4", *fixed, *arguments)
    return CliRunner().invoke(main, list(given))


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "halving_seconds", lambda _: 0.0)  # nothing is too small
    result = run("--calls")
    assert result.exit_code == 0, result.output
    heading, first, second, third, total, blank, *notes = result.stdout.splitlines()
    assert heading.split() == "call what forward backward put off share holds weights".split()
    assert [line.split()[:2] for line in (first, second, third)] == [
        ["0", "0"],
        ["1", "1"],
        ["2", "2"],
    ]
    assert first.split()[-4:] == ["96", "B", "80", "B"]  # holds six rows of its input
    assert total.split()[0] == "total"
    assert total.split()[-5:] == ["100.0%", "192", "B", "160", "B"]
    assert blank == ""
    assert notes[0] == "6 rows on cpu; measured at 6 rows"
    assert notes[1].startswith("confidence: ")
    assert notes[2].startswith("link cpu>cpu: ")
    assert notes[2].endswith(" us, by reference")
    assert notes[3].startswith("overhead: ")
    assert "profiling 6 rows" in result.stderr


def test_forwards_alone() -> None:
    result = run("--calls", "--inference", "--states", "1", model="remembering")
    assert result.exit_code == 0, result.output
    heading, *lines = result.stdout.splitlines()
    assert heading.split() == "call what forward share states weights".split()
    total = next(line for line in lines if line.split()[:1] == ["total"])
    assert total.split()[-4:] == ["96", "B", "80", "B"]  # six rows of four numbers
    assert not run("--inference").stdout.count("backward")
    refused = run("--states", "1", model="remembering")
    assert "give --inference as well" in refused.stderr
    refused = run("--inference", "--states", "other", model="remembering")
    assert "the result for the example has no part 'other'" in refused.stderr


def test_the_heaviest_calls_first_and_the_others_together() -> None:
    lines = run(model="long").stdout.splitlines()
    blank = lines.index("")
    assert blank == 1 + 20 + 2
    assert lines[21].split()[:2] == ["(5", "others)"]
    shares = [float(line.split("%")[0].split()[-1]) for line in lines[1:21]]
    assert shares == sorted(shares, reverse=True)
    every = run("--calls", model="long").stdout.splitlines()
    told = [line for line in every if not line.startswith(("halves: ", "adding: "))]  # if any
    assert len(told) == 1 + 25 + 1 + 7
    assert [line for line in told if line.startswith("contention: ")]


def test_as_json_and_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "new" / "profile.json"
    result = run("--json", "--output", str(path))
    data = json.loads(result.stdout)
    assert data["labels"] == ["0", "1", "2"]
    assert data["links"].keys() == {"cpu>cpu"}
    assert data["overhead_seconds"] > 0
    assert f"wrote {path}" in result.stderr
    assert ps.Profile.load(path).labels == ("0", "1", "2")


def test_what_was_measured_before_is_not_measured_again() -> None:
    told = "measured before; --no-cache measures again"
    assert told not in run().stderr
    again = run()
    assert told in again.stderr
    assert "profiling" not in again.stderr
    assert told not in run("--no-cache").stderr
    assert told not in run("--seconds", "3").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--microbatches", "7"), "num_microbatches=7, but the batch has 6 rows"),
        (("--microbatches", "few"), "--microbatches 'few' is neither a number"),
        (("--devices", "tpu"), "'tpu' is not a device"),
        (("--seconds", "-1"), "-1"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_what_halves_cost_is_told_where_there_are_any(monkeypatch: pytest.MonkeyPatch) -> None:
    def halving(_: object, timings: dict[int, list[Timing]], *__: object) -> list[float]:
        """A tenth for the smallest micro-batch, a twentieth for the others."""
        totals = [measure._total(passes) for passes in timings.values()]
        return [total * (0.1 if k == 0 else 0.05) for k, total in enumerate(totals)]

    monkeypatch.setattr(measure, "_halving", halving)
    monkeypatch.setattr(measure, "halving_seconds", lambda _: 1.0)  # no half is worth it
    told = run("--no-cache").stdout.splitlines()
    assert not any(line.startswith("halves: ") for line in told)
    monkeypatch.setattr(measure, "halving_seconds", lambda _: 0.0)  # every one is
    told = run("--no-cache", "--microbatches", "auto").stdout.splitlines()
    assert told[-1] == (
        "halves: a micro-batch takes 10.0% (rows: 1) to 5.0% (rows: 6) longer with backwards in "
        "halves"
    )
