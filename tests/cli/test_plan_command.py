"""`penstock plan`: what wins, the table, the drawing, the files."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from torch import nn

import penstock as ps
from penstock.cli import main
from penstock.plan.cutting import RECOMPUTE
from penstock.schedule import SCHEDULES
from tests.support.models import mlp
from tests.support.pool import pooled

HERE = "tests.cli.test_plan_command"
SMALL = [f"{HERE}:small", "--input", "6x4"]
TWO = ("--devices", "cpu,cpu")
IN_STAGES = ("--replicas", "1")
GPIPE = (*TWO, "--microbatches", "2", "--schedule", "gpipe")


def small() -> nn.Module:
    """A model that the command is given."""
    return mlp(4, 4, 4)


def other() -> nn.Module:
    """A model that the plan was not made for."""
    return mlp(4, 8, 8, 4)


@pytest.fixture(autouse=True)
def _in_a_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Files without a directory are written where the command is run."""
    monkeypatch.chdir(tmp_path)


def run(command: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, [command, *arguments])


def test_one_row_is_faster_on_one_device() -> None:
    """Not to be shared, and cut only for the cost of sending it, whatever a call takes here."""
    chosen = run("plan", f"{HERE}:small", "--input", "1x4", *TWO)
    assert chosen.exit_code == 0, chosen.output
    assert chosen.stdout.startswith("One device alone is predicted to be the fastest: ")
    result = run("plan", f"{HERE}:small", "--input", "1x4", *TWO, *IN_STAGES)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("One device alone is predicted to be faster (")
    assert "splitting is not worth it here" in result.stdout.splitlines()[0]


def test_what_is_printed() -> None:
    result = run("plan", *SMALL, *GPIPE, "--show-schedule")
    verdict, stages, timeline, prediction, considered, schedule = result.stdout.split("\n\n")
    assert "is predicted to be" in verdict
    heading, first, second = stages.splitlines()
    assert heading.split() == "stage worker modules weights enters forward backward memory".split()
    assert first.split()[:3] == ["0", "0", "cpu"]
    assert second.split()[:3] == ["1", "1", "cpu"]
    lines = timeline.splitlines()
    assert [line[:10] for line in lines[:2]] == ["worker 0 |", "worker 1 |"]
    assert all(len(line) <= 80 for line in lines)
    assert lines[2] == "0-9 forwards, a-z backwards, . idle"
    assert prediction.startswith("gpipe, 2 micro-batches of 3 rows: ")
    assert "% of the bound (" in prediction
    assert prediction.splitlines()[1].startswith("confidence: ")
    assert [line.split()[0] for line in considered.splitlines()].count("gpipe") == 1
    assert "one device" in considered
    assert schedule == "worker 0 | F0 F1 .. .. B0 B1\nworker 1 | .. F0 F1 B0 B1 ..\n"


def test_a_plan_for_inference() -> None:
    asked = (*TWO, *IN_STAGES, "--microbatches", "2", "--inference")
    result = run("plan", *SMALL, *asked)
    assert result.exit_code == 0, result.output
    _, stages, timeline, prediction, considered = result.stdout.split("\n\n")
    heading = stages.splitlines()[0]
    assert heading.split() == "stage worker modules weights states enters forward memory".split()
    drawing = "".join(line for line in timeline.splitlines() if line.startswith("worker"))
    assert "0" in drawing
    assert "a" not in drawing.replace("worker", "")
    assert prediction.startswith("inference, 2 stages, 2 micro-batches of 3 rows: ")
    assert "batches a second" in prediction
    assert "data parallel" in considered
    plan, profile = ps.Plan.load("plan.json"), ps.Profile.load("plan.profile.json")
    assert plan.inference
    assert profile.inference
    written = json.loads(Path("plan.json").read_text())
    assert written["batches_per_second"] == pytest.approx(1 / plan.predicted_step_seconds)
    data = json.loads(run("plan", *SMALL, *asked, "--json").stdout)
    assert data["microbatches_per_second"] == pytest.approx(2 / data["predicted_step_seconds"])
    for path in ("plan.json", "plan.profile.json"):
        simulated = run("simulate", path, "--microbatches", "2", "--microbatch-size", "3", "--json")
        (outcome,) = json.loads(simulated.stdout)["outcomes"]
        assert outcome["step_seconds"] == pytest.approx(data["predicted_step_seconds"], rel=1e-4)


