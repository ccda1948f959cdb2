"""Timelines and progress, as text and as figures."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from penstock.observe.progress import Progress, callback
from penstock.observe.timeline import as_text, save_figure
from penstock.schedule import build
from penstock.simulate import simulate

GPIPE = simulate(build("gpipe", 2, 3), lambda action: 1.0)


def test_as_text() -> None:
    assert as_text(GPIPE, width=16) == (
        "worker 0 |001122....aabbcc| 75% busy\nworker 1 |..001122aabbcc..| 75% busy"
    )


def test_a_figure(tmp_path: Path) -> None:
    path = tmp_path / "step.png"
    save_figure(GPIPE, path, title="three micro-batches")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 8_000


def test_progress_without_a_terminal_is_a_few_lines() -> None:
    out = io.StringIO()
    with Progress(total=100, console=Console(file=out)) as bar:
        for _ in range(100):
            bar.advance(1, loss=0.5)
    lines = out.getvalue().splitlines()
    assert len(lines) == 10
    assert lines[-1].startswith("100%  loss 0.500  ")
    assert lines[-1].endswith("samples/s")


def test_progress_in_a_terminal_shows_loss_and_speed() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with Progress(total=4, console=console) as bar:
        bar.advance(4, loss=0.25)
    assert "loss 0.250" in out.getvalue()
    assert "samples/s" in out.getvalue()


def test_the_callback_takes_what_profiling_reports(capsys) -> None:  # type: ignore[no-untyped-def]
    with callback("profiling") as report:
        report(0, 2, "profiling cpu, 1 rows")
        report(2, 2, "profiled")
    assert "profiling cpu, 1 rows" in capsys.readouterr().err
