"""The figures of the experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.bench.replica_memory import Memory
from penstock.bench.rpc_report import Line
from penstock.bench.turns import Contestant
from penstock.display.figures import bare, canvas, save
from penstock.units import show_seconds

_PLAIN, _OURS, _FOUND = "#9aa5b1", "#4c78a8", "#e1812c"


def save_bars(contestants: Sequence[Contestant], path: Path, title: str) -> None:
    """Bars with error bars: the mean of the repeats and their standard deviation.

    The text over each bar gives its mean and its speed-up over the first bar.

    Args:
        contestants: pipelines and others; the first one is what the others are compared with.
        path: of the PNG file.
        title: above the figure.
    """
    figure, axes = canvas(9, 4.2)
    places = range(len(contestants))
    colours = [_OURS if "schedule" in c.facts else _PLAIN for c in contestants]
    errors = {"ecolor": "#4a4f55", "capsize": 4}
    scale = _label_seconds(axes, contestants)
    means = [scale * c.mean for c in contestants]
    spreads = [scale * c.deviation for c in contestants]
    axes.bar(places, means, yerr=spreads, color=colours, width=0.65, error_kw=errors)
    for place, contestant in zip(places, contestants, strict=True):
        speed = f"{contestants[0].mean / contestant.mean:.2f}x" if place else ""
        text = (
            f"{show_seconds(contestant.mean)}\n{speed}" if place else show_seconds(contestant.mean)
        )
        top = (place, scale * (contestant.mean + contestant.deviation))
        axes.annotate(text, top, (0, 3), textcoords="offset points", ha="center", va="bottom")
    axes.set_xticks(places, [_broken(c.name) for c in contestants], fontsize=9)
    axes.tick_params(axis="x", length=0)
    _finish(figure, axes, path, title)


def save_sweep(contestants: Sequence[Contestant], path: Path, title: str) -> None:
    """Times against micro-batch sizes, with marks at the best one and at Penstock's choice.

    Args:
        contestants: one per size, and Penstock's choice at the end.
        path: of the PNG file.
        title: above the figure.
    """
    figure, axes = canvas(9, 4.2)
    swept, chosen = sorted(contestants[:-1], key=_size), contestants[-1]
    best = min(swept, key=lambda c: c.median)
    scale = _label_seconds(axes, contestants)
    ring = {"mfc": "none", "mec": _FOUND, "mew": 2, "zorder": 4}
    handles = [
        _points(axes, swept, scale, fmt="o-", ms=5, color=_PLAIN, label="measured"),
        *axes.plot(
            _size(best), scale * best.mean, "o", ms=14, label=f"best: {_size(best)}", **ring
        ),
        _points(axes, [chosen], scale, fmt="D", ms=7, color=_OURS, zorder=5, label=_chosen(chosen)),
    ]
    axes.set_xscale("log")
    sizes = [_size(c) for c in swept]
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("rows in a micro-batch")
    axes.grid(axis="y", color="#e6e8ea")
    axes.set_axisbelow(True)
    axes.legend(handles=handles, frameon=False, loc="upper right", ncols=3)
    _finish(figure, axes, path, title)


def save_counts(lines: Sequence[Line], limits: Mapping[int, float], path: Path, title: str) -> None:
    """Time against the number of micro-batches, a line for each way, and their limit dashed.

    Args:
        lines: one for each way of training; the way that the others are compared with is first.
        limits: seconds, by the number of micro-batches.
        path: of the PNG file.
        title: above the figure.
    """
    figure, axes = canvas(9, 4.2)
    scale = _label_seconds(axes, [c for line in lines for c in line.contestants])
    for line, colour in zip(lines, (_PLAIN, _OURS, _FOUND), strict=False):
        means = [scale * c.mean for c in line.contestants]
        spreads = [scale * c.deviation for c in line.contestants]
        style = {"color": colour, "capsize": 4, "label": line.way}
        axes.errorbar(line.counts, means, yerr=spreads, fmt="o-", ms=5, **style)
    label = "limit: (m + 1) / 2m of one device"
    bounds = [scale * limit for limit in limits.values()]
    axes.plot(list(limits), bounds, "--", color="#57606a", lw=1, label=label)
    axes.set_xscale("log", base=2)
    counts = lines[0].counts
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.set_xlabel("micro-batches, m")
    axes.grid(axis="y", color="#e6e8ea")
    axes.set_axisbelow(True)
    axes.legend(frameon=False, loc="upper right", ncols=2)
    _finish(figure, axes, path, title)


def save_memory(memory: Memory, path: Path, title: str) -> None:
    """Bars of the private memory of every process in MiB, with a panel for each scheme.

    Memory is counted beyond that of the processes at rest. The text under a panel gives the shared
    memory, with each page counted once, and the total of all processes.

    Args:
        memory: what was measured.
        path: of the PNG file.
        title: above the figure.
    """
    figure, panels = canvas(9, 4.2, len(memory.schemes))
    most = max(p.private for scheme in memory.schemes for p in scheme.processes)
    for axes, scheme in zip(panels, memory.schemes, strict=True):
        names = [process.name.replace(" ", "\n") for process in scheme.processes]
        private = [process.private / 2**20 for process in scheme.processes]
        colours = [_OURS if each in scheme.workers else _PLAIN for each in scheme.processes]
        bars = axes.bar(range(len(names)), private, color=colours, width=0.65)
        axes.bar_label(bars, [f"{size:.0f}" for size in private], padding=2)
        axes.set_xticks(range(len(names)), names, fontsize=9)
        axes.tick_params(axis="x", length=0)
        axes.set_ylim(0, 1.15 * most / 2**20)
        axes.set_title(scheme.name, fontsize=10)
        shared, total = scheme.shared / 2**20, scheme.total / 2**20
        axes.set_xlabel(f"shared, counted once: {shared:.0f} MiB; all: {total:.0f} MiB")
        bare(axes)
    panels[0].set_ylabel("private memory, MiB")
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    save(figure, path)


def _points(axes: Any, contestants: Sequence[Contestant], scale: float, **style: Any) -> Any:
    means = [scale * c.mean for c in contestants]
    spreads = [scale * c.deviation for c in contestants]
    sizes = [_size(c) for c in contestants]
    return axes.errorbar(sizes, means, yerr=spreads, capsize=4, **style)


def _label_seconds(axes: Any, contestants: Sequence[Contestant]) -> float:
    """Label and scale the axis of times; returns the factor from seconds to its unit."""
    top = max(c.mean + c.deviation for c in contestants)
    scale, unit = (1.0, "seconds") if top >= 0.1 else (1e3, "milliseconds")
    axes.set_ylabel(f"{unit} (mean ± standard deviation)")
    axes.set_ylim(0, 1.22 * scale * top)
    return scale


def _chosen(contestant: Contestant) -> str:
    return f"chosen by Penstock: {_size(contestant)}"


def _size(contestant: Contestant) -> int:
    return int(contestant.facts["microbatch_size"])


def _broken(name: str) -> str:
    return name.replace(", ", ",\n").replace("'s ", "'s\n")


def _finish(figure: Any, axes: Any, path: Path, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, pad=12)
    bare(axes)
    save(figure, path)
