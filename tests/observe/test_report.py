"""The report of a run: what is in the page, and what the numbers in it add up to."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import msgspec
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.account.attribution import BETWEEN, WAITING, WORKING
from penstock.account.history import History, Sample, StepTimes
from penstock.account.record import StepRecord
from penstock.account.suggestions import Suggestion
from penstock.board.status import Happened
from penstock.errors import InputError
from penstock.observe.findings import MEANINGS, Findings, rounded
from penstock.observe.report import report_data, report_html, report_text, save_report
from tests.support.histories import Made, history_of

HISTORY = history_of()
SECTIONS = "headline workers costs try staircase memory history stages events data".split()
VOID = {"meta", "link", "br", "img"}


class Page(HTMLParser):
    """What is in a page.

    Attributes:
        ids: of all elements.
        attributes: the name of every element, and of every attribute of it, with the value.
        scripts: the contents of scripts, by id.
        cells: of every table the rows of cells, by the table's id; with their exact seconds.
        text: all that is to be read.
        unclosed: elements that were not closed in their order.
    """

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.ids: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.scripts: dict[str, str] = {}
        self.cells: dict[str, list[list[tuple[str, float | None]]]] = {}
        self.text = ""
        self.unclosed: list[str] = []
        self._open: list[tuple[str, dict[str, str | None]]] = []
        self._table = ""
        self.feed(html)
        self.close()
        self.unclosed += [name for name, _ in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [found["id"] or ""] if "id" in found else []
        if tag not in VOID:
            self._open.append((tag, found))
        if tag == "table":
            self._table = found.get("id") or ""
            self.cells[self._table] = []
        elif tag == "tr":
            self.cells[self._table].append([])
        elif tag in ("td", "th"):
            seconds = found.get("data-seconds")
            self.cells[self._table][-1].append(("", None if seconds is None else float(seconds)))

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        name, _ = self._open.pop()
        if name != tag:
            self.unclosed.append(name)

    def handle_data(self, data: str) -> None:
        inside = [name for name, _ in self._open]
        if "script" in inside:
            key = self._open[-1][1].get("id") or ""
            self.scripts[key] = self.scripts.get(key, "") + data
        elif "style" not in inside:
            self.text += data
        if {"td", "th"} & {*inside}:
            text, seconds = self.cells[self._table][-1][-1]
            self.cells[self._table][-1][-1] = text + data, seconds


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(report_html(HISTORY))


@pytest.fixture(scope="module")
def real() -> History:
    """A run of a tiny pipeline."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    options = {"cuts": ["1"], "schedule": "1f1b", "num_microbatches": 2, "audit": None}
    x = torch.ones(4, 3)
    with ps.Pipeline(model, (x,), devices=["cpu", "cpu"], **options) as pipe:
        for _ in range(20):
            pipe.train_step(x, target=x, loss_fn=F.mse_loss)
        return pipe.history()


def replaced(history: History, **others: object) -> History:
    return msgspec.structs.replace(history, **others)


# -- numbers ------------------------------------------------------------------------------


def test_every_part_has_a_meaning() -> None:
    assert [*MEANINGS] == [*WORKING, *WAITING, *BETWEEN]


@pytest.mark.parametrize(
    ("values", "whole", "found"),
    [
        ([1.0, 1.0, 1.0], 100, [34, 33, 33]),
        ([0.0, 2.0, 0.0], 7, [0, 7, 0]),
        ([0.0, 0.0], 10, [0, 0]),
        ([0.4, 0.4, 0.2], 3, [1, 1, 1]),
    ],
)
def test_rounded_numbers_add_up(values: list[float], whole: int, found: list[int]) -> None:
    assert rounded(values, whole) == found


def test_parts_of_a_worker_add_up_to_the_mean_step() -> None:
    found = Findings(history_of(Made(workers=4, microbatches=8, slow=1.5, records=5)))
    assert found.mean_seconds > 0
    for parts in found.parts:
        assert sum(parts.values()) == pytest.approx(found.mean_seconds, rel=1e-9)
        assert {"forward", "backward", "optimizer", "data"} <= {*parts}


