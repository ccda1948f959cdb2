"""Worker processes beside worker threads, torch's pipelining and the RPC pipeline.

    python -m benchmarks.processes [--models resnet,gpt,wide,tiny] [--rounds 9] [--quick]
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

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import nn

import penstock as ps
from benchmarks import record
from benchmarks.compare import IN_TURNS, Cut, fastest, scout, take_turns
from benchmarks.flat import uniform_plan
from benchmarks.peers.torch_pipelining import LOOPED, torch_pipelining_of
from benchmarks.subjects import Subject, subjects
from penstock.bench.peers.peer import Peer
from penstock.bench.peers.rpc_pipeline import rpc_pipeline
from penstock.bench.turns import machine
from penstock.devices.allocator import keep_freed_memory
from penstock.devices.cores import use_threads
from penstock.display.tables import aligned
from penstock.plan.request import Request
from penstock.planning.planner import profile_for
from penstock.units import show_seconds

DEVICES = ("cpu", "cpu")
RATE = 0.001
TURN = 0.5  # seconds: steps that take milliseconds are slow after those of others
TALK = Console(stderr=True)


class Penstock:
    """Penstock on one kind of worker, with the plan that it makes for that."""

    def __init__(self, subject: Subject, workers: Any) -> None:
        self.name = f"Penstock, {workers}"
        self._inputs, self._target = subject.data()
        self._loss = subject.loss
        model = subject.build().train()
        self._pipe = ps.Pipeline(model, (self._inputs,), devices=DEVICES, workers=workers)
        self.plan = self._pipe.plan
        self._optimizer = self._pipe.optimizer(torch.optim.SGD, lr=RATE)
        self.loss = float("nan")
        self.train_steps: list[float] = []

    def step(self) -> float:
        """One training step; its seconds."""
        start = time.perf_counter()
        self._optimizer.zero_grad()
        loss = self._pipe.train_step(self._inputs, target=self._target, loss_fn=self._loss)
        self.train_steps.append(time.perf_counter() - start)
        self._optimizer.step()
        seconds = time.perf_counter() - start
        self.loss = loss.item()
        return seconds

    def close(self) -> None:
        """Dismiss the workers."""
        self._pipe.close()


class Rpc:
    """The RPC pipeline in so many micro-batches; all of them share their processes."""

    def __init__(self, peer: Any, count: int) -> None:
        self.name = f"RPC pipeline, m={count}"
        self._peer, self._count = peer, count

    @property
    def loss(self) -> float:
        """The batch's loss in the last step."""
        found: float = self._peer.loss
        return found

    def step(self) -> float:
        """One training step; its seconds."""
        seconds: float = self._peer.step(self._count)
        return seconds


Start = Callable[[], Peer]


def penstock_cut(subject: Subject, costs: ps.Profile, count: int, schedule: str) -> list[nn.Module]:
    """The model, cut where Penstock cuts it for this number of micro-batches and schedule."""
    program = ps.capture(subject.build().train(), (subject.data()[0],))
    cuts = ps.plan(costs, num_microbatches=count, schedule=schedule).cuts
    # torch's pipeline cannot change in place what enters a stage, so the cut moves behind that.
    changed = {value for call in program.train.calls for value in call.mutates}
    while any(changed.intersection(program.cuts.boundary(cut)) for cut in cuts):
        cuts = tuple(cut + 1 for cut in cuts)
    rows = costs.batch_size // count
    return [Cut(stage.module, rows) for stage in program.stages(cuts, training=True)]


def torchs(subject: Subject, costs: ps.Profile) -> dict[str, dict[str, Start]]:
    """torch's configurations, by name, of either cut."""
    by_hand: dict[str, Start] = {}
    ours: dict[str, Start] = {}
    for schedule in subject.schedules:
        looped = schedule in LOOPED
        cut = subject.in_four if looped else subject.by_hand
        if cut is None:
            continue
        for count in subject.counts:
            start = partial(torch_pipelining_of, subject.task(count), schedule=schedule)
            like = "interleaved" if looped else "1f1b"
            stages = partial(penstock_cut, subject, costs, count, like)
            by_hand[f"{schedule}, m={count}"] = lambda start=start, cut=cut: start(stages=cut())
            ours[f"{schedule}, m={count}"] = lambda start=start, cut=stages: start(stages=cut())
    return {"torch pipelining, cut by hand": by_hand, "torch pipelining, Penstock's cut": ours}


