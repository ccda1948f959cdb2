"""One worker on a CPU: the script's own thread runs the passes that it waits for."""

from __future__ import annotations

import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.errors import InputError, WorkerError
from penstock.interrupts import is_interrupt, signals_wait
from tests.support.models import mlp

X, Y = torch.randn(8, 4), torch.randn(8, 4)


class Noting(nn.Module):
    """A layer that does something as it runs.

    Attributes:
        then: what it does.
        ran_in: the threads that have run it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.then: Callable[[], Any] = lambda: None
        self.ran_in: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.ran_in.append(threading.get_ident())
        self.then()
        return self.layer(x)  # type: ignore[no-any-return]


@contextmanager
def pipeline(model: nn.Module, **options: Any) -> Iterator[ps.Pipeline]:
    """A pipeline of one device, with two micro-batches."""
    settings: dict[str, Any] = {"devices": ["cpu"], "num_microbatches": 2, "audit": None, **options}
    with ps.Pipeline(model, (X,), keep_closed=["0"], **settings) as pipe:
        yield pipe


def noting() -> tuple[nn.Sequential, Noting]:
    torch.manual_seed(0)
    first = Noting()
    return nn.Sequential(first, nn.Tanh(), nn.Linear(4, 4)), first


def step(pipe: ps.Pipeline) -> torch.Tensor:
    return pipe.train_step(X, target=Y, loss_fn=F.mse_loss)


def runs_in(pipe: ps.Pipeline, first: Noting, run: Callable[[], Any]) -> set[str]:
    """Where the first layer runs: here, or in the worker's own thread."""
    first.ran_in.clear()
    run()
    here = threading.get_ident()
    return {"here" if ident == here else "elsewhere" for ident in first.ran_in}


def test_passes_that_are_waited_for_run_in_the_thread_that_waits() -> None:
    model, first = noting()
    with pipeline(model) as pipe:
        assert runs_in(pipe, first, lambda: step(pipe)) == {"here"}
        assert runs_in(pipe, first, lambda: pipe(X).sum().backward()) == {"here"}
        with torch.no_grad():
            assert runs_in(pipe, first, lambda: pipe(X)) == {"here"}
            assert runs_in(pipe, first, lambda: list(pipe.map([X, X]))) == {"elsewhere"}
        optimizer = pipe.optimizer(torch.optim.Adam, lr=0.1)
        with torch.device("meta"):  # modes reach nobody else, whoever runs the pass
            assert runs_in(pipe, first, lambda: step(pipe)) == {"elsewhere"}
            optimizer.step()
        state = optimizer.state_dict()["state"].values()
        assert {value.device.type for each in state for value in each.values()} == {"cpu"}
        assert runs_in(pipe, first, lambda: step(pipe)) == {"here"}


@pytest.mark.parametrize(
    "options", [{"timeout": 60.0}, {"devices": ["cpu", "cpu"], "replicas": 1}], ids=str
)
def test_with_a_limit_and_with_others_to_wait_for_there_are_threads(options: Any) -> None:
    model, first = noting()
    with pipeline(model, **options) as pipe:
        assert runs_in(pipe, first, lambda: step(pipe)) == {"elsewhere"}


def test_steps_have_the_bits_of_plain_pytorch() -> None:
    model, _ = noting()
    plain, _ = noting()
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    with pipeline(model) as pipe:
        ours = pipe.optimizer(torch.optim.AdamW, lr=0.1)
        for _ in range(3):
            with torch.no_grad():  # in the worker's own thread
                for found in pipe.map([X, X]):
                    assert torch.equal(found, torch.cat([plain(x) for x in X.chunk(2)]))
            ours.zero_grad()
            theirs.zero_grad()
            loss = step(pipe)
            expected = torch.zeros(())
            for x, y in zip(X.chunk(2), Y.chunk(2), strict=True):
                part = F.mse_loss(plain(x), y) * 0.5
                part.backward()
                expected += part.detach()
            assert torch.equal(loss, expected)
            ours.step()
            theirs.step()
    for own, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("fails", [False, True])
