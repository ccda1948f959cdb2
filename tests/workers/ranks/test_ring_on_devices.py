"""The sum that goes around a ring of ranks on devices: in any order of their work the same bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

from penstock.devices.kinds import kind_of
from penstock.engine.span import Span
from penstock.plan.shares import blocks
from penstock.workers.ranks import ring
from tests.interleavings.running import one_core
from tests.support.simulated.apart import connected, sharing
from tests.support.simulated.module import install, simulated
from tests.workers.ranks.test_ring import (
    Build,
    Here,
    alone,
    batch,
    built,
    parameters_of,
    partial,
    plain,
    recomputed,
)

install()

COUNT = 5  # micro-batches


class OnDevice(Here):
    """A replica on a device."""

    def receive_gradients(self, microbatch: int) -> Any:
        return [torch.ones((), device=self.inputs[0].device)]


def moved(spans: list[Span], device: torch.device) -> list[Span]:
    """Their parameters on a device; one that is tied stays one."""
    known: dict[nn.Parameter, nn.Parameter] = {}
    for span in spans:
        for module in span.module.modules():  # type: ignore[union-attr]
            for name, own in [*module.named_parameters(recurse=False)]:
                if own not in known:
                    known[own] = nn.Parameter(own.detach().to(device), own.requires_grad)
                setattr(module, name, known[own])
    return spans


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("build", [plain, recomputed, partial])
@pytest.mark.parametrize("of", [2, 3])
def test_the_bits_of_one_device(
    build: Build, of: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if a script changes gradients in place as soon as it has them."""
    monkeypatch.setattr(ring, "BUCKET", 1)
    inputs = batch(COUNT)
    with one_core():
        expected = alone(built(build), inputs, 1)
    with one_core(), simulated(count=of, seed=seed) as machine, sharing():
        connections = [
            connected(machine.devices[k], machine.devices[(k + 1) % of]) for k in range(of)
        ]
        found = []
        for k, share in enumerate(blocks(COUNT, (1,) * of)):
            device = machine.devices[k]
            each = OnDevice([x.to(device) for x in inputs], moved(built(build), device))
            onward, back = connections[k][0].sender, connections[k - 1][1].receiver
            each.join(k, of, onward, back, share)  # type: ignore[arg-type]
            found.append(each)
        gradients: list[list[Any]] = [[] for _ in found]

        def run(k: int) -> None:
            with kind_of(machine.devices[k]).on(machine.devices[k]):
                found[k].run()
                found[k].total.finish()
                connections[k][0].sender.wait_for_copies()
                for parameter in parameters_of(found[k].spans):
                    own = parameter.grad
                    gradients[k].append(None if own is None else own.clone())
                    if own is not None:
                        own.mul_(0)

        with ThreadPoolExecutor(of) as pool:
            list(pool.map(run, range(of)))
        for each in gradients:
            for gradient, wanted in zip(each, expected, strict=True):
                assert (gradient is None) == (wanted is None)
                if wanted is not None:
                    assert torch.equal(gradient.cpu(), wanted)


def test_buckets_go_on_while_the_last_backward_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CPUs; the first replica needs no other for that."""
    monkeypatch.setattr(ring, "BUCKET", 1)
    with one_core(), simulated(count=2) as machine, sharing():
        first, _ = machine.devices
        ends = connected(*machine.devices)
        each = OnDevice([x.to(first) for x in batch(2)], moved(built(plain), first))
        each.join(0, 2, ends[0].sender, ends[0].receiver, [0])  # type: ignore[arg-type]
        sent = ends[0].sender.put

        def note(values: Any) -> None:
            each.log.append(values[0])
            sent(values)

        monkeypatch.setattr(ends[0].sender, "put", note)
        with kind_of(first).on(first):
            each.run()
        assert sum(event != "beginning" for event in each.log[: each.log.index("beginning")]) >= 2
