"""A job that is attacked: it trains, and is built anew where others connect to it, turn by turn.

    python -m tests.fuzz.job KIND FOLDER

A turn begins when its file is in the folder, and leaves a file with what was measured.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.files import write_whole
from penstock.links import handshake
from penstock.workers.ranks import rendezvous

LATE = 1.2  # seconds that other ranks come after the first, which listens
_PATIENCE = 300.0  # seconds without another turn
_SILENCE = 15.0  # seconds until strangers that have fallen silent were given up, and some more
_WIDTH, _ROWS, _LAYERS = 96, 32, 6


class _Watched(rendezvous.Listener):
    """A listener that tells its port."""

    folder = Path()

    def __init__(self, host: str | None = None) -> None:
        super().__init__(host)
        if self.address.port:
            (self.folder / f"port-{self.address.port}").touch()


class Job:
    """A rank, or the driver of worker processes.

    Args:
        kind: `"processes"`, `"ranks"`, or `"ranks apart"`: as if each had a machine of its own.
        folder: for turns.
    """

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.rank, self.ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        self.connecting, self._is_late = 0.0, False
        self._fewest = sys.maxsize
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.x, self.y = torch.randn(_ROWS, _WIDTH), torch.randn(_ROWS, _WIDTH)
        self._pipe: ps.Pipeline | None = None
        self._watch()

    def _watch(self) -> None:
        _Watched.folder = self.folder
        secret, connect = os.environ["FUZZ_SECRET"], rendezvous.Others.connect
        rendezvous.Listener = _Watched  # type: ignore[misc]
        rendezvous.new_secret = lambda: secret
        if self.kind == "ranks apart":
            for module in (handshake, rendezvous):
                module.this_machine = lambda: f"machine {self.rank}"  # type: ignore[attr-defined]

        def late(others: Any, peers: dict[int, int]) -> Any:
            if self.rank and self._is_late:
                time.sleep(LATE)
            self._is_late = False
            begun = time.perf_counter()
            try:
                return connect(others, peers)
            finally:
                self.connecting += time.perf_counter() - begun

        rendezvous.Others.connect = late  # type: ignore[method-assign]

    def turn(self, steps: int) -> dict[str, Any]:
        """Train, in a new pipeline under torchrun; what was measured."""
        self.connecting, self._is_late = 0.0, True
        begun = time.perf_counter()
        pipe = self._pipe or self._built()
        built, spent, losses = time.perf_counter() - begun, [], []
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.01)
        pipe.load_state_dict(self._start)
        for _ in range(steps):
            begun = time.perf_counter()
            loss = pipe.train_step(self.x, target=self.y, loss_fn=F.mse_loss)
            spent.append(time.perf_counter() - begun)
            losses.append(float(loss))
            optimizer.step()
            optimizer.zero_grad()
        if self.kind == "processes":
            self._pipe = pipe
        else:
            pipe.close()
            del pipe, optimizer
            gc.collect()
        return {
            "built": built,
            "connecting": self.connecting,
            "steps": spent,
            "losses": losses,
            "threads": threading.active_count(),
            "sockets": self._sockets(),
        }

    def _sockets(self) -> int:
        """How many are open when those of strangers that have fallen silent were given up."""
        found, end = sockets(), time.monotonic() + _SILENCE
        self._fewest = min(self._fewest, found)
        while found > self._fewest and time.monotonic() < end:
            time.sleep(0.05)
            found = sockets()
        return found

    def _built(self) -> ps.Pipeline:
        torch.manual_seed(1)
        layers = [m for _ in range(_LAYERS) for m in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh())]
        stages = 2 if self.kind == "processes" else self.ranks
        cuts = [str(2 * _LAYERS * k // stages) for k in range(1, stages)]
        given: dict[str, Any] = {"cuts": cuts, "schedule": "1f1b", "num_microbatches": 4}
        workers: Any = "processes" if self.kind == "processes" else "torchrun"
        model = nn.Sequential(*layers)
        self._start = {name: value.clone() for name, value in model.state_dict().items()}
        return ps.Pipeline(
            model,
            (self.x,),
            devices=["cpu"] * stages,
            workers=workers,
            replicas=1,
            audit=None,
            **given,
        )


def sockets() -> int:
    """How many this process has open."""
    found = 0
    for fd in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the list itself
            found += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
    return found


def main(kind: str, folder: Path) -> None:
    """Take turns until there is one without steps."""
    job, number = Job(kind, folder), 0
    while True:
        said, end = folder / f"turn-{number}", time.monotonic() + _PATIENCE
        while not said.exists():
            if time.monotonic() > end:
                raise TimeoutError(f"there was no turn {number} within {_PATIENCE:.0f} s")
            time.sleep(0.005)
        steps = int(said.read_text())
        if not steps:
            break
        found = job.turn(steps)
        write_whole(folder / f"done-{number}-{job.rank}", json.dumps(found).encode())
        number += 1
    if job._pipe:
        job._pipe.close()


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(sys.argv[1], Path(sys.argv[2]))
