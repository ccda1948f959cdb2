"""The tables of README and the docs, made from what was measured and lies in docs/data.

    python -m penstock.bench tables [--check]

rewrites what stands between `<!-- table: NAME -->` and `<!-- end of table -->`, for every NAME
whose data are there; `--check` changes nothing and says which pages would change. The file
`docs/data/NAME.json` is written by `python -m penstock.bench NAME --record`, so figures and docs
cannot drift apart.
"""

from __future__ import annotations

import json
import re
import statistics
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.bench.record import DATA, ROOT
from penstock.bench.starting import until_first_step
from penstock.units import show_seconds

PAGES = (
    "README.md",
    "docs/design.md",
    "docs/planning.md",
    "docs/watching.md",
    "docs/generation.md",
    "docs/launching.md",
    "docs/frameworks.md",
)
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n)(.*?)(<!-- end of table -->)", re.DOTALL)


COLUMNS = {
    "Penstock": ("Penstock, threads",),
    "in processes": ("Penstock, processes",),
    "stages": ("Penstock, threads, stages",),
    "stages in processes": ("Penstock, processes, stages",),
    "torch pipelining": ("torch pipelining, cut by hand", "torch pipelining, Penstock's cut"),
    "DDP": ("DistributedDataParallel",),
    "FSDP2": ("FSDP2",),
    "all cores": ("one process, all cores",),
    "one core": ("one device",),
}
"""The columns of `compare`, and the names of the contestants of which each shows the fastest."""


def compare(report: dict[str, Any]) -> str:
    """Seconds of Penstock, and how many times as long the others take; a line a model."""
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * (1 + len(COLUMNS)) + "|"]
    plans = []
    for model in report["models"]:
        found = {column: _fastest(model["rows"], names) for column, names in COLUMNS.items()}
        cells = [_cell(row, column == "Penstock") for column, row in found.items()]
        lines.append(f"| {' | '.join([model['model'], *cells])} |")
        texts = [_described(row) for row in found.values() if row is not None]
        plans.append(f"- {model['model']}: {'; '.join(texts)}.")
    return "\n".join([*lines, "", *plans, "", *conditions(report["models"])])


def _fastest(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any] | None:
    """The fastest row of these names, which a colon and a configuration may follow."""
    kinds = {row["name"].partition(": ")[0]: row for row in rows}
    return min((kinds[n] for n in names if n in kinds), key=lambda row: row["slower"], default=None)


def _cell(row: dict[str, Any] | None, is_first: bool) -> str:
    if row is None:
        return "not run"
    if is_first:
        return f"{row['median']:.3g} s"
    return f"{row['slower']:.2f}x ± {row['slower_spread']:.2f}"


def _described(row: dict[str, Any]) -> str:
    """The configuration of a contestant."""
    return f"{row['name']}: {row['plan']}" if "plan" in row else str(row["name"])


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


def sums(report: dict[str, Any]) -> str:
    """Milliseconds with the ordered sum, and how many times as long steps with others take."""
    lines = [
        "| | in order | in no order | DistributedDataParallel |",
        "|---|---|---|---|",
    ]
    for result in report["results"]:
        ordered, unordered, *peers = result["rows"]
        cells = [f"{1e3 * ordered['median']:.3g} ms", _ratio(unordered)]
        cells += [f"{_ratio(row)} ({row['name'].removeprefix('DDP, ')})" for row in peers]
        own = f"| {result['model']}, {result['where']} | {' | '.join(cells)} |"
        lines.append(own if peers else f"{own} |")
    machine = report["machine"]
    return "\n".join(
        [
            *lines,
            "",
            f"Medians of {report['rounds']} rounds in turns, and half the distance between the\n"
            f"quartiles. {machine['processor']}, {machine['cores']} cores, torch "
            f"{report['torch']},\ncommit {report['commit']}, {report['date']}.",
        ]
    )


def _ratio(row: dict[str, Any]) -> str:
    return f"{row['to_ordered']:.3f}x ± {row['spread']:.3f}"


