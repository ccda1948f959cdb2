"""torch's settings that users change after a pipeline was built."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.devices.cores import flushes_denormal
from penstock.torch_internals import nnpack_is_used

pytestmark = pytest.mark.usefixtures("pool")

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))


class Fills(nn.Module):
    """A closed module whose result has the default dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.full((4,), 1 / 3)


class Knows(nn.Module):
    """A closed module that gives what is set where it runs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known = [
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_float32_matmul_precision() != "highest",
            torch.backends.mkldnn.enabled,
            flushes_denormal(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.is_anomaly_enabled(),
            not torch.is_anomaly_check_nan_enabled(),
            nnpack_is_used(),
            torch.backends.mkldnn.deterministic,
        ]
        return x + sum(2**k * bool(value) for k, value in enumerate(known))


def put_back() -> None:
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.backends.mkldnn.set_flags(True, False)
    torch.backends.nnpack.set_flags(True)
    torch.set_anomaly_enabled(False)
    torch.set_flush_denormal(False)
    torch.backends.cuda.enable_flash_sdp(True)


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    yield
    put_back()


CHANGES: dict[str, Callable[[], Any]] = {
    "default dtype": lambda: torch.set_default_dtype(torch.float64),
    "deterministic": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "precision": lambda: torch.set_float32_matmul_precision("medium"),
    "mkldnn": lambda: torch.backends.mkldnn.set_flags(False),
    "attention": lambda: torch.backends.cuda.enable_flash_sdp(False),
    "anomaly": lambda: torch.set_anomaly_enabled(True),
    "anomaly without NaN": lambda: torch.set_anomaly_enabled(True, check_nan=False),
    "nnpack": lambda: torch.backends.nnpack.set_flags(False),
    "deterministic mkldnn": lambda: torch.backends.mkldnn.set_flags(True, True),
    "denormal": lambda: torch.set_flush_denormal(True),
}


@pytest.mark.parametrize("workers", ["threads", "processes"])
@pytest.mark.parametrize("change", CHANGES)
def test_workers_follow(change: str, workers: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Fills(), Knows(), nn.Tanh(), Fills(), Knows())
    program = ps.capture(model, (X,), keep_closed=["1", "2", "4", "5"])
    with (
        ps.Pipeline(
            *(model, (X,)),
            program=program,
            devices=["cpu"] * 2,
            cuts=["3"],
            workers=workers,
            audit=None,
        ) as pipe,
        torch.no_grad(),
    ):
        assert torch.equal(pipe(X), model(X))
        CHANGES[change]()
        result = pipe(X)
        assert torch.equal(result, model(X))
        put_back()
        assert not torch.equal(pipe(X), result)
        assert torch.equal(pipe(X), model(X))
