"""SIGTERM ends a run where it can be saved, and ends the process in time where it cannot."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import penstock as ps
from penstock.checkpoint import sigterm
from tests.checkpoint.autosaving import Run
from tests.workers.ranks.launching import ROOT
from tests.workers.ranks.test_torchrun import assert_equal

pytestmark = pytest.mark.usefixtures("pool")
SIGTERM = signal.SIGTERM


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    """The handler of a run that leaves stays to the end of its process."""
    before = signal.getsignal(SIGTERM)
    yield
    signal.signal(SIGTERM, before)


def asked_at(step: int) -> Any:
    """What sends SIGTERM to this process and all workers, as a step is about to begin."""

    def before(run: Run) -> None:
        if len(run.seen) == step:
            for pid in {os.getpid(), *(member.pid for member in run.pipe.members)}:
                os.kill(pid, SIGTERM)

    return before


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_driver_saves_and_ends(tmp_path: Path, kind: Any) -> None:
    """Nothing is lost, though it was not time to save."""
    noted: list[int] = []
    signal.signal(SIGTERM, lambda number, frame: noted.append(number))
    whole = Run(tmp_path / "whole", workers=kind)
    whole.go()
    first = Run(tmp_path / "run", every=100, before=asked_at(3), workers=kind)
    with pytest.raises(SystemExit) as ended:
        first.go()
    assert ended.value.code == 0
    assert noted == [SIGTERM]
    assert ps.load(tmp_path / "run").batches == 3
    second = Run(tmp_path / "run", workers=kind)
    assert second.go() == {}
    seen = [*first.seen, *second.seen]
    assert len(first.seen) == 3
    assert all(torch.equal(a, b) for a, b in zip(seen, whole.seen, strict=True))
    assert_equal("weights", second.weights, whole.weights)


def test_a_handler_that_exits_at_once_waits_for_the_save(tmp_path: Path) -> None:
    """Such as the one that Ray installs."""

    def leave(*_: Any) -> None:
        sys.exit(15)

    signal.signal(SIGTERM, leave)
    run = Run(tmp_path, every=100, before=asked_at(2), workers="threads")
    with pytest.raises(SystemExit) as ended:
        run.go()
    assert ended.value.code == 0
    assert ps.load(tmp_path).batches == 2


def test_a_run_that_goes_on_after_another_one_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a notebook, where SystemExit does not end the process."""
    monkeypatch.setattr(sigterm, "_SAME", 0.0)
    for name in ("first", "second"):
        run = Run(tmp_path / name, every=100, before=asked_at(2), workers="threads")
        with pytest.raises(SystemExit):
            run.go()
        assert ps.load(tmp_path / name).batches == 2


def test_not_while_gradients_are_accumulated(tmp_path: Path) -> None:
    """The step under way is completed: that of the optimizer."""

    class Asked(Run):
        def __init__(self) -> None:
            super().__init__(tmp_path, every=100, parts=2)
            step = self.pipe.train_step

            def train_step(*args: Any, **options: Any) -> Any:
                found = step(*args, **options)
                if self.pipe.random_state()["trained"] == 3:  # the first half of the second batch
                    os.kill(os.getpid(), SIGTERM)
                return found

            self.pipe.train_step = train_step  # type: ignore[method-assign]

    run = Asked()
    with pytest.raises(SystemExit):
        run.go()
    assert len(run.seen) == 2
    assert ps.load(tmp_path).batches == 4


def test_other_workers_have_heard_of_it(tmp_path: Path) -> None:
    """Those that take the place of the workers that were there."""

    def before(run: Run) -> None:
        if len(run.seen) == 2:
            os.kill(os.getpid(), SIGTERM)
            run.pipe.resize(["cpu"])

    run = Run(tmp_path, every=100, before=before)
    with pytest.raises(SystemExit):
        run.go()
    assert ps.load(tmp_path).batches == 2


