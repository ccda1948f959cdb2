"""Timelines and progress, as text and as figures."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from penstock.observe import progress
from penstock.observe.progress import Progress, callback
from penstock.observe.timeline import as_text, save_figure
from penstock.schedule import Timeline, build
from penstock.simulate import simulate

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
        ("rich", "import penstock.observe.progress", "pip install 'penstock[cli]'"),
        ("click", "import penstock.cli", "pip install 'penstock[cli]'"),
        ("matplotlib", f"{_FIGURE}save_figure(Timeline(1, []), 'x')", "'penstock[report]'"),
    ],
)
def test_what_is_missing_is_named(missing: str, code: str, advice: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None\n{code}"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert advice in result.stderr.splitlines()[-1]
