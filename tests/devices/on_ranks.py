"""A step of two ranks, compared with one device: `torchrun on_ranks.py DEVICE DEVICE`."""

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


def main(devices: tuple[str, ...]) -> None:
    """Train on both ranks, and on the first device alone."""
    torch.use_deterministic_algorithms(True)
    case = replace(CASES["chain, 1f1b"], devices=devices)
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
    on_one = x.to(devices[0])
    oracle = one_device(twin, ps.capture(twin, (on_one,)), MICROBATCHES, (on_one,), {})
    wanted = run_with_threads(lambda: oracle.train_step(0, LOSS, y.to(devices[0])), threads)
    torch.optim.SGD(twin.parameters(), lr=0.05).step()
    assert torch.equal(loss.cpu(), wanted.cpu())
    for name, value in twin.state_dict().items():
        assert torch.equal(state[name].cpu(), value.cpu()), name
    print("the same bits")


if __name__ == "__main__":
    main(tuple(sys.argv[1:]))
