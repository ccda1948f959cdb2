"""What ranks do with Lightning and Fabric; each returns what is compared."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.pytorch.plugins import MixedPrecision
from torch.nn import functional as F

from penstock.errors import InputError
from tests.integrations import test_fabric
from tests.integrations.test_lightning import (
    Lit,
    Manual,
    Unclipped,
    data,
    network,
    strategy,
    trainer,
    twins,
)

Found = dict[str, Any]


def found(rank: int) -> Found:
    """Everything, in one process group."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[2])
    return {
        "other seeds": other_seeds(rank),
        "trained": trained(folder),
        "scaled": scaled(),
        "scaled by hand": scaled_by_hand(),
        "resumed": resumed(folder),
        "fabric": fabric(folder),
    }


def other_seeds(rank: int) -> str:
    torch.manual_seed(rank)
    try:
        trainer(strategy()).fit(Lit(network()), data())
    except InputError as error:
        return str(error)
    return ""


def trained(folder: Path) -> Found:
    _, lit = twins()
    of = trainer(strategy(), gradient_clip_val=0.05)
    of.fit(lit, data(), data())
    of.save_checkpoint(folder / "trained.ckpt")
    return {
        "weights": dict(lit.net.state_dict()),
        "losses": lit.losses,
        "metrics": of.callback_metrics,
        "writes": of.is_global_zero,
    }


def scaled() -> Found:
    """With a scale that is too large at first: all ranks leave out the same steps."""
    _, lit = twins()
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20))
    trainer(strategy(), plugins=[plugin], gradient_clip_val=0.5).fit(lit, data())
    assert plugin.scaler is not None
    return {"weights": dict(lit.net.state_dict()), "scale": plugin.scaler.get_scale()}


class ByHand(Manual):
    """Its first step has no finite gradients in the last stage, and only there."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        if not self.losses:
            spoil(self.net)
        self.losses.append(loss.detach())
        optimizer.step()


def spoil(net: Any) -> None:
    """Put an inf into the gradient of the last layer, on the rank that has it."""
    if net[-1].weight.grad is not None:
        net[-1].weight.grad[0, 0] = math.inf


def scaled_by_hand() -> list[Found]:
    """With a scaler in manual optimization and in Fabric; also without ranks."""
    found = []
    for kind in (ByHand, Unclipped):
        _, lit = twins(kind)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        trainer(strategy(), plugins=[plugin]).fit(lit, data())
        found.append({"scale": torch.tensor(scaler.get_scale()), **lit.net.state_dict()})
    return [*found, scaled_fabric()]


def scaled_fabric() -> Found:
    torch.manual_seed(3)
    net = test_fabric.network()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plugin = FabricMixedPrecision("16-mixed", "cpu", scaler)
    of = Fabric(accelerator="cpu", strategy=test_fabric.strategy(), plugins=[plugin])
    of.launch()
    model, optimizer = of.setup(net, torch.optim.AdamW(net.parameters(), lr=0.05))
    for k, (x, y) in enumerate(test_fabric.batches()):
        optimizer.zero_grad()
        of.backward(F.cross_entropy(model(x), y))
        if not k:
            spoil(net)
        optimizer.step()
    (module,) = of.strategy._modules
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    of.strategy.teardown()
    return {"scale": torch.tensor(scaler.get_scale()), **weights}


def resumed(folder: Path) -> list[Found]:
    """A run of three epochs, and one that was interrupted after the first."""

    def fit(epochs: int, start: Path | None = None) -> Found:
        lightning.seed_everything(5, verbose=False)
        lit = Lit(network(0.3))
        if start is not None:
            lightning.seed_everything(99, verbose=False)
        of = trainer(strategy(), max_epochs=epochs)
        of.fit(lit, data(), ckpt_path=start)
        of.save_checkpoint(folder / f"{epochs}.ckpt")
        return dict(lit.net.state_dict())

    whole = fit(3)
    fit(1)
    return [whole, fit(3, folder / "1.ckpt")]


def fabric(folder: Path) -> Found:
    torch.manual_seed(3)
    net = test_fabric.network()
    of = test_fabric.fabric_of()
    of.launch()
    model, optimizer = of.setup(net, torch.optim.AdamW(net.parameters(), lr=0.05))
    test_fabric.train(of, model, optimizer)
    of.save(folder / "fabric.ckpt", {"model": model, "optimizer": optimizer})
    of.barrier()
    saved = torch.load(folder / "fabric.ckpt")
    of.strategy.teardown()
    return {"weights": dict(net.state_dict()), "saved": saved}