def test_a_flow_is_drawn_and_measured() -> None:
    asked = (*TWO, *IN_STAGES, "--microbatches", "2", "--inference", "--in-flight", "4")
    result = run("plan", *SMALL, *asked, "--show-schedule", "--tune")
    assert result.exit_code == 0, result.output
    *_, drawing = result.stdout.split("\n\n")
    assert drawing == (
        "worker 0 | F0.0 F0.1 F1.0 F1.1 F2.0 F2.1 …\nworker 1 | ..   F0.0 F0.1 F1.0 F1.1 F2.0 …\n"
    )
    measured = [line for line in result.stderr.splitlines() if line.startswith("measured ")]
    assert measured
    assert all(" a batch, " in line and " predicted" in line for line in measured)
    assert ps.Plan.load("plan.json").groups == 4


def test_plan_and_profile_are_written_and_named() -> None:
    result = run("plan", *SMALL, *TWO, *IN_STAGES)
    assert "wrote plan.json, and the profile that it was made from, plan.profile.json" in (
        result.stderr
    )
    plan, profile = ps.Plan.load("plan.json"), ps.Profile.load("plan.profile.json")
    assert plan.fingerprint == profile.fingerprint
    assert len(plan.stages) >= 2
    assert sorted(path.name for path in Path().iterdir()) == ["plan.json", "plan.profile.json"]
    assert ps.plan(profile, replicas=1).predicted_step_seconds <= plan.predicted_step_seconds * 1.01


def test_the_file_is_for_people() -> None:
    run("plan", *SMALL, *GPIPE)
    lines = Path("plan.json").read_text().splitlines()
    assert '  "schedule": "gpipe",' in lines
    assert '      "calls": [0,2],' in lines or '      "calls": [0,1],' in lines
    assert sum('"way"' in line for line in lines) == len(ps.Plan.load("plan.json").considered)


def test_another_file_and_none(tmp_path: Path) -> None:
    path = tmp_path / "new" / "mine.json"
    result = run("plan", *SMALL, *GPIPE, "--output", str(path), "--json")
    data = json.loads(result.stdout)
    assert data["schedule"] == ps.Plan.load(path).schedule == "gpipe"
    assert data["confidence"].keys() == {"spread", "between"}
    assert data["winner"] in ("pipeline", "one device", "data parallel")
    assert f"wrote {path}" in result.stderr
    assert (tmp_path / "new" / "mine.profile.json").exists()
    assert "wrote" not in run("plan", *SMALL, *GPIPE, "--no-output").stderr
    assert not Path("plan.json").exists()


def test_the_plan_on_stdout() -> None:
    result = run("plan", *SMALL, *GPIPE, "--output", "-")
    Path("piped.json").write_text(result.stdout)
    assert ps.Plan.load("piped.json").schedule == "gpipe"
    assert "is predicted to be" in result.stderr
    assert [path.name for path in Path().iterdir()] == ["piped.json"]
    both = run("plan", *SMALL, "--output", "-", "--json")
    assert both.exit_code == 2
    assert "both want stdout" in both.stderr


def test_profiled_once_unless_fresh() -> None:
    assert "profiling" in run("plan", *SMALL, *GPIPE).stderr
    assert "profiling" not in run("plan", *SMALL, *GPIPE).stderr
    assert "profiling" in run("plan", *SMALL, *GPIPE, "--fresh").stderr


def test_what_is_asked_reaches_the_plan() -> None:
    options = ("--schedule", "interleaved", "--stages-per-worker", "1", "--recompute", "all")
    result = run("plan", *SMALL, *TWO, *options, "--memory-limit", "1MiB", "--any-order", "--json")
    plan = json.loads(result.stdout)
    assert [stage["worker"] for stage in plan["stages"]] == [0, 1]
    assert all(stage["recompute"] for stage in plan["stages"])
    assert plan["memory_limit"] == 2**20
    lean = run("plan", *SMALL, *GPIPE, "--optimizer-state", "0", "--json")
    rich = run("plan", *SMALL, *GPIPE, "--json")
    for less, more in zip(*(json.loads(r.stdout)["stages"] for r in (lean, rich)), strict=True):
        assert more["memory_bytes"] - less["memory_bytes"] == 2 * less["weight_bytes"]


