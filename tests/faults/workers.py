"""Faults of workers: in stages, losses and optimizers, by signals, and in what they are sent."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import threading
import time
import types
from pathlib import Path
from typing import Any

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
from tests.faults.traps import Loss

# -- in a stage ---------------------------------------------------------------------------


def in_a_stage(spring: str, error: type[BaseException], words: str, goes_on: bool) -> None:
    """Note a kind that springs in a stage."""

    def script(session: Session) -> None:
        timeout = 1.0 if error is ps.WorkerTimeout and spring != "stop" else None
        session.build(timeout)
        trap, stage = session.trap()
        where = session.rng.randrange(2)
        microbatch = session.rng.randrange(session.microbatches)
        operation = session.rng.choice(["step", ["forward", "backward"][where]])
        rounds = session.rng.randrange(2)
        session.go(rounds)
        arm(session, operation, lambda: session.arm(trap, spring, where, microbatch))
        with session.expecting(error):
            session.go(rounds + 2, 8 * rounds)
        session.took(10.0 if spring == "stop" else 5.0 + (timeout or 0.0))
        expected = (stage, microbatch, ["forward", "backward"][where])
        check(session, expected, session.plan.placement[stage], words)
        undone = session.is_undone(maybe_done=False)
        if goes_on:
            session.goes_on(undone)
        elif not session.is_closed():
            session.problems.append("the pipeline is not closed")
        session.closes()

    KINDS[f"{spring} in a stage"] = Kind(f"{spring} in a stage", script)


def check(session: Session, where: tuple[Any, ...], worker: int, words: str) -> None:
    """The error says where, and what; the original traceback is the last of it."""
    error = session.error
    found = tuple(getattr(error, name, None) for name in ("stage", "microbatch", "action"))
    if (*found, getattr(error, "worker", None)) != (*where, worker):
        session.problems.append(f"it says {found} instead of {where} of worker {worker}")
    text = "\n".join([str(error), *getattr(error, "__notes__", [])])
    if words not in text:
        session.problems.append(f"it does not say {words!r} but {text!r}")


in_a_stage("raise", ps.WorkerError, MUST_TELL, goes_on=True)
in_a_stage("unsendable", ps.WorkerError, "UnsendableError: with a lock", goes_on=True)
in_a_stage("odd", ps.WorkerError, "OddError: two arguments", goes_on=True)
in_a_stage("sys.exit", ps.WorkerError, "SystemExit: 3", goes_on=True)
in_a_stage("memory", ps.WorkerError, "MemoryError", goes_on=True)
in_a_stage("tensor memory", ps.WorkerError, "can't allocate memory", goes_on=True)
in_a_stage("os._exit", ps.WorkerDied, "ended with exit code 7", goes_on=False)
in_a_stage("segfault", ps.WorkerDied, "Fatal Python error: Segmentation fault", goes_on=False)
in_a_stage("orphan", ps.WorkerDied, "was killed by SIGKILL", goes_on=False)
in_a_stage("hang", ps.WorkerTimeout, "traps.py", goes_on=False)
in_a_stage("hang in C", ps.WorkerTimeout, "traps.py", goes_on=False)
in_a_stage("stop", ps.WorkerTimeout, "stopped by a signal", goes_on=False)


@kind("much printing in a stage")
def _(session: Session) -> None:
    session.build()
    trap, _ = session.trap()
    arm(session, "step", lambda: session.arm(trap, "chatter", 0, 1))
    session.go(2)
    session.closes()


# -- in the loss --------------------------------------------------------------------------


def in_the_loss(spring: str, error: type[BaseException], words: str) -> None:
    """Note a kind that springs in the loss."""

    def script(session: Session) -> None:
        session.build()
        microbatch = session.rng.randrange(session.microbatches)
        session.loss = Loss(spring, microbatch)
        with session.expecting(error):
            session.go(1)
        session.took()
        last = len(session.plan.stages) - 1
        check(session, (last, microbatch, "loss"), session.plan.placement[last], words)
        undone = session.is_undone(maybe_done=False)
        if error is ps.WorkerError:
            session.goes_on(undone)
        session.closes()

    KINDS[f"{spring} in the loss"] = Kind(f"{spring} in the loss", script)


in_the_loss("raise", ps.WorkerError, MUST_TELL)
in_the_loss("sys.exit", ps.WorkerError, "SystemExit: 3")
in_the_loss("os._exit", ps.WorkerDied, "ended with exit code 7")


@kind("a loss that cannot be sent")
def _(session: Session) -> None:
    session.build()
    session.loss.lock = threading.Lock()
    session.go(0)
    with session.expecting(ps.InputError):
        session.go(1)
    session.took()
    session.goes_on(session.is_undone(maybe_done=False))
    session.closes()


# -- in the optimizer ---------------------------------------------------------------------


def in_the_optimizer(spring: str, error: type[BaseException], words: str) -> None:
    """Note a kind that springs in an optimizer's step on one worker."""

    def script(session: Session) -> None:
        session.build()
        session.go(1)
        victim = session.rng.randrange(2)
        arm(
            session,
            "update",
            lambda: session.optimizer.param_groups[0].update(spring=spring, victim=victim),
        )
        with session.expecting(error):
            session.go(2)
        session.took()
        check(session, (None, None, "optimizer step"), victim, words)
        check(session, (None, None, "optimizer step"), victim, "load a checkpoint")
        undone = session.is_undone(maybe_done=True)
        if error is ps.WorkerError:
            session.goes_on(undone)
        session.closes()

    KINDS[f"{spring} in the optimizer"] = Kind(f"{spring} in the optimizer", script)


