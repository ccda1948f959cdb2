"""What goes wrong in a Ray cluster, and what is not possible there, is said clearly."""

from __future__ import annotations

import _thread
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.workers.ray.pool import cause_of
from tests.support.actors import lent_actors
from tests.support.models import uniform_plan
from tests.support.traps import Trap

HERE = ps.Ray(cpus=1)
X = torch.randn(12, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _actors() -> Iterator[None]:
    with lent_actors():
        yield


def make(kind: Any = HERE, **options: Any) -> ps.Pipeline:
    """A trap in each of two stages, behind weights."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), Trap()) for _ in range(2)))
    program = ps.capture(model, (X,), keep_closed=["0", "1"])
    plan = uniform_plan(program, 2, 3)
    devices = ["cpu"] * 2
    return ps.Pipeline(model, devices=devices, workers=kind, plan=plan, program=program, **options)


def step(pipe: ps.Pipeline) -> torch.Tensor:
    return pipe.train_step(X, target=X, loss_fn=F.mse_loss)


def trap(pipe: ps.Pipeline, stage: int) -> Trap:
    found: Trap = pipe.model[stage][1]  # type: ignore[index, assignment]
    return found


def test_a_module_that_ends_its_process_ends_the_pass_only() -> None:
    with make() as pipe:
        before = step(pipe)
        gradients = {name: gradient.clone() for name, gradient in pipe.gradients().items()}
        trap(pipe, 1).arm("forward", partial(sys.exit, 3))
        with pytest.raises(ps.WorkerError, match="stage 1 failed in the forward") as caught:
            step(pipe)
        assert isinstance(caught.value.__cause__, SystemExit)
        assert "sys.exit" in "".join(caught.value.__notes__) or caught.value.__notes__
        trap(pipe, 1).disarm()
        after = pipe.gradients()
        assert all(torch.equal(after[name], gradient) for name, gradient in gradients.items())
        assert torch.equal(step(pipe), before)


def test_ctrl_c_gives_the_pass_up_and_the_pipeline_goes_on() -> None:
    with make() as pipe:
        before = step(pipe)
        pipe.zero_grad()
        trap(pipe, 1).arm("forward", partial(time.sleep, 2.0))
        timer = threading.Timer(0.5, _thread.interrupt_main)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            step(pipe)
        timer.join()
        assert pipe.gradients() == {}
        trap(pipe, 1).disarm()
        assert torch.equal(step(pipe), before)


def test_a_killed_actor_is_named_with_its_node_and_the_rest_is_closed() -> None:
    with make() as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        step(pipe)
        optimizer.step()
        victim = pipe.members[1]
        trap(pipe, 0).arm("forward", partial(time.sleep, 2.0))
        timer = threading.Timer(0.5, partial(os.kill, victim.pid, signal.SIGKILL))
        timer.start()
        with pytest.raises(ps.WorkerDied) as caught:
            step(pipe)
        timer.join()
        assert caught.value.worker == 1
        for said in (str(victim.pid), victim.host, victim.node[:8], "SYSTEM_ERROR"):
            assert said in str(caught.value)
        with pytest.raises(ps.ClosedError, match="restore a checkpoint"):
            step(pipe)
        with pytest.raises(ps.InputError, match="was last"):
            pipe.model.state_dict()
    deadline = time.monotonic() + 30
    while any(map(is_running, (m.pid for m in pipe.members))):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pipe.model.state_dict()
    assert "it had to be done before" in str(said[0].message)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_gradients_are_elsewhere() -> None:
    with make() as pipe:
        step(pipe)
        weight: Any = pipe.model[0][0].weight  # type: ignore[index]
        assert weight.grad is not None
        assert weight.grad.shape == weight.shape
        plain = torch.optim.SGD(pipe.model.parameters(), lr=0.1)
        uses = [
            lambda: weight.grad + 1,
            lambda: weight.grad.norm(),
            lambda: nn.utils.clip_grad_norm_(pipe.model.parameters(), 1.0),
            plain.step,
        ]
        for use in uses:
            with pytest.raises(ps.InputError, match="with a worker of the Ray cluster"):
                use()
        with pytest.raises(ps.InputError, match=r"pipe\.gradients\(\)"):
            torch.autograd.grad(pipe(X).sum(), [weight])
        assert torch.equal(pipe.gradients()["0.0.weight"], pipe.gradients()["0.0.weight"])
        with pytest.raises(ps.InputError, match="none of the model's"):
            pipe.clip_grad_norm_(1.0, parameters=[nn.Parameter(torch.ones(1))])


def test_old_weights_are_not_taken_for_new_ones() -> None:
    with make() as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        step(pipe)
        optimizer.step()
        with pytest.raises(ps.InputError, match=r"pipe\.fetch\(\)"):
            pipe.model.state_dict()
        weight: Any = pipe.model[0][0].weight  # type: ignore[index]
        with torch.no_grad():
            weight.mul_(2)
        with pytest.raises(ps.InputError, match="had older values"):
            step(pipe)
        with pytest.raises(ps.InputError, match="had older values"):
            pipe.state_dict()
        changed = weight.detach().clone()
        pipe.fetch()
        assert not torch.equal(weight, changed)
        step(pipe)
        optimizer.step()
        pipe.load_state_dict({n: torch.ones_like(t) for n, t in pipe.model.named_parameters()})
        step(pipe)
        pipe.fetch()
        assert torch.equal(weight, torch.ones(6, 6))
        weight.data = torch.ones(3, 3)
        with pytest.raises(ps.InputError, match="another shape"):
            step(pipe)


def test_hooks_that_come_later_are_refused() -> None:
    with make() as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        step(pipe)
        optimizer.step()
        weight: Any = pipe.model[0][0].weight  # type: ignore[index]
        before = weight.detach().clone()
        weight.register_hook(print)
        with pytest.raises(ps.InputError, match="hooks of a parameter"):
            step(pipe)
    assert not torch.equal(weight, before)  # what was trained is not lost


def test_a_changed_tensor_does_not_lose_what_others_have_learnt() -> None:
    with make() as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        step(pipe)
        optimizer.step()
        first: Any = pipe.model[0][0].weight  # type: ignore[index]
        second: Any = pipe.model[1][0].weight  # type: ignore[index]
        before = second.detach().clone()
        with torch.no_grad():
            first.fill_(2)
        with pytest.warns(UserWarning, match=r"a tensor of shape \(6, 6\) that was changed"):
            pipe.close()
    assert torch.equal(first, torch.full((6, 6), 2.0))
    assert not torch.equal(second, before)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min": 0}, "positive integer"),
        ({"min": 3, "max": 2}, "less than min=3"),
        ({"placement": "near"}, "strict_spread"),
        ({"resources": {"GPU": 1}}, "torchrun"),
        ({"wait": 0}, "number of seconds"),
    ],
)
def test_options_without_a_meaning(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ps.InputError, match=words):
        ps.Ray(**options)


def test_a_cluster_without_room() -> None:
    with pytest.raises(ps.InputError, match=r"no room for 2 workers with 1 CPU, 1 unobtainable"):
        make(ps.Ray(cpus=1, resources={"unobtainable": 1}, wait=1.0))


def test_what_cannot_be_sent() -> None:
    with make() as pipe:
        lock = threading.Lock()

        def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            with lock:
                return F.mse_loss(output, target)

        with pytest.raises(ps.InputError, match="the loss function cannot be sent"):
            pipe.train_step(X, target=X, loss_fn=loss)
        step(pipe)


def test_a_pass_that_only_some_workers_have_begun_is_given_up() -> None:
    """The one that has begun waits for the other, which never does."""
    with make() as pipe:
        before = step(pipe)
        pipe.zero_grad()
        pool = pipe._workers._pool  # type: ignore[attr-defined]
        pool.start([lambda own: time.sleep(6.5), lambda own: None])  # more than ranks wait
        timer = threading.Timer(0.5, _thread.interrupt_main)
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            step(pipe)
        timer.join()
        assert torch.equal(step(pipe), before)


@pytest.mark.parametrize("worker", [0, 1])
@pytest.mark.parametrize("sent", [False, True])
def test_a_pass_that_only_some_workers_were_given_is_given_up(
    monkeypatch: pytest.MonkeyPatch, worker: int, sent: bool
) -> None:
    """Whether or not the last one has got it when the user interrupts."""
    with make() as pipe:
        before = step(pipe)
        pipe.zero_grad()
        pool = pipe._workers._pool  # type: ignore[attr-defined]
        send = pool._send

        def interrupted(to: int, packed: Any, current: Any) -> None:
            if to != worker:
                return send(to, packed, current)
            if sent:
                send(to, packed, current)
                del current.refs[to]
            time.sleep(0.5)  # the other one has begun
            patch.undo()
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(pool, "_send", interrupted)
            with pytest.raises(KeyboardInterrupt):
                step(pipe)
        assert torch.equal(step(pipe), before)


class Unloadable:
    """A loss that can be sent, and not be loaded elsewhere."""

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(output, target)

    def __reduce__(self) -> Any:
        return int, ("no number",)


def test_what_one_worker_cannot_load_fails_on_all_of_them() -> None:
    with make() as pipe:
        before = step(pipe)
        pipe.zero_grad()
        with pytest.raises(ps.InputError, match="cannot load what it was sent"):
            pipe.train_step(X, target=X, loss_fn=Unloadable())
        assert torch.equal(step(pipe), before)


WITHOUT_RAY = """
import sys
sys.modules["ray"] = None
import penstock as ps, torch
ps.Pipeline(torch.nn.Linear(2, 2), (torch.ones(2, 2),), devices=["cpu"], workers="ray")
"""


def test_without_ray_the_error_says_what_to_install() -> None:
    """In a Python of its own: threads of a Ray that runs here import it at any time."""
    ran = subprocess.run([sys.executable, "-c", WITHOUT_RAY], capture_output=True, text=True)
    assert ran.returncode == 1
    assert 'PenstockError: workers="ray" needs the package ray' in ran.stderr
    assert "pip install 'penstock[ray]'" in ran.stderr


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        (
            "The actor died unexpectedly.\n\tpid: 9\nThe actor is dead because its worker process "
            "has died. Worker exit type: SYSTEM_ERROR Worker exit detail: It was killed. There "
            "are some potential root causes. (1) This. (2) That.",
            "SYSTEM_ERROR, It was killed",
        ),
        ("The actor died because its node has died. Node Id: 7.", "its node has died"),
        ("Something else. And more.", "Something else"),
    ],
)
def test_causes_of_death(said: str, cause: str) -> None:
    assert cause_of(RuntimeError(said)) == cause
