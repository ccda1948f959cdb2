"""Checks every model of the zoo, and writes what became of them.

    python -m tests.zoo [--family torchvision] [--only NAME | --exceptions] [--share 1/8]
                        [--limit 50] [--jobs 2] [--again] [--replicas 2] [--output docs/zoo]

What has been found is kept line by line in OUTPUT.jsonl: a run that was stopped goes on where it
was, and pieces of it can be run one after the other. Models that were checked at this commit are
left out, unless with `--again`; others keep what an earlier run found until it is their turn.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.bench.record import commit
from tests.zoo.check import COUNT, NOT_RUN, PROFILE, STAGES, STATUSES, Result
from tests.zoo.entry import Entry
from tests.zoo.pool import FAMILIES, OWN, available, check_here, entries, run

_WORST = {status: k for k, status in enumerate((*NOT_RUN, *STATUSES))}

HEAD = """# The zoo{title}

Written by `{command}`, at {commit}. The models
are small ones of their kind, with random weights: shallow or narrow, where the library lets
them be.

{how}

A *model* is one class or configuration of its library; with labels and without it is counted once,
by what is worst. *Exact*: all of that has the same bits. *Coarse*: exact, but it cannot be cut.
*Refused*: a `CaptureError` or an `InputError` that names the reason. *Crash*: any other error, or
not done in time. *Wrong*: something differs. Those to the right do not run here without Penstock
either: *no input form*, as nothing here makes inputs that they take; *cannot be built*; *does not
train*, as no gradient comes out.
"""


_STAGES = f"""\
Every model is captured, cut into {STAGES[0]} and {STAGES[1]} stages and trained for two steps, of
{COUNT} micro-batches of unequal sizes each, with a schedule that is drawn by its name (never gpipe,
unless nothing else takes so many stages); then it is evaluated. Losses, results, gradients and
buffers are compared, bit for bit, with a loop of plain PyTorch over the same micro-batches. (Where
a model draws random numbers, those of the loop are seeded as a replay seeds them.) A quarter of the
models also run in two worker processes, and another quarter on the automatic plan, for which they
are profiled for {PROFILE:.0f} seconds. One intra-op thread; the loss is the mean of squares of
everything that comes out."""

_REPLICAS = f"""\
Every model is captured and trained for two steps, of {COUNT} micro-batches of unequal sizes each,
on {{replicas}} replicas in threads: of the whole model, and of two stages if it can be cut; then it
is evaluated. Losses, results, gradients and buffers are compared, bit for bit, with a loop of plain
PyTorch over the same micro-batches. (Where a model draws random numbers, those of the loop are
seeded as a replay seeds them.) One intra-op thread; the loss is the mean of squares of everything
that comes out."""

_TORCHAUDIO = """\
torchaudio was installed without its compiled libraries, which are made for CUDA alone; no model
here uses them."""


def markdown(results: Sequence[Result], replicas: Sequence[int] = ()) -> str:
    """A table of the families, and a line for every exception."""
    columns = (*STATUSES, *NOT_RUN)
    commits = sorted({result.commit for result in results if result.commit})
    found = (
        f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}" if commits else "no known commit"
    )
    title, command, how = "", "make zoo", _STAGES
    if results and set(OWN).isdisjoint(result.family for result in results):
        title = ": models of other authors"
        command = "python -m tests.zoo --family ..."
    if replicas:
        command = " ".join(["python -m tests.zoo", *(f"--replicas {count}" for count in replicas)])
        title, how = " on replicas", _REPLICAS.format(replicas=" and ".join(map(str, replicas)))
    lines = [HEAD.format(title=title, command=command, how=how, commit=found)]
    lines += [f"| family | models that run | {' | '.join(columns)} |"]
    lines += ["|---" * (2 + len(columns)) + "|"]
    total: Counter[str] = Counter()
    for family in FAMILIES:
        counts = Counter(by_model([r for r in results if r.family == family]).values())
        if counts:
            total += counts
            lines.append(_row(family, counts))
    lines += [_row("**all**", total)]
    if not replicas:
        exact = [name for name, status in by_model(results).items() if status == "exact"]
        in_two = {r.model or r.name for r in results if list(r.stages) == [STAGES[0]]}
        few = sum(name in in_two for name in exact)
        lines += ["", f"Of the exact ones {few} have places for {STAGES[0]} stages only."]
        plans = [plan for r in results for plan in r.ran if plan.startswith("automatic plan")]
        alone = sum(plan.endswith("m=1") for plan in plans)
        if plans:
            lines[-1] += (
                f" Of {len(plans)} automatic plans {alone} have one micro-batch: with models so"
                " small, more of them are predicted to be slower."
            )
    if any(r.family in ("speechbrain", "torchaudio") for r in results):
        lines += ["", _TORCHAUDIO]
    exceptions = [r for r in results if r.line or r.status != "exact"]
    if exceptions:
        lines += ["", "| exception | family | what | why |", "|---|---|---|---|"]
        reasons = ((r, r.line.replace("|", "\\|")) for r in exceptions)
        lines += [f"| {r.name} | {r.family} | {r.status} | {why} |" for r, why in reasons]
    return "\n".join(lines) + "\n"


def _row(name: str, counts: Counter[str]) -> str:
    running = sum(counts[status] for status in STATUSES)
    cells = [counts[status] for status in (*STATUSES, *NOT_RUN)]
    return f"| {name} | {running} | {' | '.join(map(str, cells))} |"


def by_model(results: Sequence[Result]) -> dict[str, str]:
    """What became of every model: the worst of its variants; one that runs counts before others."""
    found: dict[str, str] = {}
    for result in results:
        model = result.model or result.name
        found[model] = max(found.get(model, NOT_RUN[0]), result.status, key=_WORST.__getitem__)
    return found


def main() -> int:
    """Run the zoo; 1 if any model is wrong, or crashes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", choices=FAMILIES, action="append")
    parser.add_argument("--only", action="append", help="just the models of this name")
    parser.add_argument("--exceptions", action="store_true", help="those of the earlier output")
    parser.add_argument("--share", type=share, help="such as 1/8: those of a hash of their names")
    parser.add_argument("--limit", type=int, help="as many as this, at most")
    parser.add_argument("--again", action="store_true", help="also what this commit has checked")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument(
        "--replicas",
        type=int,
        action="append",
        default=[],
        help="as many replicas, of the whole model and of two stages, instead of one",
    )
    parser.add_argument("--device", default="cpu", help="stands for all devices, such as cuda:0")
    parser.add_argument("--output", type=Path, help="writes OUTPUT.jsonl, .json and .md")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        check_here(options.child[0], options.child[1:], options.replicas, options.device)
        return 0
    earlier = _read(options.output) if options.output else []
    now = commit()
    done = {(r.family, r.name) for r in earlier if r.commit == now and not now.endswith("+")}
    bad = {r.name for r in earlier if r.status in ("coarse", "refused", "crash", "wrong")}
    chosen = [
        entry
        for entry in entries(options.family or available())
        if (not options.only or entry.name in options.only)
        and (not options.exceptions or entry.name in bad)
        and (not options.share or options.share(entry))
        and (options.again or (entry.family, entry.name) not in done)
    ][: options.limit]
    print(f"{len(chosen)} to check at {now}, {len(done)} are done", file=sys.stderr)
    lines = options.output.with_suffix(".jsonl") if options.output else None

    def note(result: Result) -> None:
        result.commit = now
        if lines:
            with lines.open("a") as file:
                file.write(json.dumps(result.to_dict()) + "\n")

    results = merged(earlier, run(chosen, options.jobs, note, options.replicas, options.device))
    if options.output:
        data = [result.to_dict() for result in results]
        options.output.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(markdown(results, options.replicas))
    print(markdown(results, options.replicas))
    return int(any(result.status in ("wrong", "crash") for result in results))