def test_the_settings_of_the_script_stay(fails: bool) -> None:
    seen: list[tuple[int, bool]] = []
    model, first = noting()

    def look() -> None:
        seen.append((torch.get_num_threads(), torch.is_inference_mode_enabled()))
        if fails:
            raise ValueError("as it has to")

    before = torch.get_num_threads()
    torch.set_num_threads(before + 3)
    try:
        with pipeline(model.eval(), threads_per_worker=1) as pipe, torch.inference_mode():
            first.then = look
            with pytest.raises(WorkerError) if fails else nullcontext():
                pipe(X)
            assert torch.is_inference_mode_enabled()
        assert torch.get_num_threads() == before + 3
        assert set(seen) == {(1, False)}
    finally:
        torch.set_num_threads(before)


def test_a_ctrl_c_is_raised_as_it_is_and_the_step_is_undone() -> None:
    model, first = noting()
    with pipeline(model) as pipe:
        expected = step(pipe), [p.grad.clone() for p in model.parameters()]
        pipe.zero_grad()
        first.then = lambda: signal.raise_signal(signal.SIGINT) if len(first.ran_in) > 3 else None
        with pytest.raises(KeyboardInterrupt):
            step(pipe)
        assert all(p.grad is None for p in model.parameters())
        first.then = lambda: None
        assert torch.equal(step(pipe), expected[0])
        for parameter, gradient in zip(model.parameters(), expected[1], strict=True):
            assert torch.equal(parameter.grad, gradient)


@pytest.mark.parametrize("where", ["module", "loss", "metrics"])
def test_what_a_handler_of_a_signal_raises_is_raised_as_it_is(where: str) -> None:
    def rings() -> None:
        signal.raise_signal(signal.SIGALRM)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        if where == "loss":
            rings()
        return F.mse_loss(output, target)

    def metrics(output: torch.Tensor, target: torch.Tensor) -> int:
        if where == "metrics":
            rings()
        return 1

    model, first = noting()
    before = signal.signal(signal.SIGALRM, raising)
    try:
        with pipeline(model) as pipe:
            first.then = rings if where == "module" else lambda: None
            with pytest.raises(TimeoutError, match="enough"):
                pipe.train_step(X, target=Y, loss_fn=loss_fn, metrics=metrics)
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("error", [SystemExit(3), ValueError("mine"), KeyError("mine")])
def test_what_a_module_raises_says_where(error: BaseException) -> None:
    def fail() -> None:
        raise error

    model, first = noting()
    with pipeline(model) as pipe:
        first.then = fail
        with pytest.raises(WorkerError, match="stage 0 failed in the forward of micro-batch 0"):
            step(pipe)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGALRM])
