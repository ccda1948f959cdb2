"""`penstock simulate`: sweeps, where the profile is, and what is said of files that are others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

import penstock as ps
from penstock.cli import main
from penstock.schedule import SCHEDULES
from tests.plan.test_plan import profile

COSTS = profile([1e-3] * 8, saved=(100.0,) * 8)
PLAN = ps.plan(COSTS, num_microbatches=4, schedule="1f1b", replicas=1)


@pytest.fixture(autouse=True)
def _files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A plan with its profile beside it, and one alone."""
    monkeypatch.chdir(tmp_path)
    PLAN.save("plan.json")
    PLAN.save("alone.json")
    COSTS.save("plan.profile.json")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments])


def outcomes(*arguments: str) -> list[dict[str, Any]]:
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["outcomes"]
    return found


def test_the_plans_own_case() -> None:
    heading, line = run("plan.json").stdout.splitlines()
    assert heading.split() == [
        *("schedule", "workers", "stages", "micro-batches", "batch", "step", "samples/s"),
        *("efficiency", "of", "bound", "memory"),
    ]
    assert line.split()[:5] == ["1f1b", "2", "2", "4", "16"]
    (found,) = outcomes("plan.json")
    assert found["step_seconds"] == pytest.approx(PLAN.predicted_step_seconds)
    assert found["case"]["microbatch_size"] == 4


def test_every_list_sweeps() -> None:
    lists = ("--workers", "1,2,4", "--schedule", "1f1b, gpipe", "--microbatches", "8,64")
    found = outcomes("plan.json", *lists, "--bandwidth", "1GB/s,25GB/s", "--latency", "500ms")
    assert len(found) == 3 * 2 * 2 * 2
    cases = [outcome["case"] for outcome in found]
    assert {case["workers"] for case in cases} == {1, 2, 4}
    assert {case["schedule"] for case in cases} == {"1f1b", "gpipe"}
    assert {case["bandwidth"] for case in cases} == {1e9, 25e9}
    assert {case["latency"] for case in cases} == {0.5}
    alone = [outcome for outcome in found if outcome["case"]["workers"] == 1]
    assert all(outcome["efficiency"] == pytest.approx(1.0) for outcome in alone)
    text = run("plan.json", *lists, "--latency", "10us").stdout
    assert text.splitlines()[0].split()[4] == "latency"


def test_all_schedules_and_those_that_cannot_be() -> None:
    found = outcomes("plan.json", "--schedule", "all", "--workers", "8", "--replicas", "1")
    assert [outcome["case"]["schedule"] for outcome in found] == list(SCHEDULES)
    notes = {o["case"]["schedule"]: o["note"] for o in found if o["step_seconds"] is None}
    assert notes.keys() == {"interleaved", "breadth-first", "zero-bubble-v"}
    assert all("16 stages are more than the 8" in note for note in notes.values())
    single = run("plan.json", "--schedule", "interleaved", "--workers", "8", "--replicas", "1")
    assert single.exit_code == 1
    assert "give 2 or more replicas" in single.stderr
    assert single.stdout == ""


def test_the_batch_grows_or_stays() -> None:
    grown = outcomes("plan.json", "--workers", "16", "--microbatches", "4,8")
    assert [outcome["batch_size"] for outcome in grown] == [2 * 4 * 4, 2 * 8 * 4]
    assert "replicas, as the program has places for 8 stages" in grown[0]["note"]
    larger = outcomes("plan.json", "--microbatch-size", "8")
    assert larger[0]["batch_size"] == 32
    kept = outcomes("plan.json", "--batch", "16", "--workers", "16", "--microbatches", "4,8")
    assert [outcome["batch_size"] for outcome in kept] == [16, 16]
    faster = outcomes("plan.json", "--speed", "2")
    half = PLAN.predicted_step_seconds / 2
    assert faster[0]["step_seconds"] == pytest.approx(half)


def test_a_profile_will_do() -> None:
    arguments = ("--microbatches", "4", "--microbatch-size", "4")
    found = outcomes("plan.profile.json", *arguments)
    assert found == outcomes("plan.json", "--schedule", "1f1b")
    elsewhere = outcomes("alone.json", "--profile", "plan.profile.json", "--workers", "4")
    assert elsewhere[0]["stages"] == 4
    missing = run("plan.profile.json", "--microbatches", "4")
    assert missing.exit_code == 2
    assert "a profile says nothing of micro-batches" in missing.stderr


def test_a_plan_alone_has_its_own_stages() -> None:
    result = run("alone.json", "--microbatches", "8", "--json")
    assert "no profile beside alone.json (alone.profile.json)" in result.stderr
    (found,) = json.loads(result.stdout)["outcomes"]
    assert found["stages"] == 2
    other = run("alone.json", "--workers", "4")
    assert other.exit_code == 1
    assert "the plan is for 2 workers, and for 4" in other.stderr
    assert "give the profile" in other.stderr


