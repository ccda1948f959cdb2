"""Lets every kind of fault happen, and writes what became of them.

python -m tests.faults [--runs 200] [--only "raise in a stage"] [--output docs/faults.md]
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from penstock.bench.record import commit
from tests.faults.kinds import KINDS
from tests.faults.outside import Outcome, adopt_orphans, run

for _name in ("workers", "drivers"):
    importlib.import_module(f"tests.faults.{_name}")  # notes its kinds


def markdown(outcomes: Sequence[Outcome]) -> str:
    """A table of the kinds."""
    good = sum(not outcome.problems and not outcome.is_late for outcome in outcomes)
    slowest = max(outcome.seconds for outcome in outcomes)
    lines = [
        "# Faults",
        "",
        f"Written by `make faults`, at commit {commit()} with torch {torch.__version__}.",
        "",
        "Each run is a training script on two worker processes, in a terminal of its own, to",
        "which something happens at a random moment. Right means: the error that was to be",
        "expected, with worker, stage, micro-batch and action, within five seconds (after the",
        "timeout, where it is one; ten for a worker that is stopped, which is noticed at",
        "default settings); parameters, gradients and buffers bit for bit as before the",
        "operation that failed; the right bits in all that follows, or a pipeline that says",
        "that it is closed; no process left, no zombie, no open file, a sane terminal.",
        "",
        f"{good} of {len(outcomes)} runs were right; the longest time was {slowest:.1f} s.",
        "",
        "| fault | runs | right | what the caller was told | longest, s |",
        "|---|---|---|---|---|",
    ]
    for name in KINDS:
        own = [outcome for outcome in outcomes if outcome.name == name]
        if own:
            right = sum(not outcome.problems and not outcome.is_late for outcome in own)
            told = Counter(_short(outcome.error) for outcome in own)
            words = "; ".join(told)
            longest = max(outcome.seconds for outcome in own)
            lines.append(f"| {name} | {len(own)} | {right} | {words} | {longest:.1f} |")
    return "\n".join(lines) + "\n"


def _short(error: str) -> str:
    """The error's name; what is said by the process that ended."""
    return f"`{error.split(':')[0]}`" if "Error: " in error or ":" in error else error


def main() -> int:
    """Run them; 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=len(KINDS))
    parser.add_argument("--seed", type=int, default=0, help="of the first run of each kind")
    parser.add_argument("--only", action="append", choices=list(KINDS), metavar="KIND")
    parser.add_argument("--output", type=Path, help="a file for the table")
    parser.add_argument(
        "--patient", action="store_true", help="1 is not for errors that are merely late"
    )
    parser.add_argument("--json", action="store_true", help="a line for each run")
    options = parser.parse_args()
    names = options.only or list(KINDS)
    importlib.import_module("torch._dynamo")  # every driver needs it: once for all of them
    adopt_orphans()
    outcomes: list[Outcome] = []
    for number in range(options.runs):
        name = names[number % len(names)]
        outcome = run(name, options.seed + number // len(names))
        outcomes.append(outcome)
        late = ["late"] if outcome.is_late else []
        verdict = "; ".join(outcome.problems + late) or "right"
        line = f"{number + 1}/{options.runs} {name} ({outcome.seed}): {outcome.error[:90]}"
        print(f"{line} {outcome.seconds:.2f} s: {verdict}", file=sys.stderr, flush=True)
        if outcome.problems:
            print(outcome.screen[-3000:], file=sys.stderr, flush=True)
        if options.json:
            print(json.dumps(asdict(outcome)), flush=True)
    if options.output:
        options.output.write_text(markdown(outcomes))
    is_hasty = not options.patient
    return int(any(outcome.problems or (is_hasty and outcome.is_late) for outcome in outcomes))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ["PENSTOCK_CACHE"] = os.devnull
    sys.exit(main())
