"""Timelines and progress, as text and as figures."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import penstock as ps
from penstock.display import progress
from penstock.display.progress import Progress, callback
from penstock.observe.sweep import save_sweep
from penstock.observe.timeline import as_text, legend, save_figure
from penstock.plan.whatif import WhatIf, what_if
from penstock.schedule import Action, Event, Kind, Timeline, build
from penstock.simulate import simulate
from tests.plan.test_plan import profile

GPIPE = simulate(build("gpipe", 2, 3), lambda action: 1.0)


# -- timelines ----------------------------------------------------------------------------


def test_as_text() -> None:
    assert as_text(GPIPE, width=16) == (
        "worker 0 |001122....aabbcc| 75% busy\nworker 1 |..001122aabbcc..| 75% busy"
    )


def test_as_text_shows_what_ran_most() -> None:
    """Backwards take twice as long here; a narrow column holds more than one action."""
    timeline = simulate(build("1f1b", 2, 4), lambda action: 1.0 + (action.kind == "B"))
    assert as_text(timeline, width=15) == (
        "worker 0 |01..aa2bb3cc.dd| 80% busy\nworker 1 |.0aa1bb2cc3dd..| 80% busy"
    )
    assert len(as_text(timeline, width=5).splitlines()[0]) == len("worker 0 |.....| 80% busy")


def test_as_text_shows_many_short_actions_as_work() -> None:
    """None of them fills half a column, but the worker is never idle."""
    timeline = simulate(build("1f1b", 1, 30), lambda action: 1.0)
    assert "." not in as_text(timeline, width=10)


def test_a_step_in_which_nothing_happened(tmp_path: Path) -> None:
    assert as_text(Timeline(1, []), width=4) == "worker 0 |....| 0% busy"
    save_figure(Timeline(1, []), tmp_path / "nothing.png")


def coloured(image: np.ndarray, colour: str) -> float:
    """The share of an image's pixels that have this colour."""
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    return float((np.abs(image[..., :3] * 255 - rgb).max(-1) < 2).mean())


