"""The benchmarks of worker processes, on models and numbers that are as small as can be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from penstock.bench import compare, frameworks, links, sleeping, starting
from penstock.bench.subjects import subjects
from penstock.schedule import SCHEDULES, Costs, build
from penstock.simulate import simulate


@pytest.mark.parametrize("name", SCHEDULES)
def test_formulas_are_what_the_simulator_finds(name: str) -> None:
    each, workers, count = sleeping.stages_each(name), 4, 12
    stages = each * workers
    costs = Costs.equal(stages, sleeping.SLEEP, sleeping.SLEEP, sleeping.SLEEP)
    found = simulate(build(name, stages, count, num_workers=workers), costs.seconds).seconds
    assert sleeping.formula(name, workers, each, count) == pytest.approx(found, rel=1e-9)


@pytest.mark.parametrize("name", subjects(quick=True))
def test_cuts_by_hand_are_the_whole_model(name: str) -> None:
    subject = subjects(quick=True)[name]
    inputs, target = subject.data()
    expected = subject.loss(subject.build()(inputs), target)
    for cut in filter(None, (subject.by_hand, subject.in_four)):
        values = inputs
        for stage in cut():
            values = stage(*(values if isinstance(values, tuple) else (values,)))
        assert torch.equal(subject.loss(values, target), expected)


def test_the_large_boundary_is_16_mib() -> None:
    subject = subjects(quick=False)["wide"]
    first, _ = subject.by_hand()
    rows = len(subject.data()[0]) // 4
    boundary = first(torch.zeros(rows, 4))
    assert boundary.numel() * boundary.element_size() == 16 << 20


@pytest.mark.slow
def test_sleeping_takes_at_least_what_the_formula_says(tmp_path: Path) -> None:
    arguments = ["--quick", "--schedules", "1f1b,zero-bubble", "--json", str(tmp_path / "x.json")]
    assert sleeping.main(arguments) == 0
    report = json.loads((tmp_path / "x.json").read_text())
    for row in report["results"]:
        assert row["excess"] >= 0
        assert row["step_excess"] >= row["excess"]


@pytest.mark.slow
def test_links_and_actions_are_measured(tmp_path: Path) -> None:
    assert links.main(["--quick", "--json", str(tmp_path / "x.json")]) == 0
    report = json.loads((tmp_path / "x.json").read_text())
    assert [row["bytes"] for row in report["links"]] == list(links.QUICK_SIZES)
    for row in report["links"]:
        for way in ("shared memory", "gloo"):
            assert row[way]["bytes_per_second"] == row["bytes"] / row[way]["seconds"]
    for result in report["actions"]:
        assert result["seconds"].keys() - {"bare loop"} == result["overhead_seconds"].keys()


@pytest.mark.slow
def test_starts_are_timed_part_by_part(tmp_path: Path) -> None:
    arguments = ["--models", "tiny", "--rounds", "1", "--json", str(tmp_path / "x.json")]
    assert starting.main(arguments) == 0
    (model,) = json.loads((tmp_path / "x.json").read_text())["models"]
    (plain,) = model["ways"].pop(starting.PLAIN)
    assert len(model["ways"]) == 4
    for (parts,) in model["ways"].values():
        assert parts.keys() - plain.keys() == {"penstock", "pipeline"}
        whole = sum(parts.values())
        assert starting.until_first_step(parts) == pytest.approx(whole - parts["second step"])


@pytest.mark.slow
def test_frameworks_train_the_same_with_penstock(tmp_path: Path) -> None:
    arguments = ["--only", "accelerate", "--rounds", "2", "--json", str(tmp_path / "x.json")]
    assert frameworks.main(arguments) == 0
    (found,) = json.loads((tmp_path / "x.json").read_text())["models"]
    one, *others = found["rows"]
    assert [row["name"] for row in others] == [frameworks.ALL_CORES, *frameworks.KINDS]
    assert all(row["loss"] == pytest.approx(one["loss"], rel=1e-3) for row in others)
    assert [bool(row["plan"]) for row in others] == [False, True, True]


@pytest.mark.slow
def test_everybody_trains_the_same(tmp_path: Path) -> None:
    arguments = ["--quick", "--models", "resnet,unet,wide", "--json", str(tmp_path / "x.json")]
    assert compare.main(arguments) == 0
    report = json.loads((tmp_path / "x.json").read_text())
    for result in report["models"]:
        rows = {row["name"].partition(": ")[0]: row for row in result["rows"]}
        kinds = {"torch pipelining, cut by hand", "torch pipelining, Penstock's cut", "FSDP2"}
        kinds |= {"DistributedDataParallel", "one process, all cores", "one device"}
        assert rows.keys() >= kinds | {"Penstock, threads", "Penstock, processes"}
        assert {"m=2", "m=2, whole"} & result["scouted"]["FSDP2"].keys()
        for row in rows.values():  # of the first step; ResNet's BatchNorm depends on micro-batches
            if not result["model"].startswith("ResNet"):
                assert row["loss"] == pytest.approx(rows["one device"]["loss"], rel=1e-3)