def watched(report: dict[str, Any]) -> str:
    """How many times as long steps take with the board, with requests, and recorded."""
    lines = [
        "| | a step | with the board | status and metrics | recorded |",
        "|---|---|---|---|---|",
    ]
    for each in report["costs"]:
        ratios = " | ".join(
            f"{median:.3f}x ({low:.3f} to {high:.3f})"
            for median, low, high in (each["board"], each["asked"], each["recorded"])
        )
        name = f"{each['model']}, {each['workers']}"
        lines.append(f"| {name} | {show_seconds(each['milliseconds'] / 1e3)} | {ratios} |")
    hung = ", ".join(
        f"{show_seconds(statistics.median(seconds))} with {workers}"
        for workers, seconds in report["hung"].items()
    )
    text = (
        "Medians of pairs, with 95 % intervals. The stack of a worker that hangs with Python's "
        f"lock is there after {hung}."
    )
    return "\n".join([*lines, "", f"{text} {_where(report)}"])


def attribution(report: dict[str, Any]) -> str:
    """How often the account named what was made wrong as what costs most."""
    lines = ["| what is wrong | pipelines | found |", "|---|---|---|"]
    lines += [
        f"| {cause} | {n} | {report['found'][cause]} |" for cause, n in report["cases"].items()
    ]
    return "\n".join([*lines, "", _where(report)])


def small(report: dict[str, Any]) -> str:
    """By how much predictions of small models were off."""
    lines = ["| | a step | predicted | after ten steps |", "|---|---|---|---|"]
    for each in report["models"]:
        took = statistics.median(run["measured"] for run in each["runs"])
        errors = [f"{each['errors'][what]:+.1%}" for what in ("predicted", "calibrated")]
        lines.append(f"| {each['model']} | {1e3 * took:.0f} ms | {' | '.join(errors)} |")
    texts = []
    for what, name in (("predicted", "predicted"), ("calibrated", "after ten steps")):
        sizes: list[float] = sorted(abs(each["errors"][what]) for each in report["models"])
        texts.append(f"{name}: median {statistics.median(sizes):.1%}, largest {sizes[-1]:.1%}")
    return "\n".join([*lines, "", f"{'; '.join(texts)}. {_where(report)}"])


def generation(report: dict[str, Any]) -> str:
    """Generation, inference and one sequence beside others, and what a pass costs."""
    models = report["models"]
    return "\n\n".join(
        [
            _generated(models),
            _one_sequence(models),
            _inferred(models),
            _passes(models[-1]["steps"]),
            "\n".join(_measured_at(models)),
        ]
    )


