"""Penstock beside its peers, on two CPU workers, in one run.

    python -m benchmarks.compare [--batch 32] [--image 128] [--rounds 9] [--quick] [--record]

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

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn

import penstock as ps
from benchmarks import peers, record
from penstock.bench.peers.models import Task, loss_function
from penstock.capture import ROWS
from penstock.devices.allocator import keep_freed_memory

DEVICES = ("cpu", "cpu")
WAITS: dict[str, dict[str, str]] = {
    "": {},
    ", OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
}
WARM_UP = 2  # steps that do not count where a configuration is tried alone,
IN_TURNS = (
    20  # and of everybody in turns: Penstock audits its first twenty, see `penstock.audit.auditor`
)
TALK = Console(stderr=True)


@dataclass(frozen=True)
class Row:
    """One contestant's result.

    Attributes:
        name: what ran.
        seconds: of every measured step, in order.
        median: of them.
        spread: half the range between the quartiles.
        slower: the median over Penstock's.
        loss: of the last step.
    """

    name: str
    seconds: list[float]
    median: float
    spread: float
    slower: float
    loss: float


class Penstock:
    """Penstock as a contestant; it times `train_step` apart from the optimizer as well."""

    def __init__(self, batch: int, image: int) -> None:
        task = Task(batch, image)
        self.images, self.target = task.data()
        self.model = peers.resnet50()
        self.program = ps.capture(self.model, (self.images,))
        self.profile = ps.profile(self.program, devices=DEVICES)
        self.pipe = ps.Pipeline(
            self.model,
            (self.images,),
            devices=DEVICES,
            program=self.program,
            plan=ps.plan(self.profile),
        )
        self.optimizer = self.pipe.optimizer(torch.optim.SGD, lr=task.learning_rate)
        self.name = f"Penstock, m={self.pipe.plan.num_microbatches}"
        self.loss = float("nan")
        self.train_steps: list[float] = []

    def step(self) -> float:
        """One training step."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.pipe.train_step(self.images, target=self.target, loss_fn=loss_function)
        self.train_steps.append(time.perf_counter() - start)
        self.optimizer.step()
        seconds = time.perf_counter() - start
        self.loss = loss.item()
        return seconds

    def close(self) -> None:
        """Dismiss the workers."""
        self.pipe.close()


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


def penstock_cut(profile: ps.Profile, num_microbatches: int, schedule: str) -> list[nn.Module]:
    """ResNet-50, cut where Penstock cuts it for this number of micro-batches and schedule."""
    model = peers.resnet50()
    program = ps.capture(model, (torch.zeros(4, 3, 128, 128),))
    cuts = ps.plan(profile, num_microbatches=num_microbatches, schedule=schedule).cuts
    # torch's pipeline cannot change in place what enters a stage, so the cut moves behind that.
    changed = {value for call in program.train.calls for value in call.mutates}
    while any(changed.intersection(program.cuts.boundary(cut)) for cut in cuts):
        cuts = tuple(cut + 1 for cut in cuts)
    rows = profile.batch_size // num_microbatches
    return [Cut(stage.module, rows) for stage in program.stages(cuts, training=True)]


Start = Callable[[], peers.Peer]


