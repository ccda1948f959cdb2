"""Runs programs drawn at random: `python -m tests.programs --count 2000`."""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

from penstock.bench.guarded import unguarded
from tests.programs.drawing import drawn
from tests.programs.running import outcome


def main() -> int:
    """Run them, print what became of them, and end with 1 if one was wrong or crashed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument("--hidden", action="store_true", help="they read a global, too")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--audit", help='"auto", or every so many steps; off if left out')
    parser.add_argument(
        "--unguarded", action="store_true", help="nobody looks at what forwards read"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    began = time.perf_counter()
    audit = options.audit
    more = {"audit": int(audit) if audit and audit.isdecimal() else audit}
    found = {}
    for number in range(options.start, options.start + options.count):
        program = drawn(number, options.hidden, options.steps)
        with unguarded() if options.unguarded else nullcontext():
            ended = found[number] = outcome(program, **more)
        if ended.verdict in ("wrong", "crash"):
            names = [block.__name__ for block in program.blocks]
            kind = program.steps[max(ended.step, 0)].kind
            print(f"{number}: {ended.verdict} in step {ended.step} ({kind}): {ended.why}")
            print(f"    {names}, {program.head}, m={program.microbatches}, {program.recompute}")
    verdicts = Counter(ended.verdict for ended in found.values())
    reasons = Counter(e.why.split("\n")[0][:90] for e in found.values() if e.verdict == "refused")
    print(dict(verdicts), f"{time.perf_counter() - began:.0f} s")
    for reason, count in reasons.most_common(25):
        print(f"{count:6} {reason}")
    if options.json:
        each = [
            {"program": n, "verdict": e.verdict, "step": e.step, "why": e.why}
            for n, e in found.items()
        ]
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"verdicts": verdicts, "programs": each}, indent=1))
    return 1 if verdicts["wrong"] or verdicts["crash"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
