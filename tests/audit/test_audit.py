"""The audit finds what a forward reads that nobody sees, and leaves nothing behind."""

from __future__ import annotations

import copy
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import penstock as ps
from penstock.audit import divergence as blame
from penstock.audit.pace import Pace
from penstock.capture.guards import Guards
from penstock.comparison.reference import run_with_threads
from tests.support.models import uniform_plan

pytestmark = [
    pytest.mark.filterwarnings("ignore::penstock.RowsWarning"),
    pytest.mark.usefixtures("pool"),
]

_numbers = torch.Generator().manual_seed(5)
X = torch.randn(8, 6, generator=_numbers)
Y = torch.randn(8, 4, generator=_numbers)
SCALE = [1.0]
MODE = ["tanh"]


class Two(nn.Module):
    """Two linear layers, with something between them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.between(self.a(x)))


class Global(Two):
    """Reads a module-level variable."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh() * SCALE[0]


class Chosen(Two):
    """Calls what a module-level variable says."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x.tanh() if MODE[0] == "tanh" else x.sigmoid()


class Closure(Two):
    """Reads a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

        def apply(x: torch.Tensor) -> torch.Tensor:
            return x * cell[0]

        cell = [1.0]
        self.cell, self.apply_cell = (lambda value: cell.__setitem__(0, value)), apply

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return self.apply_cell(x)


class File(Two):
    """Reads a file."""

    path = Path()

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(File.path.read_text())


class Clock(Two):
    """Reads the clock."""

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x * (1.0 + time.monotonic_ns() % 1000)