def test_modules_to_recompute(tmp_path: Path) -> None:
    result = run("plan", *SMALL, *GPIPE, "--recompute", "0, 2")
    assert result.exit_code == 0, result.output
    spans = [span for s in ps.Plan.load(tmp_path / "plan.json").stages for span in s.recompute]
    assert spans == [(0, 1), (2, 3)]
    result = run("simulate", "plan.json", "--workers", "2", "--recompute", "0,2")
    assert result.exit_code == 0, result.output
    result = run("plan", *SMALL, *GPIPE, "--recompute", "al")
    assert result.exit_code == 2
    assert "no call of the program is in a module named 'al'; there are '0'" in result.stderr


def test_tuning_measures_and_says_so() -> None:
    result = run("plan", *SMALL, *TWO, *IN_STAGES, "--tune", "--json")
    assert result.exit_code == 0, result.output
    told = [line for line in result.stderr.splitlines() if line.startswith("measured ")]
    assert len(told) >= 2
    plan = json.loads(result.stdout)
    assert told[0].startswith(
        f"measured {plan['schedule']}, {plan['num_microbatches']} micro-batches: "
    )
    assert told[0].endswith(" predicted")


def test_a_figure() -> None:
    result = run("plan", *SMALL, *GPIPE, "--figure", "new/step.png")
    assert result.exit_code == 0, result.output
    assert "drew new/step.png" in result.stderr
    assert Path("new/step.png").read_bytes().startswith(b"\x89PNG")


def test_machines_that_a_file_describes() -> None:
    Path("cluster.toml").write_text(
        '[[device]]\nname = "gpu"\ncount = 2\nspeed = 50.0\n[link]\nbandwidth = "25GB/s"\n'
    )
    result = run("plan", *SMALL, "--devices", "cluster.toml", "--cuts", "2", "--json")
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert [stage["device"] for stage in plan["stages"]] == ["gpu", "gpu"]
    assert plan["stages"][1]["calls"] == [2, 3]
    assert plan["stages"][1]["transfer_seconds"] > 0
    assert ps.Profile.load("plan.profile.json").devices == ("gpu", "gpu")
    assert "measuring on cpu, for the machines that cluster.toml describes" in result.stderr
    tuned = run("plan", *SMALL, "--devices", "cluster.toml", "--tune")
    assert tuned.exit_code == 2
    assert "--tune measures plans on devices that are here" in tuned.stderr
    gone = run("plan", *SMALL, "--devices", "nowhere.toml")
    assert gone.exit_code == 2
    assert "cannot read the hardware description nowhere.toml" in gone.stderr


def test_a_model_without_weights_cut_as_asked() -> None:
    result = run("plan", *SMALL, *TWO, "--microbatches", "2", "--cuts", "2", "--empty", "--json")
    assert result.exit_code == 0, result.output
    assert [stage["calls"] for stage in json.loads(result.stdout)["stages"]] == [[0, 2], [2, 3]]
    shown = run("inspect", *SMALL, "--empty", "--depth", "1").stdout
    root = ["Sequential", "Sequential", "3", "160", "B", "100%"]
    assert shown.splitlines()[1].split()[:6] == root
    wrong = run("plan", *SMALL, *TWO, "--cuts", "3")
    assert wrong.exit_code == 2
    assert "no call of the program is in a module named '3'; there are '0'" in wrong.stderr


@pytest.mark.parametrize("option", ["--output", "--figure"])
def test_a_file_in_the_way_is_noticed_before_the_work(option: str) -> None:
    Path("file").touch()
    result = run("plan", *SMALL, option, "file/plan.png")
    assert result.exit_code == 2
    assert "cannot write to" in result.stderr
    assert "profiling" not in result.stderr


@pytest.mark.parametrize("name", ["step.badformat", "step"])
def test_a_figure_of_no_known_kind_is_noticed_before_the_work(name: str) -> None:
    result = run("plan", *SMALL, "--figure", f"new/{name}")
    assert result.exit_code == 2
    assert f"the figure new/{name} ends in" in result.stderr
    assert "like step.png" in result.stderr
    assert "capturing" not in result.stderr
    assert list(Path().glob("*")) == []


