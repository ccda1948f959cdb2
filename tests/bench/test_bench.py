"""The experiments, end to end on small models."""

from __future__ import annotations

import copy
import json
import struct
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.bench.charts import save_bars, save_sweep
from penstock.bench.contestants import Field, Task
from penstock.bench.experiments import BenchSettings, run_bench, thinned
from penstock.bench.record import machine
from penstock.bench.toy import run_toy
from penstock.bench.turns import Contestant, measure, take_turns, timed, warm_up
from penstock.units import show_seconds
from tests.support.models import mlp

TWO = ("cpu", "cpu")


def png_size(path: Path) -> tuple[int, int]:
    """Width and height, from the header of a PNG file."""
    header = path.read_bytes()[:24]
    assert header.startswith(b"\x89PNG\r\n\x1a\n"), f"{path} is no PNG file"
    width, height = struct.unpack(">II", header[16:24])
    return width, height


def field(model: nn.Module, *inputs: torch.Tensor, stack: ExitStack) -> Field:
    return Field(Task.given(model, inputs, {}), TWO, stack)


# -- end to end -------------------------------------------------------------------------------


def test_everything_is_measured_drawn_and_said(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []
    said: list[str] = []
    given = (mlp(8, 8, 8), (torch.randn(12, 8),), {})
    settings = BenchSettings(model="an MLP", given=given, quick=True, output=tmp_path / "new")
    report = run_bench(settings, lambda *a: told.append(a), said.append)
    data = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert data == json.loads(json.dumps(report.to_dict()))

    assert [row["name"] for row in data["A2_A3"]] == [
        "one device",
        "one device, micro-batches",
        "one process, all cores",
        "2 devices, in turn",
        "2 devices, pieces of 2",
        "2 devices, Penstock's choice",
    ]
    assert [row["microbatch_size"] for row in data["A4"][:-1]] == [1, 2, 3, 4, 6]
    assert data["A4"][-1]["name"] == "Penstock's choice"
    assert data["A4"][-1]["num_microbatches"] == data["A2_A3"][-1]["num_microbatches"]
    rows = data["A2_A3"] + data["A4"]
    assert {len(row["seconds"]) for row in rows} == {data["settings"]["repeats"]}
    assert all(row["standard_deviation"] > 0 for row in rows)
    assert data["A2_A3"][3]["schedule"] == "naive"
    assert data["A2_A3"][3]["num_microbatches"] == 1

    fastest = min(row["median"] for row in data["A4"][:-1])
    assert data["auto_excess_over_best"] == data["A4"][-1]["median"] / fastest - 1
    pipelines = [row for row in rows if "schedule" in row]
    assert len(pipelines) == 9
    for row in pipelines:
        share = 100 * row["bound_seconds"] / row["median_train_step_seconds"]
        assert row["percent_of_bound"] == pytest.approx(share)
        assert len(row["train_step_seconds"]) == data["settings"]["repeats"]
        assert row["predicted_seconds"] > 0
        assert row["median_train_step_seconds"] <= row["median"]

    assert data["machine"]["cores"] >= 1
    assert data["machine"]["threads"] == torch.get_num_threads()
    assert "keeps freed memory" in data["settings"]["allocator"]
    assert said[0].startswith("allocator: ")
    assert "14 contestants" not in said[1]
    assert "12 contestants" in said[1]
    assert data["A1"]["exact"] is True
    assert all(done <= total for done, total, _ in told)
    assert told[-1][0] == told[-1][1] - 1

    for name in ("bars.png", "sweep.png"):
        width, height = png_size(tmp_path / "new" / name)
        assert 900 < width < 1400
        assert 400 < height < 800
    text = str(report)
    for words in ("speed-up", "of bound", "predicted", "Penstock chose", "the same bits"):
        assert words in text


def test_the_tutorial_is_resnet_50_with_its_own_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.bench.contestants.load_model", lambda name: Small())
    task = Task.tutorial(6)
    assert task.args[0].shape == (6, 3, 128, 128)
    assert task.target is not None
    assert task.target.shape == (6, 1000)
    assert torch.equal(task.target.sum(1), torch.ones(6))
    assert task.loss_fn is nn.functional.mse_loss
    with ExitStack() as stack:
        chosen = Field(task, TWO, stack).plan_in_turn()
    assert chosen.stages[0].last == "layer2"
    assert chosen.stages[1].first == "layer3"
    assert chosen.schedule == "naive"


class Small(nn.Module):
    """Has the names of ResNet's parts, and its inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Conv2d(3, 2, 7, stride=16)
        self.layer2 = nn.ReLU()
        self.layer3 = nn.Flatten()
        self.fc = nn.Linear(128, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.fc(self.layer3(self.layer2(self.layer1(x))))
        return result


def test_one_device_is_no_pipeline() -> None:
    with pytest.raises(ps.InputError, match="two devices"):
        run_bench(BenchSettings(devices=("cpu",), output=None))


# -- contestants ------------------------------------------------------------------------------


def test_the_same_work_is_done_split_and_unsplit() -> None:
    """A step of one device in micro-batches leaves the weights of a step of the pipeline."""
    torch.set_num_threads(1)
    models = [mlp(6, 6, 6)]
    models.append(copy.deepcopy(models[0]))
    x = torch.randn(10, 6)
    with ExitStack() as stack:
        alone = field(models[0], x, stack=stack).one_device("one", num_microbatches=3)
        other = field(models[1], x, stack=stack)
        pipeline = other.pipeline("two", other.plan(3))
        before = copy.deepcopy(models[0].state_dict())
        alone.step()
        pipeline.step()
    after = [m.state_dict() for m in models]
    for name, value in before.items():
        assert not torch.equal(value, after[0][name])
        assert torch.equal(after[0][name], after[1][name])


def test_contestants_have_the_threads_that_they_say() -> None:
    seen: dict[str, int] = {}

    class Watch(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen["threads"] = torch.get_num_threads()
            return x * 1.0

    with ExitStack() as stack:
        made = field(nn.Sequential(nn.Linear(4, 4), Watch()), torch.randn(6, 4), stack=stack)
        for contestant in (made.one_device("one"), made.all_cores("all")):
            contestant.step()
            assert seen["threads"] == contestant.facts["threads"], contestant.name
    assert made.threads == max(1, machine()["cores"] // 2)


def test_sizes_that_the_model_refuses_are_left_out() -> None:
    """BatchNorm wants two values per channel in training."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    given = (model, (torch.randn(10, 4),), {})
    report = run_bench(BenchSettings(given=given, quick=True, output=None))
    assert [c.facts["microbatch_size"] for c in report.sweep[:-1]] == [2, 3, 5]


# -- measuring ----------------------------------------------------------------------------


def test_contestants_take_turns_after_a_step_that_does_not_count() -> None:
    order: list[str] = []
    told: list[str] = []
    both = [Contestant(name, timed(lambda name=name: order.append(name))) for name in "ab"]
    warm_up(both, told.append)
    assert order == ["a", "b"]
    assert not both[0].seconds
    measure(both, 8, 3, told.append)
    rounds = [told[2 * k : 2 * k + 2] for k in range(1, 9)]
    assert {*map("".join, rounds)} == {"ab", "ba"}  # each of them goes first at times
    assert order[2:] == [name for name in told[2:] for _ in range(3)]
    assert len(both[0].seconds) == 8


def test_the_order_of_turns_is_drawn_anew_for_every_round() -> None:
    def order(seed: int) -> list[str]:
        noted: list[str] = []
        four = [Contestant(n, timed(lambda n=n: noted.append(n))) for n in "abcd"]
        found = take_turns(four, 8, warm_up=2, seed=seed)
        assert [len(seconds) for seconds in found] == [8] * 4
        return ["".join(noted[k : k + 4]) for k in range(0, len(noted), 4)]

    rounds = order(0)
    assert len(rounds) == 10
    assert {"".join(sorted(each)) for each in rounds} == {"abcd"}
    assert len(set(rounds)) > 3
    assert order(0) == rounds != order(1)


def test_a_round_gives_the_mean_of_its_steps_to_whom_it_belongs() -> None:
    steps = iter([1.0, 3.0, 5.0, 7.0])
    two = [Contestant("a", lambda: 10.0), Contestant("b", lambda: next(steps))]
    assert take_turns(two, 2, steps=2) == [[10.0, 10.0], [2.0, 6.0]]


def test_mean_median_and_deviation() -> None:
    contestant = Contestant("x", lambda: 0.0, {"bound_seconds": 1.5}, inner=[2.0, 3.0, 4.0])
    contestant.seconds = [1.0, 2.0, 6.0]
    assert (contestant.mean, contestant.median) == (3.0, 2.0)
    assert contestant.deviation == pytest.approx(2.6458, abs=1e-4)
    assert contestant.train_step == 3.0
    assert contestant.percent_of_bound == 50.0


@pytest.mark.parametrize(
    ("step", "left", "expected"),
    [
        (0.001, 90.0, [24, 12, 8, 6, 4, 3, 2]),  # all of them
        (1.8, 85.0, [24, 12, 8, 6, 4, 3, 2]),  # ResNet-50, batch 24, one core
        (2.5, 80.0, [24, 8, 4, 2]),
        (60.0, 80.0, [24, 6, 2]),  # three at least, with both ends
    ],
)
def test_a_quick_run_measures_fewer_sizes_of_a_slow_model(
    step: float, left: float, expected: list[int]
) -> None:
    assert thinned([24, 12, 8, 6, 4, 3, 2], step, left) == expected


def test_a_quick_run_repeats_what_there_is_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.bench.experiments._QUICK_SECONDS", 0.0)
    given = (mlp(4, 4, 4), (torch.randn(4, 4),), {})
    report = run_bench(BenchSettings(given=given, quick=True, output=None))
    assert report.settings["repeats"] == 3


def test_the_toy_is_exact_and_both_are_timed() -> None:
    toy = run_toy(TWO, repeats=2)
    assert toy.exact
    assert len(toy.split.seconds) == len(toy.one_device.seconds) == 2
    assert "cpu, cpu" in str(toy)


# -- figures ----------------------------------------------------------------------------------


def contestants(times: dict[int, float]) -> list[Contestant]:
    made = []
    for size, seconds in times.items():
        facts = {"microbatch_size": size, "schedule": "1f1b"}
        made.append(Contestant(f"of {size}", lambda: 0.0, facts))
        made[-1].seconds = [seconds, 1.1 * seconds]
    return made


@pytest.mark.parametrize("unit", [1.0, 0.001])
def test_figures_have_a_size_for_a_readme(tmp_path: Path, unit: float) -> None:
    rows = contestants({1: 3 * unit, 5: 2 * unit, 20: 1 * unit, 60: 4 * unit, 12: 1.1 * unit})
    for draw in (save_bars, save_sweep):
        path = tmp_path / f"{draw.__name__}.png"
        draw(rows, path, "a title")
        width, height = png_size(path)
        assert 900 < width < 1400
        assert 400 < height < 800


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.00042, "0.42 ms"), (0.0123, "12.3 ms"), (0.4567, "0.46 s"), (123.4, "123.4 s")],
)
def test_durations(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text