class Backward(torch.autograd.Function):
    """The identity; its backward reads a module-level variable."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        SCALE[0] += 1
        return gradient * SCALE[0]


class Slipping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Backward.apply(x)


@pytest.fixture(autouse=True)
def _as_recorded(tmp_path: Path) -> None:
    SCALE[0], MODE[0], File.path = 1.0, "tanh", tmp_path / "factor"
    File.path.write_text("1.0")


def split(model: nn.Module, m: int = 3, schedule: str = "1f1b", **options: Any) -> ps.Pipeline:
    program = ps.capture(model, (X,))
    plan = uniform_plan(program, 2, m, schedule)
    return ps.Pipeline(model, (X,), program=program, plan=plan, devices=plan.devices, **options)


def train(pipe: Any, optimizer: Any, steps: int) -> list[torch.Tensor]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(pipe.train_step(X, target=Y, loss_fn=F.mse_loss))
        optimizer.step()
    return losses


def snapshot(pipe: ps.Pipeline, optimizer: Any) -> list[torch.Tensor]:
    """Whatever a step may change."""
    gradients = [p.grad for p in pipe.parameters() if p.grad is not None]
    state = [v for p in pipe.parameters() for v in optimizer.state[p].values()]
    found = [*pipe.state_dict().values(), *gradients, *state, torch.get_rng_state()]
    return [value.detach().clone() for value in found if isinstance(value, torch.Tensor)]


def change_global(model: nn.Module) -> None:
    SCALE[0] = 2.0


def change_mode(model: nn.Module) -> None:
    MODE[0] = "sigmoid"


def change_closure(model: Any) -> None:
    model.cell(2.0)


def change_file(model: nn.Module) -> None:
    File.path.write_text("2.0")


def change_nothing(model: nn.Module) -> None:
    """The clock goes on by itself."""


CHANGES: dict[str, tuple[type[Two], Callable[[Any], None], str]] = {
    "global": (Global, change_global, "passes 2.0 where it passed 1.0 when recorded"),
    "choice": (Chosen, change_mode, r"calls sigmoid\(\) now, which it did not"),
    "closure": (Closure, change_closure, "passes 2.0 where it passed 1.0 when recorded"),
    "file": (File, change_file, "passes 2.0 where it passed 1.0 when recorded"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_nobody_sees_is_found_before_the_step(name: str) -> None:
    kind, change, words = CHANGES[name]
    model = kind()
    with split(model) as pipe:
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01)
        train(pipe, optimizer, 3)
        change(model)
        before = snapshot(pipe, optimizer)
        with pytest.raises(ps.AuditError, match=words) as raised:
            train_without_clearing(pipe, optimizer, 20)
        assert raised.value.stage in (0, 1)
        assert raised.value.module == f"the model itself ({kind.__name__})"
        after = snapshot(pipe, optimizer)
        assert len(after) == len(before) > 8
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


@pytest.mark.parametrize("part", ["ForwardResults", "replay_results", "same_tensor", "_difference"])
def test_a_search_for_the_call_that_fails_does_not_hide_what_was_found(
    monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("blocks.1")

    with split(Global()) as pipe:
        monkeypatch.setattr(blame, part, fails)
        SCALE[0] = 2.0
        with pytest.raises(ps.AuditError, match=r"search .* failed \(KeyError: 'blocks.1'\)") as it:
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert it.value.module == "the model itself (Global)"
        assert (it.value.stage, it.value.call) == (None, None)


class Repeated(Two):
    """Calls a list of modules, each of which has modules itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8))])

    def between(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return x


def test_modules_that_nobody_saw_come_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Repeated()
    with split(model) as pipe:
        monkeypatch.setattr(Guards, "hold", lambda _: True)
        model.blocks.append(nn.Sequential(nn.Linear(8, 8)))
        with pytest.raises(ps.AuditError, match=r"calls blocks\.1 now, which it did not") as it:
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert it.value.module == "blocks.1 (Sequential)"
        with pytest.raises(ps.CaptureError, match="does something else than at the captured sizes"):
            pipe(torch.cat([X] * 30))  # of a size that is recorded first


def train_without_clearing(pipe: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        optimizer.step()


def test_the_clock_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = iter(range(1000))
    monkeypatch.setattr(time, "monotonic_ns", lambda: 7)
    with split(Clock()) as pipe:
        monkeypatch.setattr(time, "monotonic_ns", lambda: next(ticks))
        with pytest.raises(ps.AuditError, match="reads a value that has changed since"):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)


@pytest.mark.parametrize("graph", [True, False])
def test_calls_are_audited_as_well(graph: bool) -> None:
    model = Global()
    with split(model) as pipe, torch.set_grad_enabled(graph):
        pipe(X)
        SCALE[0] = 2.0
        with pytest.raises(ps.AuditError, match=r"of pass 1 is not what.* \(results: .*by up to"):
            pipe(X)
        SCALE[0] = 1.0
        assert torch.equal(pipe(X), torch.cat([model(part) for part in X.tensor_split(3)]))
        assert pipe.audit.microbatches == 2
        assert pipe.audit.with_gradients == 2 * graph


def test_what_only_evaluation_does_is_found_at_once_after_training() -> None:
    class Evaluated(Two):
        def between(self, x: torch.Tensor) -> torch.Tensor:
            return x.tanh() if self.training else x * SCALE[0]

    with split(Evaluated()) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.01)
        train(pipe, optimizer, 25)
        SCALE[0] = 3.0
        pipe.eval()
        with pytest.raises(ps.AuditError), torch.no_grad():
            pipe(X)


def test_a_forward_that_raises_by_itself() -> None:
    class Raising(Two):
        def between(self, x: torch.Tensor) -> torch.Tensor:
            if SCALE[0] > 1:
                raise RuntimeError("too large")
            return x.tanh()

    with split(Raising()) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        SCALE[0] = 2.0
        with pytest.raises(ps.AuditError, match="RuntimeError: too large") as raised:
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert isinstance(raised.value.__cause__, RuntimeError)


def test_a_backward_that_is_another_is_found() -> None:
    model = nn.Sequential(nn.Linear(6, 8), Slipping(), nn.Linear(8, 4))
    with split(model) as pipe, pytest.raises(ps.AuditError, match="gradients: 2 of 4 differ"):
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)


class Remembering(nn.Module):
    """Draws, normalises, counts, and keeps a running value in a buffer that it assigns."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3))
        self.counting, self.out = Counting(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(F.dropout(self.counting(self.inner(x)), 0.2, self.training))


class Counting(nn.Module):
    """Scales by how often it was called."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.rate = 0.01
        self.register_buffer("mean", torch.zeros(8))
        self.calls: int = 0
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(len(x))
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x / (1 + self.rate * self.calls)