def test_what_the_script_did_under_another_name_is_a_part() -> None:
    first = HISTORY.records[0]
    other = {"data": "warming up"}
    driver = [each._replace(what=other.get(each.what, each.what)) for each in first.driver]
    record = msgspec.structs.replace(first, driver=tuple(driver))
    page = Page(report_html(replaced(HISTORY, records=[record]), HISTORY))
    for table in ("parts", "parts-compared"):
        row = next(row for row in page.cells[table] if row[0][0] == "warming up")
        assert float(row[1][0]) == pytest.approx(2.8, abs=0.5)
    _, *rows, total = page.cells["parts"]
    assert sum(row[1][1] or 0.0 for row in rows) == pytest.approx(total[1][1])


def test_a_record_that_took_much_longer_is_left_out_of_the_mean() -> None:
    first = HISTORY.records[0]
    begin = first.begin - 10 * (first.end - first.begin)
    late = msgspec.structs.replace(first, step=77, begin=begin)
    history = replaced(HISTORY, records=[*HISTORY.records, late])
    found = Findings(history)
    assert [each.step for each in found.usual] == [record.step for record in HISTORY.records]
    assert found.mean_seconds == Findings(HISTORY).mean_seconds
    assert "Left out: step 77" in found.left_out


def test_a_record_with_an_audit_is_left_out_for_that() -> None:
    def audited(record: StepRecord) -> StepRecord:
        more = record.driver[0]._replace(what="audit")
        return msgspec.structs.replace(record, driver=(more, *record.driver))

    first, *others = HISTORY.records
    found = Findings(replaced(HISTORY, records=[audited(first), *others]))
    assert found.left_out.startswith(
        "The mean of 2 recorded steps. Left out: step 20, with an audit, which took 5.00 ms."
    )
    assert "twice" not in found.left_out
    found = Findings(replaced(HISTORY, records=[*map(audited, HISTORY.records)]))
    assert "3 recorded steps. There was an audit in each." in found.left_out
    assert "Left out" not in found.left_out


def test_rows_per_second_are_those_of_the_batches() -> None:
    steps = [each._replace(rows=2) for each in HISTORY.steps]
    assert HISTORY.about.plan.batch_size == 8
    whole, part = Findings(HISTORY), Findings(replaced(HISTORY, steps=steps))
    assert whole.rows_per_second == pytest.approx(8 / (whole.step_seconds or 1), rel=0.01)
    assert part.rows_per_second == pytest.approx((whole.rows_per_second or 0) / 4)
    assert "The plan was made for a batch of 8 rows" in part.plan_in_words[1]


def test_what_there_is_to_say_of_the_folder_is_said() -> None:
    history = replaced(HISTORY, notes=["In records.jsonl 1 line is not whole, and left out."])
    assert "1 line is not whole" in report_text(history)
    assert "1 line is not whole" in Page(report_html(history)).text


def test_the_median_counts_steps_that_are_told_of_together() -> None:
    steps = [
        StepTimes(90, 0.0, 90, 90.0, 80.0, 3, 1.5, 9),
        StepTimes(91, 1.0, 1, 5.0, 1.0, 91, 5, 1),
    ]
    found = Findings(replaced(HISTORY, steps=steps))
    assert found.step_seconds == 1.0
    assert found.num_steps == 91


def test_outliers_are_explained_by_what_happened_then() -> None:
    first, slow = Findings(HISTORY).outliers
    assert first.step == 1
    assert "the first step" in first.why
    assert slow.step == 41
    assert slow.why.startswith("saved a checkpoint; ")
    assert "more than usual between passes" in slow.why


