"""The experiments, end to end on a small model."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from penstock.bench.experiments import BenchSettings, run_bench, run_toy
from tests.models import mlp

PNG = b"\x89PNG\r\n\x1a\n"


def test_everything_is_measured_and_drawn(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    settings = BenchSettings(
        model="an MLP", given=(mlp(8, 8, 8), (torch.randn(12, 8),), {}), quick=True, output=tmp_path
    )
    report = run_bench(settings, lambda *a: told.append(a))
    data = json.loads((tmp_path / "bench.json").read_text())
    assert data == json.loads(json.dumps(report.to_dict()))
    names = [row["name"] for row in data["A2_A3"]]
    assert names[:4] == [
        "one device",
        "one device, micro-batches",
        "one process, all cores",
        "devices in turn",
    ]
    assert names[4:] == ["pipelined, pieces of 2", "Penstock"]
    assert all(len(row["seconds"]) == 3 for row in data["A2_A3"] + data["A4"])
    assert [row["microbatch_size"] for row in data["A4"][:-1]] == [1, 2, 3, 4, 6, 12]
    assert data["A4"][-1]["name"] == "Penstock's choice"
    fastest = min(row["median"] for row in data["A4"][:-1])
    chosen = data["A4"][-1]["median"]
    assert data["auto_excess_over_best"] == chosen / fastest - 1
    assert data["machine"]["cores"] >= 1
    assert data["A1"]["exact"] is True
    assert told[-1][0] <= told[-1][1]
    for name in ("bars.png", "sweep.png"):
        content = (tmp_path / name).read_bytes()
        assert content.startswith(PNG)
        assert len(content) > 10_000
    text = str(report)
    assert "speed-up" in text
    assert "Penstock chose" in text


def test_the_toy_is_exact() -> None:
    assert run_toy(("cpu", "cpu"), steps=3)["exact"]
