"""What is known of a run: in memory, in its folder, and asked for by another process."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace as replace_fields
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.account import keeping
from penstock.account.attribution import Account, account
from penstock.account.history import ABOUT, History, RunFolder, Sample, StepTimes, read_run
from penstock.account.keeping import Kept
from penstock.account.record import AUDIT, StepRecord
from penstock.board.control import SUFFIX, ask
from penstock.observe.report import report_text
from tests.support.histories import Made, history_of
from tests.support.traps import Trap, divide

X = torch.randn(16, 8)
FACTORS = [1.0]


def pipeline(**options: Any) -> ps.Pipeline:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    return ps.Pipeline(
        model, (X,), devices=["cpu"] * 2, num_microbatches=2, replicas=1, audit=None, **options
    )


def train(pipe: ps.Pipeline, count: int) -> None:
    for _ in range(count):
        pipe.train_step(X, target=X, loss_fn=F.mse_loss)


def test_a_folder_says_what_memory_does(tmp_path: Path) -> None:
    with pipeline(run=tmp_path / "a") as pipe:
        train(pipe, 40)
        known = pipe.history()
    found = read_run(tmp_path / "a")
    assert found.records == known.records
    assert [record.step for record in found.records] == [3, 4, 5, 6, 9, 17, 33]
    assert found.about == known.about
    assert found.about.plan == pipe.plan
    assert sum(times.steps for times in found.steps) == 40
    assert sum(times.rows for times in found.steps) == 40 * 16
    assert [t.step for t in found.steps] == [t.step for t in known.steps]
    assert all(t.slowest_seconds <= t.seconds for t in found.steps)


def test_the_folder_has_the_profile_and_samples_of_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeping, "_TOGETHER", 0.0)
    monkeypatch.setattr(keeping, "_SAMPLES", 10**9)  # after every step
    with pipeline(run=tmp_path, workers="processes") as pipe:
        train(pipe, 5)
        profile = pipe._running.profile
        known = pipe.history()
    assert ps.Profile.load(tmp_path / "profile.json").labels == profile.labels
    samples = read_run(tmp_path).samples
    assert samples == known.samples
    assert [sample.step for sample in samples] == [1, 2, 3, 4, 5]
    assert all(len(sample.memory) == len(sample.worked) == 2 for sample in samples)
    assert all(
        0 < memory <= most
        for sample in samples
        for memory, most in zip(sample.memory, sample.most_memory, strict=True)
    )
    for one, other in pairwise(samples):
        assert all(a < b for a, b in zip(one.worked, other.worked, strict=True))
    pipeline(run=tmp_path).close()
    assert ps.Profile.load(tmp_path / "earlier-1/profile.json").labels == profile.labels
    assert read_run(tmp_path).samples == []


def test_samples_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(keeping.time, "monotonic", lambda: now[0])
    kept = Kept()
    kept.sample_by(lambda step: Sample(now[0], step, (1,), (1,), (0.0,), (0.0,)))
    for number in range(1, 100_001):
        now[0] += 1.0
        kept.step(number, 1.0, 1.0, 1)
    steps = [sample.step for sample in kept.history(history_of().about).samples]
    assert steps[:100] == list(range(1, 101))
    assert 1000 < len(steps) < 5000
    assert 150 < steps[-1] - steps[-2] < 250


def test_many_records_are_for_the_status_and_few_for_the_folder(tmp_path: Path) -> None:
    with pipeline(run=tmp_path) as pipe:
        train(pipe, 270)
        known = [record.step for record in pipe.history().records]
    assert known[-3:] == [129, 193, 257]
    written = [record.step for record in read_run(tmp_path).records]
    assert written[-3:] == [65, 129, 257]


def test_an_earlier_run_in_the_folder_is_put_aside(tmp_path: Path) -> None:
    """Its records are of another plan, and its steps have the same numbers."""
    with pipeline(run=tmp_path) as pipe:
        train(pipe, 4)
        plan = pipe.plan
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for _ in range(2):
        with ps.Pipeline(model, (X,), devices=["cpu"], audit=None, run=tmp_path) as other:
            train(other, 3)
    found, first = read_run(tmp_path), read_run(tmp_path / "earlier-1")
    assert [record.step for record in found.records] == [3]
    assert report_text(found)
    assert "earlier-1, earlier-2" in report_text(found)
    assert first.about.plan == plan
    assert [record.step for record in first.records] == [3, 4]
    assert sum(times.steps for times in first.steps) == 4
    assert report_text(first)
    assert [record.step for record in read_run(tmp_path / "earlier-2").records] == [3]


def test_a_kill_amid_moving_an_earlier_run_loses_nothing(tmp_path: Path) -> None:
    with pipeline(run=tmp_path) as pipe:
        train(pipe, 4)
        before = read_run(tmp_path)
        about = pipe._running.about()
    earlier = tmp_path / "earlier-1"
    earlier.mkdir()
    (earlier / ABOUT).write_bytes((tmp_path / ABOUT).read_bytes())
    (tmp_path / "steps.jsonl").rename(earlier / "steps.jsonl")
    again = replace_fields(about, environment={})
    RunFolder(tmp_path, again).close()
    assert replace_fields(read_run(earlier), steps=before.steps).records == before.records
    assert sum(times.steps for times in read_run(earlier).steps) == 4
    assert read_run(tmp_path).records == []


def test_a_line_that_is_not_whole_is_left_out_and_never_added_to(tmp_path: Path) -> None:
    """As of a process that was killed while it wrote."""
    with pipeline(run=tmp_path) as pipe:
        train(pipe, 4)
    with (tmp_path / "records.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "beg')
    found = read_run(tmp_path)
    assert [record.step for record in found.records] == [3, 4]
    assert found.notes == ["In records.jsonl 1 line is not whole, and left out."]
    with pipeline(run=tmp_path) as pipe:
        train(pipe, 4)
    assert "not whole" not in report_text(read_run(tmp_path))
    assert len(read_run(tmp_path).records) == 2
    with (tmp_path / "records.jsonl").open("ab") as file:
        file.write(b'{"step": 5, "beg\n')  # and in the midst, as of a disk that lost power
        file.write((tmp_path / "records.jsonl").read_bytes().split(b"\n")[0] + b"\n")
    assert len(read_run(tmp_path).records) == 3


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with pipeline(run=tmp_path) as pipe:
        train(pipe, 3)
        with pytest.raises(ps.InputError, match=rf"not closed \(process {os.getpid()} on .*close"):
            pipeline(run=tmp_path)
        train(pipe, 3)
    assert [record.step for record in read_run(tmp_path).records] == [3, 4, 5, 6]
    pipe = pipeline(run=tmp_path)
    del pipe
    gc.collect()
    pipeline(run=tmp_path).close()


def test_the_folder_stays_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    with pipeline(run="run") as pipe:
        monkeypatch.chdir(tmp_path / "other")
        train(pipe, 4)
    assert len(read_run(tmp_path / "run").records) == 2
    assert os.listdir(tmp_path / "other") == []


def test_steps_are_in_the_folder_without_close_and_after_ctrl_c(tmp_path: Path) -> None:
    script = f"""