def test_a_signal_waits_until_all_parameters_are_updated(number: signal.Signals) -> None:
    updated: list[int] = []

    class Slow(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            signal.raise_signal(number)
            time.sleep(0.01)
            found = super().step(closure)
            updated.append(threading.get_ident())
            return found

    model, _ = noting()
    with pipeline(model) as pipe:
        optimizer = pipe.optimizer(Slow, lr=0.1)
        step(pipe)
        before = [p.detach().clone() for p in model.parameters()]
        theirs = signal.signal(signal.SIGALRM, raising)
        try:
            with pytest.raises((KeyboardInterrupt, TimeoutError)):
                optimizer.step()
        finally:
            assert signal.signal(signal.SIGALRM, theirs) is raising
        assert updated == [threading.get_ident()]
        now = list(model.parameters())
        assert not any(torch.equal(a, b) for a, b in zip(before, now, strict=True))
        step(pipe)  # it goes on


def test_a_second_ctrl_c_does_not_wait_and_nobody_goes_on_with_half_a_step() -> None:
    class Endless(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("the second one was not seen")

    model, _ = noting()
    with pipeline(model) as pipe:
        optimizer = pipe.optimizer(Endless, lr=0.1)
        step(pipe)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        with pytest.raises(ps.ClosedError, match="KeyboardInterrupt"):
            step(pipe)


def test_the_part_of_an_optimizer_is_not_noted_as_one() -> None:
    """A step of an optimizer that does nothing is warned about once, and saved ones are its own."""
    model, _ = noting()
    with pipeline(model) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        step(pipe)
        optimizer.step()
        assert list(pipe._running.runner.steps._used) == [optimizer]
        step(pipe)
        optimizer.zero_grad()
        with pytest.warns(UserWarning, match="finds no gradient") as said:
            optimizer.step()
        assert len(said) == 1


def test_steps_do_not_look_through_the_models_of_other_pipelines() -> None:
    class Counting(nn.Module):
        looked = 0

        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)  # type: ignore[no-any-return]

        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            for found in super().named_modules(*args, **kwargs):
                Counting.looked += 1
                yield found

    other, (model, _) = Counting(mlp(*[4] * 50)), noting()
    with ps.Pipeline(other, (X,), devices=["cpu"], num_microbatches=2), pipeline(model) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(2):
            step(pipe)
            optimizer.step()
        Counting.looked = 0
        for _ in range(5):
            step(pipe)
            optimizer.step()
        assert Counting.looked < 50  # the first parameters, by both hooks of five steps


@pytest.mark.parametrize("inner", ["call", "step", "optimizer", "state", "save", "close"])
def test_the_pipeline_is_not_used_from_within_its_own_pass(inner: str, tmp_path: Path) -> None:
    model, first = noting()
    with pipeline(model) as pipe:
        expected = step(pipe)
        pipe.zero_grad()
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        uses: dict[str, Callable[[], Any]] = {
            "call": lambda: pipe(X),
            "step": lambda: step(pipe),
            "optimizer": optimizer.step,
            "state": optimizer.state_dict,
            "save": lambda: pipe.save(tmp_path / "saved", optimizer=optimizer),
            "close": pipe.close,
        }
        first.then = uses[inner]
        with pytest.raises((InputError, WorkerError), match="amid its own pass"):
            step(pipe)
        first.then = lambda: None
        assert torch.equal(step(pipe), expected)


def test_any_thread_of_the_script_may_take_its_turn() -> None:
    model, first = noting()
    found: list[Any] = []
    with pipeline(model) as pipe:
        expected = step(pipe)

        def others() -> None:
            found.append(runs_in(pipe, first, lambda: found.append(step(pipe))))

        other = threading.Thread(target=others)
        other.start()
        other.join(30)
        assert found[1] == {"here"}
        assert torch.equal(found[0], expected)
        first.then = lambda: entered.set() if entered.is_set() else (entered.set(), go.wait(30))
        entered, go = threading.Event(), threading.Event()
        other = threading.Thread(target=step, args=(pipe,))
        other.start()
        assert entered.wait(30)
        with pytest.raises(InputError, match="another thread is using this pipeline"):
            step(pipe)
        go.set()
        other.join(30)
        assert torch.equal(step(pipe), expected)


def raising(number: int, frame: Any) -> None:
    raise TimeoutError("enough")


def restoring(number: int, frame: Any) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    raise TimeoutError("enough")


def with_any(*given: Any, **more: Any) -> None:
    raise TimeoutError("enough")


class Called:
    def __call__(self, number: int, frame: Any) -> None:
        self.method(number, frame)

    def method(self, number: int, frame: Any) -> None:
        raise TimeoutError("enough")


def with_more(own: str, number: int, frame: Any) -> None:
    raise TimeoutError(own)


HANDLERS = [raising, restoring, with_any, Called(), Called().method, partial(with_more, "enough")]


@pytest.mark.parametrize("handler", HANDLERS)
def test_errors_of_handlers_are_recognized(handler: Any) -> None:
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(TimeoutError) as caught:
            signal.raise_signal(signal.SIGALRM)
        assert is_interrupt(caught.value)
        with pytest.raises(TimeoutError) as caught:  # no signal has called it
            handler(int(signal.SIGALRM), None)
        assert not is_interrupt(caught.value)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_signals_that_wait_are_all_delivered() -> None:
    came: list[int] = []

    def noting(number: int, frame: Any) -> None:
        came.append(number)
        if number == signal.SIGALRM:
            raise TimeoutError("enough")

    numbers = [signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2]
    before = {number: signal.signal(number, noting) for number in numbers}
    try:

        def ring() -> None:
            with signals_wait():
                for number in numbers:
                    signal.raise_signal(number)
                assert came == []

        with pytest.raises(TimeoutError):
            ring()
        assert came == numbers
        assert [signal.getsignal(number) for number in numbers] == [noting] * 3
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_an_error_is_an_interrupt_only_if_a_signal_has_raised_it() -> None:
    def plain() -> None:
        raise KeyError

    with pytest.raises(KeyError) as caught:
        plain()
    assert not is_interrupt(caught.value)
    assert is_interrupt(KeyboardInterrupt())
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in worker processes
    try:
        assert not is_interrupt(KeyboardInterrupt())
    finally:
        signal.signal(signal.SIGINT, before)
    elsewhere: list[bool] = []
    thread = threading.Thread(target=lambda: elsewhere.append(is_interrupt(KeyboardInterrupt())))
    thread.start()
    thread.join()
    assert elsewhere == [False]


def test_modules_can_be_debugged_where_they_run() -> None:
    """A trace function of the script, as debuggers have, sees the forward."""
    seen: list[str] = []
    model, _ = noting()

    def trace(frame: Any, event: str, argument: Any) -> None:
        if frame.f_code is Noting.forward.__code__:
            seen.append(event)

    with pipeline(model) as pipe:
        step(pipe)
        before = sys.gettrace()
        sys.settrace(trace)
        try:
            step(pipe)
        finally:
            sys.settrace(before)
    assert seen.count("call") == 2


def test_several_devices_of_a_small_model_still_give_the_same_bits() -> None:
    torch.manual_seed(0)
    model = mlp(4, 8, 4)
    results = []
    for devices in (["cpu"], ["cpu", "cpu"]):
        with pipeline(model, devices=devices, threads_per_worker=1, replicas=1) as pipe:
            results.append(step(pipe))
            pipe.zero_grad()
    assert torch.equal(*results)


# In a finalizer Python itself loses an interrupt, and says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    ("file", "lines"), [("", 1500), ("workers/gate.py", 50), ("workers/thread_pool.py", 30)]
)
def test_an_interrupt_at_any_moment_leaves_nothing_behind(file: str, lines: int) -> None:
    """After each the next step has the same bits, the script's settings are the same, nobody is in.

    The interrupts come after random numbers of lines, of one file or of any, as a step runs.
    """
    model, _ = noting()
    generator = random.Random(0)
    threads = torch.get_num_threads()
    came = 0
    with pipeline(model, threads_per_worker=threads + 1) as pipe:
        expected = step(pipe)
        for _ in range(150):
            left = generator.randrange(1, lines)

            def trace(frame: Any, event: str, argument: Any) -> Any:
                nonlocal left
                left -= frame.f_code.co_filename.endswith(file)
                if left == 0:
                    left = -1
                    raise KeyboardInterrupt
                return trace

            pipe.zero_grad()
            before = sys.gettrace()
            try:
                sys.settrace(trace)
                step(pipe)
            except KeyboardInterrupt:
                came += 1
            finally:
                sys.settrace(before)
            assert torch.get_num_threads() == threads
            assert torch.is_grad_enabled()
            pipe.zero_grad()
            assert torch.equal(step(pipe), expected)
            pipe(torch.cat([X, X]))  # another size: the script looks at the model by itself
        pipe.zero_grad()
        assert torch.equal(step(pipe), expected)
    assert came > 50
