"""Penstock beside its peers, on two CPU cores, in one run.

    python -m penstock.bench compare [--models resnet,vit,gpt,unet,wide,tiny] [--rounds 9]
        [--quick] [--json FILE] [--record]

For every model, each configuration of the peers first runs alone for a step (more micro-batches
only as long as they are not slower than fewer), and the fastest third for a few more, to find each
peer's best: `torch.distributed.pipelining` (all its schedules, 1 to 64 micro-batches, cut by hand
and again where Penstock cuts for as many micro-batches), `DistributedDataParallel` (micro-batches,
bucket sizes), FSDP2 (micro-batches, what is gathered at a time), one process with all cores
(micro-batches, whether waiting threads sleep), and one process with one thread (micro-batches).

Then the contestants take turns: Penstock with what it chooses itself (`devices=` left out), and
with stages where it chooses something else, each in threads and in processes; and the best of each
peer. They do so in groups of a few, because the system may take away the memory of processes that
wait while many others train. Penstock's choice in threads takes part in every group, and all are
compared with its steps of the same rounds. A turn is one step, or as many as Penstock runs in half
a second, and the order is drawn anew for every round. For all, a step is forward, loss, backward
and the optimizer. The conditions are the same for all: one intra-op thread per worker, or one per
core for a process that has all cores, and an allocator that keeps freed memory. Penstock's first
twenty steps, which it audits, do not count.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

import penstock as ps
from penstock.bench import record
from penstock.bench.peers.data_parallel import Buckets, data_parallel, sharded
from penstock.bench.peers.one_process import one_process
from penstock.bench.peers.peer import Peer, Recipe
from penstock.bench.peers.torch_pipelining import torch_pipelining
from penstock.bench.scouting import Make, Scouted, fastest, scout, tries
from penstock.bench.subjects import HALVING, LOOPED, Stages, Subject, subjects
from penstock.bench.turns import AUDITED, Ratio, Ticker, middle, take_turns
from penstock.capture import ROWS
from penstock.devices.allocator import keep_freed_memory
from penstock.devices.cores import use_threads
from penstock.display.progress import callback
from penstock.display.tables import aligned
from penstock.plan.request import Request
from penstock.planning.planner import profiles_for
from penstock.workers.backend import WorkerKind

DEVICES = ("cpu", "cpu")
RATE = 0.001
WAITS: dict[str, dict[str, str]] = {
    "": {},
    ", OMP_WAIT_POLICY=passive": {"OMP_WAIT_POLICY": "passive"},
}
SHARDS: dict[str, dict[str, bool]] = {
    "whole": {},
    "by child": {"by_child": True},
    "by child, freed after forwards": {"by_child": True, "frees": True},
}
KINDS: tuple[WorkerKind, ...] = ("threads", "processes")
TOGETHER = 3  # peers that take turns with Penstock
WARM_UP = 3  # rounds that do not count
TURN = 0.5  # seconds of steps: the first short steps after those of another are slower


class Penstock:
    """Penstock as a contestant, with the plan that it makes for its kind of workers.

    Args:
        subject: the model, its data and its loss.
        workers: the kind of workers.
        suffix: the end of its name.
        **options: further arguments of `Pipeline`.

    Attributes:
        name: its name in tables.
        plan: the plan that it follows.
        loss: the loss of the last step.
        train_steps: for every step, the seconds of `train_step`.
    """

    def __init__(
        self, subject: Subject, workers: WorkerKind, suffix: str = "", **options: Any
    ) -> None:
        self._inputs, self._target = subject.data()
        self._loss_fn = subject.loss
        model = subject.build().train()
        self._pipe = ps.Pipeline(model, (self._inputs,), workers=workers, **options)
        self._optimizer = self._pipe.optimizer(torch.optim.SGD, lr=RATE)
        self.name = f"Penstock, {workers}{suffix}"
        self.plan = self._pipe.plan
        self.loss = float("nan")
        self.train_steps: list[float] = []

    def step(self) -> float:
        """Run a training step with the optimizer; returns its seconds."""
        start = time.perf_counter()
        self._optimizer.zero_grad()
        begun = time.perf_counter()
        loss = self._pipe.train_step(self._inputs, target=self._target, loss_fn=self._loss_fn)
        self.train_steps.append(time.perf_counter() - begun)
        self._optimizer.step()
        seconds = time.perf_counter() - start
        self.loss = loss.item()
        return seconds

    def facts(self, steps: int) -> dict[str, Any]:
        """The plan with its prediction and its bound, and the median of measured steps.

        Args:
            steps: the number of last entries of `train_steps` that the median is of.
        """
        taken = statistics.median(self.train_steps[-steps:])
        return {
            "plan": self.plan.summary,
            "train_step_seconds": taken,
            "predicted_step_seconds": self.plan.predicted_step_seconds,
            "bound_seconds": self.plan.bound_seconds,
            "percent_of_bound": 100 * self.plan.bound_seconds / taken,
        }

    def close(self) -> None:
        """Close the pipeline with its workers."""
        self._pipe.close()


def penstocks(subject: Subject, stack: ExitStack) -> list[Penstock]:
    """Pipelines as Penstock plans them, and with a stage per device where it plans otherwise.

    There are such pipelines for each kind of workers.

    Args:
        subject: the model that they train.
        stack: closes them.
    """
    found = []
    for workers in KINDS:
        found.append(Penstock(subject, workers))
        if found[-1].plan.replicas > 1 or len(found[-1].plan.stages) < len(DEVICES):
            found.append(Penstock(subject, workers, ", stages", devices=DEVICES, replicas=1))
    for one in found:
        stack.callback(one.close)
        print(f"{subject.name}, {one.name}: {one.plan.summary}", file=sys.stderr)
    return found


class Cut(nn.Module):
    """A stage of a Penstock program, as a module of tensors for torch's pipeline to run.

    Results and gradients are made contiguous, as gloo sends no other tensors. A schedule that
    splits backwards detaches the results of a stage in place. That fails for inputs of the stage
    and for tensors that an operation has saved, so results are copied for such schedules.

    Args:
        stage: the module of the stage.
        rows: the number of rows of a micro-batch, which values without rows do not show.
        copies: whether to copy the results.
    """

    def __init__(self, stage: nn.Module, rows: int, copies: bool = False) -> None:
        super().__init__()
        self.stage = stage
        self.rows = rows
        self.copies = copies

    def forward(self, *values: torch.Tensor) -> Any:
        """The stage's results: a tuple, or a tensor if there is only one."""
        given = [_SendsContiguous.apply(v) if v.requires_grad else v for v in values]
        results = [value.contiguous() for value in self.stage({ROWS: self.rows}, None, *given)]
        if self.copies:
            results = [value.clone() for value in results]
        return tuple(results) if len(results) > 1 else results[0]


