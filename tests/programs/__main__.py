"""Runs programs drawn at random: `python -m tests.programs --count 2000`."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from penstock.bench import record
from penstock.bench.guarded import unguarded
from penstock.bench.record import ROOT
from tests.programs.drawing import OPTIMIZERS, Drawn, drawn, drawn_for_replicas
from tests.programs.running import NEVER, VERDICTS, Outcome, outcome
from tests.support.pool import pooled
from tests.support.recording import recording_cpus

PAGE, DATA = ROOT / "docs/programs.md", record.DATA / "programs.json"

HEAD = """# Random programs

Written by `python -m tests.programs --record`, with the options of each section.

Every program is a model of a few blocks that read attributes, flags and sizes, tie weights, write
in place, remember something in buffers, or draw random numbers. Attributes change between the
steps, and micro-batches are of unequal sizes. Results, losses, gradients, weights and buffers are
compared after every step with `torch.equal` (NaN in the same places) with a loop of plain PyTorch
on one device.

*Right*: all of that has the same bits. *Refused*: a `PenstockError` that says why. *Untrainable*:
plain PyTorch raises an error too. *Wrong*: something differs. *Crash*: any other error.
"""

SECTIONS = {
    "stages": """## On stages

Each is cut into two stages and run for five steps in threads: training, calls, evaluation, with
gradients and without, with several schedules and kinds of recomputation. The audit is off, so that
it does not catch what guards miss.
""",
    "replicas": """## On any number of replicas

Each is trained for three or four steps with an optimizer of PyTorch, on 1 to 4 replicas of 1 to 4
stages, with any schedule that takes them, with and without recomputation, on worker threads or
worker processes; in half of the programs stages in threads sleep now and then.
""",
    "unguarded": """## What the audit finds

