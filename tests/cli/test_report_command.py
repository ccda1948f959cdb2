"""`penstock report`, of a folder that a run has written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.account.history import RunFolder, read_run
from penstock.cli import main
from penstock.observe.report import report_html, report_text
from tests.support.histories import Made, history_of


def written(path: Path, made: Made | None = None) -> Path:
    """The folder of a run, as a pipeline would write it."""
    history = history_of(made)
    folder = RunFolder(path, history.about)
    for steps in history.steps:
        folder.add(steps)
    for record in history.records:
        folder.add(record)
    for event in history.events:
        folder.add(event)
    folder.close()
    return path


def ran(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["report", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_the_text_says_what_the_report_says(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    code, out, err = ran(run)
    assert (code, err) == (0, "")
    assert out.rstrip() == report_text(read_run(run)).rstrip()
    assert "A step takes 0.20 s, the median of 60 steps" in out


def test_a_page_is_written_and_compares(tmp_path: Path) -> None:
    run, other = written(tmp_path / "run"), written(tmp_path / "other", Made(slow=2.0))
    path = tmp_path / "report.html"
    code, out, err = ran(run, "--output", path, "--compare", other)
    assert (code, err) == (0, f"wrote {path}\n")
    assert "A step takes" in out
    assert path.read_text("utf-8") == report_html(read_run(run), read_run(other))


def test_json_has_accounts_losses_drift_and_suggestions(tmp_path: Path) -> None:
    code, out, _ = ran(written(tmp_path / "run"), "--json")
    assert code == 0
    data = json.loads(out)
    assert {"accounts", "losses", "drift", "suggestions", "parts"} <= {*data}
    for found in data["accounts"]:
        for worker in found["workers"]:
            assert sum(worker.values()) == pytest.approx(found["seconds"])
    assert data["losses"][0]["cause"] == "fill and drain"
    assert data["drift"]["steps"] == len(data["accounts"]) == 3


def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path) -> None:
    code, out, err = ran(tmp_path)
    assert (code, out) == (2, "")
    assert "is not the folder of a run" in err


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    (run / "steps.jsonl").unlink()
    (run / "steps.jsonl").mkdir()
    code, out, err = ran(run)
    assert (code, out) == (2, "")
    assert "steps.jsonl cannot be read: Is a directory" in err


def test_comparing_needs_a_page(tmp_path: Path) -> None:
    run = written(tmp_path / "run")
    code, _, err = ran(run, "--compare", run)
    assert code == 2
    assert "give --output report.html" in err
