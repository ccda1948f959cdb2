"""The tables of README and the docs, made from what was measured and lies in docs/data.

    python -m penstock.bench tables [--check]

rewrites what stands between `<!-- table: NAME -->` and `<!-- end of table -->`, for every NAME
whose data are there; `--check` changes nothing and says whether anything would. The file
`docs/data/NAME.json` is written by `python -m penstock.bench NAME --record`, so figures and docs
cannot drift apart.
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.bench.record import DATA, ROOT

PAGES = ("README.md", "docs/design.md")
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


def compare(report: dict[str, Any]) -> str:
    """Penstock and its peers, fastest first."""
    ours = next(row for row in report["rows"] if row["name"].startswith("Penstock"))
    lines = ["| | seconds a step | Penstock is faster by |", "|---|---|---|"]
    for row in report["rows"]:
        seconds = f"{row['median']:.3f} ± {row['spread']:.3f}"
        name, times = row["name"], f"{row['slower']:.2f}x"
        if row is ours:
            name, times = f"**Penstock** ({report['plan']})", ""
        lines.append(f"| {name} | {seconds} | {times} |")
    predicted, taken = report["predicted_step_seconds"], report["train_step_seconds"]
    lines += [
        "",
        f"Penstock predicted {predicted:.3f} s for its `train_step` and took {taken:.3f} s, "
        f"{report['percent_of_bound']:.0f} % of the bound.",
        conditions(report),
    ]
    return "\n".join(lines)


def processes(report: dict[str, Any]) -> str:
    """Worker processes beside threads and torch's best of either cut; a line a model."""
    columns = {
        "processes": "Penstock, processes",
        "threads": "Penstock, threads",
        "torch, by hand": "torch pipelining, cut by hand",
        "torch, Penstock's cut": "torch pipelining, Penstock's cut",
    }
    lines = [f"| | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for model in report["models"]:
        cells = [model["model"]]
        for name in columns.values():
            row = next((r for r in model["rows"] if r["name"].startswith(name)), None)
            cells.append("does not run" if row is None else cell(row, name))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", conditions(report)])


def capture_time(report: dict[str, Any]) -> str:
    """What capturing takes in memory, beside plain steps of the example and of a row."""
    columns = ("capture", "step", "row")
    lines = [
        "| | calls | capturing | a step of the example | a step of one row |",
        "|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        cells = [row["model"], str(row["capture"]["calls"])]
        for column in columns:
            live, resident = (row[column][what] / 2**20 for what in ("live", "resident"))
            cells.append(f"{live:.0f} ({resident:.0f})")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(
        [
            *lines,
            "",
            "MiB of tensors beyond the model at most, and in parentheses by how much the process\n"
            "grew. A step is a forward and a backward in plain PyTorch, with one thread.\n"
            f"{report['machine']['processor']}, torch {report['torch']}, commit "
            f"{report['commit']}, {report['date']}.",
        ]
    )


def cell(row: dict[str, Any], name: str) -> str:
    """Seconds, and by how much Penstock's processes are faster than a peer; its configuration."""
    seconds = f"{row['median']:.3g}"
    if name.startswith("Penstock"):
        return seconds
    return f"{seconds} ({row['slower']:.2f}x; {row['name'].removeprefix(name).strip(', ')})"


def conditions(report: dict[str, Any]) -> str:
    """Where, when and how it was measured."""
    machine, settings = report["machine"], report["settings"]
    return (
        f"Medians of {settings['rounds']} rounds in turns, the order drawn for each, after "
        f"{settings['warm_up']} that do not count; every peer in the configuration that was its "
        f"fastest over {settings['scout']} steps. {machine['processor']}, "
        f"{machine['cores']} cores, torch {report['torch']}, commit {report['commit']}, "
        f"{report['date']}; {settings['allocator']}; threads: {settings['threads']}."
    )


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "compare": compare,
    "processes": processes,
    "capture_time": capture_time,
}


def filled(text: str, data: Path = DATA) -> str:
    """A page with its tables as the data have them.

    Raises:
        ValueError: the page names a table that there is not.
    """

    def table(found: re.Match[str]) -> str:
        begin, name, _, end = found.groups()
        if name not in TABLES:
            raise ValueError(f"there is no table {name}; there are {', '.join(TABLES)}")
        path = data / f"{name}.json"
        if not path.exists():
            return found[0]
        return f"{begin}{TABLES[name](json.loads(path.read_text()))}\n{end}"

    return _TABLE.sub(table, text)


def main(arguments: Sequence[str]) -> int:
    """Write the tables, or look whether they are as they should be; 1 if they are not."""
    parser = ArgumentParser("python -m penstock.bench tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; 1 if something would")
    options = parser.parse_args(arguments)
    stale = []
    for page in PAGES:
        path = ROOT / page
        text = path.read_text()
        if (new := filled(text)) != text:
            stale.append(page)
            if not options.check:
                path.write_text(new)
    verb = "is not" if options.check else "was not"
    print("\n".join(f"{page} {verb} what the data say" for page in stale) or "all as the data say")
    return int(options.check and bool(stale))
