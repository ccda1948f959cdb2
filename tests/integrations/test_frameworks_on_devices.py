"""Frameworks on several devices, which are simulated: results, validation, and resumed runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from accelerate import Accelerator
from lightning.fabric import Fabric
from lightning.fabric.accelerators import CPUAccelerator as FabricAccelerator
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.nn import functional as F
from transformers import Trainer

import penstock as ps
from penstock.integrations import lightning
from penstock.integrations.accelerate import prepare
from penstock.integrations.late import beside
from penstock.integrations.lightning import FabricPenstockStrategy, PenstockStrategy
from penstock.integrations.transformers import PenstockTrainer
from tests.integrations.test_accelerate import _of_its_own as _accelerate_of_its_own  # noqa: F401
from tests.integrations.test_lightning import Lit, data, trainer
from tests.integrations.test_transformers import FULL, Mean, arguments, trained
from tests.support.models import uniform_plan
from tests.support.simulated.module import install, simulated

install()
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning"),
]
OPTIONS = {"progress": None, "audit": None}
CPUS, DEVICES = ["cpu", "cpu"], ["sim:0", "sim:1"]


@pytest.fixture
def devices() -> Iterator[list[str]]:
    with simulated():
        yield DEVICES


def network(on: Sequence[str] = CPUS) -> nn.Module:
    """All of it on the first device: simulated tensors do not come from CPUs by `.data`."""
    torch.manual_seed(3)
    layers = [nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)]
    return nn.Sequential(*layers).to(on[0])


def split(on: Sequence[str], net: nn.Module, cut: str = "2", **inputs: Any) -> dict[str, Any]:
    """Options of a pipeline with a stage on each device; nothing is measured."""
    args, kwargs = beside(net, (() if inputs else (torch.randn(12, 6),), inputs))
    plan = uniform_plan(ps.capture(net, args, kwargs), 2, 3, cuts=[cut])
    stages = tuple(msgspec.structs.replace(s, device=on[s.worker]) for s in plan.stages)
    plan = msgspec.structs.replace(plan, stages=stages)
    return {"plan": plan, "devices": list(on), **OPTIONS}


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.parameters(), lr=0.05)


def places(net: nn.Module) -> set[str]:
    return {str(parameter.device) for parameter in net.parameters()}


def weights(net: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().cpu() for parameter in net.parameters()]


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other) > 0
    assert all(map(torch.equal, one, other))


# -- Lightning -------------------------------------------------------------------------------------


class OnCpus(PenstockStrategy):
    """Lightning makes tensors on the device of batches in ways that simulated ones do not know."""

    root_device = torch.device("cpu")  # type: ignore[assignment]


class Plain(Lit):
    """Notes where the loss is."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.seen: set[str] = set()

    def loss(self, batch: Any) -> torch.Tensor:
        found = super().loss(batch)
        self.seen.add(str(found.device))
        return found

    def configure_optimizers(self) -> Any:
        return optimizer_of(self.net)


def fit(lit: Plain, epochs: int, on: list[str], start: Path | None = None, **given: Any) -> Any:
    of = trainer(OnCpus(**split(on, lit.net)), max_epochs=epochs, **given)
    of.fit(lit, data(), data(), ckpt_path=start)
    return of


def test_lightning_validates_before_training_and_resumes(
    devices: list[str], tmp_path: Path
) -> None:
    """What was saved on CPUs goes on elsewhere: the state of the optimizer follows."""
    of = fit(Plain(network()), 1, CPUS)
    of.save_checkpoint(tmp_path / "1.ckpt")
    whole, resumed = Plain(network()), Plain(network(devices))
    fit(whole, 2, CPUS, tmp_path / "1.ckpt")
    fit(resumed, 2, devices, tmp_path / "1.ckpt")
    assert resumed.seen == {"cpu"}
    assert_same(weights(resumed), weights(whole))


class Looking(Callback):
    """Notes how many pipelines there are after the first validation."""

    def on_sanity_check_end(self, trainer: Any, *_: Any) -> None:
        self.found = len(trainer.strategy.pipelines)


@pytest.mark.parametrize("place", [None, torch.device("cpu")])
def test_validation_builds_the_pipeline_where_no_device_has_all_weights(
    place: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lightning, "place_of", lambda _: place)
    looking = Looking()
    fit(Plain(network()), 1, CPUS, callbacks=[looking])
    assert looking.found == (place is None)


def test_a_model_that_was_split_is_recorded_on_one_device(devices: list[str]) -> None:
    net = network(devices)
    x = torch.randn(12, 6, device="sim:1")
    assert beside(net, (x, 3))[0].device == torch.device("sim:0")
    net[2].to("sim:1")
    assert str(beside(net, (x, 3))[0].device) == "cpu"
    assert places(net) == {"cpu"}
    assert beside(net.to("meta"), x) is x


