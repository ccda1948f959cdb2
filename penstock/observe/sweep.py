"""Draws predictions for machines that one does not have (`penstock simulate --figure`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.display.figures import bare, canvas, save
from penstock.errors import PenstockError
from penstock.plan.whatif import Predicted
from penstock.units import show_bytes, show_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = (
    "#4c78a8",
    "#e8743b",
    "#5fa39a",
    "#b07aa1",
    "#9c755f",
    "#d4a017",
    "#7f7f7f",
    "#d37295",
    "#2f6f4f",
)
_GRID, _IDEAL = "#e6e8ea", "#9aa5b1"
_MARKERS = "osD^vPX*"

_Measure = Callable[[Predicted], float]
_Series = dict[str, list[Predicted]]


class _Setting(NamedTuple):
    """What the outcomes of a series have in common."""

    schedule: str
    num_microbatches: int
    bandwidth: float | None
    latency: float | None


def save_sweep(outcomes: Sequence[Predicted], path: Path, title: str) -> None:
    """Throughput and efficiency against the number of workers, and memory against schedule.

    With one number of workers all three are bars.

    Args:
        outcomes: what was predicted; those that are not possible are left out.
        path: the file; its suffix says the format, such as `.png`, `.svg` or `.pdf`.
        title: above the figure.

    Raises:
        PenstockError: nothing is possible, matplotlib is not installed, or the file cannot be
            written.
    """
    possible = [outcome for outcome in outcomes if outcome.step_seconds]
    if not possible:
        raise PenstockError("there is nothing to draw: none of the cases is possible")
    series = _series(possible)
    figure, (left, middle, right) = canvas(14, max(4.2, 0.35 * len(series)), panels=3)
    if len({outcome.case.workers for outcome in possible}) > 1:
        _lines(left, series, _throughput)
        _ideal(left, possible)
        left.set_yscale("log")
        left.set_ylabel("samples per second")
        left.legend(frameon=False, fontsize=9)
        _lines(middle, series, _efficiency)
        middle.set_ylim(0, 105)
        middle.set_ylabel("efficiency, %")
    else:
        _bars(left, series, _throughput, "samples per second")
        _bars(middle, series, _efficiency, "efficiency, %")
    most = max(outcome.case.workers for outcome in possible)
    largest = {name: [o for o in own if o.case.workers == most] for name, own in series.items()}
    _bars(right, largest, _memory, f"memory of the fullest of {most} workers, GB")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    figure.tight_layout()
    save(figure, path)


def _throughput(outcome: Predicted) -> float:
    return outcome.samples_per_second or 0.0


def _efficiency(outcome: Predicted) -> float:
    return 100 * (outcome.efficiency or 0.0)


def _memory(outcome: Predicted) -> float:
    return outcome.memory_bytes / 1e9


def _series(outcomes: Sequence[Predicted]) -> _Series:
    """The outcomes that differ in the number of workers alone, by what they have in common."""
    common: dict[_Setting, list[Predicted]] = {}
    for outcome in outcomes:
        case = outcome.case
        key = _Setting(case.schedule, case.num_microbatches, case.bandwidth, case.latency)
        common.setdefault(key, []).append(outcome)
    changing = [len(set(column)) > 1 for column in zip(*common, strict=True)]
    return {
        _named(key, changing): sorted(own, key=lambda outcome: outcome.case.workers)
        for key, own in common.items()
    }


def _named(key: _Setting, changing: Sequence[bool]) -> str:
    """What distinguishes a series from the others."""
    names = (
        key.schedule,
        f"{key.num_microbatches} micro-batches",
        f"{show_bytes(key.bandwidth)}/s" if key.bandwidth else "",
        show_seconds(key.latency) if key.latency is not None else "",
    )
    chosen = [name for name, changes in zip(names, changing, strict=True) if changes]
    return ", ".join(filter(None, chosen)) or key.schedule


def _lines(axes: Axes, series: _Series, measure: _Measure) -> None:
    """A line for every series, over the number of workers."""
    for number, (name, own) in enumerate(series.items()):
        colour, marker = _COLOURS[number % len(_COLOURS)], _MARKERS[number % len(_MARKERS)]
        workers = [outcome.case.workers for outcome in own]
        values = [measure(outcome) for outcome in own]
        axes.plot(workers, values, f"{marker}-", label=name, color=colour, markersize=5)
    counts = sorted({outcome.case.workers for own in series.values() for outcome in own})
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_xlabel("workers")
    axes.grid(color=_GRID)
    axes.set_axisbelow(True)
    bare(axes)


def _ideal(axes: Axes, outcomes: Sequence[Predicted]) -> None:
    """The line of workers that each work alone and wait for nothing: 100 % efficiency."""
    ideal = {
        o.case.workers: o.samples_per_second / o.efficiency
        for o in outcomes
        if o.samples_per_second and o.efficiency
    }
    workers = sorted(ideal)
    axes.plot(workers, [ideal[w] for w in workers], "--", color=_IDEAL, label="ideal", zorder=1)


def _bars(axes: Axes, series: _Series, measure: _Measure, label: str) -> None:
    """A bar for every series that has an outcome, in the colour of its line."""
    drawn = {
        name: (measure(own[-1]), _COLOURS[number % len(_COLOURS)])
        for number, (name, own) in enumerate(series.items())
        if own
    }
    values, colours = zip(*drawn.values(), strict=True)
    bars = axes.barh(list(drawn), values, color=colours, height=0.65)
    axes.bar_label(bars, [f"{value:.3g}" for value in values], padding=4, fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max(values) or 1)
    axes.set_xlabel(label)
    axes.tick_params(axis="y", length=0)
    bare(axes)
