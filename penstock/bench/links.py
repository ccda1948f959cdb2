"""The overhead of Penstock itself: of its link between processes, and of a schedule's actions.

    python -m penstock.bench links [--rounds 15] [--quick] [--json FILE]

Links: a tensor goes to another process and back; one way is half of that. The shared-memory link
takes turns with gloo over loopback, each between two processes of its own.

Actions: each stage is one tiny linear layer, and a batch has 64 micro-batches. The overhead of an
action is the time of a step beyond that of an ideal pipeline, which does nothing but the work of a
bare loop, divided by the number of actions on the critical path: (step - ideal) / 2(m + p - 1),
where ideal = (m + p - 1) / mp of the bare loop's time, for m micro-batches and p workers. It
includes splitting the batch, sending it to the workers, links, the loss and the report.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps
from penstock.bench import record
from penstock.bench.peers.peer import PeerProcesses, Place
from penstock.bench.peers.torch_pipelining import torch_pipelining
from penstock.bench.peers.workload import Workload
from penstock.bench.turns import UNAUDITED, Contestant, take_turns
from penstock.bench.uniform import uniform_plan
from penstock.devices.cores import use_threads
from penstock.display.tables import Row, aligned
from penstock.units import show_bytes
from penstock.workers.backend import WorkerKind
from penstock.workers.common_jobs import Modes
from penstock.workers.processes.pool import ProcessPool
from penstock.workers.processes.worker_state import WorkerState

KIB = 1 << 10
SIZES = tuple(KIB << k for k in range(0, 17, 2))  # 1 KiB to 64 MiB
QUICK_SIZES = (KIB, 1 << 20)
WARM_UPS = 3
MICROBATCHES = 64
WIDTH = 8
RATE = 0.001
TIMEOUT = 120.0


def exchanges(size: int, quick: bool) -> int:
    """The number of round trips in a turn of a tensor of `size` bytes."""
    return max(2, min(5 if quick else 200, (64 << 20) // size))


# -- Penstock's link ----------------------------------------------------------------------


@dataclass(frozen=True)
class Join:
    """A job that makes one end of a link from a socket that the worker was granted.

    Attributes:
        grant: the number of the grant.
        first: whether it is the end that sends values and receives gradients.
    """

    grant: int
    first: bool

    def __call__(self, own: WorkerState) -> None:
        """Make the end, as `penstock.workers.processes.jobs.Build` does for a pipeline."""
        own.links[0] = own.sink(self.grant) if self.first else own.source(self.grant)


@dataclass(frozen=True)
class Exchange:
    """A job that sends a tensor to the other worker and back, many times.

    Attributes:
        first: whether this worker begins.
        size: the size of the tensor in bytes.
        times: the number of measured round trips, after `WARM_UPS` that are not.
    """

    first: bool
    size: int
    times: int

    def __call__(self, own: WorkerState) -> list[float]:
        """Run the round trips; returns the seconds of each, which count on the first worker."""
        link: Any = own.links[0]  # the end that `Join` has made
        taken = []
        payload = torch.zeros(self.size, dtype=torch.uint8)
        for _ in range(WARM_UPS + self.times):
            start = time.perf_counter()
            if self.first:
                link.send(0, (payload,))
                link.receive_gradients(0)
            else:
                link.send_gradients(0, link.receive(0))
            taken.append(time.perf_counter() - start)
        return taken[WARM_UPS:]


class SharedMemory:
    """Two of Penstock's worker processes, and the link between them."""

    name = "shared memory"

    def __init__(self) -> None:
        self._workers = ProcessPool(2, lambda: None)
        here, there = socket.socketpair()
        with here, there:
            grants = [self._workers.grant(end.fileno(), k) for k, end in enumerate((here, there))]
        self._workers.run([Modes.here(1, 2, True)] * 2, TIMEOUT)
        self._workers.run([Join(grant, k == 0) for k, grant in enumerate(grants)], TIMEOUT)

    def exchange(self, size: int, times: int) -> list[float]:
        """The seconds of each exchange."""
        jobs = [Exchange(first, size, times) for first in (True, False)]
        seconds: list[float] = self._workers.run(jobs, TIMEOUT)[0]
        return seconds

    def close(self) -> None:
        """End the processes."""
        self._workers.close()


# -- gloo ---------------------------------------------------------------------------------


class GlooRank:
    """One of two ranks over gloo."""

    def __init__(self, place: Place) -> None:
        place.join()
        self._rank = place.rank

    def exchange(self, size: int, times: int) -> list[float]:
        """Send a tensor to the other rank and back, `times` times; the seconds of each round trip.

        Args:
            size: the size of the tensor in bytes.
            times: the number of measured round trips, after `WARM_UPS` that are not.
        """
        payload, taken = torch.zeros(size, dtype=torch.uint8), []
        for _ in range(WARM_UPS + times):
            start = time.perf_counter()
            if self._rank == 0:
                dist.send(payload, 1)
                dist.recv(payload, 1)
            else:
                dist.recv(payload, 0)
                dist.send(payload, 0)
            taken.append(time.perf_counter() - start)
        return taken[WARM_UPS:]

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


class Gloo:
    """Two processes over gloo on loopback."""

    name = "gloo"

    def __init__(self) -> None:
        self._processes = PeerProcesses("gloo", [GlooRank] * 2, timeout=TIMEOUT)

    def exchange(self, size: int, times: int) -> list[float]:
        """The seconds of each exchange."""
        seconds: list[float] = self._processes.call("exchange", size, times)[0]
        return seconds

    def close(self) -> None:
        """End the processes."""
        self._processes.close()


