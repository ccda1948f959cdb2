"""Penstock beside its peers on ResNet-50, on two CPU workers, in one run.

    python -m penstock.bench compare [--batch 32] [--image 128] [--rounds 9] [--quick] [--record]

First every configuration of `torch.distributed.pipelining` (all its schedules, 2 to 16
micro-batches, cut by hand as in PyTorch's tutorial and again with Penstock's own cut) and of the
others runs alone for a few steps, to find each peer's best. Then the best of each take turns with
Penstock, one step each, round after round, in an order that is drawn anew for every round. A step
is forward, loss, backward and the optimizer, for all. All have the same conditions: one intra-op
thread a worker (as many as cores for the process that has them all), an allocator that keeps freed
memory, OpenMP as it comes (whether its threads sleep or spin when they wait is tried for the
process that has several).
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

import penstock as ps
from penstock.bench import record
from penstock.bench.peers.data_parallel import data_parallel
from penstock.bench.peers.one_process import one_process
from penstock.bench.peers.peer import Peer
from penstock.bench.peers.rpc_pipeline import rpc_pipeline
from penstock.bench.peers.torch_pipelining import torch_pipelining
from penstock.bench.peers.workload import Workload
from penstock.bench.subjects import COUNTS, LOOPED, SINGLE, Stages, Subject, resnet
from penstock.bench.turns import Ticker, take_turns
from penstock.capture import ROWS
from penstock.devices.allocator import keep_freed_memory
from penstock.display.progress import callback
from penstock.display.tables import aligned
from penstock.plan.request import Request
from penstock.planning.planner import profile_for
from penstock.workers.backend import Kind

DEVICES = ("cpu", "cpu")
RATE = 0.001
WAITS: dict[str, dict[str, str]] = {
    "": {},
    ", OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
}
WARM_UP = 2  # steps that do not count where a configuration is tried alone
IN_TURNS = 20  # rounds that do not: Penstock audits its first twenty steps

Start = Callable[[], Peer]
Scouted = dict[str, list[float] | str]
"""Of every configuration the seconds of its steps, or why it does not run."""


class Penstock:
    """Penstock as a contestant, with the plan that it makes for its kind of workers.

    Attributes:
        name: what it is called.
        plan: its plan.
        loss: of the last step.
        train_steps: seconds of every `train_step`, without the optimizer.
    """

    def __init__(self, subject: Subject, workers: Kind) -> None:
        self._inputs, self._target = subject.data()
        self._loss_fn = subject.loss
        model = subject.build().train()
        self._pipe = ps.Pipeline(
            model, (self._inputs,), devices=DEVICES, workers=workers, replicas=1
        )
        self._optimizer = self._pipe.optimizer(torch.optim.SGD, lr=RATE)
        self.name = f"Penstock, {workers}"
        self.plan = self._pipe.plan
        self.loss = float("nan")
        self.train_steps: list[float] = []

    def step(self) -> float:
        """One training step; its seconds."""
        start = time.perf_counter()
        self._optimizer.zero_grad()
        loss = self._pipe.train_step(self._inputs, target=self._target, loss_fn=self._loss_fn)
        self.train_steps.append(time.perf_counter() - start)
        self._optimizer.step()
        seconds = time.perf_counter() - start
        self.loss = loss.item()
        return seconds

    def beside_its_bound(self, warm_up: int) -> dict[str, float]:
        """The median `train_step` after this many of them, as predicted, and its bound."""
        taken = statistics.median(self.train_steps[warm_up:])
        return {
            "train_step_seconds": taken,
            "predicted_step_seconds": self.plan.predicted_step_seconds,
            "bound_seconds": self.plan.bound_seconds,
            "percent_of_bound": 100 * self.plan.bound_seconds / taken,
        }

    def close(self) -> None:
        """Dismiss the workers."""
        self._pipe.close()


class Cut(nn.Module):
    """A stage of a Penstock program, as a module of tensors for another pipeline to run.

    Args:
        stage: which one.
        rows: of every micro-batch. They cannot be told from the values: some have no rows.
    """

    def __init__(self, stage: nn.Module, rows: int) -> None:
        super().__init__()
        self.stage = stage
        self.rows = rows

    def forward(self, *values: torch.Tensor) -> Any:
        """The stage's results; alone if there is only one."""
        results = self.stage({ROWS: self.rows}, None, *values)
        return results if len(results) > 1 else results[0]


def captured(subject: Subject) -> ps.Program:
    """The model as a program."""
    return ps.capture(subject.build().train(), (subject.data()[0],))


