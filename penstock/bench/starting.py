"""How long a script takes until its first step is done, beside the same one in plain PyTorch.

    python -m penstock.bench starting [--models tiny,resnet,gpt] [--rounds 3] [--json FILE]
        [--record]

Every start is a process of its own, and they take turns. Penstock chooses the devices. A script
that uses it is started twice: with an empty folder for profiles, so that the model is measured, and
again with what was measured then. Importing torch, building the model, the pipeline (capturing,
measuring, planning, starting workers) and the first step are timed one by one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

from penstock.bench import record
from penstock.bench.subjects import subjects
from penstock.bench.turns import Ticker
from penstock.display.progress import callback

KINDS = ("threads", "processes")
PLAIN = "plain PyTorch"
UNTIL = "second step"  # the first of the parts that does not belong to a start


def started(name: str, workers: str, profiles: str) -> dict[str, float]:
    """The seconds of the parts of a script.

    Args:
        name: of the model.
        workers: their kind; empty for plain PyTorch.
        profiles: the folder where profiles are kept.

    Raises:
        RuntimeError: the script failed.
    """
    found: dict[str, float] = record.in_own_process(
        "penstock.bench.first_step", name, workers, PENSTOCK_CACHE=profiles
    )
    return found


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Measure how long a script takes to start in every way.

    Args:
        name: of the model.
        rounds: of turns.

    Returns:
        `ways`, with the seconds of every part for each way and round; and the `settings`.
    """
    ways: dict[str, list[dict[str, float]]] = {PLAIN: []}
    ways |= {f"{kind}, {when}": [] for kind in KINDS for when in ("first", "again")}
    with callback(f"starting {name}") as progress:
        tick = Ticker(rounds * len(ways), progress)
        for _ in range(rounds):
            with TemporaryDirectory() as none:
                tick(PLAIN)
                ways[PLAIN].append(started(name, "", none))
            for kind in KINDS:
                with TemporaryDirectory() as profiles:
                    for when in ("first", "again"):
                        tick(f"{kind}, {when}")
                        ways[f"{kind}, {when}"].append(started(name, kind, profiles))
    return {"ways": ways, "settings": {"rounds": rounds}}


def until_first_step(parts: dict[str, float]) -> float:
    """The seconds until the first step is done."""
    return sum(seconds for name, seconds in parts.items() if name != UNTIL)


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    parser = record.parser("starting", __doc__)
    parser.add_argument("--models", default="tiny,resnet,gpt")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args(arguments)
    known = subjects(quick=False)
    chosen = options.models.split(",")
    if unknown := [name for name in chosen if name not in known]:
        parser.error(f"--models: there is no {unknown[0]!r}; there are {', '.join(known)}")
    measured: dict[str, dict[str, Any]] = {}
    for name in chosen:
        found = measured[known[name].name] = measure(name, options.rounds)
        print(known[name].name)
        for way, starts in found["ways"].items():
            total = statistics.median(map(until_first_step, starts))
            parts = ", ".join(
                f"{part} {statistics.median(start[part] for start in starts):.2f}"
                for part in starts[0]
            )
            print(f"  {way}: {total:.2f} s until the first step is done ({parts})", flush=True)
        record.save_models("starting", measured, options)
    return 0