def test_an_outlier_that_was_recorded_is_explained_by_its_parts() -> None:
    record = HISTORY.records[-1]
    begin = record.begin - 3 * (record.end - record.begin)
    late = msgspec.structs.replace(record, begin=begin)
    last = HISTORY.steps[-1]._replace(step=record.step, slowest=record.step, slowest_seconds=9.0)
    records = [*HISTORY.records[:-1], late]
    steps = [*HISTORY.steps[:40], last]
    history = replaced(HISTORY, records=records, steps=steps, events=[])
    outlier = next(o for o in Findings(history).outliers if o.step == record.step)
    assert re.search(r"more outside than usual", outlier.why)


def test_the_sentence_names_what_costs_most() -> None:
    found = Findings(history_of(Made(workers=2, microbatches=16, slow=2.5)))
    assert found.losses[0].cause == "slow worker"
    assert "slow worker (worker 1)" in found.where_it_goes
    assert all(a.seconds >= b.seconds for a, b in zip(found.losses, found.losses[1:], strict=False))


def test_losses_are_means_of_the_recorded_steps() -> None:
    found = Findings(HISTORY)
    every = [x.seconds for a in found.usual for x in a.losses if x.cause == "fill and drain"]
    own = next(loss for loss in found.losses if loss.cause == "fill and drain")
    assert own.seconds == pytest.approx(sum(every) / 3)


def test_only_the_first_few_that_a_worker_waited_for_are_named() -> None:
    text = report_text(history_of(Made(workers=7)))
    own = next(line for line in text.splitlines() if line.startswith("worker 6 waited for"))
    assert own.count("worker") == 4
    assert re.search(r", 4 others \(.+ ms\)$", own)


def test_steps_that_are_not_like_the_others_are_said_to_be() -> None:
    assert "The median of all steps" not in Findings(HISTORY).left_out
    steps = [each._replace(seconds=10.0, slowest_seconds=10.0) for each in HISTORY.steps]
    assert "The median of all steps is 10.0 s" in Findings(replaced(HISTORY, steps=steps)).left_out


@pytest.mark.parametrize(
    ("alone", "said"),
    [
        (None, "could not run it"),
        (0.5, "this run is 2.7"),
        (0.05, "it would be 3.6"),
        (0.184, "about as fast"),
    ],
)
def test_one_device_is_compared_with(alone: float | None, said: str) -> None:
    plan = msgspec.structs.replace(HISTORY.about.plan, one_device_seconds=alone)
    about = msgspec.structs.replace(HISTORY.about, plan=plan)
    assert said in Findings(replaced(HISTORY, about=about)).against_one_device


# -- the page -----------------------------------------------------------------------------


def test_the_page_has_all_sections_once_and_is_well_formed(page: Page) -> None:
    assert page.unclosed == []
    assert len(page.ids) == len({*page.ids})
    assert [name for name in page.ids if name in SECTIONS] == SECTIONS
    assert "comparison" not in page.ids


def test_the_table_adds_up_as_it_is_shown_and_exactly(page: Page) -> None:
    _, *rows, total = page.cells["parts"]
    for column in range(1, len(total), 2):
        shown = sum(round(1000 * float(row[column][0])) for row in rows)
        assert shown == round(1000 * float(total[column][0]))
        exact = sum(row[column][1] for row in rows)
        assert exact == pytest.approx(total[column][1], rel=1e-9)
        percent = sum(round(10 * float(row[column + 1][0].rstrip("%"))) for row in rows)
        assert percent == 1000


def test_only_parts_that_occur_are_explained(page: Page) -> None:
    assert MEANINGS["forward"] in page.text
    assert MEANINGS["optimizer"] in page.text
    assert MEANINGS["recomputation"] not in page.text
    assert MEANINGS["weight half"] not in page.text


def test_nothing_is_loaded_from_elsewhere(page: Page) -> None:
    html = report_html(HISTORY)
    for _, name, value in page.attributes:
        if name in ("src", "href"):
            assert value.startswith(("#", "data:")), (name, value)
    code = html.replace("http://www.w3.org/2000/svg", "")  # the name of SVG, which nobody loads
    assert re.findall(r"https?:|@import|url\((?!#)", code) == []
    assert "default-src 'none'" in html
    assert "eval(" not in html