def profiled(subject: Subject) -> ps.Profile:
    """What the model costs now; Penstock's pipelines are planned by the same profile."""
    devices = [torch.device(device) for device in DEVICES]
    with callback(f"profiling {subject.name}") as progress:
        return profile_for(
            captured(subject), devices=devices, request=Request(), fresh=True, progress=progress
        )


def penstock_cut(subject: Subject, costs: ps.Profile, count: int, schedule: str) -> list[nn.Module]:
    """The model, cut where Penstock cuts it for this number of micro-batches and schedule."""
    program = captured(subject)
    cuts = ps.plan(costs, num_microbatches=count, schedule=schedule, replicas=1).cuts
    # torch's pipeline cannot change in place what enters a stage, so the cut moves behind that.
    changed = {value for call in program.train.calls for value in call.mutates}
    while any(changed.intersection(program.cuts.boundary(cut)) for cut in cuts):
        cuts = tuple(cut + 1 for cut in cuts)
    rows = costs.batch_size // count
    return [Cut(stage.module, rows) for stage in program.stages(cuts, training=True)]


def torch_starts(subject: Subject, costs: ps.Profile) -> tuple[dict[str, Start], dict[str, Start]]:
    """torch's configurations, by name: those cut by hand, and the same as Penstock cuts."""
    by_hand: dict[str, Start] = {}
    ours: dict[str, Start] = {}

    def start(count: int, schedule: str, cut: Stages) -> Peer:
        return torch_pipelining(subject.workload(count), cut(), schedule)

    for schedule in subject.schedules:
        looped = schedule in LOOPED
        cut = subject.in_four if looped else subject.by_hand
        if cut is None:
            continue
        for count in subject.counts:
            like = "interleaved" if looped else "1f1b"
            same = partial(penstock_cut, subject, costs, count, like)
            by_hand[f"{schedule}, m={count}"] = partial(start, count, schedule, cut)
            ours[f"{schedule}, m={count}"] = partial(start, count, schedule, same)
    return by_hand, ours


def candidates(subject: Subject, costs: ps.Profile) -> dict[str, dict[str, Start]]:
    """For each kind of peer its configurations, by name."""
    by_hand, same_cut = torch_starts(subject, costs)
    single = {n: start for n, start in by_hand.items() if n.partition(",")[0] in SINGLE}
    work = {count: subject.workload(count) for count in (1, *subject.counts)}
    cores = len(os.sched_getaffinity(0))

    def rpc(workload: Workload) -> Peer:
        return rpc_pipeline(workload, subject.by_hand())

    return {
        "torch pipelining, tutorial's cut": single,
        "torch pipelining, two stages each, cut by hand": {
            name: start for name, start in by_hand.items() if name not in single
        },
        "torch pipelining, Penstock's cut": same_cut,
        "RPC pipeline": {f"m={m}": partial(rpc, own) for m, own in work.items()},
        "DistributedDataParallel": {"": partial(data_parallel, work[1])},
        "one process, all cores": {
            f"m={m}{said}": partial(one_process, own, threads=cores, environment=waits)
            for m, own in work.items()
            for said, waits in WAITS.items()
        },
        "one device": {f"m={m}": partial(one_process, own) for m, own in work.items()},
    }


def scout(start: Start, steps: int) -> list[float] | str:
    """The seconds of a peer's steps, alone and warm; or why it does not run."""
    try:
        peer = start()
    except (RuntimeError, TypeError, ValueError, ps.PenstockError) as error:
        return f"does not run: {str(error).splitlines()[-1]}"
    try:
        return [peer.step() for _ in range(steps + WARM_UP)][WARM_UP:]
    except RuntimeError as error:
        return f"failed: {str(error).splitlines()[-1]}"
    finally:
        peer.close()


def fastest(scouted: Mapping[str, list[float] | str]) -> str | None:
    """The configuration with the smallest median; `None` if none ran."""
    medians = {n: statistics.median(s) for n, s in scouted.items() if not isinstance(s, str)}
    return min(medians, key=medians.__getitem__, default=None)


