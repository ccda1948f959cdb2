"""Steps of frameworks with Penstock and without: Trainer, Lightning, Accelerate.

    python -m penstock.bench frameworks [--only transformers,lightning,accelerate] [--rounds 3]
        [--json FILE] [--record]

The same script trains a small GPT-2 of transformers with the framework alone, with one intra-op
thread and with one per core, and with Penstock, which chooses the devices, in threads and in
processes. Each turn is a process of its own, and gives the median of its last twelve steps; the
steps before, which Penstock audits, do not count. The loss is that of the same rows after all
steps.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from typing import Any

from penstock.bench import record
from penstock.bench.framework_training import FRAMEWORKS
from penstock.bench.turns import Ratio, Ticker, middle
from penstock.display.progress import callback

ALONE, ALL_CORES = "one core", "all cores"
KINDS = ("threads", "processes")


def measure(framework: str, rounds: int) -> list[dict[str, Any]]:
    """Time the steps of a framework alone and with Penstock.

    Args:
        framework: one of `FRAMEWORKS`.
        rounds: the number of rounds, two at least.

    Returns:
        a row for each way, compared with the first: the framework alone with one thread.
    """
    cores = len(os.sched_getaffinity(0))
    ways = {ALONE: ("", 1), ALL_CORES: ("", cores), **{kind: (kind, cores) for kind in KINDS}}
    turns: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    with callback(framework) as progress:
        tick = Ticker(rounds * len(ways), progress)
        for _ in range(rounds):
            for way, (kind, threads) in ways.items():
                tick(way)
                turns[way].append(
                    record.in_own_process(
                        "penstock.bench.framework_training",
                        framework,
                        *filter(None, [kind]),
                        OMP_NUM_THREADS=str(threads),
                    )
                )
    every = {way: [statistics.median(t["seconds"]) for t in own] for way, own in turns.items()}
    rows = []
    for way, seconds in every.items():
        ratio = Ratio.of(seconds, every[ALONE])
        median, spread = middle(seconds)
        rows.append(
            {
                "name": way,
                "seconds": seconds,
                "median": median,
                "spread": spread,
                "to_one_core": ratio.median,
                "to_one_core_spread": ratio.spread,
                "loss": turns[way][-1]["loss"],
                "plan": turns[way][-1]["plan"],
            }
        )
    return rows


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    parser = record.parser("frameworks", __doc__)
    parser.add_argument("--only", default=",".join(FRAMEWORKS))
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    chosen = options.only.split(",")
    if unknown := [name for name in chosen if name not in FRAMEWORKS]:
        parser.error(f"--only: there is no {unknown[0]!r}; there are {', '.join(FRAMEWORKS)}")
    if options.rounds < 2:
        parser.error("--rounds: two at least, for a spread")
    measured: dict[str, dict[str, Any]] = {}
    for name in chosen:
        rows = measure(name, options.rounds)
        measured[name] = {"rows": rows, "settings": {"rounds": options.rounds}}
        print(name)
        for row in rows:
            print(
                f"  {row['name']:10}  {1e3 * row['median']:.0f} ms ± {1e3 * row['spread']:.0f}, "
                f"{row['to_one_core']:.2f} of one core, loss {row['loss']:.5f}  {row['plan']}",
                flush=True,
            )
        record.save_models("frameworks", measured, options)
    return 0