def others(
    subject: Subject, costs: ps.Profile, steps: int, stack: ExitStack, notes: dict[str, Any]
) -> Iterator[Any]:
    """torch's best of either cut, and the RPC pipeline at every number of micro-batches."""
    for kind, starts in torchs(subject, costs).items():
        TALK.print(f"finding the best of {len(starts)}: {kind}")
        notes[kind] = {name: scout(start, steps) for name, start in starts.items()}
        best = fastest(notes[kind])
        if best is None:
            continue
        peer = starts[best]()
        stack.callback(peer.close)
        peer.name = f"{kind}, {best}"
        yield peer
    if subject.rpc:
        rows, image = subject.data()[0].shape[0], subject.data()[0].shape[-1]
        rpc = rpc_pipeline(batch=rows, image=image, microbatches=max(subject.counts))
        stack.callback(rpc.close)
        yield from (Rpc(rpc, count) for count in (1, *subject.counts))


def measure(subject: Subject, rounds: int, steps_alone: int, seed: int) -> dict[str, Any]:
    """Everything that was measured of one model."""
    notes: dict[str, Any] = {}
    with ExitStack() as stack:
        ours = []
        for workers in ("processes", "threads"):
            ours.append(Penstock(subject, workers))
            stack.callback(ours[-1].close)
            TALK.print(f"{subject.name}, {workers}: {ours[-1].plan.summary}", markup=False)
        program = ps.capture(subject.build().train(), (subject.data()[0],))
        costs = profile_for(program, devices=list(map(torch.device, DEVICES)), request=Request())
        contestants = [*ours, *others(subject, costs, steps_alone, stack, notes)]
        steps = max(1, round(TURN / ours[0].plan.predicted_step_seconds))
        seconds = take_turns(contestants, rounds, steps=steps, seed=seed)
    return {
        "model": subject.name,
        "rows": [_row(c, seconds[c.name], seconds[ours[0].name]) for c in contestants],
        "scouted": notes,
    }


def _row(contestant: Any, taken: Sequence[float], ours: Sequence[float]) -> dict[str, Any]:
    """One contestant's result."""
    low, median, high = statistics.quantiles(taken, n=4)
    row = {
        "name": contestant.name,
        "median": median,
        "spread": (high - low) / 2,
        "slower": median / statistics.median(ours),
        "loss": contestant.loss,
        "seconds": list(taken),
    }
    if isinstance(contestant, Penstock):
        plan, steps = contestant.plan, contestant.train_steps
        step = statistics.median(steps[len(steps) // 2 :])
        row |= {
            "plan": plan.summary,
            "bound_seconds": plan.bound_seconds,
            "predicted_step_seconds": plan.predicted_step_seconds,
            "train_step_seconds": step,
            "percent_of_bound": 100 * plan.bound_seconds / step,
        }
    return row


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


def show(result: dict[str, Any]) -> list[str]:
    """The table of one model."""
    cells = [(result["model"], "s/step", "±", "processes are faster by", "of bound", "loss")]
    for row in sorted(result["rows"], key=lambda row: float(row["median"])):
        share = row.get("percent_of_bound")
        cells.append(
            (
                row["name"],
                show_seconds(row["median"]),
                show_seconds(row["spread"]),
                f"{row['slower']:.2f}x",
                f"{share:.1f} %" if share else "",
                f"{row['loss']:.6f}",
            )
        )
    plans = [f"{row['name']}: {row['plan']}" for row in result["rows"] if "plan" in row]
    return [*aligned(cells), *plans, ""]


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the comparison, print it, and return everything."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--models", default="resnet,gpt,wide,tiny")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--scout", type=int, default=5, help="steps to find torch's best")
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns")
    parser.add_argument("--quick", action="store_true", help="small models, few rounds")
    record.add_options(parser)
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.scout = 2, 1
    kept = keep_freed_memory()
    use_threads(1)  # the unsplit model too, while it is captured and profiled
    found = subjects(options.quick)
    results = []
    for name in options.models.split(","):
        results.append(measure(found[name], options.rounds, options.scout, options.seed))
        print(*show(results[-1]), sep="\n", flush=True)
    started = start_up()
    print(
        f"two worker processes are ready after {show_seconds(started['seconds'])}; importing torch "
        f"takes {show_seconds(started['import_torch_seconds'])}"
    )
    print(machine())
    settings = {
        "rounds": options.rounds,
        "warm_up": IN_TURNS,
        "scout": options.scout,
        "seed": options.seed,
        "allocator": "every process keeps freed memory (mallopt)" if kept else "the system's",
        "threads": "one a worker",
    }
    report = {"models": results, "start_up": started, "settings": settings}
    return record.save("processes", report, options.json, options.record)


if __name__ == "__main__":
    main(sys.argv[1:])
