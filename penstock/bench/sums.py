"""What it costs to add gradients in order, and how that compares with an all-reduce.

    python -m penstock.bench sums [--models mlp,deep-mlp,gpt2] [--rounds 15] [--ranks 4]
        [--quick] [--json FILE] [--record]

Penstock adds the gradients of micro-batches in their order, whichever replica computed them. Here
the same replicas train again with sums in no order, by the same means:

*In one memory*, a replica adds the gradients of a micro-batch as soon as no other one is adding,
instead of when those of the micro-batches before have been added.

*On ranks*, a replica adds up its own micro-batches first, and then adds that to what the replicas
before have sent, bucket by bucket on the same ring, instead of adding one micro-batch after the
other to it.

On ranks `DistributedDataParallel` takes part as well, with gloo's all-reduce and the fastest of
several sizes of buckets. All take turns, and a step is forward, loss, backward and the optimizer.
Every worker has one thread, so there may be more of them than cores, for all alike.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from penstock.bench import record
from penstock.bench.data_parallel import DataParallelSettings, Trained, deep_mlp, gpt2, mlp
from penstock.bench.peers.data_parallel import Buckets, data_parallel
from penstock.bench.peers.peer import Peer, Place, Recipe
from penstock.bench.peers.ranks import Rank, replicas_on_ranks
from penstock.bench.peers.workload import Workload
from penstock.bench.replica_training import Replicated
from penstock.bench.scouting import Make, fastest, scout, tries
from penstock.bench.turns import AUDITED, Ratio, Ticker, Timed, take_turns
from penstock.devices.allocator import keep_freed_memory
from penstock.display.progress import callback
from penstock.engine.gathered import Gathering
from penstock.engine.replicas import InOrder
from penstock.engine.sums import Adding, Terms, accumulate
from penstock.workers.ranks.ring import ChainedSum

IN_MEMORY = 2  # replicas
PER_REPLICA = 2  # micro-batches


class AnyTurns:
    """A lock in place of turns: whichever thread comes first has the turn, until it is done."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None

    def begin(self, numbers: Sequence[int], end: int) -> None:
        """Do nothing: there is no order."""

    def has_come(self, number: int) -> bool:
        """Whether this thread has the turn; it takes it if nobody has."""
        own = threading.get_ident()
        if self._holder != own and self._lock.acquire(blocking=False):
            self._holder = own
        return self._holder == own

    def wait(self, number: int) -> None:
        """Wait for the turn, if this thread does not have it."""
        own = threading.get_ident()
        if self._holder != own:
            self._lock.acquire()
            self._holder = own

    def done(self, number: int) -> None:
        """Give up the turn, if this thread has it."""
        if self._holder == threading.get_ident():
            self._holder = None
            self._lock.release()


class InNoOrder(InOrder):
    """What the replicas of a stage have in common if their gradients are added in no order."""

    def __init__(
        self, make: Any, adding: Adding | None = None, gathering: Gathering | None = None
    ) -> None:
        super().__init__(make)
        self.sums = AnyTurns()


class FoldedSum(ChainedSum):
    """A replica's part of a sum on a ring: its own micro-batches first, then what has come."""

    def has_come(self, number: int) -> bool:
        """Always: every backward adds to `.grad` at once."""
        return True

    def add(self, number: int, sent: Sequence[Terms]) -> None:
        """Add the gradients of a micro-batch to `.grad`."""
        for terms in sent:
            accumulate(terms)

    @contextmanager
    def in_turn(
        self, number: int, earlier: Sequence[Terms], leaves: Sequence[torch.Tensor]
    ) -> Iterator[None]:
        """Around a backward that adds to `.grad`: there is nothing to wait for."""
        self.add(number, earlier)
        yield

    @torch.no_grad()
    def _sum(self, k: int, stays: bool) -> Sequence[torch.Tensor | None]:
        if k not in self._come:
            return super()._sum(k, stays)
        return [
            _added(parameter, so_far)
            for parameter, so_far in zip(self._buckets[k], self._come.pop(k), strict=True)
        ]


def _added(parameter: nn.Parameter, so_far: torch.Tensor | None) -> torch.Tensor | None:
    """Add the sum of the replicas before to a parameter's gradient, and return the gradient."""
    if parameter.grad is None:
        parameter.grad = None if so_far is None else so_far.clone()
    elif so_far is not None:
        parameter.grad.add_(so_far)
    return parameter.grad


class UnorderedRank(Rank):
    """A rank whose gradients are added in no order."""

    def __init__(self, workload: Workload, place: Place) -> None:
        with patch("penstock.workers.ranks.workers.ChainedSum", FoldedSum):
            super().__init__(workload, place)