from penstock.account.history import RunFolder
from penstock.account.keeping import Kept
from penstock.account.record import AUDIT, StepRecord
from tests.support.histories import history_of

kept = Kept()
kept.write_to(RunFolder({str(tmp_path)!r}, history_of().about))
for number in range(1, 11):
    kept.step(number, 0.001, 0.001, rows=4)
raise KeyboardInterrupt
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "KeyboardInterrupt" in ran.stderr
    assert sum(times.steps for times in read_run(tmp_path).steps) == 10


def test_early_steps_are_seen_at_once(tmp_path: Path) -> None:
    with pipeline(run=tmp_path) as pipe:
        train(pipe, 10)
        assert sum(times.steps for times in read_run(tmp_path).steps) >= 9


def test_what_happens_is_kept(tmp_path: Path) -> None:
    trap = Trap()
    model = nn.Sequential(nn.Linear(8, 8), trap, nn.Linear(8, 8))
    with ps.Pipeline(model, (X,), devices=["cpu"] * 2, num_microbatches=2, run=tmp_path) as pipe:
        train(pipe, 1)
        trap.arm("forward", divide)
        with pytest.raises(ps.WorkerError):
            train(pipe, 1)
        assert "WorkerError" in pipe.status().events[-1].what
        assert "WorkerError" in str(pipe.status())
    [event] = read_run(tmp_path).events
    assert event.step == 1
    assert "forward of micro-batch" in event.what