def find_best(
    kinds: Mapping[str, Mapping[str, Start]], steps: int, stack: ExitStack
) -> tuple[list[Peer], dict[str, Scouted]]:
    """Try all configurations, each alone.

    Args:
        kinds: of peers, and the configurations of each, by name.
        steps: that are measured of each.
        stack: closes the peers.

    Returns:
        the fastest of every kind, started, and the seconds of all.
    """
    scouted: dict[str, Scouted] = {}
    with callback("finding each peer's best") as progress:
        tick = Ticker(sum(map(len, kinds.values())), progress)
        for kind, starts in kinds.items():
            scouted[kind] = {}
            for name, start in starts.items():
                tick(f"trying {kind}, {name}")
                scouted[kind][name] = scout(start, steps)
    found = []
    for kind, starts in kinds.items():
        best = fastest(scouted[kind])
        if best is not None:
            found.append(starts[best]())
            stack.callback(found[-1].close)
            found[-1].name = f"{kind}, {best}" if best else kind
    return found, scouted


def results(
    contestants: Sequence[Any], rounds: int, steps: int = 1, seed: int = 0
) -> list[dict[str, Any]]:
    """Let them take turns; a row for each, and by how much the first one is faster.

    Args:
        contestants: `turns.Timed`, with the `loss` of the last step.
        rounds: that count, after `IN_TURNS` that do not.
        steps: of each in a round.
        seed: of the order of turns.
    """
    with callback("taking turns") as progress:
        tick = Ticker((rounds + IN_TURNS) * len(contestants), progress)
        taken = take_turns(contestants, rounds, tick, steps=steps, warm_up=IN_TURNS, seed=seed)
    found = []
    for contestant, seconds in zip(contestants, taken, strict=True):
        low, median, high = statistics.quantiles(seconds, n=4)
        row = {
            "name": contestant.name,
            "seconds": seconds,
            "median": median,
            "spread": (high - low) / 2,
            "slower": median / statistics.median(taken[0]),
            "loss": contestant.loss,
        }
        found.append(row)
    return found


def settings(options: Any, threads: str) -> dict[str, Any]:
    """How it is measured, for the record; from now on this process keeps freed memory."""
    kept = keep_freed_memory()
    return {
        "rounds": options.rounds,
        "warm_up": IN_TURNS,
        "scout": options.scout,
        "seed": options.seed,
        "allocator": "every process keeps freed memory (mallopt)" if kept else "the system's",
        "threads": threads,
    }


def show(title: str, ratio: str, rows: Iterable[dict[str, Any]]) -> list[str]:
    """A table of results, the fastest first.

    Args:
        title: over the names.
        ratio: over by how much the first contestant is faster.
        rows: the results; some have their percent of the bound.
    """
    cells = [(title, "s/step", "±", ratio, "of bound", "loss")]
    for row in sorted(rows, key=lambda row: float(row["median"])):
        share = row.get("percent_of_bound")
        cells.append(
            (
                row["name"],
                f"{row['median']:.4g}",
                f"{row['spread']:.2g}",
                f"{row['slower']:.2f}x",
                f"{share:.1f} %" if share else "",
                f"{row['loss']:.6f}",
            )
        )
    return aligned(cells)


def main(arguments: Sequence[str]) -> int:
    """Run the comparison and print it."""
    parser = record.parser("compare", __doc__)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--image", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--scout", type=int, default=5, help="steps to find a peer's best")
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns")
    parser.add_argument("--quick", action="store_true", help="small images, few rounds")
    options = parser.parse_args(arguments)
    if options.quick:
        options.batch, options.image, options.rounds, options.scout = 8, 64, 3, 1
    how = settings(options, "one a worker; the process with all cores has as many as cores")
    counts = [m for m in COUNTS if options.batch % m == 0 and options.batch // m > 1]
    subject = resnet(options.batch, options.image, counts)
    costs = profiled(subject)
    with ExitStack() as stack:
        ours = Penstock(subject, "threads")
        stack.callback(ours.close)
        ours.name = f"Penstock, m={ours.plan.num_microbatches}"
        print(ours.plan, file=sys.stderr)
        best, scouted = find_best(candidates(subject, costs), options.scout, stack)
        rows = results([ours, *best], options.rounds, seed=options.seed)
    report = {
        "batch": options.batch,
        "image": options.image,
        "settings": how,
        "plan": ours.plan.summary,
        "rows": sorted(rows, key=lambda row: float(row["median"])),
        "scouted": scouted,
        **ours.beside_its_bound(IN_TURNS),
    }
    report = record.save("compare", report, options)
    print(*show(subject.name, "Penstock is faster by", rows), sep="\n")
    print(
        f"train_step without the optimizer: {report['train_step_seconds']:.3f} s measured, "
        f"{report['predicted_step_seconds']:.3f} s predicted, "
        f"{report['percent_of_bound']:.1f} % of the bound"
    )
    print(report["machine"])
    return 0
