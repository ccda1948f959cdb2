"""Steps of two ranks, compared with one device: `torchrun on_ranks.py near DEVICE DEVICE`.

First the ranks are two stages, then two replicas.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from torch import nn

import penstock as ps
from penstock.comparison.reference import one_device, run_with_threads
from tests.interleavings.cases import CASES, MICROBATCHES
from tests.interleavings.running import plan_of

LOSS = nn.functional.mse_loss


def compare(name: str, devices: tuple[str, ...], are_near: bool) -> None:
    """Train on both ranks, and on the first device alone.

    Args:
        name: of the case.
        devices: of the ranks.
        are_near: whether the ranks are on one machine.
    """
    case = replace(CASES[name], devices=devices)
    model, twin = case.model(), case.model().to(devices[0])
    x, y = case.batch(0)
    program = ps.capture(model, (x,))
    plan = plan_of(case, program)
    with ps.Pipeline(
        *(model, (x,)), devices=devices, plan=plan, program=program, audit=None, progress=None
    ) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.05)
        loss = pipe.train_step(x, target=y, loss_fn=LOSS)
        optimizer.step()
        state, threads = pipe.state_dict(), pipe.threads_per_worker
        print(*pipe.links)
        if len(pipe.plan.stages) == 1 and are_near:  # gradients travel during backwards
            assert pipe._running.workers._total.overlaps, "gradients go by way of the CPU"
    on_one = x.to(devices[0])
    oracle = one_device(twin, ps.capture(twin, (on_one,)), MICROBATCHES, (on_one,), {})
    wanted = run_with_threads(lambda: oracle.train_step(0, LOSS, y.to(devices[0])), threads)
    torch.optim.SGD(twin.parameters(), lr=0.05).step()
    assert torch.equal(loss.cpu(), wanted.cpu())
    for name, value in twin.state_dict().items():
        assert torch.equal(state[name].cpu(), value.cpu()), name
    print("the same bits")


if __name__ == "__main__":
    torch.use_deterministic_algorithms(True)
    for each in ("chain, 1f1b", "replicas"):
        compare(each, tuple(sys.argv[2:]), sys.argv[1] == "near")
