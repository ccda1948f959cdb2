"""Fabric's modules through pipelines, beside a loop of plain PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn
from torch.nn import functional as F

from penstock.errors import InputError
from penstock.integrations.lightning import FabricPenstockStrategy
from penstock.oracle import Oracle

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]
MICROBATCHES, STEPS = 3, 4


def network(dropout: float = 0.0) -> nn.Module:
    layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    rows = [12] * (STEPS - 1) + [7]
    return [
        (torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator))
        for n in rows
    ]


def strategy(**options: Any) -> FabricPenstockStrategy:
    usual = {"devices": 2, "num_microbatches": MICROBATCHES, "replicas": 1, "progress": None}
    return FabricPenstockStrategy(**(usual | options))


def fabric_of(precision: Any = "32-true", **options: Any) -> Fabric:
    return Fabric(accelerator="cpu", precision=precision, strategy=strategy(**options))


def train(fabric: Fabric, model: Any, optimizer: Any) -> None:
    for x, y in batches():
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(model(x), y))
        fabric.clip_gradients(model, optimizer, max_norm=0.05)
        optimizer.step()


def plain_loop(net: nn.Module, precision: str = "32-true") -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    for x, y in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, precision == "bf16-mixed", cache_enabled=False):
            oracle = Oracle(net, (x,), {}, MICROBATCHES)
            oracle.call_and_backward(0, lambda out, y: F.cross_entropy(out.float(), y), y)
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        optimizer.step()


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize(
    ("workers", "precision"),
    [("threads", "32-true"), ("threads", "bf16-mixed"), ("processes", "32-true")],
)
def test_the_bits_are_those_of_one_device(workers: str, precision: str) -> None:
    net, own = network(), network()
    own.load_state_dict(net.state_dict())
    fabric = fabric_of(precision, workers=workers)
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.05)
    model, optimizer = fabric.setup(own, optimizer)
    train(fabric, model, optimizer)
    plain_loop(net, precision)
    assert list(model.state_dict()) == list(net.state_dict())
    for name, value in net.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert [name for name, _ in model.module.named_parameters()] == [
        name for name, _ in net.named_parameters()
    ]
    model.eval()
    assert not own.training
    fabric.strategy.teardown()


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    def begun() -> tuple[Fabric, Any, Any]:
        fabric = fabric_of()
        net = network(0.3)
        return fabric, *fabric.setup(net, torch.optim.AdamW(net.parameters(), lr=0.05))

    torch.manual_seed(3)
    fabric, model, optimizer = begun()
    train(fabric, model, optimizer)
    fabric.save(tmp_path / "run.ckpt", {"model": model, "optimizer": optimizer})
    train(fabric, model, optimizer)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    fabric.strategy.teardown()

    torch.manual_seed(99)
    fabric, model, optimizer = begun()
    assert fabric.load(tmp_path / "run.ckpt", {"model": model, "optimizer": optimizer}) == {}
    train(fabric, model, optimizer)
    fabric.strategy.teardown()
    for name, value in wanted.items():
        assert torch.equal(model.state_dict()[name], value), name
    network().load_state_dict(torch.load(tmp_path / "run.ckpt")["model"])


def test_a_resumed_run_has_as_many_microbatches(tmp_path: Path) -> None:
    for number in (5, "auto"):
        fabric = fabric_of(num_microbatches=number)
        model = fabric.setup(network())
        if number == "auto":
            fabric.load(tmp_path / "run.ckpt", {"model": model})
        model(batches()[0][0])
        (module,) = fabric.strategy._modules
        assert module.late.pipe.plan.num_microbatches == 5
        fabric.save(tmp_path / "run.ckpt", {"model": model})
        fabric.strategy.teardown()


def test_options_that_do_not_exist_are_errors() -> None:
    with pytest.raises(InputError, match=r"did you mean replicas=\?"):
        FabricPenstockStrategy(replica=2)