def test_names_are_text_and_never_elements() -> None:
    evil = "<b>Net</script><img src=x onerror=alert(1)>"
    history = history_of(Made(model=evil))
    happened = Happened(history.steps[40].at, 41, evil)
    history = replaced(history, events=[happened])
    html = report_html(history)
    page = Page(html)
    assert page.text.count(evil) >= 3  # in the title, the heading, and the events
    assert not any(tag == "img" for tag, _, _ in page.attributes)
    assert "<b>Net" not in html
    assert json.loads(page.scripts["history-data"])["about"]["description"]["model"] == evil


def test_the_data_can_be_read_back(page: Page) -> None:
    back = msgspec.json.decode(page.scripts["history-data"].encode(), type=History)
    assert msgspec.json.encode(back) == msgspec.json.encode(HISTORY)


def test_the_data_of_a_long_run_are_bounded() -> None:
    steps = [StepTimes(k, 1e9 + k, 1, 1.0, 0.5, k, 1.0, 8) for k in range(1, 100_001)]
    html = report_html(replaced(HISTORY, steps=steps))
    found = Page(html)
    back = msgspec.json.decode(found.scripts["history-data"].encode(), type=History)
    assert 2000 < len(back.steps) <= 4096
    assert sum(times.steps for times in back.steps) == 100_000
    assert back.steps[-1].step == 100_000
    assert back.records == HISTORY.records
    assert "steps that followed each other are put together" in found.text


def test_it_is_light_and_dark_and_can_be_printed(page: Page) -> None:
    html = report_html(HISTORY)
    assert "prefers-color-scheme: dark" in html
    assert ':root[data-theme="dark"]' in html
    assert "@media print" in html
    assert "theme" in page.ids


def test_the_staircase_says_what_a_worker_waited_for(page: Page) -> None:
    data = json.loads(page.scripts["staircase-data"])
    assert data["records"][data["chosen"]]["name"].endswith("(median)")
    boxes = data["records"][0]["boxes"]
    wait = next(box for box in boxes if box[:2] == [1, "wait"])
    assert wait[2:4] == [1, 0]
    assert wait[6] == "the forward of micro-batch 0 in stage 0 on worker 0"
    assert {box[1] for box in boxes if box[0] == -1} >= {"optimizer", "data"}
    assert {box[1] for box in data["predicted"]["boxes"]} == {"forward", "backward"}
    assert data["stages"][1] == ["layers.3", "layers.5"]


def test_boxes_of_a_recorded_worker_do_not_overlap(page: Page) -> None:
    data = json.loads(page.scripts["staircase-data"])
    for record in data["records"]:
        for worker in (-1, 0, 1):
            own = [box[4:6] for box in record["boxes"] if box[0] == worker]
            assert own == sorted(own)
            ends = [start + seconds for start, seconds in own]
            assert all(e <= b[0] + 1e-6 for e, b in zip(ends, own[1:], strict=False))
            assert ends[-1] <= record["seconds"] + 1e-6


def test_suggestions_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    def made(accounts: object, plan: object) -> list[Suggestion]:
        return [Suggestion("num_microbatches=16", 0.12, "fill and drain becomes half as long")]

    monkeypatch.setattr("penstock.observe.findings.suggestions", made)
    text = Page(report_html(HISTORY)).text
    assert "num_microbatches=16" in text
    assert "12%" in text
    assert "num_microbatches=16:\n      fill and drain" in report_text(HISTORY)


def test_two_runs_are_compared() -> None:
    other = history_of(Made(slow=2.0, seed=1, model="Other"))
    page = Page(report_html(HISTORY, other))
    assert page.unclosed == []
    assert "comparison" in page.ids
    assert "Other" in page.text
    _, *rows = page.cells["parts-compared"]
    here, there = Findings(HISTORY), Findings(other)
    for name, *numbers in ([cell[0] for cell in row] for row in rows):
        a, b, difference = map(float, numbers)
        assert difference == pytest.approx(a - b, abs=0.0021)
        if name != "all":
            assert a == pytest.approx(1e3 * here.mean_parts.get(name, 0.0), abs=0.001)
            assert b == pytest.approx(1e3 * there.mean_parts.get(name, 0.0), abs=0.001)


