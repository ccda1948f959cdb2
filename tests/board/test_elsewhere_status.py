"""Workers on other machines are not looked up among the processes of this one."""

from __future__ import annotations

import os

from penstock.board.memory import Board, Reading
from penstock.board.runs import Description, Run, Worker
from penstock.board.status import status_here, status_of

NOBODY = 2**22 + 1  # no process can have this number


def description() -> Description:
    return Description(
        pid=os.getpid(),
        started=0,
        host="here",
        command="",
        began=0.0,
        model="Model",
        plan="",
        microbatches=1,
        workers=(
            Worker(0, "cpu", 0, 0, os.getpid(), "here", (0,)),
            Worker(1, "cpu", 0, 1, NOBODY, "there", (1,)),
        ),
        recorded=(0, 1),
        placement=(0, 1),
        predicted_seconds=1.0,
        bound_seconds=1.0,
    )


def test_a_worker_that_has_answered_runs() -> None:
    reading = Reading(0, 0, 5 * 10**9, 0, 3, 0, 0)
    counted = Board(2).counted()
    near, far = status_of(description(), {0: Reading.nothing(), 1: reading}, counted).workers
    assert (near.state, far.state) == ("running", "running")
    assert (far.passes, far.worked_seconds, far.memory) == (3, 5.0, 0)
    assert far.doing == "idle"


def test_one_that_has_not_is_not_seen() -> None:
    _, far = status_of(description(), {0: Reading.nothing()}, Board(2).counted()).workers
    assert (far.state, far.doing) == ("elsewhere", "not seen from here")


def test_what_a_board_of_this_machine_has_for_it_says_nothing() -> None:
    board = Board(2)
    try:
        near, far = status_here(Run(description(), board, None)).workers
    finally:
        board.close()
    assert (near.state, far.state) == ("running", "elsewhere")
