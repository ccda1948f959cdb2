"""`Pipeline(compile=...)`: every worker compiles its stage, once for any length."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import fx, nn

import penstock as ps
from tests.pipeline.test_inference import X, pipeline
from tests.sessions.test_sessions import Memory, Remembering
from tests.support.models import mlp

KINDS: Any = ["threads", "processes"]
pytestmark = pytest.mark.usefixtures("pool")


class Counting:
    """A backend that changes nothing, and counts what each thread has it compile."""

    def __init__(self) -> None:
        self.by_thread: Counter[str] = Counter()

    def __call__(self, module: fx.GraphModule, inputs: Any) -> Any:
        self.by_thread[threading.current_thread().name] += 1
        return module.forward


def refusing(module: fx.GraphModule, inputs: Any) -> Any:
    """A backend that says where it was called."""
    raise RuntimeError(f"compiled by {threading.current_thread().name}")


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    yield
    torch._dynamo.reset()


def test_every_stage_is_compiled_by_its_worker() -> None:
    model, backend = mlp(8, 16, 16, 8).eval(), Counting()
    with pipeline(model, compile={"backend": backend}) as pipe, torch.no_grad():
        wanted = model(X)
        assert torch.equal(pipe(X), wanted)
        assert list(backend.by_thread.values()) == [1, 1]
        assert threading.current_thread().name not in backend.by_thread
        assert all(torch.equal(found, wanted) for found in pipe.map([(X,)] * 3))
        assert sum(backend.by_thread.values()) == 2
        assert "compiled" in pipe.audit.why_not
        assert pipe.audit.microbatches == 0
    with pipeline(model) as pipe, torch.no_grad():
        pipe(X)
    assert sum(backend.by_thread.values()) == 2


def test_a_length_that_grows_is_compiled_for_once() -> None:
    """A stage is compiled for the first call, for the next with states, and for any length."""
    model, backend = Remembering().eval(), Counting()
    xs = [torch.randn(3, 2, 4) for _ in range(24)]
    mine, theirs = Memory(), Memory()
    with pipeline(model, xs[0], compile={"backend": backend}) as pipe, torch.no_grad():
        session = pipe.session()
        counts = []
        for x in xs:
            found, _ = session(x, mine)
            wanted, _ = model(x, theirs)
            assert torch.equal(found, wanted)
            counts.append(sum(backend.by_thread.values()))
    assert counts[0] == 2
    assert counts[2] <= 6
    assert counts[-1] == counts[4]


@pytest.mark.parametrize("kind", KINDS)
def test_workers_of_all_kinds_compile(kind: Any) -> None:
    model = mlp(8, 16, 16, 8).eval()
    with pipeline(model, workers=kind, compile={"backend": "aot_eager"}) as pipe:
        torch.testing.assert_close(next(pipe.map([(X,)])), model(X))
    with (
        pipeline(model, workers=kind, compile={"backend": refusing}) as pipe,
        pytest.raises(ps.WorkerError, match="compiled by "),
    ):
        next(pipe.map([(X,)]))


def test_inductor() -> None:
    model = mlp(8, 16, 16, 8).eval()
    with pipeline(model, compile=True) as pipe:
        found = list(pipe.map([(X,), (X[:3],), (X[:2],)]))
    for result, rows in zip(found, (6, 3, 2), strict=True):
        torch.testing.assert_close(result, model(X[:rows]))


def test_training_is_not_compiled() -> None:
    with pytest.raises(ps.InputError, match="compile= needs inference=True"):
        ps.Pipeline(mlp(8, 8, 8), (X,), devices=2, compile=True)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("max-autotune", "give True, or a dict of arguments of torch.compile"),
        ({"fast": True}, "compile= has 'fast', which is no argument of torch.compile"),
        ({"backend": "nothing"}, "the backend 'nothing', which torch does not know; there are .*"),
    ],
)
def test_what_torch_compile_does_not_take(given: Any, said: str) -> None:
    with pytest.raises(ps.InputError, match=said):
        pipeline(mlp(8, 8, 8), compile=given)


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._inductor.config

    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    with pytest.raises(ps.InputError, match=r"needs a C\+\+ compiler, .*no-such.*apt install g\+"):
        pipeline(mlp(8, 8, 8), compile=True)
    pipeline(mlp(8, 8, 8), compile={"backend": "eager"}).close()


def test_a_pipeline_is_not_compiled_from_outside() -> None:
    with pipeline(mlp(8, 8, 8)) as pipe:
        with pytest.raises(ps.InputError, match=r"inference=True, compile=True"):
            torch.compile(pipe)
        with pytest.raises(AttributeError, match=r"inference=True, compile=True"):
            pipe.compile()
        assert not hasattr(pipe, "another")


class Cell(nn.Module):
    """Draws random numbers in its forward, whatever its mode is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) + torch.rand_like(x)
        return x


def test_random_numbers_are_those_of_the_pass() -> None:
    """Calls that draw are not part of what is compiled, and keys are new in every pass."""
    model, backend = Cell().eval(), Counting()
    results = []
    for options in ({"compile": {"backend": backend}}, {}):
        torch.manual_seed(3)
        with pipeline(model, audit=None, **options) as pipe:
            results.append(list(pipe.map([(X,)] * 12)))
        if options:
            compiled = sum(backend.by_thread.values())
    assert all(map(torch.equal, *results))
    assert compiled < 40


def test_hooks_that_come_and_go_later() -> None:
    model, seen = mlp(8, 16, 16, 8).eval(), []
    with pipeline(model, compile={"backend": "eager"}) as pipe, torch.no_grad():
        before = pipe(X)
        handle = model[0].register_forward_hook(lambda module, args, output: output * 2)
        assert not torch.equal(pipe(X), before)
        assert torch.equal(pipe(X), model(X))
        handle.remove()
        assert torch.equal(pipe(X), before)
        model[-1].register_forward_hook(lambda module, args, output: seen.append(len(output)))
        assert torch.equal(pipe(X), before)
        assert sum(seen) == len(X)


class Counts(nn.Module):
    """Counts its calls in a buffer, so replicas let it wait for its turn, by hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1.0)
        return x + self.calls * 0


def test_replicas_compile_once() -> None:
    model, backend = nn.Sequential(nn.Linear(8, 8), Counts(), nn.Linear(8, 8)).eval(), Counting()
    options = {"compile": {"backend": backend}, "replicas": 2, "num_microbatches": 4}
    with pipeline(model, audit=None, **options) as pipe, torch.no_grad():
        pipe(X)
        before = sum(backend.by_thread.values())
        pipe(X)
        pipe(X)
        assert before == sum(backend.by_thread.values()) > 0
