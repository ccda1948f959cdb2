"""Worker processes beside worker threads, torch's pipelining and the RPC pipeline.

    python -m penstock.bench processes [--models resnet,gpt,wide,tiny] [--rounds 9] [--quick]
        [--record]

Two CPU workers with a thread each train four models. For every model, each configuration of
`torch.distributed.pipelining` (schedule, number of micro-batches; cut by hand, and cut as Penstock
does for as many micro-batches) runs alone for a few steps, to find the best of either cut. Then
they take turns with Penstock, a step each or half a second of steps, round after round, in an order
that is drawn anew for every round. A step is forward, loss, backward and the optimizer, for all;
every process has one intra-op thread and keeps freed memory. The start of two worker processes is
timed at the end.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

import penstock as ps
from penstock.bench import record
from penstock.bench.compare import (
    DEVICES,
    IN_TURNS,
    Penstock,
    find_best,
    profiled,
    results,
    settings,
    show,
    torch_starts,
)
from penstock.bench.peers.peer import Peer
from penstock.bench.peers.rpc_pipeline import rpc_pipeline
from penstock.bench.subjects import Subject, subjects
from penstock.bench.uniform import uniform_plan
from penstock.devices.cores import use_threads
from penstock.units import show_seconds
from penstock.workers.backend import Kind

KINDS: tuple[Kind, ...] = ("processes", "threads")
TURN = 0.5  # seconds: steps that take milliseconds are slow after those of others


class Rpc:
    """The RPC pipeline in so many micro-batches; all of them share their processes."""

    def __init__(self, peer: Peer, count: int) -> None:
        self.name = f"RPC pipeline, m={count}"
        self._peer, self._count = peer, count

    @property
    def loss(self) -> float:
        """The batch's loss in the last step."""
        return self._peer.loss

    def step(self) -> float:
        """One training step; its seconds."""
        return self._peer.step(self._count)


def measure(subject: Subject, options: Any) -> dict[str, Any]:
    """Everything that was measured of one model."""
    costs = profiled(subject)
    with ExitStack() as stack:
        ours = []
        for workers in KINDS:
            ours.append(Penstock(subject, workers))
            stack.callback(ours[-1].close)
            print(f"{subject.name}, {workers}: {ours[-1].plan.summary}", file=sys.stderr)
        by_hand, same_cut = torch_starts(subject, costs)
        kinds = {
            "torch pipelining, cut by hand": by_hand,
            "torch pipelining, Penstock's cut": same_cut,
        }
        best, scouted = find_best(kinds, options.scout, stack)
        contestants = [*ours, *best, *_rpc(subject, stack)]
        steps = max(1, round(TURN / ours[0].plan.predicted_step_seconds))
        rows = results(contestants, options.rounds, steps, options.seed)
    for row, contestant in zip(rows, ours, strict=False):
        row |= {"plan": contestant.plan.summary, **contestant.beside_its_bound(IN_TURNS * steps)}
    return {"model": subject.name, "rows": rows, "scouted": scouted}


def _rpc(subject: Subject, stack: ExitStack) -> list[Rpc]:
    """The RPC pipeline at every number of micro-batches, where it is measured."""
    if not subject.rpc:
        return []
    peer = rpc_pipeline(subject.workload(max(subject.counts)), subject.by_hand())
    stack.callback(peer.close)
    return [Rpc(peer, count) for count in (1, *subject.counts)]


def start_up() -> dict[str, float]:
    """Seconds until two worker processes are ready, and those of an import of torch."""
    timed = (
        "import time; start = time.perf_counter(); import torch; print(time.perf_counter() - start)"
    )
    command = [sys.executable, "-c", timed]
    importing = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    program = ps.capture(model, (x,))
    plan = uniform_plan(program, 2, 2)
    start = time.perf_counter()
    with ps.Pipeline(model, devices=DEVICES, program=program, plan=plan, workers="processes"):
        taken = time.perf_counter() - start
    return {"seconds": taken, "import_torch_seconds": importing}


def main(arguments: Sequence[str]) -> int:
    """Run the comparison and print it."""
    parser = record.parser("processes", __doc__)
    parser.add_argument("--models", default="resnet,gpt,wide,tiny")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--scout", type=int, default=5, help="steps to find torch's best")
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns")
    parser.add_argument("--quick", action="store_true", help="small models, few rounds")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.scout = 2, 1
    how = settings(options, "one a worker")
    use_threads(1)  # the unsplit model too, while it is captured and profiled
    found = subjects(options.quick)
    measured = []
    for name in options.models.split(","):
        measured.append(measure(found[name], options))
        rows = measured[-1]["rows"]
        print(*show(found[name].name, "processes are faster by", rows), sep="\n")
        plans = [f"{row['name']}: {row['plan']}" for row in rows if "plan" in row]
        print(*plans, "", sep="\n", flush=True)
    started = start_up()
    print(
        f"two worker processes are ready after {show_seconds(started['seconds'])}; importing torch "
        f"takes {show_seconds(started['import_torch_seconds'])}"
    )
    report = {"models": measured, "start_up": started, "settings": how}
    print(record.save("processes", report, options)["machine"])
    return 0