def remembered(audit: Any, workers: Any = "threads", rate: float = 0.01, **options: Any) -> Any:
    torch.manual_seed(3)
    model = Remembering()
    model.counting.rate = rate
    calls: list[int] = []
    model.inner[0].register_forward_hook(lambda *_: calls.append(1))
    with split(model, 2, audit=audit, workers=workers, merge="rows", **options) as pipe:
        calls.clear()
        torch.manual_seed(4)
        optimizer = pipe.optimizer(torch.optim.AdamW, lr=0.01)
        with pipe.recording() as timelines:
            losses = train(pipe, optimizer, 50)
        loss = F.mse_loss(pipe(X), Y)
        loss.backward()
        pipe.eval()
        output = pipe(X)
        found = [*losses, loss.detach(), output.detach(), *snapshot(pipe, optimizer)]
        counted = [model.counting.calls, len(model.counting.seen), len(calls), len(timelines)]
        return [*found, *map(torch.tensor, counted)], pipe.audit


@pytest.mark.parametrize("batchnorm", ["microbatch", "deferred"])
def test_audited_steps_leave_nothing_behind(batchnorm: str) -> None:
    plain, _ = remembered(None, batchnorm=batchnorm)
    audited, found = remembered(1, batchnorm=batchnorm)
    assert len(plain) == len(audited)
    assert all(torch.equal(a, b) for a, b in zip(plain, audited, strict=True))
    assert [int(n) for n in plain[-4:]] == [104, 104, 104, 50]
    assert (found.why_not, found.microbatches, found.with_gradients) == ("", 52, 52)


@pytest.mark.parametrize("schedule", ["zero-bubble", "gpipe"])
def test_other_schedules_and_recomputing(schedule: str) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.BatchNorm1d(8), nn.Linear(8, 4))
    program = ps.capture(model, (X,))
    for recompute in ("none", "all"):
        plan = uniform_plan(program, 2, 3, schedule, recompute=recompute)
        with ps.Pipeline(
            model, (X,), program=program, plan=plan, devices=plan.devices, audit=1
        ) as pipe:
            train(pipe, pipe.optimizer(torch.optim.SGD, lr=0.01), 3)
            assert (pipe.audit.microbatches, pipe.audit.with_gradients) == (3, 3)
            assert pipe.audit.last == 2


def test_gradients_that_were_there_are_kept() -> None:
    torch.manual_seed(1)
    models = [Two()]
    models.append(copy.deepcopy(models[0]))
    found = []
    for model, audit in zip(models, (1, None), strict=True):
        with split(model, audit=audit) as pipe:
            for _ in range(3):
                pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
            one, two = pipe(X), pipe(X * 2)  # the second is audited while the first one waits
            (one.sum() + two.sum()).backward()
            found.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_worker_processes() -> None:
    plain, _ = remembered(None, "processes", 0.0)
    audited, found = remembered(1, "processes", 0.0)
    assert all(torch.equal(a, b) for a, b in zip(plain, audited, strict=True))
    assert found.microbatches == found.with_gradients == 52
    assert found.why_not == ""


def test_what_modules_count_in_worker_processes_is_not_known_here() -> None:
    plain, _ = remembered(None, "processes")
    audited, found = remembered(1, "processes")
    assert all(torch.equal(a, b) for a, b in zip(plain, audited, strict=True))
    assert found.microbatches == 1
    assert "counting.calls" in found.why_not


