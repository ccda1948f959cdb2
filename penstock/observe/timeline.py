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
_MARGIN, _PER_DIGIT = 0.0065, 0.0063  # of the width that a number needs; narrower boxes get none
_FIRST_SIGN, _SIGNS = {Kind.FORWARD: "0", Kind.BACKWARD: "a"}, {Kind.FORWARD: 10, Kind.BACKWARD: 26}


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
    scale, unit = (1.0, "seconds") if timeline.seconds >= 1 else (1e3, "milliseconds")
    end = scale * timeline.seconds
    for worker in range(timeline.num_workers):
        axes.barh(worker, end, height=0.8, color=_IDLE)
    digits = len(str(max((e.action.microbatch for e in timeline.events), default=0)))
    room = (_MARGIN + _PER_DIGIT * digits) * timeline.seconds
    for event in timeline.events:
        _draw(axes, event, scale, numbered=event.end - event.start > room)
    _label_workers(axes, timeline)
    axes.set_xlim(0, end or 1)
    axes.set_ylim(timeline.num_workers - 0.45, -0.55)
    axes.set_xlabel(f"{unit} since the step began; the numbers are micro-batches")
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
    for worker, share in enumerate(_shares(timeline)):
        events = [e for e in timeline.events if e.worker == worker]
        cells = [_cell(events, timeline.seconds, column, width) for column in range(width)]
        lines.append(f"worker {worker} |{''.join(cells)}| {share:.0%} busy")
    return "\n".join(lines)


def _cell(events: list[Event], seconds: float, column: int, width: int) -> str:
    """The sign for one column."""
    low, high = column * seconds / width, (column + 1) * seconds / width
    best, sign = (high - low) / 2, "."
    for event in events:
        overlap = min(event.end, high) - max(event.start, low)
        if overlap >= best:
            best, sign = overlap, _sign(event)
    return sign


def _sign(event: Event) -> str:
    kind, microbatch = event.action.kind, event.action.microbatch
    return chr(ord(_FIRST_SIGN[kind]) + microbatch % _SIGNS[kind])


def _shares(timeline: Timeline) -> list[float]:
    """The share of the step that each worker was busy."""
    return [busy / timeline.seconds if timeline.seconds else 0.0 for busy in timeline.busy()]


def _canvas(height: float) -> tuple[Any, Any]:
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise PenstockError("figures need matplotlib: pip install 'penstock[report]'") from error
    figure = Figure(figsize=(10, height))
    return figure, figure.subplots()


def _draw(axes: Any, event: Event, scale: float, numbered: bool) -> None:
    start, length = scale * event.start, scale * (event.end - event.start)
    kind = event.action.kind
    axes.barh(event.worker, length, left=start, height=0.8, color=_COLOURS[kind], edgecolor="white")
    if numbered:
        place = (start + length / 2, event.worker)
        text, ink = str(event.action.microbatch), _LABELS[kind]
        axes.text(*place, text, ha="center", va="center", fontsize=9, color=ink)


def _label_workers(axes: Any, timeline: Timeline) -> None:
    workers = range(timeline.num_workers)
    axes.set_yticks(workers, [f"worker {w}" for w in workers])
    axes.tick_params(axis="y", length=0)
    beside = axes.get_yaxis_transform()  # across in shares of the figure, down in workers
    for worker, share in enumerate(_shares(timeline)):
        axes.text(1.01, worker, f"{share:.0%} busy", va="center", fontsize=9, transform=beside)


def _legend(name: str, colour: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=name)
