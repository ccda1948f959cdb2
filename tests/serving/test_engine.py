"""The engine, with work that is made for the test."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.errors import ClosedError
from penstock.serving.engine import Engine
from penstock.serving.predictor import Prediction
from penstock.serving.refusal import Refusal

PATIENCE = 30.0


class Slow:
    """Work that does nothing until it is allowed to; then each step ends a job."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.allowed = threading.Semaphore(0)
        self.cancelled: list[Any] = []
        self.error: Exception | None = None

    def add(self, job: Any) -> None:
        self.jobs.append(job)

    @property
    def is_idle(self) -> bool:
        return not self.jobs

    def step(self) -> Sequence[Any]:
        if self.allowed.acquire(timeout=0.01):
            job = self.jobs.pop(0)
            job.result, job.error, job.is_over = "done", self.error, True
        return []

    def cancel(self, job: Any) -> None:
        self.jobs = [each for each in self.jobs if each is not job]
        self.cancelled.append(job)
        job.is_over = True

    def close(self) -> None:
        for job in self.jobs:
            job.is_over = True
        self.jobs = []


class Told:
    """What an engine has told of a request."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def __call__(self, number: int, tokens: Sequence[int], is_over: bool) -> None:
        if is_over:
            self.over.set()


def nothing() -> None:
    """Neither rest nor check."""


@contextmanager
def engine(
    work: Slow, most: int, check: Any = nothing, raises: type[Exception] | None = None
) -> Iterator[Engine]:
    """An engine that runs in a thread."""
    made, errors = Engine(work, most, nothing, check), []

    def run() -> None:
        try:
            made.run()
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    while not made.ready:
        pass
    try:
        yield made
    finally:
        made.stop(0)
        thread.join(PATIENCE)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == ([] if raises is None else [raises])


def job() -> Prediction:
    return Prediction((), {})


def test_a_full_queue_refuses_and_has_room_again() -> None:
    work, told = Slow(), Told()
    with engine(work, 2) as made:
        made.submit([job()], told)
        made.submit([job()], Told())
        with pytest.raises(Refusal, match="there is room for 2") as found:
            made.submit([job()], Told())
        assert found.value.status == 429
        assert int(found.value.headers["Retry-After"]) >= 1
        assert made.open == 2
        work.allowed.release()
        assert told.over.wait(PATIENCE)
        while made.open == 2:  # it is counted after it is told
            pass
        made.submit([job()], Told())


def test_more_than_there_can_ever_be_room_for_is_the_clients_mistake() -> None:
    with engine(Slow(), 2) as made, pytest.raises(Refusal, match="larger --queue") as found:
        made.submit([job(), job(), job()], Told())
    assert found.value.status == 400


def test_a_cancelled_request_makes_room() -> None:
    work, told, mine = Slow(), Told(), job()
    with engine(work, 1) as made:
        ticket = made.submit([mine], told)
        made.cancel(ticket)
        assert told.over.wait(PATIENCE)
        assert work.cancelled == [mine]
        while made.open:
            pass
        made.cancel(ticket)  # again, and nothing happens
        made.submit([job()], Told())


def test_what_runs_goes_on_in_the_time_of_grace_and_nothing_is_taken() -> None:
    work, told, mine = Slow(), Told(), job()
    with engine(work, 2) as made:
        made.submit([mine], told)
        made.stop(PATIENCE)
        while made.ready:
            pass
        with pytest.raises(Refusal, match="stopping") as found:
            made.submit([job()], Told())
        assert found.value.status == 503
        work.allowed.release()
        assert told.over.wait(PATIENCE)
    assert (mine.result, mine.error) == ("done", None)


def test_what_is_left_after_the_time_of_grace_is_told() -> None:
    work, told, mine = Slow(), Told(), job()
    with engine(work, 2) as made:
        made.submit([mine], told)
        made.stop(PATIENCE)
        made.stop(0)
        assert told.over.wait(PATIENCE)
    assert isinstance(mine.error, Refusal)
    assert mine.error.status == 503


def test_a_useless_pipeline_ends_the_engine_and_all_requests_are_told() -> None:
    work, told, others = Slow(), (Told(), Told()), (job(), job())
    work.error = ClosedError("the workers are gone")

    def check() -> None:
        raise ClosedError("the pipeline is closed: the workers are gone")

    with engine(work, 2, check, ClosedError) as made:
        for each, mine in zip(told, others, strict=True):
            made.submit([mine], each)
        work.allowed.release()
        assert all(each.over.wait(PATIENCE) for each in told)
        while made.ready:
            pass
        with pytest.raises(Refusal, match="the workers are gone"):
            made.submit([job()], Told())
    assert isinstance(others[0].error, ClosedError)
    assert isinstance(others[1].error, Refusal)
    assert "ClosedError" in str(others[1].error)