def test_a_pipeline_that_is_closed_or_does_not_listen(tmp_path: Path) -> None:
    asked: list[int] = []
    signal.signal(SIGTERM, lambda number, frame: asked.append(number))
    ours, run = signal.getsignal(SIGTERM), Run(tmp_path)
    with run.pipe:
        handle = run.pipe.autosave(tmp_path, every=1)
        assert signal.getsignal(SIGTERM) != ours
        handle.remove()
        assert signal.getsignal(SIGTERM) == ours
        run.pipe.autosave(tmp_path, every=1)
        run.pipe.autosave(tmp_path, every=1, on_sigterm=False)
        assert signal.getsignal(SIGTERM) == ours
        run.pipe.autosave(tmp_path, every=1)
    assert signal.getsignal(SIGTERM) == ours
    run = Run(tmp_path)
    with run.pipe:
        run.pipe.autosave(tmp_path, every=1)
        theirs: Any = signal.getsignal(SIGTERM)
        signal.signal(SIGTERM, lambda number, frame: theirs(number, frame))
    os.kill(os.getpid(), SIGTERM)  # to the one that was set last, which calls what was before
    assert asked == [SIGTERM]


def test_a_process_that_ignores_it_goes_on_ignoring_it(tmp_path: Path) -> None:
    signal.signal(SIGTERM, signal.SIG_IGN)
    run = Run(tmp_path)
    with run.pipe:
        run.pipe.autosave(tmp_path, every=1)
        assert signal.getsignal(SIGTERM) == signal.SIG_IGN


def test_mistakes(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with run.pipe:
        wrong: list[Any] = [0, -1.0, True, "5"]
        for grace in wrong:
            with pytest.raises(ps.InputError, match="must be a positive number of seconds"):
                run.pipe.autosave(tmp_path, every=1, grace=grace)
        found: list[str] = []

        def elsewhere() -> None:
            with pytest.warns(UserWarning, match="only the main thread can handle signals") as all_:
                run.pipe.autosave(tmp_path, every=1)
            found.extend(str(one.message) for one in all_)

        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert len(found) == 1


# -- processes that end ---------------------------------------------------------------------------

PRELUDE = """
import os, signal, sys, time
from penstock.checkpoint import sigterm
def noted(handler):
    while not handler.received:
        time.sleep(0.01)
    return time.monotonic()
def ask():
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        # nothing is saved within its time, however long it waits for data
        ("sigterm.Sigterm(lambda: True, 0.2); ask(); time.sleep(60)", -SIGTERM),
        # nor does it run any code of Python's
        (
            "sigterm._FINAL = 0.2; sigterm.Sigterm(lambda: True, 0.2); ask(); "
            "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}); time.sleep(60)",
            128 + SIGTERM,
        ),
        # the same request, from a launcher and from whoever ended the launcher
        ("s = sigterm.Sigterm(lambda: True, 60); ask(); ask(); noted(s); sys.exit(3)", 3),
        # another one
        ("sigterm._SAME = 0.1; sigterm.Sigterm(lambda: True, 60); ask(); time.sleep(0.2); ask(); "
         "time.sleep(60)", -SIGTERM),
        # it leaves by itself, and the time is over before it has
        (
            "s = sigterm.Sigterm(lambda: True, 0.2); ask(); noted(s); s.leave(); time.sleep(1); "
            "sys.exit(3)",
            3,
        ),
        # it leaves, and gets another one on its way out
        (
            "import atexit; atexit.register(ask); sigterm._SAME = 0.0; "
            "s = sigterm.Sigterm(lambda: True, 60); ask(); s.leave(); sys.exit(3)",
            3,
        ),
        # nobody is there to save anything
        ("sigterm.Sigterm(lambda: False, 60); ask(); time.sleep(60)", -SIGTERM),
        # a fork, such as a data loader's worker, ends at once
        (
            "s = sigterm.Sigterm(lambda: True, 60); child = os.fork(); "
            "child or (ask(), time.sleep(60)); "
            "sys.exit(os.WTERMSIG(os.waitpid(child, 0)[1]) - s.received)",
            SIGTERM,
        ),
    ],
    ids="late stuck same again leaving out nobody fork".split(),
)  # fmt: skip
def test_how_a_process_ends(code: str, expected: int) -> None:
    found = subprocess.run(
        [sys.executable, "-c", PRELUDE + code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=50,
        check=False,
    )
    assert found.returncode == expected