class _SendsContiguous(torch.autograd.Function):
    """The identity; its backward makes the gradient contiguous."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].contiguous()


def captured(subject: Subject) -> ps.Program:
    """The program that is captured from the model in training mode."""
    return ps.capture(subject.build().train(), (subject.data()[0],))


def profiled(subject: Subject) -> ps.Profile:
    """Profile the model anew; Penstock's pipelines are planned with the same profile."""
    devices = [torch.device(device) for device in DEVICES]
    with callback(f"profiling {subject.name}") as progress:
        (found,) = profiles_for(
            captured(subject), choices=[devices], request=Request(), fresh=True, progress=progress
        )
    return found


def penstock_cut(
    program: ps.Program, costs: ps.Profile, count: int, schedule: str
) -> list[nn.Module]:
    """The stages of the model for torch's pipeline, cut where Penstock cuts it.

    Args:
        program: the model.
        costs: its profile.
        count: the number of micro-batches, for which Penstock plans as well.
        schedule: the schedule that torch runs.
    """
    like = "interleaved" if schedule in LOOPED else "1f1b"
    cuts = ps.plan(costs, num_microbatches=count, schedule=like, replicas=1).cuts
    # torch's pipeline cannot change in place what enters a stage, so the cut moves behind that.
    changed = {value for call in program.train.calls for value in call.mutates}
    free = [k for k in range(len(program)) if k not in program.cuts.reasons]
    allowed = [k for k in free if not changed.intersection(program.cuts.boundary(k))]
    cuts = behind(cuts, allowed)
    rows = costs.batch_size // count
    halves = schedule in HALVING
    return [Cut(stage.module, rows, halves) for stage in program.stages(cuts, training=True)]


