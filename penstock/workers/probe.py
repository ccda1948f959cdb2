"""What it costs to send values from worker to worker, to run an action at all, and to add in order.

All are measured with the workers, links and stages that train.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from typing import Any, Protocol

import msgspec
import torch
from torch import nn

from penstock.capture.randomness import Key
from penstock.engine.compile import compile_actions
from penstock.engine.ends import Endings, Feed, Outlet
from penstock.engine.replicas import SummedStage
from penstock.engine.span import MicroBatch, Span
from penstock.engine.stage import Stage
from penstock.engine.sums import Adding, OrderedSum
from penstock.engine.turns import LocalTurns
from penstock.links.link import Sink, Source
from penstock.profile.data import Link, Profile
from penstock.profile.timing import now
from penstock.schedule import Action, Kind

_ROUNDS = 100  # there and back with a small tensor
_LARGE_ROUNDS = 5
_WARM_UPS = 3
_LARGE = 16 << 20  # bytes
_ACTIONS = 25  # forwards, and as many backwards
_REPEATS = 7
_PARAMETERS, _ADDED = 64, 5  # and micro-batches, whose gradients are added in order
_KINDS = (Kind.FORWARD, Kind.BACKWARD)


class LinkProbe(Protocol):
    """Measures links with workers of one kind, before they have a plan.

    Attributes:
        kind: the kind of these workers, as in `Member`.
    """

    @property
    def kind(self) -> str:
        """The kind of these workers, as in `Member`."""

    def overlaps(self, one: torch.device, other: torch.device) -> bool:
        """Whether the worker that sends computes on while values travel."""

    def copies(self, one: torch.device, other: torch.device) -> bool:
        """Whether values are copied on the way, and not only handed over."""

    def one_way(
        self, one: torch.device, other: torch.device, size: int, rounds: int
    ) -> Sequence[float]:
        """For each round, the seconds for `size` bytes from one worker to another and back."""

    def overhead(self, one: torch.device, other: torch.device) -> float:
        """The larger result of `overhead_here` on two linked workers."""

    def adding(self, one: torch.device, other: torch.device) -> float:
        """The larger result of `adding_here` on two workers that measure at the same time."""


def with_links(profile: Profile, devices: Sequence[torch.device], where: LinkProbe) -> Profile:
    """The profile, with the links between these devices and the overheads of their workers.

    Args:
        profile: of calls.
        devices: of the workers, in the order of the stages; they exist.
        where: measures with workers of the kind that will run the plan.

    Raises:
        WorkerTimeout: a worker does not answer.
    """
    neighbours = dict.fromkeys(pairwise(devices))
    return msgspec.structs.replace(
        profile,
        links=measure_links(devices, where),
        overhead_seconds=max((where.overhead(*pair) for pair in neighbours), default=0.0),
        adding_seconds=max((where.adding(*pair) for pair in neighbours), default=0.0),
        overlap=all(where.overlaps(*pair) for pair in neighbours),
    )


def measure_links(devices: Sequence[torch.device], where: LinkProbe) -> dict[str, Link]:
    """The links between neighbours, both ways, by their devices: `"cpu>cuda:0"`.

    A tensor goes to another worker and back, through a link as it joins two stages; one way is
    half of that. Where values are handed over by reference, only the latency counts, whatever their
    size: most of it is the time that a thread needs to wake up.

    Raises:
        WorkerTimeout: a worker does not answer.
    """
    found: dict[str, Link] = {}
    for one, other in pairwise(devices):
        if f"{one}>{other}" not in found:
            found[f"{one}>{other}"] = found[f"{other}>{one}"] = _measured(one, other, where)
    return found


def _measured(one: torch.device, other: torch.device, where: LinkProbe) -> Link:
    latency = statistics.median(where.one_way(one, other, 1, _ROUNDS)) / 2
    if not where.copies(one, other):
        return Link(latency_seconds=latency)
    longer = statistics.median(where.one_way(one, other, _LARGE, _LARGE_ROUNDS)) / 2
    return Link(latency_seconds=latency, bytes_per_second=_LARGE / max(longer - latency, 1e-9))


def ping(sink: Sink, device: torch.device, size: int, rounds: int) -> list[float]:
    """Send so many bytes, and wait for what comes back; the seconds of every round."""
    payload = torch.zeros(size, dtype=torch.uint8, device=device)
    taken = []
    for _ in range(_WARM_UPS + rounds):
        start = now(device)
        sink.send(0, (payload,))
        sink.receive_gradients(0)
        taken.append(now(device) - start)
    return taken[_WARM_UPS:]


def pong(source: Source, device: torch.device, rounds: int) -> None:
    """Receive what `ping` sends, and send it back as gradients."""
    for _ in range(_WARM_UPS + rounds):
        values = source.receive(0)
        now(device)  # they may still be under way
        source.send_gradients(0, values)


def overhead_here(index: int, link: Any, device: torch.device) -> float:
    """Seconds of an action beyond the calls in it, on a worker.

    The worker runs one of two stages that do nothing, while another worker runs the other one. So
    the cost of handing values over counts as it does in training, and so does what keeps the two
    from running at the same time, such as an interpreter's lock. A GPipe schedule waits so seldom
    that latencies do not count.

    Args:
        index: the number of the stage, 0 or 1.
        link: this worker's end of the link between the two stages.
        device: of this worker.
    """
    feed, outlet = Feed(device), Outlet(Endings())
    source, sink = (feed, link) if index == 0 else (link, outlet)
    stage = Stage(index, [[Span(lambda sizes, key, value: (value,))]], source, sink)
    stage.microbatches = [MicroBatch({}, Key(0, 0, k)) for k in range(_ACTIONS)]
    value = torch.ones(1, device=device, requires_grad=True)
    actions = [Action(kind, index, k) for kind in _KINDS for k in range(_ACTIONS)]
    runs = compile_actions(actions, {index: stage}, train=True)
    taken = []
    for _ in range(_WARM_UPS + _REPEATS):
        feed.values = [(value,)] * _ACTIONS
        outlet.gradients = {k: [torch.ones(1, device=device)] for k in range(_ACTIONS)}
        start = time.perf_counter()
        for run in runs:
            run()
        taken.append((time.perf_counter() - start) / len(actions))
    return statistics.median(taken[_WARM_UPS:])


def adding_here(
    device: torch.device,
    adding: Callable[[Sequence[nn.Parameter]], Adding] = lambda _: nullcontext,
) -> float:
    """Additional seconds per parameter and backward if replicas add up gradients in order.

    The gradients of a micro-batch whose turn has not come are computed apart and added later. The
    time of the same backward when it adds to `.grad` itself is subtracted.

    Args:
        device: of this worker.
        adding: for some parameters, what lets their `.grad` be the sum so far, see `OrderedSum`.
    """
    turns = LocalTurns()
    feed, outlet = Feed(device), Outlet(Endings())
    numbers = range(1, 1 + _ADDED)  # the turn of 0 is over when these have run

    def parameters() -> list[nn.Parameter]:
        return [nn.Parameter(torch.zeros(1, device=device)) for _ in range(_PARAMETERS)]

    def ways(own: Sequence[nn.Parameter]) -> list[list[Span]]:
        return [[Span(lambda sizes, key, value: (sum(own, start=value),))]]

    def seconds(stage: Stage) -> float:
        stage.microbatches = [MicroBatch({}, Key(0, 0, k)) for k in range(numbers.stop)]
        feed.values = [(torch.ones(1, device=device, requires_grad=True),)] * numbers.stop
        outlet.gradients = {k: [torch.ones(1, device=device)] for k in numbers}
        forwards, backwards = (
            compile_actions([Action(kind, 0, k) for k in numbers], {0: stage}, train=True)
            for kind in _KINDS
        )
        for run in forwards:
            run()
        start = now(device)
        for run in backwards:
            run()
        turns.done(0)
        total.add_pending()
        return (now(device) - start) / (len(numbers) * _PARAMETERS)

    added = parameters()
    total = OrderedSum(turns, adding(added))
    whole, apart = Stage(0, ways(parameters()), feed, outlet), SummedStage(0, feed, outlet, total)
    apart.ways = ways(added)
    more = []
    for _ in range(_WARM_UPS + _REPEATS):
        turns.reset()
        more.append(seconds(apart) - seconds(whole))
    return max(statistics.median(more[_WARM_UPS:]), 0.0)