@pytest.mark.parametrize("steps", [0, 1, 2000])
def test_any_number_of_steps_and_no_record_can_be_shown(steps: int) -> None:
    history = history_of(Made(records=0), steps=steps)
    page = Page(report_html(history, history))
    assert page.unclosed == []
    assert "workers" not in page.ids
    assert "No step has been recorded in detail" in page.text
    assert ("step 2000" in page.text) == (steps == 2000)
    assert report_text(history)


def test_the_memory_of_the_run_is_shown_by_process() -> None:
    description = HISTORY.about.description
    one = [msgspec.structs.replace(worker, pid=7) for worker in description.workers]
    two = [msgspec.structs.replace(worker, pid=7 + worker.number) for worker in one]
    samples = [
        Sample(float(k), k, (k * 10**8, 10**9), (k * 10**8, 10**9), (0.0, 0.0), (0.0, 0.0))
        for k in range(1, 2000)
    ]
    for workers, titles in ((one, ["Workers 0, 1"]), (two, ["Worker 0", "Worker 1"])):
        described = msgspec.structs.replace(description, workers=tuple(workers))
        about = msgspec.structs.replace(HISTORY.about, description=described)
        history = msgspec.structs.replace(HISTORY, about=about, samples=samples)
        page = Page(report_html(history))
        assert page.unclosed == []
        assert "run-memory" in page.ids
        shown = page.text.partition("Memory over the run")[2].partition("All steps")[0]
        assert re.findall(r"(Workers? [\d, ]+), cpu: at most", shown) == titles
        assert "at most 199.9 GB" in shown
    assert "run-memory" not in Page(report_html(HISTORY)).ids


def test_why_a_worker_is_waited_for() -> None:
    text = report_text(history_of(Made(workers=3, slow=2.0)))
    assert re.search(r"worker 1 waited for worker 2 \([\d.]+ m?s: it takes longer than", text)
    assert "it takes longer" not in report_text(HISTORY)


@pytest.mark.parametrize("schedule", ["gpipe", "zero-bubble", "1f1b"])
def test_schedules_of_all_kinds_can_be_shown(schedule: str) -> None:
    history = history_of(Made(workers=3, schedule=schedule))
    page = Page(report_html(history))
    assert page.unclosed == []
    _, *rows, _ = page.cells["parts"]
    assert any(row[0][0] == "weight half" for row in rows) == (schedule == "zero-bubble")


def test_a_real_run_can_be_shown(real: History) -> None:
    assert real.records
    page = Page(report_html(real))
    assert page.unclosed == []
    _, *rows, total = page.cells["parts"]
    for column in range(1, len(total), 2):
        exact = sum(row[column][1] for row in rows)
        assert exact == pytest.approx(total[column][1], rel=1e-6)
    assert "Sequential" in page.text
    assert "worker 1" in report_text(real)
    assert json.loads(json.dumps(report_data(real)))["drift"]["steps"] == len(real.records)


def test_a_report_is_written_or_the_file_is_named(tmp_path: object) -> None:
    path = f"{tmp_path}/report.html"
    save_report(HISTORY, path)
    with open(path, encoding="utf-8") as file:
        assert file.read() == report_html(HISTORY)
    with pytest.raises(InputError, match="cannot write the report to"):
        save_report(HISTORY, f"{tmp_path}/none/report.html")


def test_text_fits_a_narrow_terminal_and_has_all_parts() -> None:
    text = report_text(history_of(Made(workers=6)), width=60)
    table = text[text.index("Where every") : text.index("What to try")].splitlines()[1:]
    assert all(len(line) <= 60 for line in table if not line.startswith("worker "))
    assert "fill and drain" in text
    assert "What a step would take less" in text