def behind(cuts: Sequence[int], allowed: Sequence[int]) -> tuple[int, ...]:
    """Each cut, or the next place behind it that is allowed and not taken.

    Args:
        cuts: in order.
        allowed: the places, in order.

    Raises:
        ValueError: there is no such place.
    """
    found: list[int] = []
    for cut in cuts:
        least = max([cut, *(taken + 1 for taken in found)])
        places = [place for place in allowed if place >= least]
        if not places:
            raise ValueError(f"there is no place for a cut behind {cut}")
        found.append(places[0])
    return tuple(found)


def torch_makes(subject: Subject, costs: ps.Profile) -> tuple[dict[str, Make], dict[str, Make]]:
    """Configurations of torch's pipeline by name: cut by hand, and cut where Penstock cuts."""
    program = captured(subject)
    by_hand: dict[str, Make] = {}
    ours: dict[str, Make] = {}

    def make(count: int, schedule: str, cut: Stages) -> Recipe:
        return torch_pipelining(subject.workload(count), cut(), schedule)

    for schedule in subject.schedules:
        looped = schedule in LOOPED
        cut = subject.in_four if looped else subject.by_hand
        if cut is None:
            continue
        for count in subject.counts:
            same = partial(penstock_cut, program, costs, count, schedule)
            by_hand[f"m={count}, {schedule}"] = partial(make, count, schedule, cut)
            ours[f"m={count}, {schedule}"] = partial(make, count, schedule, same)
    return by_hand, ours


def candidates(subject: Subject, costs: ps.Profile) -> dict[str, dict[str, Make]]:
    """For each kind of peer its configurations, by name."""
    by_hand, same_cut = torch_makes(subject, costs)
    work = {count: subject.workload(count) for count in subject.counts}
    cores = len(os.sched_getaffinity(0))
    shared = {count: own for count, own in work.items() if count >= len(DEVICES)}
    return {
        "torch pipelining, cut by hand": by_hand,
        "torch pipelining, Penstock's cut": same_cut,
        "DistributedDataParallel": {
            f"m={m}, {buckets}": partial(data_parallel, own, buckets=buckets)
            for buckets in (Buckets(), Buckets(1.0), Buckets(1000.0))
            for m, own in shared.items()
        },
        "FSDP2": {
            f"m={m}, {setting}": partial(sharded, own, **how)
            for setting, how in SHARDS.items()
            for m, own in shared.items()
        },
        "one process, all cores": {
            f"m={m}{setting}": partial(one_process, own, threads=cores, environment=waits)
            for setting, waits in WAITS.items()
            for m, own in work.items()
        },
        "one device": {f"m={m}": partial(one_process, own) for m, own in work.items()},
    }


def find_best(
    kinds: Mapping[str, Mapping[str, Make]], steps: int
) -> tuple[dict[str, Make], dict[str, Scouted]]:
    """Find the fastest configuration of each kind of peer by running every one alone.

    Args:
        kinds: the configurations by name, for each kind of peer.
        steps: the number of measured steps of the fastest third of each kind.

    Returns:
        the fastest configuration of each kind, by `"kind: configuration"`; and for each kind what
        `scout` has found.
    """
    scouted: dict[str, Scouted] = {}
    with callback("finding each peer's best") as progress:
        tick = Ticker(sum(map(tries, kinds.values())), progress)
        for kind, makes in kinds.items():
            scouted[kind] = scout(makes, steps, partial(_named, tick, kind))
    ran = ((kind, fastest(scouted[kind])) for kind in kinds)
    best = {f"{kind}: {name}": kinds[kind][name] for kind, name in ran if name is not None}
    return best, scouted


def _named(tick: Ticker, kind: str, name: str) -> None:
    tick(f"{kind}, {name}")


def measure(subject: Subject, options: Any) -> dict[str, Any]:
    """Find the peers' best configurations for a model, and measure all contestants in turns."""
    best, scouted = find_best(candidates(subject, profiled(subject)), options.scout)
    with ExitStack() as stack:
        ours = penstocks(subject, stack)
        chosen = ours[0].plan
        rows = in_turns(ours, ours, options)
    peers = list(best.items())
    for k in range(0, len(peers), TOGETHER):
        with ExitStack() as stack:
            reference = Penstock(subject, KINDS[0], plan=chosen)
            stack.callback(reference.close)
            started = [started_peer(*peer, stack) for peer in peers[k : k + TOGETHER]]
            rows += in_turns([reference, *started], [reference], options)[1:]
    return {"model": subject.name, "rows": rows, "scouted": scouted}