# -- Accelerate and Fabric -------------------------------------------------------------------------


def train(framework: Any, model: Any, optimizer: Any, home: str) -> None:
    for x, y in data():
        optimizer.zero_grad()
        output = model(x)
        assert str(output.device) == home
        framework.backward(F.cross_entropy(output, y.to(home)))
        optimizer.step()


def accelerated(on: list[str]) -> tuple[Any, Any, Any, nn.Module]:
    accelerator, net = Accelerator(cpu=True), network(on)
    model = prepare(accelerator, net, **split(on, net))
    return accelerator, model, accelerator.prepare(optimizer_of(net)), net


def test_accelerate_resumes(devices: list[str], tmp_path: Path) -> None:
    """Results are where Accelerate puts batches, and the state of the optimizer follows."""
    accelerator, model, optimizer, net = accelerated(CPUS)
    train(accelerator, model, optimizer, "cpu")
    accelerator.save_state(str(tmp_path))
    train(accelerator, model, optimizer, "cpu")
    model.close()
    accelerator, model, optimizer, resumed = accelerated(devices)
    accelerator.load_state(str(tmp_path))
    train(accelerator, model, optimizer, "cpu")
    model.close()
    assert places(resumed) == {"sim:0", "sim:1"}
    assert_same(weights(resumed), weights(net))


class OfAnyKindInFabric(FabricAccelerator):
    """Lets a strategy have devices of any kind."""

    def setup_device(self, device: torch.device) -> None:
        pass


def fabricated(on: list[str]) -> tuple[Any, Any, Any, nn.Module]:
    net = network(on)
    strategy = FabricPenstockStrategy(**split(on, net))
    fabric = Fabric(accelerator=OfAnyKindInFabric(), strategy=strategy)
    return fabric, *fabric.setup(net, optimizer_of(net)), net


def test_fabric_resumes(devices: list[str], tmp_path: Path) -> None:
    fabric, model, optimizer, net = fabricated(CPUS)
    train(fabric, model, optimizer, "cpu")
    fabric.save(tmp_path / "run.ckpt", {"model": model, "optimizer": optimizer})
    train(fabric, model, optimizer, "cpu")
    fabric.strategy.teardown()
    fabric, model, optimizer, resumed = fabricated(devices)
    fabric.load(tmp_path / "run.ckpt", {"model": model, "optimizer": optimizer})
    train(fabric, model, optimizer, "sim:1")
    fabric.strategy.teardown()
    assert_same(weights(resumed), weights(net))


def test_fabric_puts_batches_on_the_last_of_all_devices(devices: list[str]) -> None:
    assert FabricPenstockStrategy().root_device == torch.device("sim:1")


# -- the Trainer of transformers -------------------------------------------------------------------


def test_the_trainer_resumes(devices: list[str], tmp_path: Path) -> None:
    given = {"per_device_train_batch_size": 6, "optim": "adamw_torch", "max_grad_norm": 0.0}
    given |= {"max_steps": 2}
    saves = {"save_strategy": "steps", "save_steps": 1}
    trained(Trainer, arguments(tmp_path, **given, **saves), data=FULL, model=Mean())
    batch = {name: torch.stack([each[name] for each in FULL[:6]]) for name in FULL[0]}
    batch["num_items_in_batch"] = torch.tensor(96)
    found = []
    for on in (CPUS, devices):
        net = Mean().to(on[0])
        ours = trained(
            PenstockTrainer,
            arguments(tmp_path, **given),
            data=FULL,
            model=net,
            resume=str(tmp_path / "checkpoint-1"),
            pipeline=split(on, net, "head", **batch),
        )
        assert ours.state.global_step == 2
        assert ours.evaluate()["eval_loss"] > 0
        found.append(weights(ours.model))
        ours.end()
    assert places(ours.model) == {"sim:0", "sim:1"}
    assert_same(*found)


def test_cpus_were_asked_for(devices: list[str], tmp_path: Path) -> None:
    with pytest.raises(ps.InputError, match="use_cpu=True asks for CPUs, and a pipeline without"):
        PenstockTrainer(Mean(), arguments(tmp_path))
    with pytest.raises(ps.InputError, match=r"Accelerator\(cpu=True\) asks for CPUs"):
        prepare(Accelerator(cpu=True), network())
    with pytest.raises(ps.InputError, match="asks for CPUs"):
        trainer(PenstockStrategy()).fit(Plain(network()), data())
    given = {"devices": ["cpu", "cpu"]}
    PenstockTrainer(Mean(), arguments(tmp_path), pipeline=given)
