"""Records of workers and of passes, as others read them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.board import memory
from penstock.board.activity import STARTING, Activity, code
from penstock.board.memory import Board, opened
from penstock.schedule import Action, Kind

FORWARD, WAITS = code(Action(Kind.FORWARD, 1, 2), False), code(Action(Kind.FORWARD, 1, 2), True)


class Clock:
    """Says what it is told to."""

    now = 1000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(memory, "monotonic_ns", clock)
    return clock


def test_a_record_adds_up_work_and_waiting(clock: Clock) -> None:
    board = Board(2)
    record = board.records[1]
    for doing, until in (
        (STARTING, 1500),
        (WAITS, 1700),
        (FORWARD, 2000),
        (0, 2500),
        (FORWARD, 2600),
    ):
        record.note(doing)
        clock.now = until
    reading = board.reading(1)
    assert reading.activity == Activity(1, 2, "forward")
    assert (reading.waited, reading.worked) == (200, 400)  # what it does now included
    assert reading.since == 2500
    record.note(0)
    record.count()
    reading = board.reading(1)
    assert (reading.waited, reading.worked, reading.passes) == (200, 400, 1)
    assert reading.activity.is_idle
    assert board.reading(0) == memory.Reading.nothing()


def test_the_latest_steps_are_kept(clock: Clock) -> None:
    board = Board(1)
    assert board.counted().latest == []
    board.note_begun(1000)
    assert board.counted().begun == 1000
    for k in range(70):
        clock.now += 10
        board.count(duration=k, rows=2, tokens=3)
    board.count_other()
    board.note_begun(0)
    counted = board.counted()
    assert (counted.steps, counted.rows, counted.tokens, counted.others) == (70, 140, 210, 1)
    assert [step.duration for step in counted.latest] == list(range(6, 70))
    assert counted.latest[-1].end == clock.now
    assert counted.begun == 0


def test_waiting_amid_an_action_is_waiting(clock: Clock) -> None:
    board = Board(1)
    record = board.records[0]
    record.note(FORWARD)
    with record.waiting():
        clock.now += 100
        activity = board.reading(0).activity
        assert (activity.waits, activity.amid, activity.microbatch) == (True, True, 2)
    assert board.reading(0).activity == Activity(1, 2, "forward")
    assert board.reading(0).waited == 100
    record.note(WAITS)
    with record.waiting():  # it waits for values already
        assert not board.reading(0).activity.amid


def test_another_process_reads_it_without_asking(tmp_path: Path) -> None:
    board = Board(3, path=tmp_path / "a.board")
    board.records[2].note(FORWARD)
    script = (
        "import sys; from pathlib import Path; from penstock.board.memory import opened; "
        "print(opened(Path(sys.argv[1]), 3).reading(2).activity, 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", script, str(board.path)]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert found == "in the forward of micro-batch 2 in stage 1 False\n"


def test_a_reader_cannot_change_it(tmp_path: Path) -> None:
    board = Board(1, path=tmp_path / "a.board")
    with pytest.raises(TypeError, match="read-only"):
        opened(tmp_path / "a.board", 1).records[0].note(FORWARD)
    assert board.reading(0).code == 0


def test_a_closed_board_leaves_nothing(tmp_path: Path) -> None:
    board = Board(1, path=tmp_path / "a.board")
    (tmp_path / "a.json").touch()
    board.close()
    assert not list(tmp_path.iterdir())
    board.records[0].note(FORWARD)  # whoever has it may go on
    assert board.reading(0).code == FORWARD