class Scaled(nn.Module):
    """A closed module that reads a module-level variable; every process has its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * SCALE[0]


def test_what_worker_processes_do_not_see() -> None:
    model = nn.Sequential(nn.Linear(6, 8), Scaled(), nn.Linear(8, 4))
    with split(model, workers="processes") as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        SCALE[0] = 2.0
        before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        with pytest.raises(ps.AuditError, match="which worker processes do not see"):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        after = [p.grad for p in model.parameters()]
        assert len(before) == len(after) == 4
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_users_hooks_are_not_called_once_more_but_torchs_are() -> None:
    model = Two()
    nn.utils.parametrizations.weight_norm(model.a)
    prune.l1_unstructured(model.b, "weight", 0.5)  # type: ignore[no-untyped-call]
    calls = []
    model.a.register_forward_hook(lambda *_: calls.append(1))
    model.b.register_full_backward_hook(lambda *_: calls.append(2))
    with split(model, audit=1) as pipe:
        calls.clear()
        train(pipe, pipe.optimizer(torch.optim.SGD, lr=0.01), 4)
        assert pipe.audit.microbatches == 4
    assert (calls.count(1), calls.count(2)) == (12, 12)


def test_parameters_with_hooks_have_their_results_compared_only() -> None:
    model = Two()
    calls = []
    model.a.weight.register_post_accumulate_grad_hook(lambda p: calls.append(1))
    with split(model, audit=1) as pipe:
        train(pipe, pipe.optimizer(torch.optim.SGD, lr=0.01), 3)
        assert (pipe.audit.microbatches, pipe.audit.with_gradients) == (3, 0)
        assert "parameters have hooks" in pipe.audit.why_not
    assert len(calls) == 9


def test_short_memory_leaves_gradients_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.audit.auditor._free_bytes", lambda parameters: 100)
    with split(Two(), audit=1) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert (pipe.audit.microbatches, pipe.audit.with_gradients) == (1, 0)
        assert "100 are free" in pipe.audit.why_not


def test_autocast_compares_results() -> None:
    with split(Two(), audit=1) as pipe, torch.autocast("cpu", dtype=torch.bfloat16):
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert (pipe.audit.microbatches, pipe.audit.with_gradients) == (1, 0)


def test_a_step_that_fails_says_so_itself() -> None:
    class Failing(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if SCALE[0] > 1:
                raise ZeroDivisionError("broken")
            return x

    model = nn.Sequential(nn.Linear(6, 8), Failing(), nn.Linear(8, 4))
    with split(model, audit=1) as pipe:
        SCALE[0] = 2.0
        with pytest.raises(ps.WorkerError, match=r"forward of micro-batch 0.*broken"):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        SCALE[0] = 1.0
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert pipe.audit.microbatches == 1


def test_what_is_not_audited_says_why() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    with split(model, audit=None) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert (pipe.audit.microbatches, pipe.audit.why_not) == (0, "audit=None")
    options: dict[str, Any] = {"devices": ["cpu"] * 2, "num_microbatches": 2, "cuts": ["2"]}
    with ps.Pipeline(model, (X,), boundary_dtype=torch.bfloat16, **options, replicas=1) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert pipe.audit.microbatches == 0
        assert "rounded to bfloat16" in pipe.audit.why_not


@pytest.mark.parametrize("audit", [0, -1, True, "often", 0.5])
def test_mistakes(audit: Any) -> None:
    with pytest.raises(ps.InputError, match="is unknown"):
        split(Two(), audit=audit)


def passes(pace: Pace, count: int, seconds: float, cost: float, situation: int = 0) -> list[int]:
    """The numbers of those that are audited."""
    found = []
    for number in range(1, count + 1):
        if pace.is_due(situation):
            pace.spend(cost)
            found.append(number)
        pace.work(seconds)
    return found


def test_the_pace_is_close_first_and_then_a_share_of_the_time() -> None:
    small = passes(Pace("auto"), 10_000, 0.01, 0.02)
    assert small[:20] == list(range(1, 21))
    assert len(small) * 0.02 - 0.4 <= 0.005 * 100
    assert len(small) > 40
    assert passes(Pace("auto"), 100, 10.0, 20.0) == [1, 2, 4, 8, 16]
    assert passes(Pace(7), 22, 1.0, 1.0) == [1, 8, 15, 22]
    assert passes(Pace(None), 22, 1.0, 1.0) == []


def test_news_are_audited_at_once_if_others_are_paid() -> None:
    pace = Pace("auto")
    passes(pace, 30, 1.0, 1.0)
    assert passes(pace, 10, 1.0, 1.0) == []
    assert passes(pace, 10, 1.0, 1.0, situation=1) == [1]
    assert passes(pace, 10, 1.0, 1.0, situation=0) == []
    pace.expect_changes()
    assert passes(pace, 300, 1.0, 1.0, situation=0)[0] > 100


def test_news_at_every_pass_do_not_take_a_larger_share() -> None:
    pace = Pace("auto")
    passes(pace, 20, 0.01, 0.02)
    spent = [
        len(passes(pace, 1, 0.01, 0.02 * (1 + k % 3), situation=k % 2)) * 0.02 * (1 + k % 3)
        for k in range(20_000)
    ]
    assert 0.9 * 0.005 * 200 < sum(spent) <= 0.005 * 200 + max(spent)


class Written(nn.Module):
    """Writes into its input through a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x[:, 0].mul_(0.5)
        return self.b(self.a(x).tanh())


