"""The same run under torchrun: what its ranks do, each as a function of its number."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import penstock as ps
from penstock.checkpoint import autosave
from penstock.checkpoint.checkpoint import Checkpoint
from penstock.errors import CheckpointError
from tests.checkpoint.autosaving import Run, StoppedError


def _run(name: str, **options: Any) -> Run:
    count = int(os.environ["WORLD_SIZE"])
    return Run(Path(sys.argv[2]) / name, stages=count, workers="torchrun", **options)


def autosaved(rank: int) -> Any:
    """Ends in the midst of an epoch, and goes on."""
    first = _run("run")
    try:
        first.go(4)
    except StoppedError:
        second = _run("run")
        found = second.go()
    return found, [*first.seen[:2], *second.seen], second.weights


def _ask(rank: int, who: int, run: Run) -> None:
    if rank == who and len(run.seen) == 3:
        os.kill(os.getpid(), signal.SIGTERM)


def asked(rank: int, who: str) -> Any:
    """One of them gets SIGTERM before the fourth step."""
    first = _run("run", every=100, before=partial(_ask, rank, int(who)))
    try:
        first.go()
    except SystemExit as ended:
        code = ended.code
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    batches = ps.load(first.folder).batches
    second = _run("run", every=100)
    second.go()
    return code, len(first.seen), batches, [*first.seen, *second.seen], second.weights


def asked_elsewhere(rank: int) -> Any:
    """Each has an agent of its own, and one of these asks its rank to stop."""
    os.environ["GROUP_RANK"] = str(rank)
    autosave._HEARS = 0.1
    run = _run("run", every=100, before=partial(_ask, rank, 0))
    try:
        run.go()
    except SystemExit as ended:
        return ended.code
    return None


def saves_agree(rank: int) -> Any:
    """Though one of them has counted a step that has failed, and only one has gradients."""
    failed: list[BaseException] = []

    def before(run: Run) -> None:
        if len(run.seen) == 2 and not failed:
            x = torch.ones(2, 4)
            target = torch.ones(3, 4) if rank == 1 else x
            try:
                run.pipe.train_step(x, target=target, loss_fn=F.mse_loss)
            except ps.InputError as error:
                failed.append(error)

    run = _run("run", every=1, parts=2, before=before)
    for parameter in run.pipe.model[0].parameters():  # type: ignore[index]
        parameter.requires_grad_(False)
    run.go()
    return [type(error).__name__ for error in failed], len(run.seen)


def resumed(rank: int) -> Any:
    """The newest checkpoint cannot be read on one of them."""
    run = _run("none")
    load = autosave.load

    def load_here(path: Path) -> Checkpoint:
        if rank == 1 and path.name == "b":
            raise CheckpointError("it is not here yet")
        return load(path)

    folder = Path(sys.argv[2]) / "all"
    with run.pipe:
        nothing = ps.resume(folder, run.pipe, **run.things)
        for name in ("a", "b"):
            x = torch.ones(2, 4)
            run.pipe.train_step(x, target=x, loss_fn=F.mse_loss)
            run.pipe.save(folder / name, **run.things, name=name)
        autosave.load = load_here  # type: ignore[assignment]
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = ps.resume(folder, run.pipe, **run.things)
    return nothing, found, [str(warning.message) for warning in warned]
