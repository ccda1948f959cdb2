"""The view of `penstock top` while it runs: what keys do, and what fits the screen."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.segment import Segment, Segments
from rich.text import Text

from penstock.board.served import RunView
from penstock.observe.on_demand import Task, free_path, save_report_of, save_timeline, stacks_of
from penstock.observe.watch import KEYS, LEGEND, WIDE, Watch, stack_of

_STACK = 8  # lines of a worker's stacks that are better to have than the steps under way

_NEWS = 5.0  # seconds after which pipelines are asked for news again

_Line = list[Segment]


class LiveView:
    """Shows pipelines, and acts on the keys that are pressed.

    Args:
        watch: reads the state of the pipelines.
        interval: seconds over which the share of work is computed.
        stacks: whether stacks are shown from the start.
        folder: where timelines and reports are written.

    Attributes:
        paused: whether the view is frozen.
    """

    def __init__(self, watch: Watch, interval: float, stacks: bool, folder: Path) -> None:
        self._watch, self._interval, self._folder = watch, interval, folder
        self._with_stacks, self._selected = stacks, ""
        self._tasks: dict[str, Task] = {}
        self._stacks: Task | None = None
        self._news: Task | None = None
        self._noted = -_NEWS
        self._reckoned = 0.0
        self._lines: list[_Line] = []
        self._size = 0, 0
        self.paused = False

    @property
    def selected(self) -> int:
        """Which of the pipelines keys are about."""
        names = [self._watch.name(job) for job in self._watch.jobs]
        return names.index(self._selected) if self._selected in names else 0

    def press(self, key: str) -> bool:
        """Do what a key asks for.

        Args:
            key: a character; empty if none was pressed.

        Returns:
            whether to go on.
        """
        if key:
            self._size = 0, 0  # something else may be shown, also while it is paused
            self._tasks = {k: task for k, task in self._tasks.items() if not task.is_done}
        if key == " ":
            self.paused = not self.paused
        elif key == "s":
            self._with_stacks = not self._with_stacks
            self._watch.stacks = {}
            self._ask_for_stacks()
        elif key and key in "123456789" and int(key) <= len(self._watch.jobs):
            self._selected = self._watch.name(self._watch.jobs[int(key) - 1])
            self._watch.stacks = {}
            self._ask_for_stacks()
        elif key in ("t", "r"):
            self._begin(key)
        return key not in ("q", "Q")

    def look(self) -> None:
        """Read what workers are doing, and every `interval` seconds the rest; nothing if paused."""
        now = time.monotonic()
        if self.paused:
            return
        self._watch.look()
        if now - self._reckoned >= self._interval:
            self._reckoned = now
            self._watch.find()
            self._watch.reckon()
            self._ask_for_stacks()
            self._ask_for_news(now)
        elif self._with_stacks and not self._watch.stacks:  # another pipeline was selected
            self._ask_for_stacks()

    def footer(self) -> list[Text]:
        """The lines at the bottom: what is being done, and what signs and keys mean."""
        lines = [Text(task.text, style="cyan") for task in self._tasks.values()]
        if self.paused:
            lines.append(Text("paused", style="yellow"))
        several = len(self._watch.jobs) > 1
        keys = f"{KEYS}   1-9 select" if several else KEYS
        return [*lines, Text(LEGEND, style="dim"), Text(keys, style="dim")]

    def screen(self, console: Console) -> RenderableType:
        """The pipelines, cut to the lines that fit the screen, and the footer."""
        footer = console.render_lines(Group(*self.footer()))
        room = max(1, console.height - len(footer))
        size = console.width, room
        if not self.paused or size != self._size:
            self._size, self._lines = size, self._fitting(console, room)
        every = [*self._lines, *footer]
        joined = [segment for line in every for segment in (*line, Segment.line())]
        return Segments(joined[:-1])

    def _fitting(self, console: Console, room: int) -> list[_Line]:
        """What is above the footer: with the steps under way if there is room for them."""
        width, selected, stacks = console.width, self.selected, self._watch.stacks
        lines: list[_Line] = []
        for with_steps in (True, False) if width >= WIDE else (False,):
            shown = self._watch.pipelines(width, selected, self._with_stacks, with_steps)
            lines = console.render_lines(shown)
            if len(lines) + _STACK * len(stacks) <= room:
                break
        left = room - len(lines)
        for place, (name, stack) in enumerate(stacks.items()):
            own = console.render_lines(stack_of(name, stack))
            share = left // (len(stacks) - place)
            lines += _cut(console, own, share)
            left -= min(len(own), share)
        return _cut(console, lines, room)

    # -- what is asked for --------------------------------------------------------------------

    def _ask_for_stacks(self) -> None:
        """Ask the selected pipeline, unless it is being asked, without waiting for it."""
        if not self._with_stacks or not self._watch.jobs:
            self._watch.stacks = {}
            return
        if self._stacks is None or self._stacks.is_done:
            job = self._watch.jobs[self.selected]
            self._stacks = Task("", lambda: self._show_stacks(job))

    def _ask_for_news(self, now: float) -> None:
        """Ask all pipelines, unless they were asked lately, without waiting for them."""
        if now - self._noted >= _NEWS and (self._news is None or self._news.is_done):
            self._noted = now
            self._news = Task("", self._take_news)

    def _take_news(self) -> str:
        self._watch.ask_for_news()
        return ""

    def _show_stacks(self, job: list[RunView]) -> str:
        found = stacks_of(job)
        if self._with_stacks and job in self._watch.jobs[self.selected : self.selected + 1]:
            self._watch.stacks, self._size = found, (0, 0)
        return ""

    def _begin(self, key: str) -> None:
        """Begin to write a timeline or a report of the selected pipeline."""
        if key in self._tasks or not self._watch.jobs:
            return
        job = self._watch.jobs[self.selected]
        of = f"of {job[0].description.model} (process {job[0].description.pid})"
        if key == "t":
            waiting = f"timeline {of}: waiting for the next step"
            self._tasks[key] = Task(waiting, lambda: self._timeline(job))
        else:
            self._tasks[key] = Task(f"report {of}: being written", lambda: self._report(job))

    def _timeline(self, job: list[RunView]) -> str:
        pid = job[0].description.pid
        step, path = save_timeline(
            job, lambda step: free_path(self._folder, f"timeline-{pid}-{step}", ".pftrace")
        )
        return f"wrote the timeline of step {step} to {path.name}; ui.perfetto.dev shows it"

    def _report(self, job: list[RunView]) -> str:
        path = free_path(self._folder, f"report-{job[0].description.pid}", ".html")
        save_report_of(job, path)
        return f"wrote the report to {path.name}"


def _cut(console: Console, lines: list[_Line], room: int) -> list[_Line]:
    """As many of these lines as there is room for; the last says how many others there are."""
    if len(lines) <= room:
        return lines
    more = Text(f"... {len(lines) - room + 1} more lines do not fit", style="dim")
    return [*lines[: room - 1], *console.render_lines(more)] if room > 0 else []
