"""`python -m penstock.bench NAME ...` runs a benchmark; without a name, it lists them all."""

from __future__ import annotations

import importlib
import sys

NAMES = (
    "compare",
    "links",
    "sleeping",
    "capture_time",
    "guarded",
    "gpus",
    "halves",
    "sums",
    "generation",
    "large",
    "partition",
    "truth",
    "attribution",
    "small",
    "starting",
    "frameworks",
    "surviving",
    "watched",
    "pictures",
    "contract",
    "record",
    "tables",
)


def main(name: str = "", *arguments: str) -> int:
    """Run a benchmark; if there is none of this name, list all of them.

    Args:
        name: the name of the benchmark, one of `NAMES`.
        *arguments: its command-line arguments.

    Returns:
        the exit status of the benchmark; after a list 0, or 2 if the name is unknown.
    """
    if name in NAMES:
        status: int = importlib.import_module(f"penstock.bench.{name}").main(arguments)
        return status
    for each in NAMES:
        doc = importlib.import_module(f"penstock.bench.{each}").__doc__ or ""
        print(f"python -m penstock.bench {each:12}  {doc.splitlines()[0]}")
    return 0 if name in ("", "-h", "--help") else 2


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