def test_every_error_of_a_step_is_kept_once_and_shown_in_a_line() -> None:
    def fails(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("long\n" * 300)

    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.last(self.first(x) * FACTORS[0])
            return result

    model = Changing()
    with ps.Pipeline(
        model, (X,), devices=["cpu"] * 2, num_microbatches=2, replicas=1, audit=1
    ) as pipe:
        train(pipe, 1)
        with pytest.raises(ps.InputError):
            pipe.train_step(X[:, :3], target=X, loss_fn=F.mse_loss)
        with pytest.raises(ps.WorkerError):
            pipe.train_step(X, target=X, loss_fn=fails)
        FACTORS[0] = 2.0
        try:
            with pytest.raises(ps.AuditError):
                train(pipe, 1)
        finally:
            FACTORS[0] = 1.0
        events = pipe.history().events
        notes = pipe.status().notes
    kinds = [event.what.partition(":")[0] for event in events]
    assert kinds == ["InputError", "WorkerError", "AuditError"]
    assert all(len(note) <= 160 and "\n" not in note for note in notes)


def test_a_backward_that_fails_is_kept() -> None:
    trap = Trap()
    model = nn.Sequential(nn.Linear(8, 8), trap, nn.Linear(8, 8))
    with ps.Pipeline(model, (X,), devices=["cpu"] * 2, num_microbatches=2, audit=None) as pipe:
        out = pipe(X)
        trap.arm("backward", divide)
        with pytest.raises(ps.WorkerError):
            out.sum().backward()
        assert [event.what[:11] for event in pipe.history().events] == ["WorkerError"]


def test_a_status_looks_at_every_record_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def counted(record: StepRecord, plan: ps.Plan) -> Account:
        looked.append(record.step)
        return account(record, plan)

    with pipeline() as pipe:
        monkeypatch.setattr(keeping, "account", counted)
        train(pipe, 5)
        for _ in range(3):
            pipe.status()
        train(pipe, 1)
        pipe.status()
        assert [found.step for found in pipe.accounts()] == [3, 4, 5, 6]
    assert looked == [3, 4, 5, 6]


def test_audits_take_no_place_of_what_stands_for_others() -> None:
    first = history_of(Made(records=20)).records
    audited = [
        replace_fields(r, driver=(*r.driver, r.driver[0]._replace(what=AUDIT))) for r in first[10:]
    ]
    kept = Kept()
    for record in [*first[:6], *audited[:6], *audited[6:]]:
        kept.record(record)
    assert [r.step for r in kept.records if not r.is_audited] == [r.step for r in first[:6]]
    assert len(kept.records) == 12


def test_an_error_about_a_file_whose_name_is_no_text(tmp_path: Path) -> None:
    """Python has lone surrogates for bytes that are no UTF-8, which JSON cannot have."""
    with pipeline(run=tmp_path) as pipe:
        with pytest.raises(OSError, match=r"^a"), pipe._running.runner.steps.failing():
            raise OSError("a\udcff")
        assert pipe.history().events[-1].what == r"OSError: a\udcff"
    assert read_run(tmp_path).events[-1].what == r"OSError: a\udcff"


def test_other_processes_ask_for_it() -> None:
    with pipeline() as pipe:
        train(pipe, 12)  # the next one that is recorded of itself is the 17th
        path = pipe._workers.board.path
        assert path is not None
        assert ask(path.with_suffix(SUFFIX), "record") == 9
        train(pipe, 2)
        found = msgspec.convert(ask(path.with_suffix(SUFFIX), "history"), History, str_keys=True)
        assert [record.step for record in found.records] == [3, 4, 5, 6, 9, 13]
        assert found == pipe.history()


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(ps.InputError, match=r"other files, such as thesis\.tex; give a new folder"):
        pipeline(run=tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]
    (tmp_path / "file").write_text("")
    with pytest.raises(ps.InputError, match="cannot be a folder"):
        pipeline(run=tmp_path / "file")


@pytest.mark.parametrize("name", [ABOUT, "steps.jsonl"])
def test_links_out_of_a_run_are_refused(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "run"
    with pipeline(run=folder) as pipe:
        train(pipe, 1)
    (folder / name).rename(tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    with pytest.raises(ps.InputError, match=rf"{name} is a link to .*outside of the run"):
        read_run(folder)
    (folder / name).unlink()
    (tmp_path / name).rename(folder / "moved")
    (folder / name).symlink_to("moved")
    assert len(read_run(folder).steps) == 1


def test_folders_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ps.InputError, match=r"not the folder of a run.*run\.json"):
        read_run(tmp_path / "nowhere")
    (tmp_path / ABOUT).write_text("{}")
    with pytest.raises(ps.InputError, match="is not what Pipeline"):
        read_run(tmp_path)
    (tmp_path / ABOUT).write_bytes(b'{"environment": {"a": "\xff"}}')
    with pytest.raises(ps.InputError, match="is not what Pipeline"):
        read_run(tmp_path)
    with pipeline(run=tmp_path) as pipe:
        train(pipe, 3)
    (tmp_path / "steps.jsonl").write_text("nonsense\n")
    with pytest.raises(ps.InputError, match=r"steps\.jsonl is not what"):
        read_run(tmp_path)
    (tmp_path / "steps.jsonl").unlink()
    (tmp_path / "steps.jsonl").mkdir()
    with pytest.raises(ps.InputError, match=r"steps\.jsonl cannot be read: Is a directory"):
        read_run(tmp_path)
    about = msgspec.json.decode((tmp_path / ABOUT).read_bytes())
    (tmp_path / ABOUT).write_bytes(msgspec.json.encode({**about, "version": 7}))
    with pytest.raises(ps.InputError, match="version 7; this Penstock reads version 1"):
        read_run(tmp_path)


def test_a_disk_that_is_full_does_not_end_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RunFolder, item: object) -> None:
        raise OSError(28, "No space left on device")

    with pipeline(run=tmp_path) as pipe:
        monkeypatch.setattr(RunFolder, "add", full)
        with pytest.warns(UserWarning, match=r"No space left.*the training goes on"):
            train(pipe, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(pipe, 3)
        assert len(pipe.history().records) == 4


def test_steps_that_end_together_are_noted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(keeping.time, "time", lambda: now)
    kept = Kept()
    for number, seconds in enumerate([0.3, 0.5, 0.1, 0.2, 0.4], start=1):
        now += seconds
        kept.step(number, seconds, seconds / 2, rows=4)
    kept.step(6, 2.5, 1.0, rows=4)
    with pipeline() as pipe:
        times = kept.history(pipe._running.about()).steps
    assert times[0] == StepTimes(
        step=5,
        at=pytest.approx(101.5),
        steps=5,
        seconds=pytest.approx(1.5),
        pass_seconds=pytest.approx(0.75),
        slowest=2,
        slowest_seconds=0.5,
        rows=20,
    )
    assert (times[1].step, times[1].steps, times[1].seconds) == (6, 1, 2.5)