def _generated(models: Sequence[dict[str, Any]]) -> str:
    """How many times as long as Penstock in threads others take for all sequences."""
    names = {
        "in processes": ("Penstock, processes",),
        "stages in turn": ("stages in turn", "stages in turn, accelerate's hooks"),
        "transformers' pipeline": ("transformers' pipeline",),
    }
    titles = " | ".join([*names, "the machine allows"])
    lines = [f"| generation | in threads | {titles} |", "|---" * 6 + "|"]
    for model in models:
        found = model["generation"]
        rows, same = found["rows"], found["same_groups"]
        first, best = rows[0], _fastest_of(rows, ("Penstock, threads",))
        speed = f"{found['tokens'] / first['median']:.0f} tokens/s, {same} groups"
        cells = [model["model"], speed]
        for each in names.values():
            alike = _fastest_of([row for row in rows if row["groups"] == same], each)
            own = _fastest_of(rows, each)
            if alike is None or own is None or best is None:
                cells.append("does not run")
                continue
            groups = f"{own['groups']} group{'s' if own['groups'] > 1 else ''}"
            ratio = own["median"] / best["median"]
            cells.append(f"{_times(alike)}; at best {ratio:.2f}x, {groups}")
        side_by_side = model["limit"]["a group"][-1]
        cells.append(f"{1 / side_by_side['to_first']:.2f}x of the stages in turn")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _one_sequence(models: Sequence[dict[str, Any]]) -> str:
    """How many times as long as one device a pipeline takes for one sequence."""
    titles = "one device", "in threads", "in processes", "stages alone, handed on"
    lines = [f"| one sequence | {' | '.join(titles)} |", "|---" * 5 + "|"]
    for model in models:
        first, *others = model["latency"]["rows"]
        ours = [row for row in others if row["name"].startswith("Penstock")]
        token = f"{1e3 * first['median'] / model['latency']['new_tokens']:.3g} ms a token"
        handed_on = model["limit"]["one sequence"][1]
        cells = [model["model"], token, *map(_times, ours), _times(handed_on)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _inferred(models: Sequence[dict[str, Any]]) -> str:
    """How many times as long as `pipe.map` in threads others take for batches."""
    names = ("Penstock, processes", "prepare_pippy", "one device")
    titles = "in processes", "`prepare_pippy`", "one device"
    lines = [f"| `pipe.map` | in threads | {' | '.join(titles)} |", "|---" * 5 + "|"]
    for model in models:
        rows = model["inference"]["rows"]
        first = rows[0]
        setting = first["name"].rpartition(", ")[2]
        cells = [model["model"], f"{1e3 * first['median']:.3g} ms, {setting}"]
        for name in names:
            row = next((row for row in rows if row["name"].startswith(name)), None)
            text = row["name"].removeprefix(name).removeprefix(", ") if row else ""
            cells.append(f"{_times(row)}{text and f', {text}'}" if row else "does not run")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _passes(steps: Sequence[dict[str, Any]]) -> str:
    """What a pass costs above its work, for one session and for one for each stage."""
    names = [row["name"] for row in steps[0]["rows"]]
    lines = [f"| a pass above its work | the work | {' | '.join(names)} |"]
    lines.append("|---" * (2 + len(names)) + "|")
    for each in steps:
        above = [f"{1e6 * row['above']:.0f} ± {1e6 * row['spread']:.0f} us" for row in each["rows"]]
        work = f"{1e6 * each['work']:.0f} us"
        lines.append(f"| {' | '.join([each['model'], work, *above])} |")
    return "\n".join(lines)


def _fastest_of(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> dict[str, Any] | None:
    """The fastest of those with these names."""
    named = [row for row in rows if row["name"] in names]
    return min(named, key=lambda row: float(row["median"]), default=None)


def _times(row: dict[str, Any]) -> str:
    return f"{row['to_first']:.2f}x ± {row['spread']:.2f}"


def _measured_at(models: Sequence[dict[str, Any]]) -> list[str]:
    """Where, when and how generation was measured; a line for all models that were alike."""
    alike: dict[str, list[str]] = {}
    for model in models:
        machine, how = model["machine"], model["settings"]
        count, rows, length = how["batches"]
        text = (
            f"{how['sequences']} sequences with prompts of {how['prompt']} tokens, "
            f"{how['new_tokens']} new tokens each; {count} batches of {rows} rows of {length} "
            f"tokens. Medians of {how['rounds']} rounds in turns, and half the distance between "
            f"the quartiles; every worker with one thread; {how['allocator']}. "
            f"{machine['processor']}, {machine['cores']} cores, torch {model['torch']}, commit "
            f"{model['commit']}, {model['date']}."
        )
        alike.setdefault(text, []).append(model["model"])
    if len(alike) == 1:
        return list(alike)
    return [f"- {'; '.join(names)}: {text}" for text, names in alike.items()]


def _where(report: dict[str, Any]) -> str:
    """Where and when something was measured."""
    machine = report["machine"]
    return (
        f"{machine['processor']}, {machine['cores']} cores,\ntorch {report['torch']}, commit "
        f"{report['commit']}, {report['date']}."
    )


def _of_models(report: dict[str, Any]) -> str:
    """Where and when models were measured; those that were measured apart are named."""
    alike: dict[str, list[str]] = {}
    for found in report["models"]:
        alike.setdefault(_where(found), []).append(found["model"])
    if len(alike) == 1:
        return next(iter(alike))
    return "\n".join(f"{'; '.join(names)}: {text}" for text, names in alike.items())


def conditions(models: Sequence[dict[str, Any]]) -> list[str]:
    """Where, when and how models were measured; a line for all that were alike."""
    alike: dict[str, list[str]] = {}
    for found in models:
        machine, settings = found["machine"], found["settings"]
        text = (
            f"Medians of {settings['rounds']} rounds in turns, the order drawn for each, after "
            f"{settings['warm_up']} that do not count; every peer in the configuration that was "
            f"its fastest over {settings['scout']} steps. {machine['processor']}, "
            f"{machine['cores']} cores, torch {found['torch']}, commit {found['commit']}, "
            f"{found['date']}; {settings['allocator']}; threads: {settings['threads']}."
        )
        alike.setdefault(text, []).append(found["model"])
    if len(alike) == 1:
        return list(alike)
    return [f"- {'; '.join(names)}: {text}" for text, names in alike.items()]


def starting(report: dict[str, Any]) -> str:
    """Seconds of scripts until their first step is done, and of building the pipeline in it."""
    ways = list(report["models"][0]["ways"])
    lines = [f"| | {' | '.join(ways)} |", "|---" * (1 + len(ways)) + "|"]
    for found in report["models"]:
        cells = []
        for starts in found["ways"].values():
            own = statistics.median(start.get("pipeline", 0.0) for start in starts)
            total = statistics.median(map(until_first_step, starts))
            cells.append(f"{total:.1f} s" + (f" ({own:.1f})" if own else ""))
        lines.append(f"| {' | '.join([found['model'], *cells])} |")
    rounds = {found["settings"]["rounds"] for found in report["models"]}
    return "\n".join(
        [
            *lines,
            "",
            "In parentheses the seconds of building the pipeline. Medians of "
            f"{', '.join(map(str, rounds))} starts in turns. {_of_models(report)}",
        ]
    )


def frameworks(report: dict[str, Any]) -> str:
    """Milliseconds of a framework's step on one core, and how many times as long others take."""
    titles = {"transformers": "Trainer", "lightning": "Lightning", "accelerate": "Accelerate"}
    names = [row["name"] for row in report["models"][0]["rows"]]
    lines = [f"| | {' | '.join(names)} |", "|---" * (1 + len(names)) + "|"]
    plans = []
    for found in report["models"]:
        first, *others = found["rows"]
        ratios = [f"{r['to_one_core']:.2f}x ± {r['to_one_core_spread']:.2f}" for r in others]
        cells = [titles[found["model"]], f"{1e3 * first['median']:.0f} ms", *ratios]
        lines.append(f"| {' | '.join(cells)} |")
        by_plan: dict[str, list[str]] = {}
        for row in others:
            by_plan.setdefault(row["plan"], []).append(row["name"])
        plans += [
            f"- {cells[0]}, {' and '.join(by_plan[plan])}: {plan}." for plan in by_plan if plan
        ]
    rounds = ", ".join(map(str, {found["settings"]["rounds"] for found in report["models"]}))
    return "\n".join(
        [*lines, "", *plans, "", f"Medians of {rounds} processes in turns. {_of_models(report)}"]
    )


TABLES: dict[str, Callable[[dict[str, Any]], str]] = {
    "compare": compare,
    "capture_time": capture_time,
    "sums": sums,
    "small": small,
    "attribution": attribution,
    "watched": watched,
    "generation": generation,
    "starting": starting,
    "frameworks": frameworks,
}


def filled(text: str, data: Path = DATA) -> str:
    """The text of a page, with its tables made anew from the data.

    Args:
        text: the page as it is.
        data: the folder of the data; a table without data stays as it is.

    Raises:
        ValueError: the page names a table that does not exist.
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
    """Write the tables; with --check write nothing, and return 1 if a page is out of date."""
    parser = ArgumentParser("python -m penstock.bench tables", description=__doc__)
    parser.add_argument("--check", action="store_true", help="check only; 1 if out of date")
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