The guards that compare what a forward reads before each pass are switched off, and some programs
read module-level variables, which guards cannot see. Each runs for up to 20 steps, first without an
audit. What is wrong then runs again with one (`audit="auto"`), which has to raise its error before
the step is compared.
""",
}

Found = Mapping[int, tuple[Drawn, Outcome]]


def given(options: argparse.Namespace) -> dict[str, Any]:
    """What the pipelines get besides."""
    audit = options.audit
    more: dict[str, Any] = {"audit": int(audit) if audit and audit.isdecimal() else audit}
    more["device"] = options.device
    if options.device != "cpu" or options.graphs:
        torch.use_deterministic_algorithms(True, warn_only=True)
    return {**more, "cuda_graphs": True} if options.graphs else more


def kept_to(program: Drawn, options: argparse.Namespace) -> Drawn:
    """With the settings that hold for all programs of this run."""
    if options.graphs:  # what is recomputed is not recorded
        program = replace(program, recompute="none")
    on_threads = options.device != "cpu" or options.graphs
    workers = options.workers or ("threads" if on_threads else program.workers)
    return replace(program, workers=workers)


def main() -> int:
    """Run them, print what became of them, and end with 1 if one was wrong or crashed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--start", type=int, default=0)
    parser.add_argument(
        "--replicas", action="store_true", help="on 1 to 4 replicas, trained by an optimizer"
    )
    parser.add_argument("--device", default="cpu", help="stands for all devices, such as cuda:0")
    parser.add_argument("--workers", choices=["threads", "processes"], help="instead of either")
    parser.add_argument("--graphs", action="store_true", help="stages are run as CUDA graphs")
    parser.add_argument("--hidden", action="store_true", help="they read a global, too")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--audit", help='"auto", or every so many steps; off if left out')
    parser.add_argument(
        "--unguarded", action="store_true", help="nobody looks at what forwards read"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--record", action="store_true", help="into docs/programs.md")
    options = parser.parse_args()
    began = time.perf_counter()
    audit, more = options.audit, given(options)
    found: dict[int, tuple[Drawn, Outcome]] = {}
    unaudited: dict[int, Outcome] = {}
    is_faked = options.graphs and options.device == "cpu"
    with pooled(), recording_cpus() if is_faked else nullcontext():
        for number in range(options.start, options.start + options.count):
            if options.replicas:
                program = drawn_for_replicas(number)
            else:
                program = drawn(number, options.hidden, options.steps)
            program = kept_to(program, options)
            with unguarded() if options.unguarded else nullcontext():
                ended = outcome(
                    program, **{**more, **({"audit": None} if options.unguarded else {})}
                )
                if options.unguarded and audit and ended.verdict == "wrong":
                    unaudited[number] = ended
                    ended = outcome(program, **more)
            found[number] = program, ended
            if ended.verdict in NEVER:
                kind = program.steps[max(ended.step, 0)].kind
                print(f"{number}: {ended.verdict} in step {ended.step} ({kind}): {ended.why}")
                names = [block.__name__ for block in program.blocks]
                print(f"    {names}, {settings(*found[number])}")
    verdicts = Counter(ended.verdict for _, ended in found.values())
    print(dict(verdicts), f"{time.perf_counter() - began:.0f} s")
    table = audited(found, unaudited) if unaudited else tables(found)
    print(table)
    if options.record:
        name = "replicas" if options.replicas else "unguarded" if options.unguarded else "stages"
        keep(name, {**record.origin(), "options": sys.argv[1:], "table": table})
    if options.json:
        each = [
            {
                "program": n,
                **settings(program, e),
                "verdict": e.verdict,
                "step": e.step,
                "why": e.why,
            }
            for n, (program, e) in found.items()
        ]
        options.json.parent.mkdir(parents=True, exist_ok=True)
        data = {**record.origin(), "verdicts": verdicts, "programs": each}
        options.json.write_text(json.dumps(data, indent=1))
    return 1 if verdicts["wrong"] or verdicts["crash"] else 0


def keep(name: str, section: Mapping[str, Any]) -> None:
    """Keep the table of one section, and write the page of all."""
    every = json.loads(DATA.read_text()) if DATA.exists() else {}
    every[name] = section
    DATA.write_text(json.dumps(every, indent=1) + "\n")
    parts = [HEAD]
    for key, head in SECTIONS.items():
        if key in every:
            one = every[key]
            options = " ".join(option for option in one["options"] if option != "--record")
            run = f"`{options}`, at commit {one['commit']} with torch {one['torch']}."
            parts.append(f"{head}\n{run}\n\n{one['table']}\n")
    PAGE.write_text("\n".join(parts))


def audited(found: Found, unaudited: Mapping[int, Outcome]) -> str:
    """What has become of the programs that were wrong without an audit."""
    verdicts = Counter(
        "found by the audit" if found[number][1].why.startswith("AuditError") else "not found by it"
        for number in unaudited
    )
    counts = {"all": len(found), "wrong without an audit": len(unaudited), **verdicts}
    return "\n".join(
        ["| | programs |", "|---|---|", *(f"| {k} | {n} |" for k, n in counts.items())]
    )


def settings(program: Drawn, ended: Outcome) -> dict[str, Any]:
    """How a program was run."""
    optimizer = None if program.optimizer is None else OPTIMIZERS[program.optimizer][0].__name__
    return {
        "replicas": program.replicas,
        "stages": ended.stages,
        "workers": program.workers,
        "schedule": program.schedule,
        "recompute": program.recompute,
        "micro-batches": program.microbatches,
        "optimizer": optimizer,
        "delayed": program.delayed,
        "head": program.head,
    }


def tables(found: Found) -> str:
    """How many ended how, by setting, and why some were refused."""
    each = [(settings(program, ended), ended) for program, ended in found.values()]
    lines = [f"| | programs | {' | '.join(VERDICTS)} |", "|---" * (2 + len(VERDICTS)) + "|"]
    for name in ("replicas", "stages", "workers", "schedule", "recompute", "optimizer"):
        values = sorted({own[name] for own, _ in each if own[name]})
        for value in values:
            lines.append(row(f"{name}: {value}", (e for own, e in each if own[name] == value)))
    several = (e for own, e in each if own["replicas"] > 1)
    lines += [row("several replicas", several), row("**all**", (e for _, e in each))]
    reasons = Counter(reason(e) for _, e in each if e.verdict == "refused")
    if reasons:
        lines += ["", "| refused | why |", "|---|---|"]
        lines += [f"| {n} | {why} |".replace("*", "\\*") for why, n in reasons.most_common()]
    return "\n".join(lines)


def reason(ended: Outcome) -> str:
    """Why a program was refused: the first sentence, without names and shapes."""
    text = re.sub(r"\w+\[\S*\](?: as \S+\])?", "a tensor", ended.why.split("\n")[0])
    return re.split(r"[.;] ", re.sub(r"'[^']*'", "'…'", text.partition(": ")[2]))[0]


def row(name: str, outcomes: Iterable[Outcome]) -> str:
    """A line of the table."""
    counts = Counter(ended.verdict for ended in outcomes)
    return f"| {name} | {counts.total()} | {' | '.join(str(counts[v]) for v in VERDICTS)} |"


if __name__ == "__main__":
    raise SystemExit(main())
