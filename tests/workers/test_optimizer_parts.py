"""Where the parts of an optimizer run, and where what it remembers is."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.workers.optimizer_parts import move_state


class _Noted(torch.optim.SGD):
    """Notes the threads in which it steps."""

    threads: set[str]

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.threads.add(threading.current_thread().name)
        super().step(closure)


BOTH = {"penstock-0", "penstock-1"}


@pytest.mark.parametrize(
    ("width", "fused", "names"), [(8, False, {"penstock-0"}), (8, True, BOTH), (256, False, BOTH)]
)
def test_small_parameters_are_updated_by_one_thread(
    width: int, fused: bool, names: set[str]
) -> None:
    """Unless one operation updates many of them."""
    _Noted.threads = set()
    model, x = nn.Sequential(*(nn.Linear(width, width) for _ in range(4))), torch.randn(4, width)
    alone = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    model(x).square().mean().backward()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    alone.step()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    alone.zero_grad()
    model.load_state_dict(before)
    options = {"replicas": 1, "num_microbatches": 1, "progress": None}
    with ps.Pipeline(model, (x,), devices=["cpu"] * 2, workers="threads", **options) as pipe:
        optimizer = pipe.optimizer(_Noted, lr=0.1, fused=fused)
        pipe.train_step(x, loss_fn=lambda y: y.square().mean())
        optimizer.step()
    assert _Noted.threads == names
    assert all(torch.equal(expected[name], value) for name, value in model.state_dict().items())


def test_state_follows_parameters_to_other_devices() -> None:
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    for fused in (False, True):
        state = {parameter: {"exp_avg": torch.zeros(3), "step": torch.zeros(()), "other": 1}}
        move_state([{"params": [parameter], "fused": fused}], state)
        own = state[parameter]
        assert own["exp_avg"].device.type == "meta"
        assert own["step"].device.type == ("meta" if fused else "cpu")
        assert own["other"] == 1


class Together(torch.optim.SGD):
    """Remembers a number for all parameters, on which its steps depend."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        together: dict[str, int] = self.state["together"]
        together["steps"] = together.get("steps", 0) + 1
        for parameter in (p for group in self.param_groups for p in group["params"]):
            parameter.add_(parameter.grad, alpha=-0.1 / together["steps"])


@pytest.mark.parametrize("on_failure", ["raise", "replace"])
def test_what_belongs_to_no_parameter_is_kept(tmp_path: Path, on_failure: Any) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), torch.randn(4, 4)
    options: dict[str, Any] = {"replicas": 1, "num_microbatches": 1, "on_failure": on_failure}
    with ps.Pipeline(model, (x,), devices=["cpu"] * 2, workers="processes", **options) as pipe:
        optimizer = pipe.optimizer(Together)

        def step() -> dict[str, int]:
            optimizer.zero_grad()
            pipe.train_step(x, loss_fn=lambda y: y.square().mean())
            optimizer.step()
            found: dict[str, int] = optimizer.state_dict()["state"]["together"]
            return found

        assert step() == {"steps": 1}
        pipe.save(tmp_path, optimizer=optimizer)
        assert ps.load(tmp_path).optimizer_state()["state"] == {"together": {"steps": 1}}
        initial = optimizer.state_dict()
        pipe.resize(["cpu"])
        assert step() == {"steps": 2}
        optimizer.load_state_dict(initial)
        assert step() == {"steps": 2}
        ps.load(tmp_path).restore(pipe, optimizer=optimizer)
        assert step() == {"steps": 2}