def test_what_a_forward_writes_through_a_view_of_its_input_is_written_once() -> None:
    torch.manual_seed(0)
    model, losses, left = Written(), [], []
    for audit in (1, None):
        twin, x = copy.deepcopy(model), X.clone()
        with ps.Pipeline(
            twin, (X.clone(),), devices=["cpu"] * 2, cuts=["b"], audit=audit, replicas=1
        ) as pipe:
            losses.append(pipe.train_step(x, target=Y, loss_fn=F.mse_loss))
        left.append(x)
    assert torch.equal(*losses)
    assert torch.equal(*left)
    assert torch.equal(left[0][:, 0], X[:, 0] * 0.5)


def test_an_interrupt_as_the_reference_starts_waits_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it works on, and hangs hooks on, is the user's model."""
    done: list[int] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        signal.raise_signal(signal.SIGINT)

    def slow() -> None:
        time.sleep(0.3)
        done.append(1)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_with_threads(slow, 1)
    assert done


class _Races(torch.autograd.Function):
    """The identity, with a gradient like that of a kernel whose threads add in any order."""

    runs = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _Races.runs += 1
        noise = 0.0 if torch.are_deterministic_algorithms_enabled() else 1e-3 * (_Races.runs % 2)
        return gradients[0] * (1 + noise)


class Races(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Races.apply(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_that_add_in_any_order_are_no_error(
    threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one thread there are none, so the same is an error."""
    monkeypatch.setattr("penstock.devices.choice.cores", lambda: threads)
    _Races.runs = 0
    model = nn.Sequential(nn.Linear(6, 8), Races(), nn.Linear(8, 4))
    program = ps.capture(model, (X,))
    plan = uniform_plan(program, 1, 2)
    with ps.Pipeline(model, (X,), program=program, plan=plan, devices=["cpu"], audit=1) as pipe:
        assert pipe.threads_per_worker == threads
        if threads == 1:
            with pytest.raises(ps.AuditError, match=r"the first is 0\.\w+\)"):
                pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
            return
        with pytest.warns(UserWarning, match=r"the same bits in every run here \(gradients"):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert pipe.audit.microbatches == 0
        assert "use_deterministic_algorithms" in pipe.audit.why_not
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_clock_is_an_error_with_several_threads_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.devices.choice.cores", lambda: 2)
    model = Global()
    program = ps.capture(model, (X,))
    plan = uniform_plan(program, 1, 2)
    with ps.Pipeline(model, (X,), program=program, plan=plan, devices=["cpu"], audit=1) as pipe:
        pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        monkeypatch.setattr(f"{__name__}.SCALE", [2.0])
        with pytest.raises(ps.AuditError, match=r"the forward passes 2\.0"):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)


class Strided(nn.Module):
    """Draws, and asks how a value lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.drop, self.b = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.a(x))
        return self.b(x if x.is_contiguous() else x.contiguous())  # type: ignore[no-any-return]


def test_a_model_that_draws_may_ask_for_layouts() -> None:
    with split(Strided(), audit=1) as pipe:
        for _ in range(2):
            pipe.train_step(X, target=Y, loss_fn=F.mse_loss)
        assert (pipe.audit.microbatches, pipe.audit.why_not) == (2, "")
