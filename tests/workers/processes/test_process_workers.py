"""Workers that are processes: every report arrives, or the reason why it cannot."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.errors import ClosedError, InputError, WorkerDied, WorkerTimeout
from penstock.links.local import Aborted
from penstock.links.wire import Wire
from penstock.workers import pool as worker_pool
from penstock.workers.processes import pool as processes
from penstock.workers.processes.pool import ProcessPool
from penstock.workers.thread_pool import ThreadPool
from tests.support.pool import lend

LONG = 600.0  # seconds: longer than pytest lets a test run, so what is waited for has to come


@pytest.fixture
def team() -> Iterator[ProcessPool]:
    """Two workers of the pool."""
    found = lend(2, lambda: None)
    found.run(returning(0))  # they have started
    yield found
    found.close()


@pytest.fixture
def fresh() -> Iterator[ProcessPool]:
    """Two workers that will not be of use afterwards."""
    found = ProcessPool(2, lambda: None)
    found.run(returning(0))
    yield found
    found.close()
    assert found.pids
    for pid in found.pids:
        assert not Path(f"/proc/{pid}").exists()


def returning(value: Any) -> list[Callable[[Any], Any]]:
    return [lambda own: (own.worker, value)] * 2


def assert_usable(team: ProcessPool) -> None:
    assert team.run(returning(7), 20.0) == [(0, 7), (1, 7)]


def waiting(team: ProcessPool) -> tuple[Callable[[Any], Any], socket.socket]:
    """A job of worker 1 that waits for another worker, and that one's end."""
    here, there = socket.socketpair()
    number = team.grant(there.fileno(), 1)
    there.close()

    def wait(own: Any) -> None:
        _, receiver = own.ends(Wire(socket.socket(fileno=own.granted(number))))
        receiver.get()

    return wait, here


def interrupted_after(seconds: float) -> None:
    threading.Timer(seconds, signal.raise_signal, [signal.SIGINT]).start()


def test_results_come_by_worker(team: ProcessPool) -> None:
    for number in range(30):
        assert team.run(returning(torch.tensor(number)), 20.0) == [(0, number), (1, number)]


def test_an_error_wakes_the_others(team: ProcessPool) -> None:
    def fail(own: Any) -> None:
        raise KeyError("mine")

    wait, other = waiting(team)
    with pytest.raises(KeyError, match="mine") as caught:
        team.run([fail, wait], LONG)
    assert 'raise KeyError("mine")' in caught.value.__notes__[-1]
    assert_usable(team)
    other.close()


def test_what_a_worker_cannot_send(team: ProcessPool) -> None:
    with pytest.raises(InputError, match=r"result of worker 0 cannot be sent.*pickle"):
        team.run([lambda own: threading.Lock(), returning(0)[1]], 20.0)
    assert_usable(team)


def test_what_cannot_be_sent_to_a_worker(team: ProcessPool) -> None:
    lock = threading.Lock()
    with pytest.raises(InputError, match="worker 1 is another process"):
        team.run([returning(0)[0], lambda own: lock], LONG)
    assert_usable(team)


def test_what_a_worker_cannot_load(team: ProcessPool) -> None:
    class Picky:
        def __reduce__(self) -> Any:
            return __import__, ("nowhere_to_be_found",)

    picky = Picky()
    with pytest.raises(InputError, match="No module named 'nowhere_to_be_found'"):
        team.run([returning(0)[0], lambda own: picky], 20.0)
    assert_usable(team)


def test_what_the_driver_cannot_load(team: ProcessPool) -> None:
    def job(own: Any) -> Any:
        class Here:
            def __reduce__(self) -> Any:
                return eval, (f"1 / (os.getpid() == {os.getpid()})", {"os": os})

        return Here()

    with pytest.raises(ZeroDivisionError) as caught:
        team.run([job, returning(0)[1]], 20.0)
    assert "report of worker 0" in caught.value.__notes__[0]
    assert_usable(team)


def test_much_that_is_sent_both_ways(team: ProcessPool) -> None:
    data = os.urandom(3_000_000)
    assert team.run(returning(data), 30.0) == [(0, data), (1, data)]


def test_jobs_that_belong_together_are_done_in_spite_of_ctrl_c(
    team: ProcessPool, tmp_path: Path
) -> None:
    def job(own: Any) -> None:
        time.sleep(0.4)
        (tmp_path / str(own.worker)).touch()

    interrupted_after(0.1)
    with pytest.raises(KeyboardInterrupt):
        team.run([job] * 2, 5.0, whole=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]
    assert_usable(team)


class _Interrupted:
    """Is being packed when the user presses Ctrl-C."""

    def __reduce__(self) -> Any:
        raise KeyboardInterrupt


def _breaks_off(own: Any) -> None:
    raise Aborted


