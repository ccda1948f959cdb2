"""What plans are compared with, whether it is possible and requested or not."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.plan.cutting import Cutter
from penstock.plan.decisions import Candidate, Way
from penstock.plan.layout import Layout, Memory, Stretch
from penstock.plan.partition import CapacityError
from penstock.plan.shares import BUCKET
from penstock.profile.data import ADDED_PER_SECOND, Link, Profile
from penstock.schedule import build, check
from penstock.simulate import Simulator

_SCHEDULE = "1f1b"  # of the pipelines that there are replicas of


def alternatives(profile: Profile, memory: Memory, replicas: bool = True) -> list[Candidate]:
    """One device, data parallelism, and replicas of a shorter pipeline where devices suffice.

    The first two come first, whether they fit the memory or not. Gradients are taken to be summed
    around a ring after the backward, as `DistributedDataParallel` does. These are only compared
    with: where the planner may choose among all kinds, the plans that Penstock runs take their
    place.

    Args:
        profile: what was measured.
        memory: what training holds.
        replicas: whether replicas of a shorter pipeline are wanted.
    """
    devices = len(profile.devices)
    found = [one_device(profile, memory), data_parallel(profile, memory)]
    for number in range(2, devices // 2 + 1) if replicas else ():
        is_possible = profile.batch_size >= number and devices // number <= profile.num_calls
        if devices % number == 0 and is_possible:
            found.append(_replicated_pipelines(profile, memory, number))
    return found


def one_device(profile: Profile, memory: Memory) -> Candidate:
    """The fastest device alone, at the best of the measured micro-batch sizes."""
    kinds = dict.fromkeys(profile.devices)
    every = [_replicated(profile, memory, "one device", [device]) for device in kinds]
    return min(every, key=lambda candidate: candidate.seconds)


def data_parallel(profile: Profile, memory: Memory) -> Candidate:
    """A replica of the model on every device, each with its share of the batch's rows."""
    if profile.batch_size < len(profile.devices):
        why = f"{len(profile.devices)} replicas cannot share {profile.batch_size} rows"
        return _impossible(profile, "data parallel", len(profile.devices), why)
    return _replicated(profile, memory, "data parallel", profile.devices)