def share(text: str) -> Callable[[Entry], bool]:
    """Whether an entry is in a share, given as `1/8`.

    Raises:
        argparse.ArgumentTypeError: there is no such share.
    """
    given = re.fullmatch(r"(\d+)/(\d+)", text)
    if not given or not 1 <= int(given[1]) <= int(given[2]):
        raise argparse.ArgumentTypeError(f"{text} is no share, such as 1/8")
    number, shares = int(given[1]), int(given[2])

    def within(entry: Entry) -> bool:
        digest = hashlib.sha256(f"{entry.family} {entry.counted}".encode()).digest()
        return int.from_bytes(digest[:4], "big") % shares == number - 1

    return within


def _read(output: Path) -> list[Result]:
    """What earlier runs have found; the last line of a model counts."""
    path, lines = output.with_suffix(".json"), output.with_suffix(".jsonl")
    data = json.loads(path.read_text()) if path.exists() else []
    if lines.exists():
        text = lines.read_text()  # the last line may be half a line
        data += [json.loads(line) for line in text.splitlines() if line.endswith("}")]
    fields = Result.__dataclass_fields__
    old = {"does not run": "no input form"}  # what it was called
    read = [Result(**{k: v for k, v in each.items() if k in fields}) for each in data]
    for result in read:
        result.status = old.get(result.status, result.status)
    return merged(read, [])


def merged(earlier: Sequence[Result], new: Sequence[Result]) -> list[Result]:
    """The new results, and the earlier ones of other models."""
    found = {(r.family, r.name): r for r in (*earlier, *new)}
    return sorted(found.values(), key=lambda r: (FAMILIES.index(r.family), r.name))


if __name__ == "__main__":
    sys.exit(main())
