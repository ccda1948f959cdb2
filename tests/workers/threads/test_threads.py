"""Workers that are threads: one job at a time each, and every failure reaches the caller."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from penstock.errors import ClosedError, WorkerTimeout
from penstock.links.local import Aborted
from penstock.workers.thread_pool import ThreadPool
from tests.support.threads import NewThreads


class Team:
    """Three workers, and an event that the abort sets for those who wait."""

    def __init__(self, count: int = 3) -> None:
        self.woken = threading.Event()
        self.resets = 0
        devices = [torch.device("cpu")] * count
        self.workers = ThreadPool(devices, 1, self.woken.set, self._reset)

    def _reset(self) -> None:
        self.woken.clear()
        self.resets += 1

    def wait(self) -> None:
        """A job that waits for another worker, and is told that it will not come."""
        assert self.woken.wait(5)
        raise Aborted


@pytest.fixture
def team() -> Iterator[Team]:
    found = Team()
    yield found
    found.workers.close()
    found.workers.join(5)


def returning(value: Any) -> Callable[[], Any]:
    return lambda: value


def raising(error: BaseException, after: float = 0.0) -> Callable[[], Any]:
    def job() -> None:
        time.sleep(after)
        raise error

    return job


def test_results_come_by_worker(team: Team) -> None:
    assert len(team.workers) == 3
    for round_number in range(50):
        jobs = [returning((round_number, k)) for k in range(3)]
        assert team.workers.run(jobs) == [(round_number, k) for k in range(3)]


def test_every_worker_is_one_thread_with_its_share_of_cores(team: Team) -> None:
    def job() -> tuple[str, int]:
        return threading.current_thread().name, torch.get_num_threads()

    names = [f"penstock-{k}" for k in range(3)]
    assert team.workers.run([job] * 3) == team.workers.run([job] * 3) == [(n, 1) for n in names]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_error_wakes_the_others_and_is_raised(team: Team, failing: int) -> None:
    jobs: list[Callable[[], Any]] = [team.wait] * 3
    jobs[failing] = raising(KeyError("mine"), after=0.05)
    with pytest.raises(KeyError, match="mine"):
        team.workers.run(jobs)
    assert team.resets == 1
    assert team.workers.run([returning(1)] * 3) == [1, 1, 1]


def test_one_of_two_errors_is_raised(team: Team) -> None:
    with pytest.raises((KeyError, IndexError)):
        team.workers.run([raising(KeyError()), team.wait, raising(IndexError())])
    assert team.workers.run([returning(1)] * 3) == [1, 1, 1]


@pytest.mark.parametrize("error", [SystemExit(3), GeneratorExit(), KeyboardInterrupt()])
def test_errors_that_are_no_exceptions_do_not_end_a_worker(
    team: Team, error: BaseException
) -> None:
    with pytest.raises(type(error)):
        team.workers.run([raising(error), team.wait, team.wait])
    assert team.workers.run([returning(1)] * 3) == [1, 1, 1]


def test_a_late_worker_is_named(team: Team) -> None:
    with pytest.raises(WorkerTimeout, match=r"worker 1 did not finish within"):
        team.workers.run([returning(1), lambda: team.woken.wait(600), returning(1)], timeout=0.1)
    assert team.workers.run([returning(1)] * 3) == [1, 1, 1]  # it noticed, so all is well


def test_a_worker_that_cannot_be_stopped_closes_the_team(
    team: Team, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(team.workers, "_grace", 0.1)
    release = threading.Event()
    with pytest.raises(WorkerTimeout):
        team.workers.run([lambda: release.wait(5), returning(1), returning(1)], timeout=0.1)
    with pytest.raises(ClosedError, match="a worker was still busy"):
        team.workers.run([returning(1)] * 3)
    release.set()
    team.workers.join(5)


def test_what_a_job_holds_is_let_go_before_the_caller_hears(team: Team) -> None:
    class Big:
        alive = 0

        def __init__(self) -> None:
            Big.alive += 1

        def __del__(self) -> None:
            Big.alive -= 1

    for _ in range(20):
        big = Big()
        jobs = [lambda big=big: None] * 3
        del big
        team.workers.run(jobs)
        del jobs
        assert Big.alive == 0


def test_closing_twice_and_running_after_it(new_threads: NewThreads, team: Team) -> None:
    assert len(new_threads()) == 3
    team.workers.close("I said so")
    team.workers.close("again")
    team.workers.join(5)
    assert new_threads() == []
    with pytest.raises(ClosedError, match="the pipeline is closed: I said so"):
        team.workers.run([returning(1)] * 3)
