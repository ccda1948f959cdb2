"""What is known of a run, as one HTML page that needs nothing else, and as text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.resources import files
from typing import TYPE_CHECKING, NamedTuple

import msgspec
from msgspec.structs import replace

from penstock.account.attribution import BETWEEN, WAITING, WORKING, LostTime
from penstock.account.history import History
from penstock.display.tables import aligned
from penstock.errors import PenstockError
from penstock.files import save_whole
from penstock.observe.charts import (
    history_chart,
    memory_charts,
    run_memory_charts,
    staircase,
    thinned,
)
from penstock.observe.findings import MEANINGS, PARTS, Findings, awaited, remedy, rounded, where
from penstock.plan.plan import Plan
from penstock.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from jinja2 import Environment

_SCALES = (
    (10.0, 1.0, "s", "seconds"),
    (1e-3, 1e3, "ms", "milliseconds"),
    (0.0, 1e6, "us", "microseconds"),
)
_ENTRIES = 4096  # of the times of steps, in the data of a page: half a megabyte
_NAMED = 3  # of those that a worker waited for
_DIGITS = 3  # after the point, of seconds in tables


class Cell(NamedTuple):
    """A part of a worker's time.

    Attributes:
        name: the name of the part.
        seconds: the time that it took.
        shown: `seconds` as text in the unit of the table, rounded so that the cells of a worker add
            up to its total as shown.
        percent: `share` as text, rounded so that the cells of a worker add up to 100.0.
        share: the part of the whole, in percent.
    """

    name: str
    seconds: float
    shown: str
    percent: str
    share: float


class Bar(NamedTuple):
    """Where the time of one worker went.

    Attributes:
        title: the worker or the run whose time this is.
        cells: the parts, which add up to the whole.
        total: the whole as text, in the unit of the table.
        waited_for: whom the worker waited for, in words; empty for a run.
        width: the width of the bar, in percent of the longest one.
    """

    title: str
    cells: list[Cell]
    total: str
    waited_for: str
    width: float = 100.0


class Row(NamedTuple):
    """A line of the comparison of two runs: a name, both, and how they differ."""

    name: str
    here: str
    there: str
    difference: str


def save_report(
    history: History, path: str | os.PathLike[str], other: History | None = None
) -> None:
    """Write the report of a run as one HTML file, which needs no network.

    Args:
        history: of the run.
        path: of the file.
        other: a run to compare it with.

    Raises:
        InputError: it cannot be written there.
        PenstockError: jinja2 is not installed.
    """
    save_whole(path, report_html(history, other).encode(), "report")


def report_html(history: History, other: History | None = None) -> str:
    """The report of a run as one HTML page, which needs no network.

    Args:
        history: of the run.
        other: a run to compare it with.

    Raises:
        PenstockError: jinja2 is not installed.
    """
    from markupsafe import Markup

    found = Findings(history)
    compared = Findings(other) if other is not None else None
    here = files("penstock.observe")
    unit = _unit(found.mean_seconds)
    page = _environment().get_template("report.html.jinja")
    return page.render(
        found=found,
        about=history.about,
        plan=found.plan,
        when=_date(history.about.description.began),
        until=_date(history.steps[-1].at) if history.steps else "",
        unit=unit,
        bars=_bars(found),
        families=_families(found.occurring),
        meanings=MEANINGS,
        losses=[_cost(loss, found.mean_seconds) for loss in found.losses],
        stages=_stages(found.plan),
        memory=memory_charts(found.typical, found.plan) if found.typical else [],
        run_memory=run_memory_charts(history),
        chart=history_chart(found),
        events=[(_date(e.at), e.step, e.what) for e in history.events],
        both_unit=_unit(max(found.mean_seconds, compared.mean_seconds if compared else 0.0)),
        comparison=_comparison(found, compared) if compared is not None else [],
        both=_both(found, compared) if compared is not None else [],
        parts_compared=_parts_compared(found, compared) if compared is not None else [],
        other_about=other.about if other is not None else None,
        staircase=Markup(_embedded(staircase(found))),
        raw=Markup(_embedded(replace(history, steps=thinned(history.steps, _ENTRIES)))),
        is_thinned=len(history.steps) > _ENTRIES,
        style=Markup(here.joinpath("report.css").read_text("utf-8")),
        script=Markup(here.joinpath("report.js").read_text("utf-8")),
    )


def _environment() -> Environment:
    """The templates, which escape what they are given.

    Raises:
        PenstockError: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, FunctionLoader, StrictUndefined
    except ModuleNotFoundError as error:
        raise PenstockError("reports need jinja2: pip install 'penstock[report]'") from error
    here = files("penstock.observe")
    found = Environment(
        loader=FunctionLoader(lambda name: here.joinpath(name).read_text("utf-8")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "seconds": show_seconds,
        "bytes": show_bytes,
        "slug": _slug,
        "written_out": _written_out,
    }
    return found


def _embedded(value: object) -> str:
    """JSON that may stand in a script element: nothing in it ends or opens an element."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")


def _slug(name: str) -> str:
    """A name of a part as a class of CSS."""
    return name.replace(" ", "-")


def _date(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


# -- parts --------------------------------------------------------------------------------


def _unit(seconds: float) -> str:
    """The unit of a table whose largest entry this is."""
    return next(unit for least, _, unit, _ in _SCALES if seconds >= least)


def _factor(unit: str) -> float:
    """How many of this unit a second has."""
    return next(factor for _, factor, name, _ in _SCALES if name == unit)


def _written_out(unit: str) -> str:
    return next(written for _, _, name, written in _SCALES if name == unit)


def _cells(parts: Mapping[str, float], names: Sequence[str], unit: str) -> list[Cell]:
    """The parts of one worker's time; what is shown adds up to the whole that is shown."""
    values = [parts.get(name, 0.0) for name in names]
    whole = sum(values)
    small = 10**_DIGITS
    shown = rounded(values, round(whole * _factor(unit) * small))
    percent = rounded(values, 1000)
    return [
        Cell(
            name,
            seconds,
            f"{count / small:.{_DIGITS}f}",
            f"{tenths / 10:.1f}",
            100 * seconds / whole if whole else 0.0,
        )
        for name, seconds, count, tenths in zip(names, values, shown, percent, strict=True)
    ]


def _total(seconds: float, unit: str) -> str:
    small = 10**_DIGITS
    return f"{round(seconds * _factor(unit) * small) / small:.{_DIGITS}f}"


def _bars(found: Findings) -> list[Bar]:
    """Where every worker's time went."""
    unit, names = _unit(found.mean_seconds), found.occurring
    return [
        Bar(
            f"Worker {worker}",
            _cells(parts, names, unit),
            _total(sum(parts.values()), unit),
            _waited(waited, found),
        )
        for worker, (parts, waited) in enumerate(zip(found.parts, found.waited_for, strict=True))
    ]


def _waited(waited: Mapping[int, float], found: Findings) -> str:
    """Whom a worker waited for, and why; the longest first, and only the first few are named."""
    ordered = sorted(waited.items(), key=lambda item: -item[1])
    named = ordered if len(ordered) <= _NAMED + 1 else ordered[:_NAMED]
    texts = []
    for who, seconds in named:
        why = found.why_late(who)
        texts.append(f"{awaited(who)} ({show_seconds(seconds)}{f': {why}' if why else ''})")
    if others := ordered[len(named) :]:
        rest = sum(seconds for _, seconds in others)
        texts.append(f"{len(others)} others ({show_seconds(rest)})")
    return ", ".join(texts)


def _families(names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The parts that occur, by what they have in common."""
    families = {
        "Working": WORKING,
        "Waiting in a pass": WAITING,
        "Between passes": (*BETWEEN, *(name for name in names if name not in PARTS)),
    }
    return [
        (title, own)
        for title, of in families.items()
        if (own := [name for name in names if name in of])
    ]


class Cost(NamedTuple):
    """What one cause costs, as the page shows it."""

    cause: str
    about: str
    seconds: str
    percent: float
    meaning: str
    remedy: str


def _cost(loss: LostTime, whole: float) -> Cost:
    return Cost(
        loss.cause,
        where(loss).strip(" ()"),
        show_seconds(loss.seconds),
        100 * loss.seconds / whole if whole else 0.0,
        MEANINGS.get(loss.cause, ""),
        remedy(loss.cause),
    )


def _stages(plan: Plan) -> list[dict[str, str]]:
    """What the plan says of every stage of the first replica."""
    return [
        {
            "number": str(number),
            "worker": f"{stage.worker} ({stage.device})",
            "modules": " … ".join(dict.fromkeys((stage.first, stage.last))),
            "weights": show_bytes(stage.weight_bytes),
            "enters": show_bytes(stage.input_bytes),
            "forward": show_seconds(stage.forward_seconds),
            "backward": show_seconds(stage.backward_seconds),
            "memory": show_bytes(stage.memory_bytes),
        }
        for number, stage in enumerate(plan.stages)
    ]


# -- two runs -----------------------------------------------------------------------------


def _comparison(here: Findings, there: Findings) -> list[Row]:
    """What two runs were, side by side."""
    plans = here.plan, there.plan
    rows = [
        Row(
            "model",
            here.history.about.description.model,
            there.history.about.description.model,
            "",
        ),
        Row("schedule", plans[0].schedule, plans[1].schedule, ""),
        Row("devices", here.devices, there.devices, ""),
        Row("stages", str(len(plans[0].stages)), str(len(plans[1].stages)), ""),
        Row("replicas", str(plans[0].replicas), str(plans[1].replicas), ""),
        Row("rows of a planned batch", str(plans[0].batch_size), str(plans[1].batch_size), ""),
        Row("micro-batches", str(plans[0].num_microbatches), str(plans[1].num_microbatches), ""),
        _differing("step, median", here.step_seconds, there.step_seconds),
        _differing("predicted step", *(plan.predicted_step_seconds for plan in plans)),
        _differing("lower bound", *(plan.bound_seconds for plan in plans)),
    ]
    rate, other = here.rows_per_second, there.rows_per_second
    if rate and other:
        rows.append(Row("rows per second", f"{rate:.4g}", f"{other:.4g}", _change(rate, other)))
    return rows


def _differing(name: str, here: float | None, there: float | None) -> Row:
    def text_of(seconds: float | None) -> str:
        return "not known" if seconds is None else show_seconds(seconds)

    return Row(name, text_of(here), text_of(there), _change(here, there))


def _change(here: float | None, there: float | None) -> str:
    """How much more one has than the other, as a percentage of the other."""
    if here is None or not there:
        return ""
    return f"{100 * (here - there) / there:+.1f}%"


def _both(here: Findings, there: Findings) -> list[Bar]:
    """The means of all workers of both runs, as bars of the same scale."""
    longest = max(here.mean_seconds, there.mean_seconds)
    unit = _unit(longest)
    bars = []
    for title, found in (("This run", here), ("The other run", there)):
        if found.usual:
            cells = _cells(found.mean_parts, found.occurring, unit)
            width = 100 * found.mean_seconds / longest
            bars.append(Bar(title, cells, _total(found.mean_seconds, unit), "", width))
    return bars


def _parts_compared(here: Findings, there: Findings) -> list[Row]:
    """The parts of both runs, the means of all workers."""
    unit = _unit(max(here.mean_seconds, there.mean_seconds))
    names = [name for name in PARTS if name in {*here.occurring, *there.occurring}]
    names += sorted({*here.occurring, *there.occurring} - {*PARTS})
    pairs = [(n, here.mean_parts.get(n, 0.0), there.mean_parts.get(n, 0.0)) for n in names]
    pairs.append(("all", here.mean_seconds, there.mean_seconds))
    return [
        Row(name, _total(a, unit), _total(b, unit), f"{(a - b) * _factor(unit):+.{_DIGITS}f}")
        for name, a, b in pairs
    ]


# -- text and data ------------------------------------------------------------------------


def report_text(history: History, width: int | None = None) -> str:
    """The report of a run in short, for a terminal.

    Args:
        history: of the run.
        width: how long lines may be; those of sentences are not broken.
    """
    found = Findings(history)
    description = history.about.description
    sentences = [
        f"{description.model} (process {description.pid} on {description.host}): "
        f"{description.plan}",
        *found.plan_in_words,
        "",
        found.headline,
        found.against_prediction,
        found.against_bound,
        found.against_one_device,
        found.where_it_goes,
        *history.notes,
    ]
    lines = [sentences[0], *(line for line in sentences[1:] if line)]
    if found.parts:
        lines += ["", f"Where every worker's time went. {found.left_out}"]
        lines += aligned(_parts_table(found), (0,), width)
        lines += [
            f"worker {worker} waited for {_waited(waited, found)}"
            for worker, waited in enumerate(found.waited_for)
            if waited
        ]
    if found.losses:
        lines += ["", "What a step would take less without each cause:"]
        lines += aligned(_losses_table(found), (0, 1), width)
    if found.suggestions:
        lines += ["", "What to try:"]
        for each in found.suggestions:
            lines += [f"{each.gain:4.0%}  {each.what}:", f"      {each.why}"]
    return "\n".join(lines)


def _parts_table(found: Findings) -> list[list[str]]:
    """A line for every part, a column for every worker."""
    bars, unit = _bars(found), _unit(found.mean_seconds)
    rows = [[_written_out(unit), *(f"worker {worker}" for worker in range(len(bars)))]]
    for place, name in enumerate(found.occurring):
        cells = [bar.cells[place] for bar in bars]
        rows.append([name, *(f"{cell.shown} {cell.percent:>5}%" for cell in cells)])
    return [*rows, ["all", *(f"{bar.total} 100.0%" for bar in bars)]]


def _losses_table(found: Findings) -> list[list[str]]:
    rows = [["cause", "where", "seconds", "share"]]
    for loss in found.losses:
        cost = _cost(loss, found.mean_seconds)
        rows.append([cost.cause, cost.about, cost.seconds, f"{cost.percent:.1f}%"])
    return rows


def report_data(history: History) -> dict[str, object]:
    """What is found in a run, as plain data for JSON."""
    found = Findings(history)
    data = {
        "model": history.about.description.model,
        "plan": history.about.description.plan,
        "steps": found.num_steps,
        "step_seconds": found.step_seconds,
        "parts": found.parts,
        "waited_for": found.waited_for,
        "losses": found.losses,
        "drift": found.drift,
        "suggestions": found.suggestions,
        "outliers": found.outliers,
        "notes": list(history.notes),
        "accounts": found.accounts,
    }
    plain: dict[str, object] = msgspec.to_builtins(data, str_keys=True)
    return plain
