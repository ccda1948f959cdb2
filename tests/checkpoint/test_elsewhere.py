"""Checkpoints are read without Penstock, by the lines of the docs and by transformers."""

from __future__ import annotations

import copy
import json
import re
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.nn import functional as F

import penstock as ps
from tests.support.models import cases, uniform_plan
from tests.workers.ranks.steps import X, small

DOCS = Path(ps.__file__).parents[1] / "docs" / "checkpoints.md"


def test_the_lines_of_the_docs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = ps.capture(model := small(), (X,))
    plan = uniform_plan(program, 2, 3)
    monkeypatch.chdir(tmp_path)
    with ps.Pipeline(model, (X,), program=program, plan=plan, devices=["cpu"] * 2) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01)
        pipe.train_step(X, target=X, loss_fn=F.mse_loss)
        optimizer.step()
        pipe.save("checkpoint", optimizer=optimizer)
        expected = optimizer.state_dict()
    (tmp_path / "checkpoint" / "model-000009-00001-of-00001.safetensors").write_text("killed")
    *_, lines = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    plain = small()
    for parameter in plain.parameters():
        parameter.detach().zero_()
    other = torch.optim.AdamW(plain.parameters(), lr=0.01)
    known = {"model": plain, "optimizer": other, "torch": torch, "Path": Path, "json": json}
    exec(lines, {**known, "safetensors": safetensors})
    for name, value in model.state_dict().items():
        assert torch.equal(plain.state_dict()[name], value), name
    found = other.state_dict()
    assert found["state"].keys() == expected["state"].keys()
    for number, values in expected["state"].items():
        for key, value in values.items():
            assert torch.equal(found["state"][number][key], value), (number, key)


def test_transformers(tmp_path: Path) -> None:
    case = cases()["gpt2"]
    model = case.model()
    program = ps.capture(model, case.args, case.kwargs)
    plan = uniform_plan(program, 2, 3)
    options = {"program": program, "plan": plan, "devices": ["cpu"] * 2}
    with ps.Pipeline(model, case.args, case.kwargs, **options, replicas=1) as pipe:  # type: ignore[arg-type]
        model.config.save_pretrained(tmp_path)  # stays where it is
        model.generation_config.save_pretrained(tmp_path)
        pipe.save(tmp_path)
    expected = copy.deepcopy(model.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = type(model).from_pretrained(tmp_path)
    assert list(found.state_dict()) == list(expected)
    for name, value in found.state_dict().items():
        assert torch.equal(value, expected[name]), name
