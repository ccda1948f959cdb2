"""`python -m benchmarks.contract`: runs every case and writes the table."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path

from benchmarks.contract.cases import CASES
from benchmarks.contract.measured import OTHERS, OURS, Contenders
from benchmarks.contract.table import as_data, as_markdown
from penstock.devices.cores import use_threads


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.contract", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/exactness"))
    parser.add_argument("--only", nargs="*", help="these cases, by the names of their functions")
    options = parser.parse_args()
    asked = (*OURS, *OTHERS)
    warnings.simplefilter("ignore")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # a core for each worker
    use_threads(1)
    known = {case.name: case for case in CASES}
    unknown = sorted(set(options.only or ()) - known.keys())
    if unknown:
        parser.error(f"there is no case {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [known[name] for name in options.only or known]
    start, found = time.monotonic(), {}
    with Contenders() as contenders:
        for case in chosen:
            found[case] = {name: contenders.verdict(case, name) for name in asked}
            said = "; ".join(f"{name}: {verdict}" for name, verdict in found[case].items())
            print(f"{case.title}: {said}", file=sys.stderr, flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.with_suffix(".md").write_text(as_markdown(found))
    options.output.with_suffix(".json").write_text(json.dumps(as_data(found), indent=2) + "\n")
    print(f"{len(chosen)} cases in {time.monotonic() - start:.0f} s", file=sys.stderr)
    ours = [verdict for v in found.values() for name, verdict in v.items() if name in OURS]
    sys.exit(0 if all(verdict.is_exact for verdict in ours) else 1)


if __name__ == "__main__":
    main()