def candidates(batch: int, image: int, profile: ps.Profile) -> dict[str, dict[str, Start]]:
    """For each kind of peer its configurations, by name."""
    counts = [m for m in peers.COUNTS if batch % m == 0 and batch // m > 1]
    task = {"batch": batch, "image": image}
    by_hand: dict[str, Start] = {}
    looped: dict[str, Start] = {}
    same_cut: dict[str, Start] = {}
    for name, m in itertools.product(peers.SCHEDULES, counts):
        cut_for = "1f1b" if name in peers.SINGLE else "interleaved"
        settings = {**task, "schedule": name, "microbatches": m}
        of_one_stage = by_hand if name in peers.SINGLE else looped
        of_one_stage[f"{name}, m={m}"] = lambda s=settings: peers.torch_pipelining(**s)
        same_cut[f"{name}, m={m}"] = lambda s=settings, cut_for=cut_for: peers.torch_pipelining(
            **s, stages=penstock_cut(profile, s["microbatches"], cut_for)
        )
    rpc: dict[str, Start] = {
        f"m={m}": lambda m=m: peers.rpc_pipeline(**task, microbatches=m) for m in (1, *counts)
    }
    return {
        "torch pipelining, tutorial's cut": by_hand,
        "torch pipelining, two stages each, cut by hand": looped,
        "torch pipelining, Penstock's cut": same_cut,
        "RPC pipeline": rpc,
        "DistributedDataParallel": {"": lambda: peers.data_parallel(**task)},
        "one process, all cores": {
            f"m={m}{said}": lambda m=m, waits=waits: peers.all_cores(
                **task, microbatches=m, environment=waits
            )
            for m in (1, *counts)
            for said, waits in WAITS.items()
        },
        "one device": {
            f"m={m}": lambda m=m: peers.one_core(**task, microbatches=m) for m in (1, *counts)
        },
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


def fastest(scouted: dict[str, list[float] | str]) -> str | None:
    """The configuration with the smallest median; `None` if none ran."""
    medians = {n: statistics.median(s) for n, s in scouted.items() if not isinstance(s, str)}
    return min(medians, key=medians.__getitem__, default=None)


def find_best(
    kinds: dict[str, dict[str, Start]], steps: int
) -> tuple[dict[str, Start], dict[str, dict[str, list[float] | str]]]:
    """The fastest configuration of every kind, and the seconds of all."""
    found: dict[str, Start] = {}
    seconds: dict[str, dict[str, list[float] | str]] = {}
    with Progress(console=TALK) as bar:
        task = bar.add_task("finding each peer's best", total=sum(map(len, kinds.values())))
        for kind, configurations in kinds.items():
            seconds[kind] = {}
            for name, start in configurations.items():
                seconds[kind][name] = scout(start, steps)
                bar.advance(task)
            best = fastest(seconds[kind])
            if best is not None:
                found[f"{kind}, {best}" if best else kind] = configurations[best]
    return found, seconds


def take_turns(
    contestants: Sequence[Any], rounds: int, warm_up: int = IN_TURNS, steps: int = 1, seed: int = 0
) -> dict[str, list[float]]:
    """The mean seconds of each contestant's steps, so many each, round after round.

    The order of a round is drawn anew, by a seed, so that nobody has always the same predecessor.
    """
    drawn = random.Random(seed)
    seconds: dict[str, list[float]] = {c.name: [] for c in contestants}
    with Progress(console=TALK) as bar:
        task = bar.add_task("taking turns", total=(rounds + warm_up) * len(contestants))
        for turn in range(rounds + warm_up):
            for contestant in drawn.sample(contestants, len(contestants)):
                taken = [contestant.step() for _ in range(steps)]
                if turn >= warm_up:
                    seconds[contestant.name].append(statistics.mean(taken))
                bar.advance(task)
    return seconds


def rows(contestants: Sequence[Any], seconds: dict[str, list[float]]) -> list[Row]:
    """The results, fastest first."""
    ours = statistics.median(seconds[contestants[0].name])
    result = []
    for contestant in contestants:
        taken = seconds[contestant.name]
        low, median, high = statistics.quantiles(taken, n=4)
        result.append(
            Row(contestant.name, taken, median, (high - low) / 2, median / ours, contestant.loss)
        )
    return sorted(result, key=lambda row: row.median)


def main() -> None:
    """Run the comparison and print it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--image", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--scout", type=int, default=5, help="steps to find a peer's best")
    parser.add_argument("--seed", type=int, default=0, help="of the order of turns")
    parser.add_argument("--quick", action="store_true", help="small images, few rounds")
    record.add_options(parser)
    options = parser.parse_args()
    if options.quick:
        options.batch, options.image, options.rounds, options.scout = 8, 64, 3, 1
    kept = keep_freed_memory()
    ours = Penstock(options.batch, options.image)
    TALK.print(str(ours.pipe.plan))
    kinds = candidates(options.batch, options.image, ours.profile)
    best, scouted = find_best(kinds, options.scout)
    with ExitStack() as stack:
        stack.callback(ours.close)
        contestants: list[Any] = [ours]
        for name, start in best.items():
            peer = start()
            stack.callback(peer.close)
            peer.name = name
            contestants.append(peer)
        seconds = take_turns(contestants, options.rounds, seed=options.seed)
    result = rows(contestants, seconds)
    train_step = statistics.median(ours.train_steps[IN_TURNS:])
    plan = ours.pipe.plan
    report = {
        "batch": options.batch,
        "image": options.image,
        "settings": {
            "rounds": options.rounds,
            "warm_up": IN_TURNS,
            "scout": options.scout,
            "seed": options.seed,
            "allocator": "every process keeps freed memory (mallopt)" if kept else "the system's",
            "threads": "one a worker; the process with all cores has as many as cores",
        },
        "plan": plan.summary,
        "rows": [asdict(row) for row in result],
        "scouted": scouted,
        "train_step_seconds": train_step,
        "predicted_step_seconds": plan.predicted_step_seconds,
        "bound_seconds": plan.bound_seconds,
        "percent_of_bound": 100 * plan.bound_seconds / train_step,
    }
    report = record.save("compare", report, options.json, options.record)
    print_table(result, report)


def print_table(result: Sequence[Row], report: dict[str, Any]) -> None:
    """The table, and how far the step is from the bound."""
    table = Table(title=f"ResNet-50, batch {report['batch']} of {report['image']}² images")
    for column in ("", "s/step", "±", "Penstock is faster by", "loss"):
        table.add_column(column, justify="left" if not column else "right")
    for row in result:
        cells = (f"{row.median:.3f}", f"{row.spread:.3f}", f"{row.slower:.2f}x", f"{row.loss:.6f}")
        table.add_row(row.name, *cells)
    console = Console(file=sys.stdout, width=110)
    console.print(table)
    console.print(
        f"train_step without the optimizer: {report['train_step_seconds']:.3f} s measured, "
        f"{report['predicted_step_seconds']:.3f} s predicted, "
        f"{report['percent_of_bound']:.1f} % of the bound"
    )
    console.print(str(report["machine"]))


if __name__ == "__main__":
    main()
