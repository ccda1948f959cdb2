"""Python that asks how its inputs lie in memory, or how torch is set, is answered as ever."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(3))
TURNED = X.t().contiguous().t()


pytestmark = pytest.mark.usefixtures("pool", "one_thread")


Does = Callable[[Any, torch.Tensor], Any]


class Asking(nn.Module):
    """Two layers, and what a case makes of its input before."""

    def __init__(self, does: Does) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last, self.does = nn.Linear(6, 6), nn.Linear(6, 4), does

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = self.does(self, x)
        return self.last(self.first(x * 1.0).tanh() * float(factor))


ASKED: dict[str, Does] = {
    "is_contiguous": lambda m, x: 2 if x.is_contiguous() else 3,
    "stride": lambda m, x: 2 if x.stride()[-1] == 1 else 3,
    "stride of a dimension": lambda m, x: x.stride(1),
    "dim_order": lambda m, x: x.dim_order()[0] + 1,
    "of what is made of it": lambda m, x: 2 if (x + 1).is_contiguous() else 3,
    "stride of what is made of it": lambda m, x: 1 + (x + 1).stride(-1) % 5,
    "storage_offset": lambda m, x: 2 if x.storage_offset() else 3,
    "is_inference": lambda m, x: 2 if x.is_inference() else 3,
    "address": lambda m, x: 2 if x.data_ptr() == (x + 1).data_ptr() else 3,
    "of a parameter": lambda m, x: 2 if m.first.weight.is_contiguous() else 3,
}


def plain(model: nn.Module, x: torch.Tensor, count: int) -> torch.Tensor:
    return torch.cat([model(part) for part in x.tensor_split(count)])


@contextmanager
def pipeline(does: Does, count: int, kind: Any, example: torch.Tensor = X) -> Iterator[Any]:
    model = Asking(does)
    program = ps.capture(model, (example,))
    options: Any = {"program": program, "num_microbatches": count, "workers": kind}
    cuts = ["last"] if len(program) > 1 else []
    devices = ["cpu"] * (1 + len(cuts))
    with ps.Pipeline(
        *(model, (example,)), devices=devices, cuts=cuts or None, audit=None, **options, replicas=1
    ) as pipe:
        yield pipe


REFUSED = ("stride", "stride of a dimension", "stride of what is made of it", "storage_offset")
"""What is not known of inputs with gaps, or of those that begin within others' memory."""


@pytest.mark.parametrize(
    ("name", "count", "kind"),
    [
        *((name, 1, "threads") for name in ASKED),
        *((name, 2, "threads") for name in ASKED if name != "storage_offset"),
        *((name, 2, "processes") for name in ("is_contiguous", "of what is made of it")),
    ],
)
def test_inputs_that_lie_otherwise(name: str, count: int, kind: Any) -> None:
    does = ASKED[name]
    batches = [X, TURNED, X, X[:7], TURNED[:6], X.repeat(1, 2)[:, :6], X[1:], TURNED.clone()]
    with pipeline(does, count, kind) as pipe:
        for k, x in enumerate(batches):
            try:
                found = pipe(x)
            except ps.PenstockError:
                assert name in REFUSED
                assert k not in (0, 2, 3)
                continue
            assert torch.equal(found, plain(pipe.model, x, count))
        with torch.no_grad():
            pipe.model.first.weight.data = pipe.model.first.weight.t().contiguous().t()
            if kind == "threads":
                assert torch.equal(pipe(X), plain(pipe.model, X, count))


@pytest.mark.parametrize("example", [X, TURNED], ids=["contiguous", "turned"])
def test_the_example_lies_as_it_does(example: torch.Tensor) -> None:
    with pipeline(ASKED["is_contiguous"], 1, "threads", example) as pipe:
        assert "" not in pipe.program.closed
        for x in (X, TURNED):
            assert torch.equal(pipe(x), plain(pipe.model, x, 1))


def test_an_open_model_that_asks_for_addresses_says_why_it_is_closed() -> None:
    program = ps.capture(Asking(ASKED["address"]), (X,))
    assert "data_ptr" in program.closed[""]


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def precision() -> Iterator[None]:
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")


SETTINGS: dict[str, tuple[Does, Callable[[], Any]]] = {
    "inference mode": (
        lambda m, x: 2 if torch.is_inference_mode_enabled() else 3,
        torch.inference_mode,
    ),
    "inference of what is made": (
        lambda m, x: 2 if (x + 1).is_inference() else 3,
        torch.inference_mode,
    ),
    "deterministic": (
        lambda m, x: 2 if torch.are_deterministic_algorithms_enabled() else 3,
        deterministic,
    ),
    "default dtype": (
        lambda m, x: 2 if torch.get_default_dtype() == torch.float64 else 3,
        doubles,
    ),
    "precision": (lambda m, x: len(torch.get_float32_matmul_precision()), precision),
    "anomalies": (
        lambda m, x: 2 if torch.is_anomaly_enabled() else 3,
        torch.autograd.detect_anomaly,
    ),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.parametrize("name", SETTINGS)
def test_torch_that_is_set_otherwise(name: str, kind: Any) -> None:
    does, setting = SETTINGS[name]
    with pipeline(does, 2, kind) as pipe:
        for around in (nullcontext, setting, nullcontext, setting):
            with torch.no_grad(), around():
                assert torch.equal(pipe(X), plain(pipe.model, X, 2))


class Doubling(Asking):
    """Does something else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def test_a_module_whose_class_is_another_one() -> None:
    with pipeline(lambda m, x: 2, 2, "threads") as pipe:
        for kind in (Asking, Doubling, Asking):
            pipe.model.__class__ = kind
            assert torch.equal(pipe(X), plain(pipe.model, X, 2))
