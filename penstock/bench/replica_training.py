"""Step times and bits of replicas, of fewer of them, and of `DistributedDataParallel`.

The largest number of replicas runs on ranks as well, as in a script under torchrun.

All take turns in training the same model from the same weights on the same micro-batches, with one
intra-op thread for each replica or rank and an allocator that keeps freed memory. Before, every
configuration of `DistributedDataParallel` runs alone for a few steps, to find its best.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.bench.peers.data_parallel import Buckets, data_parallel
from penstock.bench.peers.peer import Peer
from penstock.bench.peers.ranks import replicas_on_ranks
from penstock.bench.peers.workload import Workload
from penstock.bench.scouting import Make, Scouted, fastest, scout, tries
from penstock.bench.turns import AUDITED, Contestant, Ratio, Ticker, take_turns
from penstock.comparison.reference import run_with_threads
from penstock.devices.cores import only_cores
from penstock.display.tables import Row, aligned
from penstock.display.terminal import Progress
from penstock.errors import PenstockError
from penstock.oracle import Oracle
from penstock.pipeline import Pipeline
from penstock.units import show_seconds
from penstock.workers.backend import WorkerKind

_DDP = "DistributedDataParallel"


@dataclass(frozen=True)
class Bits:
    """The gradients of the first batch beside those of one device.

    Attributes:
        parameters: how many there are.
        equal: the number of parameters whose gradients have the same bits.
        difference: the largest absolute difference of an entry; 0 if all bits are the same.
        largest: the largest absolute entry of one device's gradients, for comparison.
    """

    parameters: int
    equal: int
    difference: float
    largest: float

    @classmethod
    def of(cls, gradients: Sequence[Tensor], expected: Sequence[Tensor]) -> Bits:
        """Compare the gradients of all parameters, in the same order."""
        pairs = list(zip(gradients, expected, strict=True))
        return cls(
            parameters=len(pairs),
            equal=sum(torch.equal(own, other) for own, other in pairs),
            difference=max((own - other).abs().max().item() for own, other in pairs),
            largest=max(other.abs().max().item() for other in expected),
        )

    @property
    def exact(self) -> bool:
        """Whether all bits are the same."""
        return self.equal == self.parameters

    def check(self, name: str) -> None:
        """Raise unless all bits are the same.

        Raises:
            PenstockError: some are not.
        """
        if not self.exact:
            raise PenstockError(
                f"{name}: the gradients of {self.parameters - self.equal} of {self.parameters} "
                f"parameters do not have the bits of one device; the largest difference is "
                f"{self.difference:.3g}"
            )

    def __str__(self) -> str:
        if self.exact:
            return "the bits of one device"
        return f"off by up to {self.difference:.2g}, in {self.parameters - self.equal} gradients"

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        return {**vars(self), "exact": self.exact}


@dataclass(frozen=True)
class Measured:
    """A contestant, and how exact its gradients are.

    Attributes:
        contestant: what was timed; its facts have the number of `replicas`, and `workers`:
            `"threads"`, `"processes"`, `"ranks"` as under torchrun, or `"ddp"` for
            `DistributedDataParallel`.
        bits: its gradients of the first batch, compared with those of one device.
    """

    contestant: Contestant
    bits: Bits

    @property
    def workers(self) -> str:
        """What runs the replicas: a kind of workers, `"ranks"` or `"ddp"`."""
        workers: str = self.contestant.facts["workers"]
        return workers

    @property
    def replicas(self) -> int:
        """The number of replicas."""
        replicas: int = self.contestant.facts["replicas"]
        return replicas


@dataclass(frozen=True)
class Training:
    """What was measured of one model.

    Attributes:
        model: what it is called.
        num_microbatches: of a batch, for all.
        measured: the contestants, which took turns; `DistributedDataParallel` is the last.
        scouted: the seconds of all configurations of the latter, each alone.
    """

    model: str
    num_microbatches: int
    measured: tuple[Measured, ...]
    scouted: Scouted

    def to_one(self, one: Measured) -> Ratio | None:
        """Its step time over that of one replica on the same kind of workers, if there is one."""
        found = (m for m in self.measured if m.workers == one.workers and m.replicas == 1)
        return next((_ratio(one, alone) for alone in found), None)

    def to_ddp(self, one: Measured) -> Ratio | None:
        """Its step time over that of `DistributedDataParallel`, for as many replicas as ranks."""
        ddp = self.measured[-1]
        return _ratio(one, ddp) if one.replicas == ddp.replicas else None

    def to_dict(self) -> dict[str, Any]:
        """The same as plain data."""
        rows = []
        for one in self.measured:
            ratios = {"to_one_replica": self.to_one(one), "to_ddp": self.to_ddp(one)}
            rows.append(
                {
                    **one.contestant.to_dict(),
                    **{name: vars(ratio) if ratio else None for name, ratio in ratios.items()},
                    "bits": one.bits.to_dict(),
                }
            )
        return {
            "model": self.model,
            "num_microbatches": self.num_microbatches,
            "rows": rows,
            "scouted": self.scouted,
        }

    def lines(self, width: int | None = None) -> list[str]:
        """The same as a table."""
        title = f"{self.model}, m={self.num_microbatches}"
        cells: list[Row] = [
            (title, "median", "of one replica's", "of DDP's", "gradients of the first batch")
        ]
        for one in self.measured:
            ratios = (self.to_one(one), self.to_ddp(one) if one is not self.measured[-1] else None)
            cells.append(
                (
                    one.contestant.name,
                    show_seconds(one.contestant.median),
                    *(str(ratio) if ratio else "" for ratio in ratios),
                    str(one.bits),
                )
            )
        return aligned(cells, left=(0, 4), width=width)


def _ratio(one: Measured, other: Measured) -> Ratio:
    return Ratio.of(one.contestant.seconds, other.contestant.seconds)


class Replicated:
    """Penstock with so many replicas, which have a core and an intra-op thread each.

    Args:
        workload: what it trains.
        replicas: how many.
        workers: threads or processes; ranks are a `Peer`.

    Attributes:
        name: what it is called.
        facts: what the report says of it.
        gradients: those of the batch at the initial weights, in the order of the parameters.
    """

    def __init__(self, workload: Workload, replicas: int, workers: WorkerKind) -> None:
        self.name = f"{replicas} replica{'s' * (replicas > 1)}, {workers}"
        self.facts: dict[str, Any] = {"replicas": replicas, "workers": workers}
        self._inputs, self._target = workload.data()
        self._loss_fn = workload.loss
        with only_cores(replicas):
            self._pipe = Pipeline(
                workload.build().train(),
                (self._inputs,),
                devices=["cpu"] * replicas,
                replicas=replicas,
                num_microbatches=workload.num_microbatches,
                workers=workers,
                progress=None,
            )
        self.facts |= {
            "num_microbatches": self._pipe.plan.num_microbatches,
            "schedule": self._pipe.plan.schedule,
            "threads": self._pipe.threads_per_worker,
        }
        self._optimizer = self._pipe.optimizer(torch.optim.SGD, lr=workload.learning_rate)
        self._backward()
        self.gradients = gradients_of(self._pipe.model)

    @property
    def weights(self) -> list[Tensor]:
        """The parameters as they are now."""
        return [parameter.detach() for parameter in self._pipe.model.parameters()]

    def _backward(self) -> None:
        self._optimizer.zero_grad()
        self._pipe.train_step(self._inputs, target=self._target, loss_fn=self._loss_fn)

    def step(self) -> float:
        """Run one training step, and return its seconds."""
        start = time.perf_counter()
        self._backward()
        self._optimizer.step()
        return time.perf_counter() - start

    def close(self) -> None:
        """Close the pipeline, which ends its workers."""
        self._pipe.close()


def gradients_of(model: nn.Module) -> list[Tensor]:
    """Copies of the gradients of all parameters; zeros where there is none."""
    return [
        torch.zeros_like(p) if p.grad is None else p.grad.detach().clone()
        for p in model.parameters()
    ]


def on_one_device(workload: Workload) -> list[Tensor]:
    """The gradients of the batch, its micro-batches run in order by a loop of plain PyTorch."""
    model = workload.build().train()
    inputs, target = workload.data()
    oracle = Oracle(model, (inputs,), {}, workload.num_microbatches)
    run_with_threads(partial(oracle.train_step, 0, workload.loss, target), 1)
    return gradients_of(model)


def train(
    model: str,
    workload: Workload,
    *,
    counts: Sequence[int],
    kinds: Sequence[WorkerKind],
    buckets: Sequence[Buckets],
    rounds: int,
    steps: int,
    progress: Progress,
) -> Training:
    """Let replicas and the best of `DistributedDataParallel` take turns.

    Args:
        model: what it is called.
        workload: what they train; every number of replicas divides its micro-batches.
        counts: of replicas, in ascending order; the last is also the number of ranks.
        kinds: of workers that replicas run on.
        buckets: of `DistributedDataParallel`, those that are tried.
        rounds: that are measured, after `AUDITED` that are not.
        steps: to try each of the buckets.
        progress: called as it goes on.

    Raises:
        PenstockError: Penstock's gradients are not those of one device, or its weights in the end
            depend on the number of replicas or on their kind; or no configuration of
            `DistributedDataParallel` runs.
    """
    expected = on_one_device(workload)
    makes = {
        f"m={workload.num_microbatches}, {each}": partial(
            data_parallel, workload, processes=counts[-1], buckets=each
        )
        for each in buckets
    }
    scouted = _scouted(model, makes, steps, progress)
    with ExitStack() as stack:
        ours: list[Replicated] = []
        for kind in kinds:
            for count in counts:
                progress(0, 1, f"{model}: starting {count} replicas, {kind}")
                ours.append(Replicated(workload, count, kind))
                stack.callback(ours[-1].close)
        measured = [
            Measured(Contestant(one.name, one.step, one.facts), Bits.of(one.gradients, expected))
            for one in ours
        ]
        ranks = replicas_on_ranks(workload, processes=counts[-1]).start()
        stack.callback(ranks.close)
        measured.append(_of_peer(ranks, f"{counts[-1]} replicas, ranks", "ranks", expected))
        for one in measured:
            one.bits.check(f"{model}, {one.contestant.name}")
        best, peer = _best(makes, scouted)
        stack.callback(peer.close)
        measured.append(_of_peer(peer, f"{_DDP}, {best}", "ddp", expected))
        contestants = [one.contestant for one in measured]
        tick = Ticker((rounds + AUDITED) * len(contestants), progress, f"{model}: ")
        taken = take_turns(contestants, rounds, tick, warm_up=AUDITED)
        for contestant, seconds in zip(contestants, taken, strict=True):
            contestant.seconds = seconds
        found = [[torch.from_numpy(each) for each in own] for own in ranks.call("weights")]
        of_ranks = {f"rank {rank}": own for rank, own in enumerate(found)}
        check_same_weights(model, {**{one.name: one.weights for one in ours}, **of_ranks})
    return Training(model, workload.num_microbatches, tuple(measured), scouted)


def _of_peer(peer: Peer, name: str, workers: str, expected: Sequence[Tensor]) -> Measured:
    """A peer as a contestant; each of its processes has a replica."""
    every = peer.call("gradients")
    facts = {"replicas": len(every), "workers": workers}
    found = [torch.from_numpy(each) for each in every[0]]
    return Measured(Contestant(name, peer.step, facts), Bits.of(found, expected))


def _scouted(model: str, makes: Mapping[str, Make], steps: int, progress: Progress) -> Scouted:
    """The seconds of every configuration, each alone."""
    tick = Ticker(tries(makes), progress, f"{model}: trying {_DDP}, ")
    return scout(makes, steps, tick)


def _best(makes: Mapping[str, Make], scouted: Scouted) -> tuple[str, Peer]:
    """The fastest configuration, started.

    Raises:
        PenstockError: none runs.
    """
    best = fastest(scouted)
    if best is None:
        raise PenstockError(f"{_DDP} ran in no configuration: {next(iter(scouted.values()))}")
    return best, makes[best]().start()


def check_same_weights(model: str, weights: dict[str, list[Tensor]]) -> None:
    """Raise unless all have the same bits after as many steps.

    Args:
        model: what it is called.
        weights: the parameters of every contestant, by its name.

    Raises:
        PenstockError: some parameters differ.
    """
    (first, expected), *others = weights.items()
    for name, found in others:
        if not all(map(torch.equal, found, expected)):
            raise PenstockError(
                f"{model}: after as many steps the weights of {name} do not have the bits of those "
                f"of {first}"
            )
