"""Shared by all tests: CUDA tests are left out where there is no GPU."""

from __future__ import annotations

import signal
import warnings
from uuid import uuid4

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from penstock.loading import tolerate_missing_torchvision_operators

    tolerate_missing_torchvision_operators()


def pytest_configure() -> None:
    """Ctrl-C is tested also where a shell that runs the tests in the background ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    chosen = [item for item in items if "cuda" not in item.keywords]
    config.hook.pytest_deselected(items=[item for item in items if "cuda" in item.keywords])
    items[:] = chosen


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every test finds an empty cache, and leaves the user's alone."""
    directory = tmp_path_factory.getbasetemp() / f"cache-{uuid4().hex}"  # made when it is needed
    monkeypatch.setenv("PENSTOCK_CACHE", str(directory))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
