"""Checks every model of the zoo, and writes what became of them.

python -m tests.zoo [--family torchvision] [--only NAME | --exceptions] [--output docs/zoo]

Models that are left out keep what an earlier run found, if the output is there already.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from tests.zoo.check import Result
from tests.zoo.pool import FAMILIES, check_here, entries, run


def markdown(results: Sequence[Result]) -> str:
    """A table of the families, and a line for every exception."""
    lines = [
        "# The zoo",
        "",
        "Written by `make zoo`. The models are small ones of their kind, with random weights:",
        "shallow or narrow, where the library lets them be.",
        "",
        "*Exact*: cut into two and four stages, forward and gradients",
        "have the bits of the unsplit model, in training and evaluation, at three batch sizes.",
        "*Coarse*: exact, but it cannot be cut. *Does not run*: not without Penstock either.",
        "",
        "| family | models that run | exact | coarse | refused | wrong | do not run here |",
        "|---|---|---|---|---|---|---|",
    ]
    for family in FAMILIES:
        counts = Counter(r.status for r in results if r.family == family)
        running = sum(counts.values()) - counts["does not run"]
        if counts:
            cells = [counts[s] for s in ("exact", "coarse", "refused", "wrong", "does not run")]
            lines.append(f"| {family} | {running} | " + " | ".join(map(str, cells)) + " |")
    runs = (r for r in results if r.status != "does not run")
    exceptions = [r for r in runs if r.line or r.status != "exact"]
    if exceptions:
        lines += ["", "| exception | family | what | why |", "|---|---|---|---|"]
        lines += [f"| {r.name} | {r.family} | {r.status} | {r.line} |" for r in exceptions]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the zoo; 1 if any model is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, action="append")
    parser.add_argument("--only", action="append", help="just the models of this name")
    parser.add_argument("--exceptions", action="store_true", help="those of the earlier output")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, help="writes OUTPUT.json and OUTPUT.md")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        check_here(options.child[0], options.child[1:])
        return 0
    earlier = _read(options.output) if options.output else []
    chosen = (
        {r.name for r in earlier if r.status not in ("exact", "does not run")}
        if options.exceptions
        else set()
    )
    chosen |= set(options.only or ())
    found = [
        entry
        for entry in entries(options.family or FAMILIES)
        if entry.name in chosen or not (options.only or options.exceptions)
    ]
    results = merged(earlier, run(found, options.jobs))
    if options.output:
        data = [result.to_dict() for result in results]
        options.output.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(markdown(results))
    print(markdown(results))
    return int(any(result.status == "wrong" for result in results))


def _read(output: Path) -> list[Result]:
    path = output.with_suffix(".json")
    return [Result(**data) for data in json.loads(path.read_text())] if path.exists() else []


def merged(earlier: Sequence[Result], new: Sequence[Result]) -> list[Result]:
    """The new results, and the earlier ones of other models."""
    found = {(r.family, r.name): r for r in (*earlier, *new)}
    return sorted(found.values(), key=lambda r: (FAMILIES.index(r.family), r.name))


if __name__ == "__main__":
    sys.exit(main())
