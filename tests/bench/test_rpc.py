"""A master and two workers: what is measured, its limit, and what is said and drawn of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from penstock.bench.rpc import RpcSettings, run_rpc
from penstock.bench.rpc_report import ALONE, PLAIN, STEPPED, TUTORIAL, RpcReport
from penstock.bench.turns import Contestant
from tests.bench.test_bench import png_size
from tests.support.pool import pooled

COUNTS = (1, 2, 4)


def small() -> nn.Sequential:
    """From images of 4x4 to a thousand classes, the same every time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(1), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 1000))


def halves() -> list[nn.Module]:
    model = small()
    return [model[:2], model[2:]]


def measured(way: str, times: dict[int, list[float]]) -> list[Contestant]:
    found = []
    for count, seconds in times.items():
        facts = {"way": way, "num_microbatches": count}
        found.append(Contestant(f"{way}, m={count}", lambda: 0.0, facts, seconds=seconds))
    return found


def test_limits_and_speed_ups() -> None:
    tutorial = measured(TUTORIAL, {2: [6.0, 8.0], 1: [7.0, 9.0], 8: [5.0, 5.0]})
    ours = measured(PLAIN, {1: [4.0, 4.0], 2: [3.0, 4.0], 8: [2.0, 3.0]})
    alone = measured(ALONE, {1: [8.0, 8.0], 2: [6.0, 8.0, 9.0], 8: [4.0, 8.0]})
    report = RpcReport({}, {"cores": 2}, [*alone, *tutorial, *ours])
    theirs, mine = report.lines
    assert theirs.counts == [1, 2, 8]
    assert report.limits == pytest.approx({1: 8.0, 2: 8 * 3 / 4, 8: 6 * 9 / 16})
    assert [report.share(c) for c in mine.contestants] == pytest.approx([2.0, 6 / 3.5, 1.35])
    assert [report.speed_up(c) for c in mine.contestants] == [2.0, 2.0, 2.0]
    rows = report.to_dict()["B1_B2"]
    assert [(row["name"], row["limit"], row["speed_up"]) for row in rows[3:5]] == [
        (f"{PLAIN}, m=1", 8.0, 2.0),
        (f"{PLAIN}, m=2", 6.0, 2.0),
    ]
    assert [row["median"] for row in report.to_dict()["one_device"]] == [8.0, 8.0, 6.0]
    assert rows[0]["standard_deviation"] == pytest.approx(2**0.5)
    text = str(report)
    assert "(m + 1) / 2m" in text
    assert "cores 2" in text


@pytest.mark.slow
def test_both_experiments_end_to_end(tmp_path: Path) -> None:
    settings = RpcSettings(
        rows=8,
        image=4,
        counts=COUNTS,
        batches=2,
        repeats=2,
        output=tmp_path / "new",
        stages=halves,
        model=small,
    )
    said: list[str] = []
    with pooled():
        report = run_rpc(settings, talk=said.append)
    assert [line.way for line in report.lines] == [TUTORIAL, PLAIN, STEPPED]
    assert all(line.counts == list(COUNTS) for line in report.lines)
    data = json.loads((tmp_path / "new" / "rpc.json").read_text())
    assert data == json.loads(json.dumps(report.to_dict()))
    rows = {(row["way"], row["num_microbatches"]): row for row in data["B1_B2"]}
    assert all(len(row["seconds"]) == 2 for row in rows.values())
    # Everybody starts from the same weights, and each of Penstock's pairs does so once.
    first = rows[TUTORIAL, 1]["first_loss"]
    for count in COUNTS:
        assert rows[PLAIN, count]["first_loss"] == pytest.approx(first, rel=1e-5)
    assert rows[STEPPED, 1]["first_loss"] < first  # the plain style has made a step before it
    width, height = png_size(tmp_path / "new" / "rpc.png")
    assert 900 < width < 1400
    assert 400 < height < 800
    assert len(data["one_device"]) == len(COUNTS)
    assert "4 contestants each, 2 rounds" in said[0]
