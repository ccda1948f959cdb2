"""How long the exact partition takes, by the size of the problem and its constraints.

    python -m penstock.bench partition [--rounds 3] [--large] [--json FILE]

Prints seconds. `--large` adds 10,000 calls on 256 devices.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.bench import record
from penstock.bench.turns import Contestant, take_turns, timed
from penstock.plan.partition import CapacityError, Partition, partition
from penstock.plan.problem import Variant

Case = Callable[[], Partition]
SIZES = ((1000, 64),)
LARGE = (10_000, 256)
KINDS = (16, 16, 7)


def cases(calls: int, devices: int) -> dict[str, Case]:
    """Partitions over unequal devices in a given order, with ever more constraints, by name."""
    rng = np.random.default_rng(0)
    work = rng.lognormal(0.0, 1.0, calls)
    seconds = work * rng.uniform(0.5, 1.0, (devices, 1))
    boundary = rng.lognormal(17.0, 1.0, calls + 1)
    terms: dict[str, Any] = {
        "num_microbatches": 4 * devices,
        "latency": boundary / 1e11,
        "tie": boundary,
        "allowed": rng.random(calls + 1) < 0.7,
    }
    in_flight = np.arange(devices, 0, -1)[:, None]
    kept = 1e6 * work + in_flight * 1e5 * rng.lognormal(0.0, 1.0, calls)
    entry = in_flight * boundary / 1e3
    keep = Variant(seconds, kept, entry)
    again = Variant(seconds * 4 / 3, 0.2 * kept, entry)
    partly = Variant(seconds * 7 / 6, 0.6 * kept, entry)

    def scarce(variant: Variant) -> NDArray[np.float64]:
        """Memory caps: a tenth more than the variant needs on devices of equal memory."""
        try:
            partition([variant], caps=np.zeros(devices), **terms)
        except CapacityError as error:
            return np.full(devices, 1.1 * error.shortfall.bytes)
        return np.zeros(devices)

    few, fewer = scarce(keep), scarce(again)
    return {
        "bottleneck": lambda: partition(seconds, **terms | {"fill": 0.0}),
        "step": lambda: partition(seconds, **terms),
        "step, caps": lambda: partition([keep], caps=few, **terms),
        "step, caps, 3 variants": lambda: partition([keep, partly, again], caps=fewer, **terms),
    }


def any_order(calls: int) -> Case:
    """A partition over devices of three kinds in the best of all orders, with memory caps."""
    rng = np.random.default_rng(0)
    seconds = rng.lognormal(0.0, 1.0, calls) * np.array([[1.0], [1.5], [2.5]])
    costs = [Variant(seconds, np.ones((3, calls)))]
    caps = [calls / 10, calls / 20, calls / 20]
    return lambda: partition(costs, counts=KINDS, num_microbatches=64, caps=caps)


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    parser = record.parser("partition", __doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--large", action="store_true")
    options = parser.parse_args(arguments)
    named = {
        f"{calls} calls, {devices} devices, {name}": case
        for calls, devices in (*SIZES, *([LARGE] if options.large else []))
        for name, case in cases(calls, devices).items()
    }
    named[f"300 calls, {'+'.join(map(str, KINDS))} devices in any order, caps"] = any_order(300)
    contestants = [Contestant(name, timed(case)) for name, case in named.items()]
    seconds = dict(zip(named, take_turns(contestants, options.rounds), strict=True))
    for name, times in seconds.items():
        print(f"{name}: {statistics.median(times):.2f} s ({min(times):.2f} to {max(times):.2f})")
    record.save("partition", {"seconds": seconds}, options)
    return 0
