"""The thread of a rank: what it holds ends with it, and it waits for nobody for ever."""

from __future__ import annotations

import gc
import os
import socket
import threading

import pytest
import torch

import penstock as ps
from penstock.board.activity import code
from penstock.board.memory import Board
from penstock.links.local import Aborted
from penstock.links.wire import Wire
from penstock.schedule import Action, Kind
from penstock.workers.ranks.thread import RankThread


def test_no_file_descriptor_is_left() -> None:
    record = Board(1).records[0]
    gc.collect()  # what other tests have left
    before = set(os.listdir("/proc/self/fd"))
    thread = RankThread(torch.device("cpu"), 1, lambda: None, record)
    assert thread.run([lambda: 7]) == [7]
    assert set(os.listdir("/proc/self/fd")) != before
    thread.close()
    thread.release()
    thread.release()
    thread.give_up(KeyboardInterrupt())
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("ended", ["read", "given up", "late"])
def test_a_neighbour_that_reads_nothing_is_not_waited_for_for_ever(ended: str) -> None:
    ours, theirs = socket.socketpair()
    wire, neighbour = Wire(ours), Wire(theirs)
    record = Board(1).records[0]
    record.note(code(Action(Kind.FORWARD, 0, 1), False))
    thread = RankThread(torch.device("cpu"), 1, lambda: None, record)
    try:
        thread.begin(1, 0.2 if ended == "late" else 60.0)
        while wire.has_room():
            wire.send(b"some")
        found: list[BaseException | None] = []

        def waiting() -> None:
            try:
                thread.wait_for_room(wire)
                found.append(None)
            except BaseException as error:
                found.append(error)

        waits = threading.Thread(target=waiting)
        waits.start()
        waits.join(0.1)
        assert not found
        if ended == "given up":
            thread._signal_stop()
        while ended == "read" and waits.is_alive() and neighbour.ready():
            neighbour.receive()
        waits.join(30)
        (error,) = found
        expected = {"read": type(None), "given up": Aborted, "late": ps.WorkerTimeout}
        assert type(error) is expected[ended]
        if ended == "late":
            assert "a neighbour read nothing within 0 s; this rank is waiting for" in str(error)
    finally:
        thread.close()
        thread.release()
        wire.close()
        neighbour.close()
