"""Kills training runs at random moments, and compares their ends, bit for bit.

python -m tests.resume [--runs 50] [--seed 0] [--output docs/resume.md]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from penstock.bench.record import commit
from penstock.loading import tolerate_missing_torchvision_operators
from tests.resume.killing import KINDS, MOMENTS, Outcome, Watch, run

_WORDS = {"any": "at any moment", "save": "after a save has begun"}


def markdown(outcomes: Sequence[Outcome]) -> str:
    """A table of the kinds of workers and moments."""
    good = sum(not outcome.problems for outcome in outcomes)
    lines = [
        "# Killed and resumed",
        "",
        f"Written by `make resume`, at commit {commit()} with torch {torch.__version__}.",
        "",
        "Each run trains a small GPT-2 with dropout, AdamW, a scheduler and clipping on random",
        "batches, saves every second step, every other time in the background, and is killed by",
        "SIGKILL once or twice. It is started again with threads or processes, in two or three",
        "stages, whatever it had before. Right means: it was killed, and its losses, its weights,",
        "what AdamW remembers, the scheduler and the random generator are bit for bit those of a",
        "run that nobody has interrupted.",
        "",
        f"{good} of {len(outcomes)} runs were right.",
        "",
        "| first started on | killed | runs | kills | in the midst of a save | right |",
        "|---|---|---|---|---|---|",
    ]
    for workers in KINDS:
        for moment in MOMENTS:
            own = [o for o in outcomes if (o.workers, o.moment) == (workers, moment)]
            if own:
                kills, torn = sum(o.kills for o in own), sum(o.torn for o in own)
                right = sum(not o.problems for o in own)
                cells = [workers, _WORDS[moment], *map(str, (len(own), kills, torn, right))]
                lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def uninterrupted(folder: Path) -> dict[str, Any]:
    """How a run ends that nobody kills."""
    folder.mkdir()
    watch = Watch(folder, "threads", 2, 0)
    watch.until_the_end("any", None, 0)
    if watch.code:
        raise SystemExit(f"the uninterrupted run has ended with {watch.code}")
    return torch.load(folder / "end.pt", weights_only=True)


def main() -> int:
    """Run them; 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--output", type=Path, help="a file for the table")
    options = parser.parse_args()
    tolerate_missing_torchvision_operators()
    from transformers import GPT2LMHeadModel  # noqa: F401 - once, for all that are forked

    kinds = [(workers, moment) for moment in MOMENTS for workers in KINDS]
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory() as scratch:
        expected = uninterrupted(Path(scratch) / "uninterrupted")
        for number in range(options.runs):
            workers, moment = kinds[number % len(kinds)]
            folder = Path(scratch) / str(number)
            folder.mkdir()
            seed = options.seed + number // len(kinds)
            outcome = run(workers, moment, seed, expected, folder)
            outcomes.append(outcome)
            verdict = "; ".join(outcome.problems) or "right"
            went = f"{outcome.kills} kills, {outcome.torn} in a save, from {outcome.resumed}"
            line = f"{number + 1}/{options.runs} {workers}, {moment} ({outcome.seed}): {went}"
            print(f"{line}: {verdict}", file=sys.stderr, flush=True)
    table = markdown(outcomes)
    print(table)
    if options.output:
        options.output.write_text(table)
    never = not any(outcome.kills for outcome in outcomes)
    return int(never or any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ["PENSTOCK_CACHE"] = os.devnull
    sys.exit(main())
