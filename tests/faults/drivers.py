"""Faults of the driver: Ctrl-C, and its end, by whatever."""

from __future__ import annotations

import gc
import os
import signal
import time
from contextlib import suppress

import torch
from torch.utils.data import DataLoader

import penstock as ps
from tests.faults.kinds import (
    A_WHILE,
    KINDS,
    MUST_TELL,
    ROUNDS,
    Kind,
    arm,
    kind,
    nothing_is_left,
)
from tests.faults.session import Session

# -- Ctrl-C -------------------------------------------------------------------------------


def _interrupted(session: Session) -> None:
    """The script is interrupted somewhere; it goes on, or the pipeline is closed."""
    with session.expecting(KeyboardInterrupt):
        session.go(ROUNDS)
    session.tell("over")
    undone = session.is_undone(maybe_done=True)
    session.disarm()  # it may have come before the trap was sprung
    with suppress(ps.ClosedError):
        if not session.is_closed():
            session.goes_on(undone)
    session.closes()


@kind("Ctrl-C", deed="ctrl-c")
def _(session: Session) -> None:
    session.build()
    _interrupted(session)


@kind("Ctrl-C, with replicas", deed="ctrl-c")
def _(session: Session) -> None:
    session.build(replicas=2)
    _interrupted(session)


@kind("Ctrl-C in a stage that takes long", deed="ctrl-c")
def _(session: Session) -> None:
    session.build()
    trap, _ = session.trap()
    arm(session, "step", lambda: session.arm(trap, "hang", 0, 0))
    _interrupted(session)


@kind("Ctrl-C twice", deed="two ctrl-c")
def _(session: Session) -> None:
    session.build()
    trap, _ = session.trap()
    arm(session, "step", lambda: session.arm(trap, "hang", 0, 0))
    try:
        with session.expecting(KeyboardInterrupt):
            session.go(ROUNDS)
        time.sleep(1.0)
    except KeyboardInterrupt:
        pass  # the second came late
    session.tell("over")
    nothing_is_left(session)


@kind("Ctrl-C while workers start", deed="ctrl-c", when=("building", 2.0))
def _(session: Session) -> None:
    with session.expecting(KeyboardInterrupt):
        session.build()
        session.go(ROUNDS)
    session.tell("over")
    nothing_is_left(session)


# -- the end of the driver ----------------------------------------------------------------


def _trains(session: Session) -> None:
    session.build()
    session.go(10 * ROUNDS)


def _trains_replicas(session: Session) -> None:
    session.build(replicas=2)
    session.go(10 * ROUNDS)


def _starts(session: Session) -> None:
    session.build()
    time.sleep(20)


KINDS["SIGKILL to the driver"] = Kind(
    "SIGKILL to the driver", _trains, "kill", survives=False, exit_code=-signal.SIGKILL
)
KINDS["SIGTERM to the driver"] = Kind(
    "SIGTERM to the driver", _trains, "terminate", survives=False, exit_code=-signal.SIGTERM
)
KINDS["SIGTERM to the driver, with replicas"] = Kind(
    "SIGTERM to the driver, with replicas",
    _trains_replicas,
    "terminate",
    survives=False,
    exit_code=-signal.SIGTERM,
)
KINDS["SIGKILL to the driver, a worker stopped"] = Kind(
    "SIGKILL to the driver, a worker stopped",
    _trains,
    "kill, one stopped",
    survives=False,
    exit_code=-signal.SIGKILL,
)
KINDS["SIGKILL to the driver as workers start"] = Kind(
    "SIGKILL to the driver as workers start",
    _starts,
    "kill",
    ("building", 2.0),
    survives=False,
    exit_code=-signal.SIGKILL,
)
KINDS["the terminal is closed"] = Kind(
    "the terminal is closed", _trains, "hang up", survives=False, exit_code=-signal.SIGHUP
)


@kind("SIGKILL to the driver, which has forked", deed="kill", survives=False, exit_code=-9)
def _(session: Session) -> None:
    session.build()
    child = os.fork()
    if child == 0:
        time.sleep(30)
        os._exit(0)
    session.tell("forked", pid=child)
    session.go(10 * ROUNDS)


@kind(
    "SIGKILL to the driver, which loads data",
    deed="kill",
    when=("loading", A_WHILE),
    survives=False,
    exit_code=-9,
)
def _(session: Session) -> None:
    session.build()
    data = torch.utils.data.TensorDataset(torch.randn(100_000, 5))
    loader = DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)
    next(batches)
    session.tell("loading")
    for _ in batches:
        session.go(1)


@kind("a mistake in the script", exit_code=1, last="NameError: the script's own mistake")
def _(session: Session) -> None:
    session.build()
    session.go(1)
    raise NameError("the script's own mistake")


@kind("an error that nobody catches", exit_code=1, last=MUST_TELL)
def _(session: Session) -> None:
    session.build()
    trap, _ = session.trap()
    arm(session, "step", lambda: session.arm(trap, "raise", 0, 0))
    session.go(1)


@kind("the script ends without close()")
def _(session: Session) -> None:
    session.build()
    session.go(1, session.rng.choice([0, 1, 2, 3, 4, 6, 7]))  # not with a backward


@kind("os._exit in the driver", exit_code=5, survives=False)
def _(session: Session) -> None:
    session.build()
    session.go(1)
    os._exit(5)


@kind("a pipeline that is forgotten")
def _(session: Session) -> None:
    session.build()
    session.go(1)
    session.optimizer = session.reference = None  # type: ignore[assignment]
    session.output = torch.zeros(())
    del session.pipe
    gc.collect()
    session.nothing_is_left()


@kind("closed in the midst")
def _(session: Session) -> None:
    session.build()
    session.later(A_WHILE, lambda: session.pipe.close())
    with session.expecting((ps.ClosedError, ps.WorkerError)):
        session.go(ROUNDS)
    session.took()
    nothing_is_left(session)
