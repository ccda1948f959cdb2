"""Runs many interleavings: `python -m tests.interleavings --count 10000`."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from penstock.bench.record import origin
from tests.interleavings.cases import CASES
from tests.interleavings.many import mistaken, quiet, right_ones
from tests.interleavings.mutations import MUTATIONS

_CHUNK = 50  # interleavings that a process is given at a time
_CHUNKS = 10  # until other processes take their place, as the memory of threads stays


def main(arguments: Sequence[str] | None = None) -> int:
    """Run interleavings and mistakes, and say what was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.interleavings", description=__doc__)
    parser.add_argument("--count", type=int, default=1000, help="of the engine as it is")
    parser.add_argument("--mistaken", type=int, default=20, help="of each mistake")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--output", type=Path, help="a page of the docs to write")
    given = parser.parse_args(arguments)
    context = multiprocessing.get_context("spawn")
    begin, cases, wrong = time.monotonic(), Counter[str](), list[str]()
    chunks = [(k, min(_CHUNK, given.count - k)) for k in range(0, given.count, _CHUNK)]
    together = given.jobs * _CHUNKS
    for first in range(0, len(chunks), together):
        with ProcessPoolExecutor(given.jobs, context, initializer=quiet) as pool:
            for found in pool.map(right_ones, *zip(*chunks[first:][:together], strict=True)):
                cases += found.cases
                wrong += found.wrong
                done = f"{cases.total()} of {given.count}, {len(wrong)} wrong"
                print(done, *found.wrong, sep="\n  ", flush=True)
    with ProcessPoolExecutor(given.jobs, context, initializer=quiet) as pool:
        mistakes = list(pool.map(mistaken, MUTATIONS, [given.mistaken] * len(MUTATIONS)))
    page = _page(cases, wrong, dict(zip(MUTATIONS, mistakes, strict=True)), given.mistaken)
    print(page, f"{time.monotonic() - begin:.0f} s")
    if given.output:
        given.output.write_text(page)
    unseen = [name for name, (bits, _) in zip(MUTATIONS, mistakes, strict=True) if not bits]
    return 1 if wrong or (unseen and given.mistaken) else 0


def _page(
    cases: Counter[str], wrong: Sequence[str], mistakes: dict[str, tuple[int, int]], tries: int
) -> str:
    made = origin()
    lines = [
        "# Interleavings on simulated accelerators",
        "",
        f"Written by `python -m tests.interleavings --count {cases.total()} --mistaken {tries} "
        f"--output docs/interleavings.md`, torch {made['torch']}, commit {made['commit']}, "
        f"{made['date']}. [GPUs](gpus.md) says what is simulated.",
        "",
        "Each case runs three training steps with an optimizer, an evaluation, and a change of the "
        "weights by hand, in worker threads on up to four devices; some cases also map batches, "
        "save and restore, and record timelines. A seed decides which thread, and which stream, "
        "goes on next: this is an *order*. All losses, results, gradients, weights and buffers are "
        "compared with plain PyTorch on one CPU, bit by bit, and PyTorch's race detector for CUDA "
        "sees all kernels and events.",
        "",
        "| case | orders |",
        "|---|---|",
        *(f"| {name} | {cases[name]} |" for name in CASES if cases[name]),
        "",
        f"Orders in which a bit was wrong, or the detector found a race: {len(wrong)} of "
        f"{cases.total()}.",
        *(f"- {each}" for each in wrong),
        "",
        "## Mistakes made on purpose",
        "",
        f"Each is made in {tries} orders. The detector does not see the CPU's memory.",
        "",
        "| mistake | orders with wrong bits | with races |",
        "|---|---|---|",
        *(f"| {name} | {bits} | {races} |" for name, (bits, races) in mistakes.items()),
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
