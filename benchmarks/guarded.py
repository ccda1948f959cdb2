"""What guards and the audit cost: steps with them and without, in turns.

    python -m benchmarks.guarded [--models gpt,tiny] [--rounds 200] [--json FILE] [--record]

Two pipelines over copies of a model train by turns, a step each, in an order that is drawn anew in
every round. One is as users have it; the other has no audit, and takes it for granted that nothing
has changed that its forward reads. The first twenty steps, of which each may be audited, are
warm-up; what they cost is said beside it. Medians leave out the few audits, so there are totals.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import penstock as ps
from benchmarks import record
from benchmarks.subjects import Subject, subjects
from penstock.capture.guards import Guards

WARM_UP = 24


@contextmanager
def unguarded() -> Iterator[None]:
    """Meanwhile, nothing is looked at that a forward has read."""
    hold = Guards.hold
    Guards.hold = lambda _: True  # type: ignore[method-assign]
    try:
        yield
    finally:
        Guards.hold = hold  # type: ignore[method-assign]


def cost(subject: Subject, rounds: int, workers: str) -> dict[str, Any]:
    """The seconds of every step, with and without."""
    x, y = subject.data()
    options: dict[str, Any] = {"devices": ["cpu", "cpu"], "workers": workers}
    with ps.Pipeline(subject.build(), (x,), **options) as with_:
        plan = with_.plan
        with ps.Pipeline(subject.build(), (x,), plan=plan, audit=None, **options) as without:

            def step(name: str) -> float:
                pipe = with_ if name == "with" else without
                begun = time.perf_counter()
                pipe.train_step(x, target=y, loss_fn=subject.loss)
                pipe.model.zero_grad()
                return time.perf_counter() - begun

            seconds: dict[str, list[float]] = {"with": [], "without": []}
            for _ in range(WARM_UP + rounds):
                for name in random.sample(sorted(seconds), 2):
                    if name == "with":
                        seconds[name].append(step(name))
                    else:
                        with unguarded():
                            seconds[name].append(step(name))
            audited = with_.audit.microbatches
    first = {name: sum(each[:WARM_UP]) for name, each in seconds.items()}
    then = {name: each[WARM_UP:] for name, each in seconds.items()}
    pairs = [a / b for a, b in zip(then["with"], then["without"], strict=True)]
    return {
        "model": subject.name,
        "workers": workers,
        "rounds": rounds,
        "median seconds": {name: statistics.median(each) for name, each in then.items()},
        "ratio of medians": statistics.median(then["with"]) / statistics.median(then["without"]),
        "median of ratios": statistics.median(pairs),
        "ratio of totals": sum(then["with"]) / sum(then["without"]),
        "seconds of the first steps": first,
        "audited": audited,
        "seconds": then,
    }


def main(args: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else "")
    parser.add_argument("--models", default="gpt,tiny")
    parser.add_argument("--workers", default="threads,processes")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--quick", action="store_true", help="small models")
    record.add_options(parser)
    options = parser.parse_args(args)
    found = []
    for name in options.models.split(","):
        for workers in options.workers.split(","):
            subject = subjects(options.quick)[name]
            rounds = options.rounds if options.quick or name == "tiny" else options.rounds // 10
            each = cost(subject, rounds, workers)
            print(
                f"{each['model']}, {workers}: {each['ratio of medians']:.4f} by medians, "
                f"{each['median of ratios']:.4f} by pairs, {each['ratio of totals']:.4f} in all "
                f"({1e3 * each['median seconds']['with']:.2f} ms a step, {each['audited']} audits)",
                flush=True,
            )
            found.append(each)
    whole = record.save("guarded", {"costs": found}, options.json, options.record)
    if not options.json:
        print(json.dumps({key: whole[key] for key in ("commit", "machine")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