in_the_optimizer("raise", ps.WorkerError, MUST_TELL)
in_the_optimizer("os._exit", ps.WorkerDied, "ended with exit code 7")


# -- signals to workers -------------------------------------------------------------------


def to_a_worker(number: signal.Signals) -> None:
    """Note a kind that sends a worker a signal at a random moment of the script."""

    def script(session: Session) -> None:
        stops = number == signal.SIGSTOP
        session.build()
        victim = session.rng.choice(session.pids)
        with session.expecting(ps.WorkerTimeout if stops else ps.WorkerDied):
            session.later(A_WHILE, lambda: os.kill(victim, number))
            session.go(ROUNDS)
        session.took(10.0 if stops else 5.0)  # a pause of two seconds is not an end yet
        words = "stopped by a signal" if stops else f"killed by {number.name}"
        if words not in str(session.error):
            session.problems.append(f"it does not say {words!r} but {session.error}")
        session.is_undone(maybe_done=False)
        if not session.is_closed():
            session.problems.append("the pipeline is not closed")
        session.closes()

    KINDS[f"{number.name} to a worker"] = Kind(f"{number.name} to a worker", script)


for _number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP):
    to_a_worker(_number)


@kind("SIGTERM to a worker")
def _(session: Session) -> None:
    """Its driver decides when it ends."""
    session.build()
    victim = session.rng.choice(session.pids)
    session.later(A_WHILE, lambda: os.kill(victim, signal.SIGTERM))
    session.go(4)
    time.sleep(A_WHILE)
    session.go(5, 32)
    session.closes()


@kind("SIGKILL to an idle worker")
def _(session: Session) -> None:
    session.build()
    session.go(1)
    os.kill(session.rng.choice(session.pids), signal.SIGKILL)
    time.sleep(session.rng.choice([0.0, 0.05]))
    with session.expecting(ps.WorkerDied):
        session.go(2, 8)
    session.took()
    session.is_undone(maybe_done=False)
    session.closes()


@kind("SIGKILL to a worker that starts")
def _(session: Session) -> None:
    def kill() -> None:
        while not session.pids:
            time.sleep(0.01)
        session.moment = time.monotonic()
        os.kill(session.rng.choice(session.pids), signal.SIGKILL)

    with session.expecting(ps.WorkerDied):
        session.later(2.0, kill)
        session.build()
        session.go(ROUNDS)
    session.took()
    nothing_is_left(session)


@kind("SIGKILL to a worker of two pipelines")
def _(session: Session) -> None:
    other = Session(random.Random(session.rng.random()), lambda *_, **__: None)
    other.build()
    theirs = set(session.pids)
    session.build()
    own = sorted(set(session.pids) - theirs)
    other.go(1)
    with session.expecting(ps.WorkerDied):
        session.later(A_WHILE, lambda: os.kill(session.rng.choice(own), signal.SIGKILL))
        session.go(ROUNDS)
    session.took()
    session.is_undone(maybe_done=False)
    other.go(3, 8)
    session.pipe.close()
    other.go(4, 24)
    other.pipe.close()
    session.problems += other.problems
    session.nothing_is_left_of_processes()


# -- what workers cannot load -------------------------------------------------------------


@kind("a module that workers cannot import")
def _(session: Session) -> None:
    module = types.ModuleType("nowhere_to_be_found")
    exec("class Absent:\n    pass\n", module.__dict__)
    module.Absent.__module__ = module.__name__
    sys.modules[module.__name__] = module
    session.build()
    session.loss.absent = module.Absent()
    with session.expecting(ps.InputError):
        session.go(1)
    session.took()
    if "nowhere_to_be_found" not in str(session.error):
        session.problems.append(f"it does not name the module: {session.error}")
    session.goes_on(session.is_undone(maybe_done=False))
    session.closes()


@kind("torch that workers cannot import")
def _(session: Session) -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "torch.py").write_text("raise ImportError('no torch today')\n")
        sys.path.insert(0, folder)
        with session.expecting(ps.WorkerDied):
            session.build()
    notes = "\n".join(getattr(session.error, "__notes__", []))
    if "no torch today" not in notes or "start" not in str(session.error):
        session.problems.append(f"it does not say why: {session.error} {notes}")
    nothing_is_left(session)
