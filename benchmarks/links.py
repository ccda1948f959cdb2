"""What Penstock's own machinery costs: its link between processes, and the actions of a schedule.

    python -m benchmarks.links [--rounds 15] [--quick] [--json FILE]

Links: a tensor goes to another process and back; one way is half of that. The shared-memory link
takes turns with gloo over loopback, each between two processes of its own.

Actions: stages that are one tiny linear layer, 64 micro-batches. The overhead of an action is what
a step takes longer than it would if workers did nothing but the bare loop's work, for each action
on the way: (step - ideal) / 2(m + p - 1), where ideal = (m + p - 1) / mp of the bare loop. That
includes everything: splitting the batch, telling the workers, links, the loss, the report.
"""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock as ps
from benchmarks.flat import uniform_plan
from benchmarks.peers.torch_pipelining import torch_pipelining_of
from penstock.bench.peers.models import Given, loss_function
from penstock.bench.peers.processes import PeerProcesses, Place
from penstock.bench.turns import machine
from penstock.devices.cores import use_threads
from penstock.display.tables import aligned
from penstock.links.shared_memory import Sink, Source
from penstock.links.wire import Wire
from penstock.units import show_bytes
from penstock.workers.processes.jobs import Modes
from penstock.workers.processes.pool import ProcessPool
from penstock.workers.processes.worker_state import WorkerState

KIB = 1 << 10
SIZES = tuple(KIB << k for k in range(0, 17, 2))  # 1 KiB to 64 MiB
QUICK_SIZES = (KIB, 1 << 20)
WARM_UPS = 3
MICROBATCHES = 64
WIDTH = 8
TIMEOUT = 120.0


def exchanges(size: int, quick: bool) -> int:
    """How often a tensor of so many bytes goes there and back in a turn."""
    return max(2, min(5 if quick else 200, (64 << 20) // size))


# -- Penstock's link ----------------------------------------------------------------------


@dataclass(frozen=True)
class Join:
    """Have one end of a link, made of the socket that was granted under a number."""

    grant: int
    first: bool

    def __call__(self, own: WorkerState) -> None:
        """As `penstock.workers.processes.jobs.Build` does for a pipeline."""
        sender, receiver = own.ends(Wire(socket.socket(fileno=own.granted(self.grant))))
        own.links[0] = Sink(sender, receiver) if self.first else Source(receiver, sender)


@dataclass(frozen=True)
class Exchange:
    """Send a tensor there and back, so often."""

    first: bool
    size: int
    times: int

    def __call__(self, own: WorkerState) -> list[float]:
        """The seconds of each, where it began."""
        link, taken = own.links[0], []
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
            grants = [self._workers.grant(k, end.fileno()) for k, end in enumerate((here, there))]
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
        place.join_gloo()
        self._rank = place.rank

    def exchange(self, size: int, times: int) -> list[float]:
        """Send a tensor there and back; the seconds of each."""
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
    with ExitStack() as stack:
        ways: list[Any] = []
        for start in (SharedMemory, Gloo):
            ways.append(start())
            stack.callback(ways[-1].close)
        taken: dict[tuple[str, int], list[float]] = {(w.name, s): [] for w in ways for s in sizes}
        for _ in range(rounds):
            for size in sizes:
                for way in ways:
                    seconds = way.exchange(size, exchanges(size, quick))
                    taken[way.name, size].append(statistics.median(seconds) / 2)
    return [
        {
            "bytes": size,
            **{
                way.name: {
                    "seconds": (median := statistics.median(taken[way.name, size])),
                    "bytes_per_second": size / median,
                    "rounds": taken[way.name, size],
                }
                for way in ways
            },
        }
        for size in sizes
    ]


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

    def step() -> float:
        model.zero_grad()
        start = time.perf_counter()
        for inputs, target in pairs:
            (loss_function(model(inputs), target) / MICROBATCHES).backward()
        return time.perf_counter() - start

    return step


def pipeline(stages: int, workers: Any, stack: ExitStack) -> Callable[[], float]:
    """A `train_step` of Penstock."""
    model, (x, y) = tiny(stages), tiny_data()
    program = ps.capture(model, (x,))
    chosen = uniform_plan(program, stages, MICROBATCHES)
    pipe = ps.Pipeline(
        model, devices=["cpu"] * stages, program=program, plan=chosen, workers=workers
    )
    stack.callback(pipe.close)

    def step() -> float:
        pipe.zero_grad()
        start = time.perf_counter()
        pipe.train_step(x, target=y, loss_fn=loss_function)
        return time.perf_counter() - start

    return step


def torchs(stages: int, stack: ExitStack) -> Callable[[], float]:
    """A step of `torch.distributed.pipelining`."""
    task = Given(tiny_data, loss_function, MICROBATCHES)
    peer = torch_pipelining_of(task, list(tiny(stages)), "1F1B", processes=stages)
    stack.callback(peer.close)
    return peer.step


def measure_actions(stages: int, rounds: int) -> dict[str, Any]:
    """Seconds of overhead per action, of all on so many workers; medians, in one run."""
    use_threads(1)
    with ExitStack() as stack:
        steps = {
            "bare loop": bare(stages),
            "threads": pipeline(stages, "threads", stack),
            "processes": pipeline(stages, "processes", stack),
            "torch pipelining": torchs(stages, stack),
        }
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for turn in range(rounds + WARM_UPS):
            for name, step in steps.items():
                seconds = step()
                if turn >= WARM_UPS:
                    taken[name].append(seconds)
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
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
    cells = [("one way", "shared memory", "", "gloo", "", "faster by")]
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


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Measure, print, and return everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="two sizes, few rounds")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    sizes, rounds = (QUICK_SIZES, 2) if options.quick else (SIZES, options.rounds)
    links = measure_links(sizes, rounds, options.quick)
    print(*show_links(links), sep="\n")
    measured = partial(measure_actions, rounds=rounds if options.quick else 4 * rounds)
    actions = [measured(stages) for stages in (1, 2)]
    print("", *show_actions(actions), "", machine(), sep="\n")
    report = {"links": links, "actions": actions, "machine": machine()}
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return report


if __name__ == "__main__":
    main(sys.argv[1:])
