"""Timelines to look at: as a figure, and as text for the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.schedule import Event, Kind, Timeline

_COLOURS = {Kind.FORWARD: "#4c78a8", Kind.BACKWARD: "#f2a65a"}
_NAMES = {Kind.FORWARD: "forward", Kind.BACKWARD: "backward"}
_LABELS = {Kind.FORWARD: "white", Kind.BACKWARD: "#2b2f33"}
_IDLE = "#eceef0"
_MARGIN, _PER_DIGIT = 0.0065, 0.0063  # of the width; a box with less room gets no number


def save_figure(timeline: Timeline, path: Path, title: str | None = None) -> None:
    """Draw who was busy when: a lane per worker, a box per action, its micro-batch's number in it.

    Args:
        timeline: what happened.
        path: of the PNG file.
        title: above the figure.

    Raises:
        PenstockError: matplotlib is not installed.
    """
    figure, axes = _canvas(height=0.9 + 0.62 * timeline.num_workers)
    for worker in range(timeline.num_workers):
        axes.barh(worker, 1e3 * timeline.seconds, height=0.8, color=_IDLE)
    for event in timeline.events:
        _draw(axes, event, timeline.seconds)
    _label_workers(axes, timeline)
    axes.set_xlim(0, 1e3 * timeline.seconds)
    axes.set_ylim(timeline.num_workers - 0.45, -0.55)
    axes.set_xlabel("milliseconds since the step began; the numbers are micro-batches")
    axes.set_title(title or "One training step", loc="left", fontsize=11)
    colours = {**{_NAMES[kind]: colour for kind, colour in _COLOURS.items()}, "idle": _IDLE}
    handles = [_legend(name, colour) for name, colour in colours.items()]
    axes.legend(handles=handles, ncol=3, loc="lower right", bbox_to_anchor=(1, 1), frameon=False)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, dpi=140, bbox_inches="tight")


def as_text(timeline: Timeline, width: int = 80) -> str:
    """A line per worker: digits are the micro-batches of forwards, letters those of backwards.

    A column is `timeline.seconds / width`; it shows what ran for most of it, `.` where nothing did.
    """
    lines = []
    for worker, busy in enumerate(timeline.busy()):
        events = [e for e in timeline.events if e.worker == worker]
        cells = [_cell(events, timeline.seconds, column, width) for column in range(width)]
        share = busy / timeline.seconds if timeline.seconds else 0.0
        lines.append(f"worker {worker} |{''.join(cells)}| {share:.0%} busy")
    return "\n".join(lines)


def _cell(events: list[Event], seconds: float, column: int, width: int) -> str:
    """The sign for one column."""
    low, high = column * seconds / width, (column + 1) * seconds / width
    best, sign = (high - low) / 2, "."
    for event in events:
        overlap = min(event.end, high) - max(event.start, low)
        if overlap >= best:
            first = "0" if event.action.kind is Kind.FORWARD else "a"
            signs = 10 if event.action.kind is Kind.FORWARD else 26
            best, sign = overlap, chr(ord(first) + event.action.microbatch % signs)
    return sign


def _canvas(height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise PenstockError("figures need matplotlib: pip install 'penstock[report]'") from error
    figure = Figure(figsize=(10, height))
    return figure, figure.subplots()


def _draw(axes: Any, event: Event, total: float) -> None:
    start, length = 1e3 * event.start, 1e3 * (event.end - event.start)
    colour = _COLOURS[event.action.kind]
    axes.barh(event.worker, length, left=start, height=0.8, color=colour, edgecolor="white")
    text = str(event.action.microbatch)
    if event.end - event.start > (_MARGIN + _PER_DIGIT * len(text)) * total:
        place = (start + length / 2, event.worker)
        ink = _LABELS[event.action.kind]
        axes.text(*place, text, ha="center", va="center", fontsize=9, color=ink)


def _label_workers(axes: Any, timeline: Timeline) -> None:
    workers = range(timeline.num_workers)
    axes.set_yticks(workers, [f"worker {w}" for w in workers])
    axes.tick_params(axis="y", length=0)
    for worker, busy in enumerate(timeline.busy()):
        share = busy / timeline.seconds if timeline.seconds else 0.0
        place = (1.01 * 1e3 * timeline.seconds, worker)
        axes.annotate(f"{share:.0%} busy", place, va="center", fontsize=9, annotation_clip=False)


def _legend(name: str, colour: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=name)
