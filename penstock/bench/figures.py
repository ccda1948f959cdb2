"""The figures of the experiments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.bench.measure import Contestant
from penstock.errors import PenstockError

_PLAIN, _OURS, _OTHER = "#9aa5b1", "#4c78a8", "#f2a65a"


def save_bars(contestants: Sequence[Contestant], path: Path, title: str) -> None:
    """Bars with error bars: the mean of the repeats and their standard deviation.

    Raises:
        PenstockError: matplotlib is not installed.
    """
    figure, axes = _canvas()
    places = range(len(contestants))
    means = [c.mean for c in contestants]
    errors = [c.deviation for c in contestants]
    colours = [_OURS if "bound_seconds" in c.facts else _PLAIN for c in contestants]
    axes.bar(places, means, yerr=errors, color=colours, capsize=4, width=0.65)
    for place, contestant in zip(places, contestants, strict=True):
        height = contestant.mean + contestant.deviation
        speed = contestants[0].mean / contestant.mean
        text = f"{_time(contestant.mean)}\n{speed:.2f}x"
        axes.text(place, height, text, ha="center", va="bottom", fontsize=9)
    axes.set_xticks(places, [c.name.replace(", ", ",\n") for c in contestants], fontsize=9)
    axes.set_ylabel("seconds, mean and standard deviation")
    axes.set_ylim(0, 1.2 * max(c.mean + c.deviation for c in contestants))
    _finish(figure, axes, path, title)


def save_sweep(contestants: Sequence[Contestant], path: Path, title: str) -> None:
    """Time against micro-batch size; the best that was found, and Penstock's own choice.

    Args:
        contestants: one per size, and Penstock's choice at the end.
        path: of the PNG file.
        title: above the figure.

    Raises:
        PenstockError: matplotlib is not installed.
    """
    figure, axes = _canvas()
    swept = sorted(contestants[:-1], key=_size)
    chosen = contestants[-1]
    best = min(swept, key=lambda c: c.median)
    sizes, means = [_size(c) for c in swept], [c.mean for c in swept]
    errors = [c.deviation for c in swept]
    axes.errorbar(sizes, means, yerr=errors, fmt="o-", color=_PLAIN, capsize=4, label="sweep")
    axes.plot(_size(best), best.mean, "o", ms=13, mfc="none", mec=_OTHER, mew=2, label="best found")
    axes.errorbar(
        [_size(chosen)],
        [chosen.mean],
        yerr=[chosen.deviation],
        fmt="*",
        ms=15,
        color=_OURS,
        capsize=4,
        label="Penstock's own choice",
    )
    axes.set_xscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    axes.set_xlabel("rows in a micro-batch")
    axes.set_ylabel("seconds, mean and standard deviation")
    axes.set_ylim(0, 1.1 * max(c.mean + c.deviation for c in contestants))
    axes.legend(frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
    _finish(figure, axes, path, title)


def _size(contestant: Contestant) -> int:
    return int(contestant.facts["microbatch_size"])


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.2f} ms"


def _canvas() -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise PenstockError("figures need matplotlib: pip install 'penstock[report]'") from error
    figure = Figure(figsize=(9, 4.2))
    return figure, figure.subplots()


def _finish(figure: Any, axes: Any, path: Path, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=130, bbox_inches="tight")
