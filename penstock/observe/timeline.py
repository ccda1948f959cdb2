"""Timelines to look at: as a figure, and as text for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.display.figures import bare, canvas, save
from penstock.schedule import Event, Kind, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARGIN, _PER_DIGIT = 0.0065, 0.0063  # shares of the width: boxes too small for a number get none
_TERMINAL = 80  # columns of text, with what stands beside the drawing
_LEAST = 20  # columns of the drawing
_BUSY, _ELSEWHERE, _IDLE_SIGN = "busy", " ", "."
_IDLE = "#eceef0"
_ABOVE_LEGEND = 24  # points


class _Style(NamedTuple):
    """The colours of one kind of action in figures, and its signs in text."""

    name: str
    colour: str
    ink: str
    first_sign: str
    signs: int


_STYLES = {
    Kind.FORWARD: _Style("forward", "#4c78a8", "white", "0", 10),
    Kind.BACKWARD: _Style("backward", "#f2a65a", "#2b2f33", "a", 26),
    Kind.INPUT: _Style("input half", "#e8743b", "white", "a", 26),
    Kind.WEIGHT: _Style("weight half", "#5fa39a", "white", "A", 26),
}


@dataclass(frozen=True)
class _Lane:
    """What one worker did for one of its stages; all that it did if it has one."""

    worker: int
    stage: int
    events: tuple[Event, ...]


def save_figure(timeline: Timeline, path: Path, title: str | None = None) -> None:
    """Draw who was busy when: a lane per worker, a box per action, its micro-batch's number in it.

    A worker of several stages has a lane for each; it is idle where there is grey over all of them.

    Args:
        timeline: what happened.
        path: the file; its suffix says the format, such as `.png`, `.svg` or `.pdf`.
        title: above the figure.

    Raises:
        PenstockError: matplotlib is not installed, or the file cannot be written.
    """
    lanes = _lanes(timeline)
    figure, axes = canvas(10, 0.9 + 0.62 * timeline.num_workers + 0.34 * _extra(lanes))
    scale, unit = (1.0, "seconds") if timeline.seconds >= 1 else (1e3, "milliseconds")
    end = scale * timeline.seconds
    for worker, own in enumerate(lanes):
        _draw_idle(axes, worker, own, timeline.seconds, scale)
        for place, lane in enumerate(own):
            _draw(axes, lane, _Box(worker - 0.4 + 0.8 * place / len(own), 0.8 / len(own)), scale)
    _number(axes, timeline, lanes, scale)
    _label_workers(axes, timeline, lanes)
    axes.set_xlim(0, end or 1)
    axes.set_ylim(timeline.num_workers - 0.45, -0.55)
    axes.set_xlabel(f"{unit} since the step began; the numbers are micro-batches")
    axes.set_title(title or "One training step", loc="left", fontsize=11, pad=_ABOVE_LEGEND)
    _add_legend(axes, _kinds(timeline))
    bare(axes, "top", "right", "left")
    save(figure, path)


def as_text(timeline: Timeline, width: int | None = None) -> str:
    """A line per worker and stage, in which every sign is a micro-batch; `legend` says which.

    A column is `timeline.seconds / width`; it shows what ran for most of it, `.` where the worker
    was idle, and nothing in the lines of a worker's other stages. By default all of it fits 80
    columns.
    """
    lanes = _lanes(timeline)
    several = any(len(own) > 1 for own in lanes)
    names = [_names(worker, own, timeline, several) for worker, own in enumerate(lanes)]
    beside = len(names[0][0]) + len(f" || 100% {_BUSY}")
    width = width or max(_LEAST, _TERMINAL - beside)
    lines = []
    for worker, share in enumerate(_shares(timeline)):
        ran = _columns(lanes[worker], timeline.seconds, width)
        for place, lane in enumerate(lanes[worker]):
            cells = "".join(_cell(event, lane) for event in ran)
            busy = "" if place else f" {share:.0%} {_BUSY}"
            lines.append(f"{names[worker][place]} |{cells}|{busy}")
    return "\n".join(lines)


def _names(worker: int, lanes: Sequence[_Lane], timeline: Timeline, with_stages: bool) -> list[str]:
    """What stands before the lanes of a worker, equally wide for all workers."""
    name = f"worker {worker:>{len(str(timeline.num_workers - 1))}}"
    if not with_stages:
        return [name]
    digits = len(str(max(event.action.stage for event in timeline.events)))
    first, *others = [f" stage {lane.stage:>{digits}}" for lane in lanes]
    return [name + first, *(" " * len(name) + other for other in others)]


def legend(timeline: Timeline) -> str:
    """What the signs of `as_text` mean, for the kinds of actions that there are."""
    words = {
        Kind.FORWARD: "0-9 forwards",
        Kind.BACKWARD: "a-z backwards",
        Kind.INPUT: "a-z input halves of backwards",
        Kind.WEIGHT: "A-Z weight halves",
    }
    kinds = _kinds(timeline)
    return ", ".join([*(words[kind] for kind in kinds), f"{_IDLE_SIGN} idle"])


# -- what both show -----------------------------------------------------------------------


def _lanes(timeline: Timeline) -> list[list[_Lane]]:
    """The lanes of every worker, one at least."""
    found: list[dict[int, list[Event]]] = [{} for _ in range(timeline.num_workers)]
    for event in sorted(timeline.events, key=lambda event: event.start):
        found[event.worker].setdefault(event.action.stage, []).append(event)
    return [
        [_Lane(worker, stage, tuple(own[stage])) for stage in sorted(own)] or [_Lane(worker, 0, ())]
        for worker, own in enumerate(found)
    ]


def _kinds(timeline: Timeline) -> list[Kind]:
    """The kinds of actions that there are, in their usual order."""
    used = {event.action.kind for event in timeline.events} or {Kind.FORWARD, Kind.BACKWARD}
    return [kind for kind in _STYLES if kind in used]


def _shares(timeline: Timeline) -> list[float]:
    """The share of the step that each worker was busy."""
    return [busy / timeline.seconds if timeline.seconds else 0.0 for busy in timeline.busy()]


# -- text ---------------------------------------------------------------------------------


def _columns(lanes: Sequence[_Lane], seconds: float, width: int) -> list[Event | None]:
    """For every column, the event that filled the largest part of it.

    `None` where the worker was idle for more than half of the column.
    """
    busy, best = [0.0] * width, [0.0] * width
    found: list[Event | None] = [None] * width
    if not seconds:
        return found
    share = seconds / width
    for event in sorted((e for lane in lanes for e in lane.events), key=lambda event: event.start):
        first = int(event.start / share)
        for column in range(first, min(width, int(event.end / share) + 1)):
            overlap = min(event.end, (column + 1) * share) - max(event.start, column * share)
            busy[column] += overlap
            if overlap >= best[column]:
                best[column], found[column] = overlap, event
    return [event if b >= share / 2 else None for event, b in zip(found, busy, strict=True)]


def _cell(event: Event | None, lane: _Lane) -> str:
    """The sign for one column of a lane."""
    if event is None:
        return _IDLE_SIGN
    kind, stage, microbatch = event.action
    if stage != lane.stage:
        return _ELSEWHERE
    style = _STYLES[kind]
    return chr(ord(style.first_sign) + microbatch % style.signs)


# -- figures ------------------------------------------------------------------------------


class _Box(NamedTuple):
    """Where a lane is, from top to bottom, in workers."""

    top: float
    height: float


def _extra(lanes: Sequence[Sequence[_Lane]]) -> int:
    """The lanes beyond one per worker."""
    return sum(len(own) - 1 for own in lanes)


def _draw(axes: Axes, lane: _Lane, box: _Box, scale: float) -> None:
    """All boxes of a lane, kind by kind: one artist for each kind, however many they are."""
    for kind, style in _STYLES.items():
        own = [event for event in lane.events if event.action.kind is kind]
        spans = [(scale * event.start, scale * (event.end - event.start)) for event in own]
        if spans:
            axes.broken_barh(spans, box, facecolors=style.colour, edgecolors="white", linewidth=0.8)


def _draw_idle(
    axes: Axes, worker: int, lanes: Sequence[_Lane], seconds: float, scale: float
) -> None:
    spans = [(scale * a, scale * (b - a)) for a, b in _gaps(lanes, seconds)]
    axes.broken_barh(spans, (worker - 0.4, 0.8), facecolors=_IDLE)


def _gaps(lanes: Sequence[_Lane], seconds: float) -> Iterable[tuple[float, float]]:
    """The spans of time, in seconds, in which a worker did nothing."""
    now = 0.0
    for start, end in sorted((e.start, e.end) for lane in lanes for e in lane.events):
        if start > now:
            yield now, start
        now = max(now, end)
    if seconds > now:
        yield now, seconds


def _number(axes: Axes, timeline: Timeline, lanes: Sequence[Sequence[_Lane]], scale: float) -> None:
    """The micro-batch's number in every box that has room for it."""
    digits = len(str(max((e.action.microbatch for e in timeline.events), default=0)))
    room = (_MARGIN + _PER_DIGIT * digits) * timeline.seconds
    for worker, own in enumerate(lanes):
        for place, lane in enumerate(own):
            middle = worker - 0.4 + 0.8 * (place + 0.5) / len(own)
            for event in lane.events:
                if event.end - event.start > room:
                    axes.text(
                        scale * (event.start + event.end) / 2,
                        middle,
                        str(event.action.microbatch),
                        ha="center",
                        va="center",
                        fontsize=9,
                        color=_STYLES[event.action.kind].ink,
                    )


def _label_workers(axes: Axes, timeline: Timeline, lanes: Sequence[Sequence[_Lane]]) -> None:
    names = [_label(worker, own) for worker, own in enumerate(lanes)]
    axes.set_yticks(range(timeline.num_workers), names)
    axes.tick_params(axis="y", length=0)
    beside = axes.get_yaxis_transform()  # across in shares of the figure, down in workers
    for worker, share in enumerate(_shares(timeline)):
        text = f"{share:.0%} {_BUSY}"
        axes.text(1.01, worker, text, va="center", fontsize=9, transform=beside)


def _label(worker: int, lanes: Sequence[_Lane]) -> str:
    if len(lanes) == 1:
        return f"worker {worker}"
    return f"worker {worker}: stages " + ", ".join(str(lane.stage) for lane in lanes)


def _add_legend(axes: Axes, kinds: Sequence[Kind]) -> None:
    from matplotlib.patches import Patch

    colours = {**{_STYLES[kind].name: _STYLES[kind].colour for kind in kinds}, "idle": _IDLE}
    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncol=len(handles),
        frameon=False,
        borderaxespad=0.2,
        borderpad=0,
    )