def test_a_link_that_breaks_as_another_thread_closes(
    team: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    collect = team._collect

    def closing(*arguments: Any, **options: Any) -> None:
        collect(*arguments, **options)
        team._closed_because = "I said so"

    with monkeypatch.context() as patch:
        patch.setattr(team, "_collect", closing)
        with pytest.raises(ClosedError, match="the pipeline is closed: I said so"):
            team.run([_breaks_off, returning(0)[0]], 60.0)
    team._closed_because = None
    assert_usable(team)


@pytest.mark.parametrize(("worker", "whole"), [(0, False), (1, False), (0, True)])
def test_ctrl_c_before_anything_is_sent(team: ProcessPool, worker: int, whole: bool) -> None:
    """Nobody waits for what a worker was not given, until it is taken for a busy one."""
    jobs = returning(_Interrupted())
    jobs[1 - worker] = returning(0)[0]
    with pytest.raises(KeyboardInterrupt):
        team.run(jobs, 60.0, whole)
    assert_usable(team)


def test_jobs_that_belong_together_are_not_parted(
    fresh: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    give = fresh._give

    def interrupted(worker: int, job: Any, current: Any) -> None:
        give(worker, job, current)
        raise KeyboardInterrupt

    monkeypatch.setattr(fresh, "_give", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fresh.run(returning(0), 5.0, whole=True)
    with pytest.raises(ClosedError, match=r"KeyboardInterrupt.*others not"):
        fresh.run(returning(0), 20.0)


def test_an_interrupt_as_a_report_is_noted(
    fresh: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report is lost, but nobody waits for it."""

    def interrupted(worker: int, *message: Any) -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(fresh, "_opened", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fresh.run([lambda own: None, lambda own: time.sleep(0.2)], LONG)
    with pytest.raises(ClosedError, match="in the midst of a message"):
        fresh.run(returning(0), 20.0)


def test_a_worker_that_takes_long_to_notice_a_failure_is_killed(
    fresh: ProcessPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(own: Any) -> None:
        raise KeyError("mine")

    monkeypatch.setattr(fresh, "_grace", 0.2)
    with pytest.raises(KeyError, match="mine"):
        fresh.run([fail, lambda own: time.sleep(LONG)], LONG)
    with pytest.raises(ClosedError, match=r"still busy.*KeyError"):
        fresh.run(returning(0), 20.0)


def test_a_stopped_worker_does_not_read(fresh: ProcessPool) -> None:
    """What it is sent is more than fits on the way."""
    data = os.urandom(3_000_000)
    os.kill(fresh.pids[1], signal.SIGSTOP)
    with pytest.raises(WorkerTimeout, match=r"worker 1 does not read.*stopped by a signal") as e:
        fresh.run(returning(data), 0.5)
    assert e.value.worker == 1


def test_what_a_worker_leaves_behind_is_killed_with_it(fresh: ProcessPool, tmp_path: Path) -> None:
    """It holds the worker's files open, so their end is no sign of the worker's."""
    file = tmp_path / "pid"

    def job(own: Any) -> None:
        child = os.fork()
        if child == 0:
            time.sleep(LONG)
            os._exit(0)
        file.write_text(str(child))
        os._exit(4)

    with pytest.raises(WorkerDied, match="ended with exit code 4"):
        fresh.run([job, returning(0)[1]], LONG)
    stat = Path(f"/proc/{file.read_text()}/stat")
    while stat.exists() and " Z " not in stat.read_text():  # init may not have seen it yet
        time.sleep(0.01)


def test_work_is_finished_before_an_interrupt_is_raised() -> None:
    done = []

    def work() -> None:
        time.sleep(0.3)
        done.append(1)

    interrupted_after(0.05)
    with pytest.raises(KeyboardInterrupt):
        processes._uninterrupted(work)
    assert done == [1]
    with pytest.raises(ZeroDivisionError):
        processes._uninterrupted(lambda: [][1 // 0])


def test_time_in_which_the_driver_was_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = ThreadPool([torch.device("cpu")], 1, lambda: None, lambda: None)
    clock, wait = [0.0], workers._await_report

    def stopped(current: Any, seconds: float | None) -> None:
        clock[0] += 100.0
        wait(current, seconds)

    monkeypatch.setattr(worker_pool, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(workers, "_await_report", stopped)
    assert workers.run([lambda: time.sleep(1.5) or 5], 10.0) == [5]
    workers.close()
    workers.join(5.0)


def test_workers_have_the_warning_filters_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "warnoptions", ["ignore", "error:the one:UserWarning"])
    found = ProcessPool(1, lambda: None)

    def options(own: Any) -> list[str]:
        return list(sys.warnoptions)

    try:
        assert found.run([options], LONG) == [["ignore", "error:the one:UserWarning"]]
    finally:
        found.close()


@pytest.mark.parametrize("job_fails", [True, False])
def test_a_device_that_fails_after_the_job_is_its_error(
    fresh: ProcessPool, job_fails: bool
) -> None:
    """As with an index out of bounds, of which a GPU tells whoever waits for it."""

    def fails(own: Any) -> int:
        def synchronize() -> None:
            raise RuntimeError("CUDA error: device-side assert triggered")

        own._wait_for_device = synchronize
        if job_fails:
            raise KeyError("mine")
        return 1

    with pytest.raises(
        KeyError if job_fails else RuntimeError, match="mine" if job_fails else "CUDA"
    ):
        fresh.run([fails, lambda own: 2], 20.0)