def test_memory_that_is_too_small() -> None:
    found = outcomes("plan.json", "--memory-limit", "300B", "--recompute", "none")
    assert found[0]["step_seconds"] is None
    assert "does not fit the memory by" in found[0]["note"]
    rows = run("plan.json", "--memory-limit", "300B", "--recompute", "none").stdout.splitlines()
    assert "does not fit the memory by" in rows[1]


def test_a_figure() -> None:
    result = run("plan.json", "--workers", "1,2", "--figure", "new/sweep.png")
    assert "drew new/sweep.png" in result.stderr
    assert Path("new/sweep.png").read_bytes().startswith(b"\x89PNG")
    unknown = run("plan.json", "--figure", "sweep.badformat")
    assert unknown.exit_code == 2
    assert unknown.stdout == ""
    assert "ends in '.badformat': give one of" in unknown.stderr
    nothing = run("plan.json", "--memory-limit", "9B", "--recompute", "none", "--figure", "x.png")
    assert nothing.exit_code == 1
    assert "none of the cases is possible" in nothing.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nowhere.json",), "cannot read the plan nowhere.json"),
        (("empty.json",), "is neither a plan nor a profile"),
        (("plan.json", "--profile", "alone.json"), "is a plan; give the profile"),
        (("plan.json", "--profile", "nowhere.json"), "cannot read the profile nowhere.json"),
        (("plan.json", "--profile", "other.json"), "is the profile of another model"),
        (("plan.profile.json", "--profile", "plan.profile.json"), "is a profile itself"),
        (("plan.json", "--workers", "1,x"), "--workers: 'x' is not a number; write a list"),
        (("plan.json", "--bandwidth", "fast"), "--bandwidth: 'fast' is not a speed"),
        (("plan.json", "--latency", "10 miles"), "--latency: '10 miles' is not a time"),
        (("plan.json", "--schedule", "best"), "choose naive, gpipe"),
        (("plan.json", "--batch", "8", "--microbatch-size", "2"), "leave out --microbatch-size"),
        (("plan.json", "--replicas", "few"), "--replicas: 'few' is neither a number nor auto"),
        (("plan.json", "--speed", "0"), "20 times as fast"),
    ],
)
def test_mistakes(arguments: tuple[str, ...], words: str) -> None:
    Path("empty.json").write_text("[]")
    msgspec.structs.replace(COSTS, fingerprint="0" * 16).save("other.json")
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stdout == ""


def test_without_torch() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from penstock.cli import main; "
        "lists = ['--workers', '1,4096', '--schedule', '1f1b,fitted']; "
        "result = CliRunner().invoke(main, ['simulate', 'plan.json', *lists]); "
        "print(result.exit_code, len(result.stdout.splitlines()), 'torch' in sys.modules)"
    )
    wide = {**os.environ, "COLUMNS": "200"}  # where every plan has one line
    command = [sys.executable, "-c", code]
    found = subprocess.run(command, capture_output=True, text=True, check=True, env=wide)
    assert found.stdout.strip() == "0 5 False"


def test_a_plan_of_replicas_is_simulated_as_it_is() -> None:
    costs = msgspec.structs.replace(COSTS, devices=("cpu",) * 4)
    costs.save("plan.profile.json")
    ps.plan(costs, replicas=2, num_microbatches=8, schedule="1f1b").save("plan.json")
    (found,) = outcomes("plan.json")
    assert (found["replicas"], found["stages"], found["batch_size"]) == (2, 2, 16)
    assert found["case"]["num_microbatches"] == 4
    assert (
        "--replicas: '1,2' is neither a number nor auto"
        in run("plan.json", "--replicas", "1,2").stderr
    )
    for option in ("--microbatch-size", "--batch"):
        assert "0 is not in the range x>=1" in run("plan.json", option, "0").stderr


def test_a_flow_of_forwards() -> None:
    """Of a plan for inference, or of any profile if that is asked for."""
    plan = ps.plan(COSTS, num_microbatches=4, replicas=1, inference=True)
    plan.save("flow.json")
    COSTS.save("flow.profile.json")
    heading, line = run("flow.json").stdout.splitlines()
    assert heading.split()[:4] == ["workers", "stages", "micro-batches", "batch"]
    assert "per batch" in heading
    assert line.split()[:3] == ["2", "2", "4"]
    asked = ("flow.profile.json", "--inference", "--microbatches", "4", "--batch", "16")
    for found in (outcomes("flow.json"), outcomes(*asked, "--workers", "2")):
        assert found[0]["step_seconds"] == pytest.approx(plan.predicted_step_seconds)
    (more,) = outcomes("flow.json", "--in-flight", "7")
    assert more["case"]["in_flight"] == 7
    refused = run("flow.json", "--schedule", "1f1b")
    assert "--schedule 1f1b is about backwards or their order" in refused.stderr
    refused = run("flow.json", "--recompute", "all")
    assert "a plan for inference has forwards only" in refused.stderr