def test_help_knows_all_schedules_and_ways_to_recompute() -> None:
    for name in ("plan", "verify"):
        command = main.get_command(click.Context(main), name)
        assert command is not None
        options = {option.name: option for option in command.params}
        schedule, recompute = options["schedule"], options["recompute"]
        assert isinstance(schedule, click.Option)
        assert schedule.help == f"{', '.join(SCHEDULES)}."
        assert set((recompute.metavar or "").split("|")) == {*RECOMPUTE, "LIST"}


# -- plans that are followed ----------------------------------------------------------------


def test_verify_follows_a_plan() -> None:
    run("plan", *SMALL, *GPIPE, "--cuts", "1")
    result = run("verify", *SMALL, "--plan", "plan.json")
    assert result.exit_code == 0, result.output
    assert "in 2 stages, 3 micro-batches, gpipe," in result.stdout.splitlines()[0]
    assert result.stdout.splitlines()[0].endswith(": exact")
    assert "profiling" not in result.stderr


def test_verify_takes_what_a_pipeline_takes() -> None:
    options = ("--recompute", "all", "--schedule", "interleaved", "--stages-per-worker", "1")
    result = run("verify", *SMALL, *TWO, *options, "--memory-limit", "1GiB")
    assert result.exit_code == 0, result.output
    assert "in 2 stages" in result.stdout
    short = run("verify", *SMALL, *TWO, "--memory-limit", "300B")
    assert short.exit_code == 1
    assert "memory" in short.stderr


def test_a_plan_that_is_none_or_another_models() -> None:
    run("plan", *SMALL, *GPIPE)
    Path("broken.json").write_bytes(b"\xff\xfe{")
    for arguments, code, words in (
        ((f"{HERE}:other", "--input", "6x4", "--plan", "plan.json"), 1, "made for another model"),
        ((*SMALL, "--plan", "plan.profile.json"), 1, "is a profile; give a plan that was made"),
        ((*SMALL, "--plan", "broken.json"), 1, "is not a plan that Plan.save wrote"),
        ((*SMALL, "--plan", "nowhere.json"), 2, "cannot read the plan nowhere.json"),
        ((*SMALL, "--plan", "plan.json", "--devices", "cpu"), 1, "is for 2 devices and there are"),
        ((*SMALL, "--plan", "plan.json", "--cuts", "1"), 2, "--plan has its own cuts"),
    ):
        result = run("verify", *arguments)
        assert result.exit_code == code, result.output
        assert words in result.stderr
        assert result.stdout == ""
    with pytest.raises(ps.InputError, match="is a plan; give the profile that it was made from"):
        ps.Profile.load("plan.json")


def test_links_of_processes(tmp_path: Path) -> None:
    with pooled():
        result = run("plan", *SMALL, *TWO, "--workers", "processes")
    assert result.exit_code == 0, result.output
    links = json.loads((tmp_path / "plan.profile.json").read_text())["links"]
    assert links["cpu>cpu"]["bytes_per_second"] > 0  # threads hand over references


@pytest.mark.parametrize("devices", [(), ("--devices", "cpu,cpu")])
def test_the_profile_beside_is_that_of_the_plan(devices: tuple[str, ...]) -> None:
    """Also if the plan leaves devices out."""
    result = run("plan", *SMALL, *devices)
    assert result.exit_code == 0, result.output
    plan, profile = ps.Plan.load("plan.json"), ps.Profile.load("plan.profile.json")
    assert profile.devices == plan.devices
    assert profile.threads == plan.threads


def test_more_machines_than_places_for_stages_have_replicas() -> None:
    Path("cluster.toml").write_text('[[device]]\nname = "gpu"\ncount = 6\n')
    result = run("plan", *SMALL, "--devices", "cluster.toml", "--json")
    assert result.exit_code == 0, result.output
    assert len(ps.Plan.load("plan.json").devices) == 6
    result = run("plan", *SMALL, "--devices", "cluster.toml", "--replicas", "1")
    assert result.exit_code == 1
    assert "3 at most" in result.stderr
