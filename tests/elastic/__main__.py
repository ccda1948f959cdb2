"""Runs of every kind of workers through random events, and the table in out/elastic.md.

python -m tests.elastic [--runs 2] [--output out/elastic.md]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from penstock.bench.record import origin
from penstock.devices.cores import cores
from penstock.devices.machine import processor
from tests.elastic import processes, torchrun
from tests.elastic.training import STEPS, TASKS, reference


def main() -> int:
    """Run them; 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=2, help="of each model and kind of workers")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    here, actors, ranks = [], [], []
    for model in TASKS:
        expected = reference(model)
        for seed in range(options.runs):
            here.append(processes.run(model, seed, expected, STEPS, processes.EVENTS))
            print(here[-1].line(), flush=True)
        for seed in range(options.runs if find_spec("ray") else 0):
            actors.append(processes.run(model, seed, expected, STEPS, processes.EVENTS, "ray"))
            print(actors[-1].line(), flush=True)
        with tempfile.TemporaryDirectory() as folder:
            ranks.append(torchrun.run(model, 0, Path(folder), STEPS, torchrun.EVENTS))
        print(ranks[-1].line(), flush=True)
    wrong = [outcome.line() for outcome in (*here, *actors, *ranks) if outcome.problems]
    if options.output:
        found = origin()
        text = "\n".join(
            [
                "# Runs through random events\n",
                f"`make elastic`: {STEPS} steps with {processes.EVENTS} events each, compared bit "
                f"by bit with one device. {processor()}, {cores()} cores, torch {found['torch']}, "
                f"commit {found['commit']}, {found['date']}.\n",
                f"{len(here)} runs of worker processes, {len(actors)} of actors of a Ray cluster, "
                f"and {len(ranks)} of torchrun; wrong: {len(wrong)}.\n",
                "## Worker processes\n",
                processes.table(here),
                "## Actors\n",
                processes.table(actors),
                "## torchrun\n",
                torchrun.table(ranks),
            ]
        )
        options.output.write_text(text)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
