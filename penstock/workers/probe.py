"""What it costs to send values from worker to worker, and to run an action at all.

Both are measured with the workers, links and stages that train.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import msgspec
import torch

from penstock.capture.randomness import Key
from penstock.engine.compile import compile_actions
from penstock.engine.ends import Feed, Outlet
from penstock.engine.span import Span
from penstock.engine.stage import MicroBatch, Stage
from penstock.links.local import LocalLink
from penstock.profile.data import Link, Profile
from penstock.profile.timing import now
from penstock.schedule import Action, Kind
from penstock.workers.threads import ThreadWorkers

_ROUNDS = 100  # there and back with a small tensor
_LARGE_ROUNDS = 5
_WARM_UPS = 3
_LARGE = 16 << 20  # bytes
_ACTIONS = 50  # forwards, and as many backwards
_TIMEOUT = 10.0


def with_links(profile: Profile, devices: Sequence[torch.device]) -> Profile:
    """The profile, with the links between these devices and the overhead of their workers.

    Args:
        profile: of calls.
        devices: of the workers, in the order of the stages; they exist.

    Raises:
        WorkerTimeout: a worker does not answer.
    """
    return msgspec.structs.replace(
        profile, links=measure_links(devices), overhead_seconds=measure_overhead(devices)
    )


def measure_links(devices: Sequence[torch.device]) -> dict[str, Link]:
    """The link between every two kinds of neighbours, by `"cpu>cuda:0"`: sender and receiver.

    A tensor goes to another worker and back, through a link as it joins two stages; one way is
    half of that. On one device values are handed over by reference: however large they are, only
    the latency counts, most of which the thread needs to wake up.

    Raises:
        WorkerTimeout: a worker does not answer.
    """
    found: dict[str, Link] = {}
    for one, other in pairwise(devices):
        if f"{one}>{other}" not in found:
            found[f"{one}>{other}"] = found[f"{other}>{one}"] = _measured_link(one, other)
    return found


def _measured_link(one: torch.device, other: torch.device) -> Link:
    latency = _one_way(one, other, 1, _ROUNDS)
    if one == other:
        return Link(latency_seconds=latency)
    longer = _one_way(one, other, _LARGE, _LARGE_ROUNDS)
    return Link(latency_seconds=latency, bytes_per_second=_LARGE / max(longer - latency, 1e-9))


def _one_way(one: torch.device, other: torch.device, size: int, rounds: int) -> float:
    """Seconds in which so many bytes reach the other worker; the median of the rounds."""
    link = LocalLink(one, other)
    taken: list[float] = []

    def ping() -> None:
        payload = torch.zeros(size, dtype=torch.uint8, device=one)
        for _ in range(_WARM_UPS + rounds):
            start = now(one)
            link.send(0, (payload,))
            link.receive_gradients(0)
            taken.append(now(one) - start)

    def pong() -> None:
        for _ in range(_WARM_UPS + rounds):
            values = link.receive(0)
            now(other)  # they may still be under way
            link.send_gradients(0, values)

    _run((one, other), (ping, pong), link.abort, link.reset)
    return statistics.median(taken[_WARM_UPS:]) / 2


def measure_overhead(devices: Sequence[torch.device]) -> float:
    """Seconds that a worker needs for an action beside the calls in it, on the slowest device.

    Raises:
        WorkerTimeout: a worker does not answer.
    """
    return max(_overhead(device) for device in dict.fromkeys(devices))


def _overhead(device: torch.device) -> float:
    """The mean of a forward and a backward of a stage that does nothing, the median of each."""
    feed, outlet = Feed(device), Outlet(lambda microbatch, results: results)
    stage = Stage(0, [[Span(lambda sizes, key, value: (value,))]], feed, outlet)
    stage.microbatches = [MicroBatch({}, Key(0, 0, k)) for k in range(_ACTIONS)]
    value = torch.ones(1, device=device, requires_grad=True)
    feed.values = [(value,)] * _ACTIONS
    outlet.gradients = {k: [torch.ones(1, device=device)] for k in range(_ACTIONS)}
    kinds = (Kind.FORWARD, Kind.BACKWARD)
    actions = [Action(kind, 0, k) for k in range(_ACTIONS) for kind in kinds]
    taken: list[float] = []

    def work() -> None:
        runs = compile_actions(actions, {0: stage}, train=True)
        for wait, run in zip(runs[::2], runs[1::2], strict=True):
            start = time.perf_counter()
            wait()
            run()
            taken.append(time.perf_counter() - start)

    _run((device,), (work,), lambda: None, lambda: None)
    return (statistics.median(taken[::2]) + statistics.median(taken[1::2])) / 2


def _run(
    devices: Sequence[torch.device],
    jobs: Sequence[Callable[[], None]],
    abort: Callable[[], None],
    reset: Callable[[], None],
) -> None:
    """Run one job on a worker of each device."""
    workers = ThreadWorkers(devices, threads=1, abort=abort, reset=reset)
    try:
        workers.run(jobs, _TIMEOUT)
    finally:
        workers.close()
        workers.join(_TIMEOUT)
