"""The benchmark of what the planner predicts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

import penstock as ps
from penstock.bench.truth import is_same, predicted, trainer


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble-v", "fitted"])
@pytest.mark.parametrize("count", [2, 3])
def test_a_plan_is_predicted_again_by_its_own_profile_as_before(schedule: str, count: int) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    program = ps.capture(model, (torch.randn(6, 8),))
    costs = ps.profile(program, devices=["cpu", "cpu"], num_microbatches=count, seconds=0.1)
    plan = ps.plan(costs, num_microbatches=count, schedule=schedule, replicas=1)
    assert predicted(plan, costs) == plan.predicted_step_seconds
    assert is_same(plan, ps.plan(costs, num_microbatches=count, schedule=schedule, replicas=1))
    assert not is_same(plan, ps.plan(costs, num_microbatches=count, schedule="gpipe", replicas=1))
    alone = ps.plan(costs, num_microbatches=count, schedule=plan.schedule, replicas=1)
    assert is_same(plan, msgspec.structs.replace(alone, considered=()))


@pytest.mark.slow
def test_turns_and_both_errors_are_written(tmp_path: Path) -> None:
    path = tmp_path / "truth.json"
    command = [sys.executable, "-m", "penstock.bench", "truth"]
    command += ["--models", "mlp", "--counts", "2", "--schedules", "1f1b", "--turns", "2"]
    command += ["--json", str(path)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    (result,) = json.loads(path.read_text())["results"]
    (row,) = result["plans"]
    assert len(row["turns"]) == 2
    assert all(turn["steps"] for turn in row["turns"])
    assert row["before"] == row["before_seconds"] / row["measured_seconds"] - 1
    measured = [row["measured_seconds"] for row in (result["chosen"], *result["fastest"])]
    assert result["chosen_over_best"] == measured[0] / min(measured) - 1
    assert "profiled in the same turn: 1 errors" in done.stdout
    assert "profiled before: 1 errors" in done.stdout


def test_a_trainer_that_ends_is_an_error_that_names_its_plan() -> None:
    program = ps.capture(nn.Linear(2, 2), (torch.randn(4, 2),))
    costs = ps.profile(program, devices=["cpu"], num_microbatches=2, seconds=0.1)
    plan = ps.plan(costs, num_microbatches=2, schedule="gpipe", replicas=1)
    with pytest.raises(RuntimeError, match=r"(?s)the trainer of gpipe, m=2: 'start' failed.*Plan"):
        trainer("mlp", plan)  # it is not of that model
