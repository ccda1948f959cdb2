"""Models prepared with Accelerate, beside a loop of plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import penstock as ps
from penstock.errors import InputError
from penstock.integrations.accelerate import prepare
from penstock.oracle import Oracle

pytestmark = pytest.mark.usefixtures("one_thread")
MICROBATCHES = 3


@pytest.fixture(autouse=True)
def _of_its_own() -> Iterator[None]:
    """Accelerate keeps its state for the process; other tests may have left some."""
    _reset()
    yield
    _reset()


def _reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def network(dropout: float = 0.0) -> nn.Module:
    layers = [nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))


def data() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(4 * 12, 6, generator=generator)
    y = torch.randint(0, 3, (len(x),), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=12)


def through(accelerator: Accelerator, net: object, **options: Any) -> Any:
    usual = {"devices": 2, "num_microbatches": MICROBATCHES, "replicas": 1, "progress": None}
    return prepare(accelerator, net, **(usual | options))


def train(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for x, y in loader:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()


def plain_loop(net: nn.Module, accumulate: int, is_mixed: bool) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)

    def loss_fn(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output.float(), y) / accumulate

    for k, (x, y) in enumerate(data()):
        with torch.autocast("cpu", torch.bfloat16, is_mixed):
            oracle = Oracle(net, (x,), {}, MICROBATCHES)
            oracle.call_and_backward(0, loss_fn, y)
        if (k + 1) % accumulate == 0:
            nn.utils.clip_grad_norm_(net.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.usefixtures("pool")
@pytest.mark.parametrize(
    ("workers", "accumulate", "precision"),
    [("threads", 1, "no"), ("threads", 2, "no"), ("threads", 1, "bf16"), ("processes", 2, "no")],
)
def test_the_bits_are_those_of_one_device(workers: str, accumulate: int, precision: str) -> None:
    net, own = network(), network()
    own.load_state_dict(net.state_dict())
    accelerator = Accelerator(
        cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulate
    )
    model = through(accelerator, own, workers=workers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    optimizer, loader = accelerator.prepare(optimizer, data())
    train(accelerator, model, optimizer, loader)
    plain_loop(net, accumulate, precision == "bf16")
    assert len(model.late.pipe.plan.stages) == 2
    for name, value in net.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
        assert torch.equal(own.state_dict()[name], value), name
    assert "forward" not in vars(own)
    model.close()


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(tmp_path: Path) -> None:
    def begun() -> tuple[Accelerator, Any, Any, Any]:
        accelerator = Accelerator(cpu=True)
        model = through(accelerator, network(0.3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return accelerator, model, *accelerator.prepare(optimizer, data())

    torch.manual_seed(3)
    accelerator, model, optimizer, loader = begun()
    train(accelerator, model, optimizer, loader)
    accelerator.save_state(str(tmp_path / "state"))
    train(accelerator, model, optimizer, loader)
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    model.close()
    AcceleratorState._reset_state(reset_partial_state=True)

    torch.manual_seed(99)
    accelerator, model, optimizer, loader = begun()
    accelerator.load_state(str(tmp_path / "state"))
    train(accelerator, model, optimizer, loader)
    model.close()
    for name, value in wanted.items():
        assert torch.equal(model.state_dict()[name], value), name


def test_a_resumed_run_has_as_many_microbatches(tmp_path: Path) -> None:
    for number in (5, "auto"):
        accelerator = Accelerator(cpu=True)
        model = through(accelerator, network(), num_microbatches=number)
        if number == "auto":
            accelerator.load_state(str(tmp_path))
        model(torch.randn(12, 6))
        assert model.late.pipe.plan.num_microbatches == 5
        accelerator.save_state(str(tmp_path))
        model.close()
        _reset()


def test_a_resumed_run_may_begin_with_fewer_rows(tmp_path: Path) -> None:
    for number, rows in ((4, 12), ("auto", 2)):
        accelerator = Accelerator(cpu=True)
        model = through(accelerator, network(), num_microbatches=number)
        if number == "auto":
            accelerator.load_state(str(tmp_path))
        assert model(torch.randn(rows, 6)).shape == (rows, 3)
        accelerator.save_state(str(tmp_path))
        model.close()
        _reset()


@pytest.mark.parametrize("is_plain", [False, True])
def test_either_loads_what_the_other_has_saved(is_plain: bool, tmp_path: Path) -> None:
    def begun(is_plain: bool) -> tuple[Accelerator, Any, Any, Any]:
        _reset()
        accelerator, net = Accelerator(cpu=True), network()
        model = accelerator.prepare(net) if is_plain else through(accelerator, net)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return accelerator, model, *accelerator.prepare(optimizer, data())

    accelerator, model, optimizer, loader = begun(is_plain)
    train(accelerator, model, optimizer, loader)
    accelerator.save_state(str(tmp_path))
    accelerator, other, resumed, loader = begun(not is_plain)
    accelerator.load_state(str(tmp_path))
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name
    assert str(resumed.state_dict()) == str(optimizer.state_dict())
    train(accelerator, other, resumed, loader)
    (other if is_plain else model).close()


def test_saved_models_are_plain(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    net = network()
    model = through(accelerator, net)
    model(torch.randn(12, 6))
    accelerator.save_model(model, str(tmp_path))
    from safetensors.torch import load_file

    other = network()
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(other[0].weight, net[0].weight)
    assert accelerator.unwrap_model(model).model is net
    model.close()


def test_what_cannot_be_prepared() -> None:
    accelerator = Accelerator(cpu=True)
    net = network()
    pipe = ps.Pipeline(net, (torch.randn(12, 6),), devices=2, progress=None)
    with pipe, pytest.raises(InputError, match="a Pipeline was given, which Accelerate does not"):
        through(accelerator, pipe)
    with pytest.raises(InputError, match=r"a SGD was given, not an nn\.Module; optimizers"):
        through(accelerator, torch.optim.SGD(net.parameters()))
    with pytest.raises(InputError, match=r"device=2; did you mean devices=\?"):
        prepare(accelerator, net, device=2)
    with pytest.raises(InputError, match='"threads" or "processes"'):
        through(accelerator, net, workers="torchrun")
    with pytest.raises(InputError, match="prepared already"):
        through(accelerator, accelerator.prepare(network()))


def test_what_divides_or_replaces_the_model_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="set up to compile models by eager"):
        through(Accelerator(cpu=True, dynamo_backend="eager"), network())
    _reset()
    accelerator = Accelerator(cpu=True)
    with monkeypatch.context() as patched:
        patched.setattr(Accelerator, "mixed_precision", "fp8")
        with pytest.raises(InputError, match="mixed_precision='fp8' replaces layers"):
            through(accelerator, network())
    monkeypatch.setattr(Accelerator, "distributed_type", DistributedType.DEEPSPEED)
    with pytest.raises(InputError, match="set up for DEEPSPEED, which divides the model itself"):
        through(accelerator, network())


def test_the_model_stays_where_it_is_until_the_first_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be too large for the device of the batches."""
    accelerator, net = Accelerator(cpu=True), network()
    monkeypatch.setattr(Accelerator, "device", torch.device("meta"))
    through(accelerator, net)
    assert all(parameter.device.type == "cpu" for parameter in net.parameters())
