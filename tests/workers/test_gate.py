"""The script is alone with a model's modules: no worker is inside, and no other thread of it."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
from torch import nn

from penstock.workers.gate import BusyError, Gate, gate_of


def test_another_thread_waits_until_the_first_has_left() -> None:
    gate, seen = Gate(), []
    first_is_in, may_leave = threading.Event(), threading.Event()

    def first() -> None:
        with gate.alone(10):
            first_is_in.set()
            may_leave.wait(10)
            seen.append("first")

    def second() -> None:
        with gate.alone(10):
            seen.append("second")

    threads = [threading.Thread(target=each) for each in (first, second)]
    threads[0].start()
    assert first_is_in.wait(10)
    threads[1].start()
    threads[1].join(0.2)
    assert not seen
    may_leave.set()
    for thread in threads:
        thread.join(10)
    assert seen == ["first", "second"]


def test_within_it_is_alone_until_it_has_left_for_good() -> None:
    gate, inside = Gate(), threading.Event()

    def worker() -> None:
        with gate:
            inside.set()

    with gate.alone(10):
        with gate.alone(10):
            threading.Thread(target=worker).start()
        assert not inside.wait(0.2)
    assert inside.wait(10)


def test_those_who_are_busy_are_not_waited_for_too_long() -> None:
    gate = Gate()
    with gate, pytest.raises(BusyError), ExitStack() as stack:
        stack.enter_context(gate.alone(0.05))
    with gate.alone(10):
        pass


def test_models_that_share_modules_have_one_gate() -> None:
    shared = nn.Linear(2, 2)
    one, other = nn.Sequential(shared), nn.Sequential(nn.Tanh(), shared)
    assert gate_of(one) is gate_of(other) is gate_of(shared)
    assert gate_of(nn.Linear(2, 2)) is not gate_of(one)