def test_a_figure_shows_work_and_idleness_to_scale(tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = tmp_path / "step.png"
    save_figure(GPIPE, path, title="three micro-batches")
    image = imread(path)
    height, width = image.shape[:2]
    assert 1000 < width < 2000
    assert 200 < height < 600
    forward, backward, idle = (coloured(image, c) for c in ("#4c78a8", "#f2a65a", "#eceef0"))
    assert forward > 0.1
    assert backward == pytest.approx(forward, rel=0.1)
    assert idle == pytest.approx(2 / 3 * forward, rel=0.15)  # 2 of 8 seconds, beside 3 and 3


HALVES = Timeline(
    2,
    [
        Event(0, Action(Kind.FORWARD, 0, 0), 0.0, 2.0),
        Event(1, Action(Kind.FORWARD, 1, 0), 2.0, 4.0),
        Event(1, Action(Kind.FORWARD, 2, 0), 4.0, 6.0),
        Event(1, Action(Kind.INPUT, 2, 0), 6.0, 8.0),
        Event(1, Action(Kind.WEIGHT, 2, 0), 8.0, 10.0),
    ],
)


def test_as_text_has_a_line_for_every_stage_of_a_worker() -> None:
    """Elsewhere is not idle: a dot in all of its lines is."""
    assert as_text(HALVES, width=10) == (
        "worker 0 stage 0 |00........| 20% busy\n"
        "worker 1 stage 1 |..00      | 80% busy\n"
        "         stage 2 |..  00aaAA|"
    )
    assert (
        legend(HALVES) == "0-9 forwards, a-z input halves of backwards, A-Z weight halves, . idle"
    )
    assert legend(GPIPE) == "0-9 forwards, a-z backwards, . idle"


@pytest.mark.parametrize("workers", [2, 12])
def test_as_text_fits_a_terminal(workers: int) -> None:
    for schedule, stages in (("1f1b", workers), ("zero-bubble-v", 2 * workers)):
        timeline = simulate(build(schedule, stages, 32), lambda action: 1.0)
        assert max(map(len, as_text(timeline).splitlines())) in (79, 80)


def test_events_that_take_no_time() -> None:
    assert as_text(Timeline(1, [Event(0, Action(Kind.FORWARD, 0, 0), 0.0, 0.0)]), width=2) == (
        "worker 0 |..| 0% busy"
    )


def test_a_figure_has_a_lane_for_every_stage_and_a_colour_for_every_kind(tmp_path: Path) -> None:
    from matplotlib.image import imread

    path = tmp_path / "step.png"
    save_figure(HALVES, path)
    image = imread(path)
    shares = [coloured(image, c) for c in ("#4c78a8", "#e8743b", "#5fa39a", "#eceef0")]
    forward, halves, weights, idle = shares
    assert coloured(image, "#f2a65a") == 0
    assert halves == pytest.approx(weights, rel=0.1)
    assert forward == pytest.approx(4 * halves, rel=0.15)  # a whole lane, and two half ones
    assert idle == pytest.approx(10 * halves, rel=0.15)  # eight seconds of a lane and two


def test_a_figure_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(ps.PenstockError, match=r"cannot write the figure .*step\.nothing"):
        save_figure(GPIPE, tmp_path / "step.nothing")


# -- sweeps -------------------------------------------------------------------------------


def test_a_sweep_draws_every_series_and_the_ideal(tmp_path: Path) -> None:
    from matplotlib.image import imread

    costs = profile([1.0] * 8, saved=(1e9,) * 8)
    cases = [
        WhatIf(workers=workers, num_microbatches=8, schedule=name)
        for name in ("1f1b", "gpipe")
        for workers in (1, 2, 4)
    ]
    found = [what_if(costs, case) for case in cases]
    save_sweep(found, tmp_path / "both.png", "two")
    save_sweep(found[:3], tmp_path / "one.png", "one")
    both, one = (imread(tmp_path / name) for name in ("both.png", "one.png"))
    assert both.shape[1] > 2 * both.shape[0]
    second = "#e8743b"
    assert coloured(both, second) > 0.02
    assert coloured(one, second) == 0
    assert coloured(one, "#9aa5b1") > 0
    with pytest.raises(ps.PenstockError, match="there is nothing to draw"):
        save_sweep([], tmp_path / "none.png", "none")


# -- progress -----------------------------------------------------------------------------


def test_progress_without_a_terminal_is_a_few_lines() -> None:
    out = io.StringIO()
    with Progress(total=100, console=Console(file=out)) as bar:
        for _ in range(100):
            bar.advance(1, loss=0.5)
    lines = out.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[-1].startswith("100%  loss 0.500  ")
    assert lines[-1].endswith("samples/s")


def test_progress_without_a_loss() -> None:
    out = io.StringIO()
    with Progress(total=10, unit="rows", console=Console(file=out)) as bar:
        bar.advance(10)
    assert out.getvalue().startswith("100%  ")
    assert "loss" not in out.getvalue()
    assert out.getvalue().endswith("rows/s\n")


def test_progress_in_a_terminal_shows_loss_and_speed() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with Progress(total=4, console=console) as bar:
        bar.advance(4, loss=0.25)
    assert "loss 0.250" in out.getvalue()
    assert "samples/s" in out.getvalue()


def test_the_callback_takes_what_profiling_reports(capsys: pytest.CaptureFixture[str]) -> None:
    with callback("profiling") as report:
        report(0, 2, "profiling cpu, 1 rows")
        report(2, 2, "profiled")
    captured = capsys.readouterr()
    assert captured.err == "0/2  profiling cpu, 1 rows\n"  # the second came too soon for a line
    assert captured.out == ""


def test_the_callback_goes_on_talking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.0)
    out = io.StringIO()
    with callback("profiling", Console(file=out)) as report:
        report(0, 2, "one")
        report(1, 2, "two")
    assert out.getvalue() == "0/2  one\n1/2  two\n"


def test_the_callback_in_a_terminal_leaves_nothing_behind() -> None:
    out = io.StringIO()
    with callback("profiling", Console(file=out, force_terminal=True, width=80)) as report:
        report(1, 2, "half of it")
    assert "half of it" in out.getvalue()
    assert out.getvalue().endswith("\x1b[2K")  # erases the line


# -- without the extras -----------------------------------------------------------------------

_FIGURE = (
    "from penstock.observe.timeline import save_figure; from penstock.schedule import Timeline; "
)


@pytest.mark.parametrize(
    ("missing", "code", "advice"),
    [
        ("rich", "import penstock.display.progress", "pip install 'penstock[cli]'"),
        ("click", "import penstock.cli", "pip install 'penstock[cli]'"),
        ("matplotlib", f"{_FIGURE}save_figure(Timeline(1, []), 'x')", "'penstock[report]'"),
    ],
)
def test_what_is_missing_is_named(missing: str, code: str, advice: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None\n{code}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert advice in result.stderr.splitlines()[-1]


def test_replicas_of_workers_with_several_stages_have_a_line_each() -> None:
    """There are more stages than workers of a replica, and no more than workers in all."""
    actions = [Action(Kind.FORWARD, stage, 0) for stage in range(4)]
    events = [
        Event(2 * replica + action.stage % 2, action, float(k), float(k + 1))
        for replica in range(2)
        for k, action in enumerate(actions)
    ]
    lines = as_text(Timeline(4, events)).splitlines()
    assert len(lines) == 8
    assert [line[:16].strip() for line in lines[:2]] == ["worker 0 stage 0", "stage 2"]