def _replicated(profile: Profile, memory: Memory, way: Way, devices: Sequence[str]) -> Candidate:
    share = -(-profile.batch_size // len(devices))
    slowest: tuple[float, int, float] = (0.0, 1, 0.0)
    for name in dict.fromkeys(devices):
        own = msgspec.structs.replace(profile, devices=(name,))
        if len(devices) == 1:
            own = profile.alone(name)
        options = []
        for count in _counts(own, share):
            layout = Layout(msgspec.structs.replace(own, batch_size=share), count)
            whole = [Stretch(0, 0, own.num_calls)]
            held = layout.peaks(whole, [1], memory)[0]
            if held <= memory.caps(own)[0]:
                actions = 2 * count * profile.overhead_seconds + profile.pass_seconds
                seconds = count * float(layout.seconds.sum()) + actions
                options.append((seconds, count, held))
        if not options:
            why = "a whole model does not fit the memory"
            return _impossible(profile, way, len(devices), why)
        slowest = max(slowest, min(options))
    seconds, count, held = slowest
    return Candidate(
        way=way,
        schedule="",
        num_microbatches=min(count * len(devices), profile.batch_size),
        replicas=len(devices),
        predicted_step_seconds=seconds + _reduced(profile, sum(profile.weights), devices),
        threads=profile.threads,
        memory_bytes=round(held),
        only_compared=True,
    )


def _impossible(profile: Profile, way: Way, replicas: int, why: str) -> Candidate:
    return Candidate(
        way=way,
        schedule="",
        num_microbatches=1,
        replicas=replicas,
        predicted_step_seconds=None,
        threads=profile.threads,
        only_compared=True,
        why=why,
    )


def _replicated_pipelines(profile: Profile, memory: Memory, replicas: int) -> Candidate:
    """So many replicas of a pipeline over the first devices of the list."""
    stages = len(profile.devices) // replicas
    share = -(-profile.batch_size // replicas)
    own = msgspec.structs.replace(profile, devices=profile.devices[:stages], batch_size=share)
    best: tuple[float, int, float] | None = None
    for count in _counts(own, share):
        layout, schedule = Layout(own, count), build(_SCHEDULE, stages, count)
        flying = check(schedule).in_flight
        try:
            stretches = Cutter(layout, range(stages), flying, memory, "auto").best(1.0)
        except CapacityError:
            continue
        weights = max(layout.weights[s.start : s.stop].sum() for s in stretches)
        homes = profile.devices[::stages]
        seconds = layout.simulated(Simulator(schedule), stretches) + profile.pass_seconds
        seconds += _reduced(profile, float(weights), homes)
        found = (seconds, count, max(layout.peaks(stretches, flying, memory)))
        best = min(best, found) if best else found
    return Candidate(
        way="data parallel",
        schedule=_SCHEDULE,
        num_microbatches=min(best[1] * replicas, profile.batch_size) if best else 1,
        replicas=replicas,
        stages=stages,
        predicted_step_seconds=best[0] if best else None,
        threads=profile.threads,
        memory_bytes=round(best[2]) if best else 0,
        only_compared=True,
        why="" if best else "does not fit the memory",
    )


def _counts(profile: Profile, rows: int) -> list[int]:
    """Into how many micro-batches of measured sizes so many rows can be split."""
    sizes = {size for name in profile.devices for size in profile.on(name).rows if size <= rows}
    return sorted({-(-rows // size) for size in sizes or {rows}})


def _reduced(profile: Profile, size: float, homes: Sequence[str]) -> float:
    """Seconds in which so many bytes of gradients are summed over these devices."""
    if len(homes) < 2:
        return 0.0
    ring = zip(homes, (*homes[1:], homes[0]), strict=True)
    links = [profile.link(one, other) for one, other in ring]
    slowest = Link(
        latency_seconds=max(link.latency_seconds for link in links),
        bytes_per_second=min(link.bytes_per_second or ADDED_PER_SECOND for link in links),
    )
    return ring_seconds(size, len(homes), slowest)


def ring_seconds(size: float, replicas: int, link: Link) -> float:
    """Seconds in which a ring of replicas sums so many bytes (Patarasuk and Yuan 2009).

    Where the link hands values over for free, the adding itself takes `ADDED_PER_SECOND`.
    """
    speed = link.bytes_per_second or ADDED_PER_SECOND
    return 2 * (replicas - 1) * (size / replicas / speed + link.latency_seconds)


def chain_seconds(size: float, replicas: int, share: int, link: Link, adding: float) -> float:
    """Seconds of an ordered sum along a chain of replicas, in buckets, and back around the ring.

    Every link carries the sums and the totals. A replica adds the gradients of its micro-batches
    to each bucket that comes.

    Args:
        size: bytes of gradients.
        replicas: how many there are.
        share: how many micro-batches each runs.
        link: the slowest.
        adding: bytes that a replica adds in a second.
    """
    if replicas == 1:
        return 0.0
    speed = link.bytes_per_second or adding
    bucket = min(size, BUCKET)
    hops = 2 * replicas - 3  # of the last bucket, after all others have left the first replica
    last = hops * (bucket / speed + link.latency_seconds)
    return 2 * size / speed + share * size / adding + last


def gathering_seconds(
    size: float, replicas: int, share: int, link: Link, adding: float, seconds: float
) -> float:
    """Seconds by which a step is longer because gradients are added on the first replica's device.

    Before a pass every other replica gets the weights from there. It sends back the gradients of
    each of its micro-batches, in buckets. The last buckets arrive after the backwards, all at the
    same time. Others travel during the passes, as far as there is time.

    Args:
        size: bytes of weights, and of gradients of a micro-batch.
        replicas: how many there are.
        share: how many micro-batches each runs.
        link: to the first replica's device, the slowest.
        adding: bytes that are added there in a second.
        seconds: that the passes take.
    """
    others = (replicas - 1) * size
    copying = others / link.bytes_per_second if link.bytes_per_second else 0.0
    last = copying * min(size, BUCKET) / size if size else 0.0
    late = max(last, share * copying - seconds)
    return copying + late + 2 * link.latency_seconds + others / adding


def adding_seconds(sizes: Sequence[float], replicas: int, adding: float) -> float:
    """Seconds in which replicas in one memory add up the last gradients.

    Args:
        sizes: bytes of gradients of every worker of a replica.
        replicas: how many there are.
        adding: bytes that a worker adds in a second.
    """
    return (replicas - 1) * sum(sizes) / len(sizes) / adding
