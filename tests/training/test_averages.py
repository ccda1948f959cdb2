"""Averages of weights, which torch keeps beside the model."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.workers.ranks.norms import norms
from tests.workers.ranks.steps import X, Y, small_pipe

pytestmark = pytest.mark.usefixtures("pool")


@pytest.mark.parametrize("workers", ["threads", "processes"])
@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_beside_the_pipeline(workers: str, use_buffers: bool) -> None:
    """It is that of a plain model which has the same weights after every step."""
    with small_pipe(workers=workers, devices=["cpu"] * 2) as pipe:
        twin = copy.deepcopy(pipe.model)
        ours, theirs = (
            AveragedModel(m, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=use_buffers)
            for m in (pipe.model, twin)
        )
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            pipe.train_step(X, target=Y, loss_fn=torch.nn.functional.mse_loss)
            optimizer.step()
            twin.load_state_dict(pipe.state_dict())
            ours.update_parameters(pipe.model)
            theirs.update_parameters(twin)
        state, expected = pipe.state_dict(of=ours.module), theirs.module.state_dict()
        assert state.keys() == expected.keys() == pipe.state_dict().keys()
        for name, tensor in expected.items():
            assert torch.equal(state[name], tensor), name
        assert not torch.equal(state["1.0.weight"], pipe.state_dict()["1.0.weight"])

        # To evaluate it in the pipeline, let that have its weights for a while.
        kept = copy.deepcopy(pipe.state_dict())
        pipe.load_state_dict(state)
        with torch.no_grad():
            assert torch.equal(pipe.eval()(X), torch.cat(parts(theirs.module)))
        pipe.load_state_dict(kept)


def parts(model: torch.nn.Module) -> list[torch.Tensor]:
    """The results of micro-batches in evaluation mode."""
    return [model.eval()(part) for part in X.tensor_split(3)]


def test_processes_do_as_threads() -> None:
    """What the ranks of torchrun are compared with, too."""
    threads, processes = (norms({"workers": w, "devices": ["cpu"] * 2}) for w in
                          ("threads", "processes"))  # fmt: skip
    assert threads.keys() == processes.keys()
    for key, value in threads.items():
        pairs = zip(value, processes[key], strict=True)
        if isinstance(value, dict):
            assert value.keys() == processes[key].keys()
            pairs = ((value[name], processes[key][name]) for name in value)
        for mine, other in pairs:
            tensors = (
                [(mine[k], other[k]) for k in mine] if isinstance(mine, dict) else [(mine, other)]
            )
            assert all(a is b is None or torch.equal(a, b) for a, b in tensors), key