def started_peer(name: str, make: Make, stack: ExitStack) -> Peer:
    """A peer in its own processes; `stack` closes them."""
    peer = make().start()
    stack.callback(peer.close)
    peer.name = name
    return peer


def in_turns(
    contestants: Sequence[Any], ours: Sequence[Penstock], options: Any
) -> list[dict[str, Any]]:
    """Let contestants take turns; a row of results for each, compared with the first.

    Args:
        contestants: those who take turns, with Penstock's first.
        ours: Penstock's among them; they run the steps that are audited before the turns.
        options: the options of the command, with `rounds` and `seed`.
    """
    first = []
    for contestant in contestants:
        contestant.step()
        first.append(contestant.loss)
    for _ in range(AUDITED):
        for own in ours:
            own.step()
    steps = max(1, round(TURN / statistics.median(ours[0].train_steps[-5:])))
    with callback("taking turns") as progress:
        tick = Ticker((options.rounds + WARM_UP) * len(contestants), progress)
        how: dict[str, int] = {"steps": steps, "warm_up": WARM_UP, "seed": options.seed}
        taken = take_turns(contestants, options.rounds, tick, **how)
    rows = [row(*each, taken[0]) for each in zip(contestants, taken, first, strict=True)]
    for found, own in zip(rows, ours, strict=False):
        found |= own.facts(steps * options.rounds)
    return rows


def row(contestant: Any, seconds: list[float], loss: float, ours: list[float]) -> dict[str, Any]:
    """A contestant's result.

    Args:
        contestant: the contestant, for its name.
        seconds: the mean seconds of its steps in every round.
        loss: the loss of its first step.
        ours: the seconds of the contestant that it is compared with, in the same rounds.
    """
    median, spread = middle(seconds)
    slower = Ratio.of(seconds, ours)
    return {
        "name": contestant.name,
        "seconds": seconds,
        "median": median,
        "spread": spread,
        "slower": slower.median,
        "slower_spread": slower.spread,
        "loss": loss,
    }


def show(title: str, rows: Iterable[dict[str, Any]]) -> list[str]:
    """A table of results, the fastest first.

    Args:
        title: the heading of the column of names.
        rows: the results; Penstock's have a `percent_of_bound`.
    """
    cells = [(title, "s/step", "±", "of Penstock's", "of bound", "first loss")]
    for found in sorted(rows, key=lambda row: float(row["slower"])):
        share = found.get("percent_of_bound")
        cells.append(
            (
                found["name"],
                f"{found['median']:.4g}",
                f"{found['spread']:.2g}",
                f"{found['slower']:.2f}x ± {found['slower_spread']:.2f}",
                f"{share:.1f} %" if share else "",
                f"{found['loss']:.6f}",
            )
        )
    return aligned(cells)


def main(arguments: Sequence[str]) -> int:
    """Run the comparison and print it."""
    parser = record.parser("compare", __doc__)
    parser.add_argument("--models", default=",".join(subjects(quick=True)))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--scout", type=int, default=5, help="steps to find a peer's best")
    parser.add_argument("--seed", type=int, default=0, help="seed of the order of turns")
    parser.add_argument("--quick", action="store_true", help="small models, few rounds")
    options = parser.parse_args(arguments)
    record.check_whole(parser, options, "quick")
    if options.quick:
        options.rounds, options.scout = 2, 1
    known = subjects(options.quick)
    chosen = options.models.split(",")
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"--models: there is no {unknown[0]!r}; there are {', '.join(known)}")
    kept = keep_freed_memory()
    use_threads(1)  # the unsplit model too, while it is captured and profiled
    settings = {
        "rounds": options.rounds,
        "warm_up": WARM_UP,
        "scout": options.scout,
        "seed": options.seed,
        "allocator": "every process keeps freed memory (mallopt)" if kept else "the system's",
        "threads": "one a worker, and as many as cores for a process that has them all",
    }
    measured: dict[str, dict[str, Any]] = {}
    for name in chosen:
        found = measured[known[name].name] = {**measure(known[name], options), "settings": settings}
        print(*show(known[name].name, found["rows"]), "", sep="\n", flush=True)
        report = record.save_models("compare", measured, options)
    print(report["machine"])
    return 0