class Unordered(Replicated):
    """Replicas in threads whose gradients are added in no order."""

    def __init__(self, workload: Workload, replicas: int) -> None:
        with patch("penstock.workers.threads.workers.InOrder", InNoOrder):
            super().__init__(workload, replicas, "threads")
        self.name = "no order"


def in_memory(workload: Workload, rounds: int) -> dict[str, Any]:
    """Compare the sums in order and in no order, with replicas in threads."""
    with ExitStack() as stack:
        ordered = Replicated(workload, IN_MEMORY, "threads")
        stack.callback(ordered.close)
        ordered.name = "in order"
        unordered = Unordered(workload, IN_MEMORY)
        stack.callback(unordered.close)
        return {"where": f"{IN_MEMORY} threads", **compared([ordered, unordered], rounds)}


def on_ranks(
    workload: Workload, ranks: int, buckets: dict[str, Make], rounds: int, steps: int
) -> Any:
    """Compare both sums on ranks, and `DistributedDataParallel` in its fastest configuration.

    Args:
        workload: what they train.
        ranks: how many.
        buckets: the configurations of `DistributedDataParallel`, by name.
        rounds: that count.
        steps: how many are measured of a configuration that is tried again.
    """
    with callback("finding the best size of buckets") as progress:
        scouted = scout(buckets, steps, Ticker(tries(buckets), progress))
    best = fastest(scouted)
    unordered = Recipe("no order", [partial(UnorderedRank, workload)] * ranks)
    recipes = {"in order": replicas_on_ranks(workload, processes=ranks), "no order": unordered}
    if best is not None:
        recipes[f"DDP, {best}"] = buckets[best]()
    with ExitStack() as stack:
        peers: list[Peer] = []
        for name, recipe in recipes.items():
            peers.append(recipe.start())
            stack.callback(peers[-1].close)
            peers[-1].name = name
        return {"where": f"{ranks} ranks", "scouted": scouted, **compared(peers, rounds)}


def compared(contestants: Sequence[Timed], rounds: int) -> dict[str, Any]:
    """The seconds of contestants that take turns, and their ratios to those of the first."""
    with callback("taking turns") as progress:
        tick = Ticker((rounds + AUDITED) * len(contestants), progress)
        taken = take_turns(contestants, rounds, tick, warm_up=AUDITED)
    rows = []
    for contestant, seconds in zip(contestants, taken, strict=True):
        ratio = Ratio.of(seconds, taken[0])
        rows.append(
            {
                "name": contestant.name,
                "median": statistics.median(seconds),
                "to_ordered": ratio.median,
                "spread": ratio.spread,
                "seconds": seconds,
            }
        )
    return {"rows": rows}


def configurations(workload: Workload, ranks: int, buckets: Sequence[Buckets]) -> dict[str, Make]:
    """`DistributedDataParallel` with each of these buckets, by the names that `scout` takes.

    Args:
        workload: what it trains.
        ranks: how many.
        buckets: the settings, each different.
    """
    return {
        f"m={workload.num_microbatches}, {each}": partial(
            data_parallel, workload, processes=ranks, buckets=each
        )
        for each in buckets
    }


def measure(model: Trained, options: Any, tried: DataParallelSettings) -> list[dict[str, Any]]:
    """The results of one model: with replicas in threads, and on ranks."""
    here = in_memory(model.workload(PER_REPLICA * IN_MEMORY, model.rows), options.rounds)
    work = model.workload(PER_REPLICA * options.ranks, model.rows)
    buckets = configurations(work, options.ranks, tried.buckets)
    there = on_ranks(work, options.ranks, buckets, options.rounds, tried.tries)
    return [{"model": model.name, **found} for found in (here, there)]


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    models = {made.file: made for made in (mlp(), deep_mlp(), gpt2())}
    parser = record.parser("sums", __doc__)
    parser.add_argument("--models", default=",".join(models))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--quick", action="store_true", help="three rounds, one size of buckets")
    options = parser.parse_args(arguments)
    record.check_whole(parser, options, "models", "quick")
    tried = (DataParallelSettings.quick if options.quick else DataParallelSettings.full)(None)
    if options.quick:
        options.rounds = 3
    chosen = options.models.split(",")
    if unknown := [name for name in chosen if name not in models]:
        parser.error(f"--models: there is no {unknown[0]!r}; there are {', '.join(models)}")
    keep_freed_memory()
    found = []
    for name in chosen:
        for result in measure(models[name], options, tried):
            found.append(result)
            text = ", ".join(
                f"{row['name']} {1e3 * row['median']:.2f} ms ({row['to_ordered']:.3f} ± "
                f"{row['spread']:.3f})"
                for row in result["rows"]
            )
            print(f"{result['model']}, {result['where']}: {text}", flush=True)
    record.save("sums", {"results": found, "rounds": options.rounds}, options)
    return 0
