"""What guards and the audit cost: steps with them and without, in turns.

    python -m penstock.bench guarded [--models gpt,tiny] [--seconds 120] [--pairs 1500]
        [--json FILE] [--record]

One pipeline trains in pairs of steps. One step of a pair is as users run it. The other one is not
audited, and does not check whether anything has changed in what its forward reads, in the modules
that worker processes have copies of, or in hooks. The order of the two is drawn anew for every
pair, so that memory, caches and other work of the machine affect both alike.

The ratio is the median of the ratios of all pairs, with the interval that contains 95 % of the
medians of resampled pairs (bootstrap). The first two pairs and those with an audited step are left
out of it. The time of audits is given separately: in the first twenty passes, which have many by
design, and in all later ones as a share of the time of their steps.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import penstock as ps
from penstock.audit.auditor import Auditor
from penstock.bench import record
from penstock.bench.subjects import Subject, subjects
from penstock.capture.guards import Guards
from penstock.engine.hooks import Opened
from penstock.workers.following import Following, Unchanged

WARM_UP = 2
FIRST = 20  # passes of which each may be audited
FEWEST = 5  # pairs without audits, however long they take
SAMPLES = 2000


@contextmanager
def unguarded() -> Iterator[None]:
    """While open, pipelines do not check whether what a forward has read is unchanged."""
    with patch.object(Guards, "hold", lambda _: True):
        yield


@contextmanager
def trusting() -> Iterator[None]:
    """While open, pipelines do not check for changes before a pass, and no pass is audited."""
    with ExitStack() as stack:
        stack.enter_context(unguarded())
        stack.enter_context(patch.object(Opened, "check", lambda _: None))
        stack.enter_context(patch.object(Unchanged, "check", lambda _: None))
        stack.enter_context(patch.object(Following, "changes", lambda _: {}))
        stack.enter_context(patch.object(Auditor, "around", lambda *_: nullcontext()))
        yield


def cost(
    subject: Subject, seconds: float, most: int, workers: Any, known: dict[str, Any]
) -> dict[str, Any]:
    """Train in pairs of steps, with checks and audits and without; returns their times.

    Args:
        subject: what is trained.
        seconds: how long to train; it goes on until there are `FEWEST` pairs without audits.
        most: the largest number of pairs, unless more are needed for `FEWEST` without audits.
        workers: the kind of workers.
        known: the model, the program and the plan of an earlier call, which are used again; the
            first call adds them.
    """
    x, y = subject.data()
    model = known.setdefault("model", subject.build())
    given: dict[str, Any] = {name: known.get(name) for name in ("program", "plan")}
    spent: dict[str, list[float]] = {"with": [], "without": [], "audit": []}
    with ps.Pipeline(
        model, (x,), devices=["cpu", "cpu"], workers=workers, replicas=1, **given
    ) as pipe:
        known.update(program=pipe.program, plan=pipe.plan)

        def step(name: str) -> float:
            with trusting() if name == "without" else nullcontext():
                begun = time.perf_counter()
                pipe.train_step(x, target=y, loss_fn=subject.loss)
                model.zero_grad()
                return time.perf_counter() - begun

        end, audited = time.perf_counter() + seconds, 0.0
        while spent["audit"][WARM_UP:].count(0.0) < FEWEST or (
            len(spent["with"]) < most and time.perf_counter() < end
        ):
            for name in random.sample(["with", "without"], 2):
                spent[name].append(step(name))
            spent["audit"].append(pipe.audit.seconds - audited)
            audited = pipe.audit.seconds
    pairs = list(zip(spent["with"], spent["without"], spent["audit"], strict=True))
    ratios = [one / other for one, other, audit in pairs[WARM_UP:] if not audit]
    later = sum(spent["with"][FIRST:])
    return {
        "model": subject.name,
        "workers": workers,
        "pairs": len(ratios),
        "milliseconds without": 1e3 * statistics.median(spent["without"][WARM_UP:]),
        "ratio": statistics.median(ratios),
        "interval": interval(ratios),
        "seconds of the first passes": sum(spent["with"][:FIRST]),
        "of which audits": sum(spent["audit"][:FIRST]),
        "share of later audits": sum(spent["audit"][FIRST:]) / later if later else 0.0,
        "seconds": spent,
    }


def interval(ratios: Sequence[float]) -> tuple[float, float]:
    """The interval that contains 95 % of the medians of resampled ratios."""
    medians = sorted(
        statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(SAMPLES)
    )
    return medians[round(0.025 * SAMPLES)], medians[round(0.975 * SAMPLES) - 1]


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    parser = record.parser("guarded", __doc__)
    parser.add_argument("--models", default="gpt,tiny")
    parser.add_argument("--workers", default="threads,processes")
    parser.add_argument(
        "--seconds", type=float, default=120.0, help="for each model and kind of workers"
    )
    parser.add_argument(
        "--pairs", type=int, default=1500, help="at most, for each model and kind of workers"
    )
    parser.add_argument("--quick", action="store_true", help="small models")
    options = parser.parse_args(arguments)
    record.check_whole(parser, options, "models", "workers", "quick")
    found = []
    for name in options.models.split(","):
        known: dict[str, Any] = {}
        for workers in options.workers.split(","):
            subject = subjects(options.quick)[name]
            each = cost(subject, options.seconds, options.pairs, workers, known)
            low, high = each["interval"]
            print(
                f"{each['model']}, {workers}: {each['ratio']:.4f} ({low:.4f} to {high:.4f}; "
                f"{each['pairs']} pairs, {each['milliseconds without']:.2f} ms a step without). "
                f"Audits took {each['of which audits']:.2f} s of the first passes' "
                f"{each['seconds of the first passes']:.2f} s, and "
                f"{100 * each['share of later audits']:.2f} % of the later ones",
                flush=True,
            )
            found.append(each)
    record.save("guarded", {"costs": found}, options)
    return 0
