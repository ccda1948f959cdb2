"""What happens to one test's ranks does not fail the tests that follow."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.workers.ranks import launching
from tests.workers.ranks.launching import Launcher


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    """One of this file's own, which is ill-treated."""
    found = Launcher()
    yield found
    found.close()


def test_a_dead_launcher_is_replaced(launcher: Launcher, tmp_path: Path) -> None:
    assert launcher.run("number", tmp_path) == [0, 1]
    first = launcher.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)  # until it has ended
    assert launcher.run("number", tmp_path) == [0, 1]
    assert launcher.pid != first


def test_a_launcher_that_dies_at_work(launcher: Launcher, tmp_path: Path) -> None:
    launcher.run("number", tmp_path)
    pid = launcher.pid
    assert pid is not None
    threading.Timer(0.3, os.kill, [pid, signal.SIGKILL]).start()
    with pytest.raises(RuntimeError, match="the launcher ended during sleeping"):
        launcher.run("sleeping", tmp_path)
    assert launcher.run("number", tmp_path) == [0, 1]


def test_ranks_that_do_not_end(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher.run("number", tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(launching, "WATCHDOG", 0.3)
        with pytest.raises(RuntimeError, match="the ranks of sleeping have not ended"):
            launcher.run("sleeping", tmp_path)
    assert launcher.run("number", tmp_path) == [0, 1]
