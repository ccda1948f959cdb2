"""Ctrl-C in the midst of a message waits for its end: the pipeline goes on, with the same bits."""

from __future__ import annotations

import inspect
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.interrupts import interrupts_wait
from penstock.links.wire import Wire
from tests.support.models import mlp

X, Y = torch.randn(8, 6), torch.randn(8, 4)


@pytest.fixture(scope="module")
def pipe() -> Iterator[ps.Pipeline]:
    torch.manual_seed(0)
    devices = ["cpu"] * 2
    model = mlp(6, 8, 4)
    with ps.Pipeline(
        model, (X,), devices=devices, workers="processes", num_microbatches=4, replicas=1
    ) as made:
        yield made


@pytest.fixture
def handled(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A handler of the user's own."""

    def handler(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handler)
    yield handler
    signal.signal(signal.SIGINT, before)


def step(pipe: ps.Pipeline) -> list[torch.Tensor]:
    pipe.zero_grad()
    loss = pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
    return [loss, *(p.grad.clone() for p in pipe.parameters() if p.grad is not None)]


# In a finalizer Python itself loses an interrupt, and says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupted_at_random_moments(pipe: ps.Pipeline, handled: Any) -> None:
    expected, drawn = step(pipe), random.Random(0)
    begun = time.perf_counter()
    for _ in range(5):
        step(pipe)
    usual = (time.perf_counter() - begun) / 5
    interrupted = 0
    for _ in range(60):
        timer = threading.Timer(drawn.uniform(0, 2 * usual), signal.raise_signal, [signal.SIGINT])
        try:
            timer.start()
            while timer.is_alive():
                step(pipe)
            timer.join()
            time.sleep(0)  # a signal that has come is seen here, at the latest
        except KeyboardInterrupt:
            interrupted += 1
        timer.join()
        assert signal.getsignal(signal.SIGINT) is handled
        assert all(map(torch.equal, step(pipe), expected))
    assert interrupted > 30


@pytest.mark.parametrize("moment", ["_read", "_send", "_rest"])
def test_interrupted_in_the_midst_of_a_message(
    pipe: ps.Pipeline, handled: Any, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The signal comes when a part of it has been sent or read."""
    expected, usual, came = step(pipe), getattr(Wire, moment), []

    def interrupted(wire: Wire, *args: Any) -> Any:
        found = usual(wire, *args)
        if not came:
            came.append(wire)
            signal.raise_signal(signal.SIGINT)
        return found

    monkeypatch.setattr(Wire, moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        step(pipe)
    monkeypatch.undo()
    assert came
    assert signal.getsignal(signal.SIGINT) is handled
    assert all(map(torch.equal, step(pipe), expected))


def test_a_second_interrupt_does_not_wait(handled: Any) -> None:
    reached = []

    def work() -> None:
        with interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            reached.append("between")
            signal.raise_signal(signal.SIGINT)
            reached.append("after")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["between"]
    assert signal.getsignal(signal.SIGINT) is handled


def test_one_within_another(handled: Any) -> None:
    reached = []

    def work() -> None:
        with interrupts_wait():
            with interrupts_wait():
                signal.raise_signal(signal.SIGINT)
            reached.append("outer")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert reached == ["outer"]
    assert signal.getsignal(signal.SIGINT) is handled


def test_an_error_does_not_hide_an_interrupt(handled: Any) -> None:
    def work() -> None:
        with interrupts_wait():
            signal.raise_signal(signal.SIGINT)
            raise ValueError

    with pytest.raises(KeyboardInterrupt):
        work()
    assert signal.getsignal(signal.SIGINT) is handled


def test_other_threads_leave_signals_alone(handled: Any) -> None:
    found = []

    def look() -> None:
        with interrupts_wait():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [handled]


def test_where_it_is_ignored_it_stays_so() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts_wait():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


WITHOUT_MESSAGES = re.compile(
    r"penstock/(pipeline|passes|runner|workers/(pool|thread_pool|(threads|processes)/workers))\.py$"
)


class Interrupter:
    """Lets a Ctrl-C come at a certain moment: as a function begins, or as a call returns.

    These are the moments at which Python looks for signals. It does not as a generator yields: an
    error that is raised there would end the generator without its `finally`.
    """

    def __init__(self) -> None:
        self.moments = 0
        self._chosen = -1

    def run(self, work: Any, moment: int = -1) -> Any:
        """The result of some work; `None` if it was interrupted."""
        self.moments, self._chosen = 0, moment
        sys.setprofile(self._look)
        try:
            return work()
        except KeyboardInterrupt:
            return None
        finally:
            sys.setprofile(None)

    def _look(self, frame: FrameType, event: str, _: Any) -> None:
        yields = event == "return" and frame.f_code.co_flags & inspect.CO_GENERATOR
        if event != "c_call" and not yields and WITHOUT_MESSAGES.search(frame.f_code.co_filename):
            self.moments += 1
            if self.moments == self._chosen:
                raise KeyboardInterrupt


class Moved(nn.Module):
    """With statistics that a step moves, and masks that it draws."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 16), nn.BatchNorm1d(16)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.drop(self.norm(self.first(x)).tanh()))


@pytest.mark.parametrize(("kind", "every"), [("threads", 2), ("processes", 29)])
def test_interrupted_at_many_moments_of_a_step(kind: Any, every: int) -> None:
    """Nothing of the step is left, or all of it is; and the next one has the bits of any other.

    Between two functions, for instance, when workers have a pass and nobody waits for it yet.
    """
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "cuts": ["drop"], "workers": kind}
    model, interrupter = Moved(), Interrupter()
    with ps.Pipeline(
        model, (X,), num_microbatches=2, audit=None, timeout=20, **options, replicas=1
    ) as pipe:
        start = {name: value.clone() for name, value in model.state_dict().items()}
        random_state = pipe.random_state()

        def work() -> torch.Tensor:
            loss: torch.Tensor = pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
            return loss

        def begin() -> None:
            with torch.no_grad():
                for name, value in model.state_dict().items():
                    value.copy_(start[name])
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 0.25)
            pipe.load_random_state(random_state)

        def now() -> list[torch.Tensor]:
            gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            return [*gradients, *(buffer.clone() for buffer in model.buffers())]

        work()
        begin()
        before = now()
        loss, after = interrupter.run(work), now()
        begin()
        interrupter.run(work)
        assert not all(map(torch.equal, before, after))
        for moment in range(1, interrupter.moments, every):
            begin()
            interrupter.run(work, moment)
            found = now()
            assert any(all(map(torch.equal, found, each)) for each in (before, after)), moment
            begin()
            assert torch.equal(work(), loss)
            assert all(map(torch.equal, now(), after)), moment


@pytest.mark.parametrize(("kind", "every"), [("threads", 5), ("processes", 19)])
def test_interrupted_at_many_moments_of_a_map(kind: Any, every: int) -> None:
    interrupter = Interrupter()
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "workers": kind, "timeout": 20}
    with ps.Pipeline(mlp(6, 8, 4), (X,), num_microbatches=2, **options, replicas=1) as pipe:

        def work() -> torch.Tensor:
            return torch.stack(list(pipe.map([X, X + 1, X + 2])))

        expected = work()
        interrupter.run(work)
        for moment in range(1, interrupter.moments, every):
            interrupter.run(work, moment)
            assert torch.equal(work(), expected), moment
            assert not pipe._runner.workers._pool.under_way  # type: ignore[attr-defined]