def measure_links(sizes: Sequence[int], rounds: int, quick: bool) -> list[dict[str, Any]]:
    """For every size, seconds one way and bytes per second of both; medians over all rounds."""

    def one_way(way: SharedMemory | Gloo, size: int) -> float:
        return statistics.median(way.exchange(size, exchanges(size, quick))) / 2

    with ExitStack() as stack:
        ways: list[SharedMemory | Gloo] = []
        for start in (SharedMemory, Gloo):
            ways.append(start())
            stack.callback(ways[-1].close)
        found: list[dict[str, Any]] = []
        for size in sizes:
            both = [Contestant(way.name, partial(one_way, way, size)) for way in ways]
            found.append({"bytes": size})
            for contestant, seconds in zip(both, take_turns(both, rounds), strict=True):
                median = statistics.median(seconds)
                found[-1][contestant.name] = {
                    "seconds": median,
                    "bytes_per_second": size / median,
                    "rounds": seconds,
                }
    return found


# -- actions ------------------------------------------------------------------------------


def tiny(stages: int) -> nn.Sequential:
    """A linear layer for every stage."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(stages)))


def tiny_data() -> tuple[Tensor, Tensor]:
    """Two rows for every micro-batch."""
    generator = torch.Generator().manual_seed(0)
    rows = 2 * MICROBATCHES
    return tuple(torch.randn(rows, WIDTH, generator=generator) for _ in range(2))  # type: ignore


def bare(stages: int) -> Callable[[], float]:
    """The bare loop over the micro-batches, on one core."""
    model, (x, y) = tiny(stages), tiny_data()
    pairs = list(zip(x.tensor_split(MICROBATCHES), y.tensor_split(MICROBATCHES), strict=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        for inputs, target in pairs:
            (F.mse_loss(model(inputs), target) / MICROBATCHES).backward()
        optimizer.step()
        return time.perf_counter() - start

    return step


def pipeline(stages: int, workers: WorkerKind, stack: ExitStack) -> Callable[[], float]:
    """A training step of Penstock: `zero_grad`, `train_step` and the optimizer's step."""
    model, (x, y) = tiny(stages), tiny_data()
    program = ps.capture(model, (x,))
    chosen = uniform_plan(program, stages, MICROBATCHES)
    pipe = ps.Pipeline(
        model,
        devices=["cpu"] * stages,
        program=program,
        plan=chosen,
        workers=workers,
        audit=UNAUDITED,
    )
    stack.callback(pipe.close)
    optimizer = pipe.optimizer(torch.optim.SGD, lr=RATE)

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        pipe.train_step(x, target=y, loss_fn=F.mse_loss)
        optimizer.step()
        return time.perf_counter() - start

    return step


def torchs(stages: int, stack: ExitStack) -> Callable[[], float]:
    """A step of `torch.distributed.pipelining`."""
    workload = Workload(partial(tiny, stages), tiny_data, F.mse_loss, MICROBATCHES, RATE)
    peer = torch_pipelining(workload, list(tiny(stages)), processes=stages).start()
    stack.callback(peer.close)
    return peer.step


def measure_actions(stages: int, rounds: int) -> dict[str, Any]:
    """Measure the overhead of an action in seconds for each contestant, on `stages` workers."""
    use_threads(1)
    with ExitStack() as stack:
        contestants = [
            Contestant("bare loop", bare(stages)),
            Contestant("threads", pipeline(stages, "threads", stack)),
            Contestant("processes", pipeline(stages, "processes", stack)),
            Contestant("torch pipelining", torchs(stages, stack)),
        ]
        seconds = take_turns(contestants, rounds, warm_up=WARM_UPS)
    taken = {c.name: own for c, own in zip(contestants, seconds, strict=True)}
    medians = {name: statistics.median(own) for name, own in taken.items()}
    ticks = MICROBATCHES + stages - 1
    ideal = medians["bare loop"] / stages * ticks / MICROBATCHES
    overheads = {
        name: (median - ideal) / (2 * ticks)
        for name, median in medians.items()
        if name != "bare loop"
    }
    return {"workers": stages, "seconds": medians, "overhead_seconds": overheads, "rounds": taken}


# -- the report ---------------------------------------------------------------------------


def show_links(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table of links."""
    cells: list[Row] = [("one way", "shared memory", "", "gloo", "", "faster by")]
    for row in rows:
        ours, theirs = row["shared memory"], row["gloo"]
        cells.append(
            (
                show_bytes(row["bytes"]),
                *(
                    text
                    for way in (ours, theirs)
                    for text in (
                        f"{1e6 * way['seconds']:.0f} µs",
                        f"{way['bytes_per_second'] / 1e9:.2f} GB/s",
                    )
                ),
                f"{theirs['seconds'] / ours['seconds']:.1f}x",
            )
        )
    return aligned(cells)


def show_actions(results: Sequence[dict[str, Any]]) -> list[str]:
    """The table of overheads."""
    names = list(results[0]["overhead_seconds"])
    cells = [("overhead of an action", *names)]
    for result in results:
        each = (f"{1e6 * result['overhead_seconds'][name]:.0f} µs" for name in names)
        cells.append((f"workers: {result['workers']}", *each))
    return aligned(cells)


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    parser = record.parser("links", __doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="two sizes, few rounds")
    options = parser.parse_args(arguments)
    record.check_whole(parser, options, "quick")
    sizes, rounds = (QUICK_SIZES, 2) if options.quick else (SIZES, options.rounds)
    links = measure_links(sizes, rounds, options.quick)
    print(*show_links(links), sep="\n")
    measured = partial(measure_actions, rounds=rounds if options.quick else 4 * rounds)
    actions = [measured(stages) for stages in (1, 2)]
    print("", *show_actions(actions), "", sep="\n")
    print(record.save("links", {"links": links, "actions": actions}, options)["machine"])
    return 0
