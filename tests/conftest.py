"""Shared by all tests: which are left out, and what each of them finds."""

from __future__ import annotations

import faulthandler
import signal
import warnings
from collections.abc import Generator, Iterator
from uuid import uuid4

import pytest
import torch
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, settings

from penstock.devices.settings import TorchSettings
from tests.support import shares, tail
from tests.support.boards import boards
from tests.support.pool import pooled
from tests.support.threads import new_threads
from tests.workers.ranks.launching import Launcher

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from penstock.loading import tolerate_missing_torchvision_operators

    tolerate_missing_torchvision_operators()

__all__ = ["boards", "new_threads"]  # fixtures
_TO_END = 60.0  # seconds that a test has when its time is over

# A machine that does something else as well is no mistake.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", help="a share of the slow tests, such as 3/8")
    parser.addoption("--whole", action="store_true", help="with the long tail of the others")


def pytest_configure() -> None:
    """Ctrl-C is tested also where a shell that runs the tests in the background ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before those are left out that are not asked for by -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left = set() if config.getoption("whole") else tail.tail() - set(config.args)
    for item in items:
        if item.nodeid in left:
            item.add_marker("slow")
            item.add_marker("tail")
    chosen = items
    if not torch.cuda.is_available():
        asked = "cuda" in config.getoption("markexpr")
        chosen = [item for item in items if asked or "cuda" not in item.keywords]
        for item in chosen if asked else ():
            item.add_marker(pytest.mark.skip(reason="there is no CUDA device here"))
    if share := config.getoption("share"):
        expression = config.getoption("markexpr")
        if expression != "slow":
            raise pytest.UsageError(f"--share is of the slow tests: -m slow, not -m {expression!r}")
        slow = [item for item in chosen if "slow" in item.keywords]
        chosen = shares.chosen(slow, *shares.parsed(share))
    kept = set(chosen)
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = chosen


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Where a test does not even hear that its time is over, its process says where, and ends.

    So do those whose threads wait for each other and have the interpreter. pytest-xdist goes on
    with the other tests in another process.
    """
    marker = item.get_closest_marker("timeout")
    given = item.config.getoption("timeout") or item.config.getini("timeout")
    limit = float(marker.args[0] if marker and marker.args else given)
    stderr = item.config.stash[fault_handler_stderr_fd_key]
    faulthandler.dump_traceback_later(limit + _TO_END, exit=True, file=stderr)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Every test finds an empty cache, and leaves the user's alone."""
    directory = tmp_path_factory.getbasetemp() / f"cache-{uuid4().hex}"  # made when it is needed
    monkeypatch.setenv("PENSTOCK_CACHE", str(directory))


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as they are, also where pytest-xdist says how wide its terminal is."""
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """No test leaves torch set otherwise for those after it, which would find other bits."""
    before = _settings()
    yield
    after = _settings()
    if after != before:
        before[0].apply()
        torch.set_grad_enabled(before[1])
        torch.backends.mha.set_fastpath_enabled(before[2])
    assert after == before


def _settings() -> tuple[TorchSettings, bool, bool]:
    found = TorchSettings.here()
    default = tuple("none" if name == "ieee" else name for name in found.precisions)
    others = torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled()
    return (found._replace(precisions=default), *others)


@pytest.fixture(scope="module")
def pool() -> Iterator[None]:
    """Pipelines of worker processes share them."""
    with pooled():
        yield


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Plain models have as many intra-op threads as every worker."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    """Starts ranks quickly."""
    found = Launcher()
    yield found
    found.close()
