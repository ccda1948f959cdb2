"""What ranks do with Lightning and Fabric; each returns what is compared."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.plugins import MixedPrecision

from penstock.errors import InputError
from tests.integrations import test_fabric
from tests.integrations.test_lightning import Lit, data, network, strategy, trainer, twins

Found = dict[str, Any]


def found(rank: int) -> Found:
    """Everything, in one process group."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[2])
    return {
        "other seeds": other_seeds(rank),
        "trained": trained(folder),
        "scaled": scaled(),
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
