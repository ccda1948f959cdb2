"""What guards and the audit cost: steps with them and without, in turns.

    python -m penstock.bench guarded [--models gpt,tiny] [--seconds 120] [--pairs 1500]
        [--json FILE] [--record]

One pipeline trains. Its steps come in pairs: one as users have it, and one that is not audited and
takes it for granted that nothing has changed of what its forward reads, of the modules that worker
processes have copies of, or of hooks. Which of the two is first is drawn anew for every pair, so
that both find memory, caches and the machine's other work alike.

The ratio is the median of the pairs' own, with the interval in which 95 % of the medians of
resampled pairs lie (bootstrap). Pairs with an audited step are left out of it, and the first two.
What audits took is said apart: those of the first twenty passes, which are many by design, and
those of all later ones, as a share of the time of their steps.
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
FEWEST = 5  # pairs, however long they take
SAMPLES = 2000


@contextmanager
def unguarded() -> Iterator[None]:
    """Meanwhile, nothing is looked at that a forward has read."""
    with patch.object(Guards, "hold", lambda _: True):
        yield


@contextmanager
def trusting() -> Iterator[None]:
    """Meanwhile, nothing at all is looked at before a pass, and none is audited."""
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
    """Train for a while, and say what each kind of step took.

    Args:
        subject: what is trained.
        seconds: how long; a few pairs of steps at least.
        most: so many pairs at most.
        workers: of which kind.
        known: the model, the program and the plan; they are made, and left there, by the first.
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
        while len(spent["with"]) < most and (
            time.perf_counter() < end or len(spent["with"]) < FEWEST
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
    """In which 95 % of the medians of resampled ratios lie."""
    medians = sorted(
        statistics.median(random.choices(ratios, k=len(ratios))) for _ in range(SAMPLES)
    )
    return medians[round(0.025 * SAMPLES)], medians[round(0.975 * SAMPLES) - 1]


def main(arguments: Sequence[str]) -> int:
    """Measure and print."""
    parser = record.parser("guarded", __doc__)
    parser.add_argument("--models", default="gpt,tiny")
    parser.add_argument("--workers", default="threads,processes")
    parser.add_argument("--seconds", type=float, default=120.0, help="for each of them")
    parser.add_argument("--pairs", type=int, default=1500, help="at most, for each of them")
    parser.add_argument("--quick", action="store_true", help="small models")
    options = parser.parse_args(arguments)
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
