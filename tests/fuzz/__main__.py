"""Sends hostile messages to everything that listens in real jobs, and says what became of these.

python -m tests.fuzz [--messages 10000] [--only ranks] [--json] [--output out/fuzz.md]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from penstock.bench.record import commit
from tests.fuzz.run import KINDS, Outcome, as_json, run

JOBS = {
    "processes": "a script with two worker processes",
    "ranks": "torchrun with three ranks on one machine",
    "ranks apart": "torchrun with two ranks, each of which takes itself for a machine of its own",
}


def markdown(outcomes: Sequence[Outcome], command: str) -> str:
    """The page."""
    lines = [
        "# Hostile messages",
        "",
        f"Written by `{command}`, at commit {commit()} with torch {torch.__version__}.",
        "",
        "Each job trains a small model in turns, without and with strangers who send messages to",
        "every socket on which one of its processes listens: silence, noise, huge lengths, pickles",
        "that leave a mark if they are read, HTTP, questions, other protocols, and greetings of",
        "ranks with a flipped bit, of another connection, with another secret, echoed or cut off.",
        "They come at once, dripping, cut off, reset, or from somebody who never reads. Ranks are",
        "started anew in every turn, and all but the first come 1.2 s late, so that strangers have",
        "that long. The job must end well, with the same losses in all turns, and without a thread",
        "or a socket more than before.",
        "",
        "Strangers are on the job's machine and take some of its cores. In turns without them they",
        "talk to a process that has nothing to do with the job, as fast. Delay is the ratio of the",
        "median step in a turn with strangers to that in the turn before, as a median of all",
        "pairs, with the interval in which 95 % of the medians of resampled pairs lie. Connecting",
        "is what a rank that comes late takes to be connected.",
        "",
        "| job | messages | pairs of turns | crashes | unpickled | delay of steps | connecting, "
        "without and with, ms | longest, ms |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in outcomes:
        middle, low, high = each.ratio
        connecting = ["", ""]
        if each.kind != "processes":
            without, with_them = each.connecting
            connecting = [
                f"{1e3 * without:.1f}, {1e3 * with_them:.1f}",
                f"{1e3 * each.slowest:.0f}",
            ]
        lines.append(
            f"| {JOBS[each.kind]} | {sum(each.sent.values())} | {len(each.hostile)} "
            f"| {len(each.problems)} | {each.unpickled} | {middle:.3f} ({low:.3f} to {high:.3f}) "
            f"| {' | '.join(connecting)} |"
        )
    lines += ["", "| job | socket | messages |", "|---|---|---|"]
    lines += [
        f"| {each.kind} | {name} | {count} |"
        for each in outcomes
        for name, count in sorted(each.sent.items())
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Run the jobs; 1 if anything is not as it should be."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--messages", type=int, default=10_000, help="to each job")
    parser.add_argument("--seed", type=int, default=0, help="of the first message")
    parser.add_argument("--rate", type=float, default=300.0, help="messages a second")
    parser.add_argument("--steps", type=int, default=60, help="of a turn")
    parser.add_argument("--only", action="append", choices=list(KINDS), metavar="JOB")
    parser.add_argument(
        "--torch", action="store_true", help="also to the sockets of gloo and of torchrun's store"
    )
    parser.add_argument("--json", action="store_true", help="a line for each job")
    parser.add_argument("--output", type=Path, help="a file for the page")
    options = parser.parse_args()
    outcomes = []
    for kind in options.only or KINDS:
        outcome = run(
            kind, options.messages, options.seed, options.rate, options.steps, options.torch
        )
        outcomes.append(outcome)
        verdict = "; ".join(outcome.problems) or "right"
        print(f"{kind}: {sum(outcome.sent.values())} messages: {verdict}", file=sys.stderr)
        if options.json:
            print(json.dumps(as_json(outcome)), flush=True)
    if options.output:
        command = " ".join(["python -m tests.fuzz", *sys.argv[1:]])
        options.output.write_text(markdown(outcomes, command))
    return int(any(outcome.problems for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
