"""A live view of running pipelines, for a terminal: `penstock top`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from penstock.board.memory import Reading
from penstock.board.runs import find
from penstock.board.served import Remote, RunView
from penstock.board.status import News, Status, WorkerStatus, status_of
from penstock.observe.on_demand import news_of, stacks_of
from penstock.observe.staircase import Staircase
from penstock.units import show_bytes, show_seconds

LEGEND = "0-9 forwards, a-z backwards, L loss, R recomputation, > send, . wait, + other"
KEYS = "q quit   s stacks   t timeline   r report   space pause"
NOTHING = "no pipeline is running"

WIDE = 100
"""Columns of a screen, below which less is shown."""

_SIGNS = {"loss": "L", "recomputation": "R", "send": ">"}  # of parts of actions
_BAR = 10  # columns
_ROOMY = 150  # columns, from which on it is said in full what workers do
_SENTENCE = 56  # columns that this takes
_FEW = 8  # looks that are shown on any screen
_HISTORY = 512  # looks that are remembered


@dataclass
class _Seen:
    """What was seen of a worker.

    Attributes:
        marks: one character for each look at it, see `LEGEND`.
        before: when `shares` was last computed, and how long the worker had worked and waited by
            then, in nanoseconds; `None` before the first time.
        shares: the shares of time that it worked and waited between the last two computations.
    """

    marks: deque[str] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    before: tuple[int, int, int] | None = None
    shares: tuple[float, float] = (0.0, 0.0)


class Watch:
    """Looks at pipelines again and again.

    Args:
        pid: a process that drives a pipeline or has a worker of one; `None` for all pipelines of
            this user.
        source: lists the pipelines instead of `pid`, such as those that an address serves.

    Attributes:
        jobs: the pipelines, each as the list of its ranks; a list of one without torchrun.
        stacks: the threads' stacks that were last fetched, by process and worker.
        nothing: says in words why there is no pipeline.
    """

    def __init__(
        self, pid: int | None = None, source: Callable[[], Sequence[RunView]] | None = None
    ) -> None:
        self._source = source or (lambda: find(pid))
        self.nothing: Callable[[], str] = lambda: NOTHING
        self._seen: dict[tuple[str, int], _Seen] = {}
        self._stairs: dict[str, Staircase] = {}
        self._news: dict[str, News] = {}
        self.jobs: list[list[RunView]] = []
        self.stacks: Mapping[str, str] = {}

    def find(self) -> None:
        """List the running pipelines again; all ranks of a job count as one pipeline."""
        known = {run.path: run for job in self.jobs for run in job}
        jobs: dict[str, list[RunView]] = {}
        for found in self._source():
            run = known.get(found.path, found)
            jobs.setdefault(run.description.job or str(run.path), []).append(run)
        self.jobs = [sorted(job, key=lambda run: run.description.rank) for job in jobs.values()]

    def look(self) -> None:
        """Note what every worker is doing at this moment."""
        for job in self.jobs:
            marks = {}
            for number, reading in _readings(job).items():
                marks[number] = mark(reading), reading.since
                self._of(job, number).marks.append(marks[number][0])
            begun = job[0].board.counted().begun
            self._staircase(job).look(time.monotonic_ns(), begun, marks)

    def reckon(self) -> None:
        """Reckon how busy every worker was since the last time."""
        now = time.monotonic_ns()
        for job in self.jobs:
            for number, reading in _readings(job).items():
                seen = self._of(job, number)
                if seen.before is not None:
                    then, worked, waited = seen.before
                    span = max(1, now - then)
                    shares = (reading.worked - worked) / span, (reading.waited - waited) / span
                    seen.shares = min(1.0, shares[0]), min(1.0, shares[1])
                seen.before = now, reading.worked, reading.waited

    def ask_for_stacks(self) -> None:
        """Ask every pipeline what the threads of its workers are doing."""
        self.stacks = stacks_of([run for job in self.jobs for run in job])

    def ask_for_news(self) -> None:
        """Ask every pipeline what there is to say of it; under torchrun the first rank of it."""
        self._news = {self.name(job): news_of(job[0]) for job in list(self.jobs)}

    def name(self, job: Sequence[RunView]) -> str:
        """A name that no other pipeline has: the path of its first board, or its address."""
        return str(job[0].path)

    def statuses(self) -> list[Status]:
        """The state of every pipeline."""
        return [self._status(job) for job in self.jobs]

    def _status(self, job: Sequence[RunView]) -> Status:
        remote = [run for run in job if isinstance(run, Remote)]
        processes = {number: p for run in remote for number, p in run.processes().items()}
        counted = job[0].board.counted()
        known = processes if remote else None
        status = status_of(job[0].description, _readings(job), counted, known)
        news = self._news.get(self.name(job), News())
        return replace(status, notes=news.notes, events=news.events)

    def view(self, width: int, keys: bool = False) -> RenderableType:
        """All of it, for a screen of so many columns."""
        parts = [part for place in range(len(self.jobs)) for part in self._panel(place, width)]
        if not self.jobs:
            parts.append(self._none())
        for name, stack in self.stacks.items():
            parts += [stack_of(name, stack), Text()]
        footer = [LEGEND, *([KEYS] if keys else [])]
        return Group(*parts, *(Text(line, style="dim") for line in footer))

    def pipelines(
        self, width: int, selected: int, only: bool = False, with_steps: bool = False
    ) -> RenderableType:
        """The pipelines alone, of which one may be selected.

        Args:
            width: columns of the screen.
            selected: the number of the pipeline that is marked, if there are several.
            only: whether only the selected pipeline is shown.
            with_steps: whether the step under way is drawn for each pipeline.
        """
        places = range(len(self.jobs))[selected : selected + 1] if only else range(len(self.jobs))
        parts: list[RenderableType] = []
        for place in places:
            title = _title(place, place == selected) if len(self.jobs) > 1 else Text()
            parts += self._panel(place, width, title, with_steps)
        return Group(*parts) if parts else self._none()

    def _none(self) -> Text:
        return Text(self.nothing(), style="yellow")

    def _panel(
        self, place: int, width: int, title: Text | None = None, with_steps: bool = False
    ) -> list[RenderableType]:
        """One pipeline."""
        job = self.jobs[place]
        status = self._status(job)
        seen = {worker.number: self._of(job, worker.number) for worker in status.workers}
        steps = self._step(job, status, width) if with_steps else []
        head = _headline(title or Text(), status)
        return [*head, Text(), _table(status.workers, seen, width), *steps, Text()]

    def _step(self, job: Sequence[RunView], status: Status, width: int) -> list[Text]:
        """The step that is under way, as far as it was seen; nothing if steps are too short."""
        stairs = self._staircase(job)
        lines = stairs.lines(width) if stairs.is_worth_it(status.step_seconds) else []
        if not lines:
            return []
        subject = "the pass under way" if stairs.is_under_way else "the latest pass"
        predicted = show_seconds(status.predicted_seconds)
        caption = f"{subject}, {show_seconds(stairs.seconds)}; predicted, between bars: {predicted}"
        style = "" if stairs.is_under_way else "dim"
        return [Text(), Text(caption, style="dim"), *(Text(line, style=style) for line in lines)]

    def _of(self, job: Sequence[RunView], number: int) -> _Seen:
        return self._seen.setdefault((self.name(job), number), _Seen())

    def _staircase(self, job: Sequence[RunView]) -> Staircase:
        predicted = job[0].description.predicted_seconds
        return self._stairs.setdefault(self.name(job), Staircase(predicted))


def _readings(job: Sequence[RunView]) -> dict[int, Reading]:
    """What the records of all its processes say."""
    return {number: reading for run in job for number, reading in run.readings().items()}


def mark(reading: Reading) -> str:
    """One character for what a worker is doing, see `LEGEND`."""
    activity = reading.activity
    if activity.microbatch is None:
        return "+" if activity.what else " "
    if activity.waits:
        return "."
    if activity.what == "forward":
        return str(activity.microbatch % 10)
    if activity.what in _SIGNS:
        return _SIGNS[activity.what]
    return chr(ord("a") + activity.microbatch % 26)


def _title(place: int, is_selected: bool) -> Text:
    """The key that selects a pipeline, before its name."""
    key = str(place + 1) if place < 9 else " "
    if is_selected:
        return Text(f"[{key}]", style="reverse").append(" ")
    return Text(f" {key} ", style="dim").append(" ")


def _headline(title: Text, status: Status) -> list[Text]:
    first, *others = status.headline
    return [title.append(Text(first, style="bold")), *map(Text, others)]


class _Looks:
    """The latest looks at a worker, as many as there is room for."""

    def __init__(self, marks: Sequence[str]) -> None:
        self._marks = "".join(marks)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(self._marks[-options.max_width :].rjust(options.max_width))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(min(_FEW, options.max_width), options.max_width)


def _table(
    workers: Sequence[WorkerStatus], seen: Mapping[int, _Seen], width: int
) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 1), expand=True)
    is_wide = width >= WIDE
    table.add_column("worker", no_wrap=True)
    has_room = width >= _ROOMY
    table.add_column("now", no_wrap=True, ratio=3, min_width=_SENTENCE if has_room else None)
    table.add_column("for", no_wrap=True, justify="right")
    table.add_column("busy", no_wrap=True, min_width=_BAR + 5)
    table.add_column("latest looks", no_wrap=True, ratio=4 if is_wide else 2)
    table.add_column("memory", no_wrap=True, justify="right")
    if is_wide:
        table.add_column("peak", no_wrap=True, justify="right")
        table.add_column("of", no_wrap=True, justify="right")
    for worker in workers:
        own = seen[worker.number]
        doing = worker.doing if has_room else _short(worker)
        cells: list[RenderableType] = [
            Text(f"{worker.number} {worker.device}"),
            Text(doing, style=_STYLES.get(worker.state, ""), overflow="ellipsis"),
            show_seconds(worker.seconds) if worker.what else "",
            bar(*own.shares),
            _Looks(own.marks),
            show_bytes(worker.memory) if worker.memory else "",
        ]
        if is_wide:
            cells.append(show_bytes(worker.most_memory) if worker.most_memory else "")
            cells.append(show_bytes(worker.limit) if worker.limit else "")
        table.add_row(*cells)
    return table


_STYLES = {"stopped": "red", "gone": "red", "elsewhere": "dim"}


def stack_of(name: str, stack: str) -> Text:
    """The stacks of a worker's threads, below its name; the thread that works comes first."""
    heading, *threads = stack.split("\n\n")
    first, *lines = heading.split("\n")
    if lines:
        threads.insert(0, "\n".join(lines))
    threads.sort(key=lambda thread: not thread.startswith("Current thread"))
    text = Text(name, style="bold")
    return text.append("\n" + "\n".join([first, *threads]), style="not bold")


def _short(worker: WorkerStatus) -> str:
    """What a worker is doing, in a few words."""
    if worker.state != "running" or worker.stage is None:
        return worker.doing
    if worker.waits:
        return "waits" if worker.waits_for is None else f"waits for worker {worker.waits_for}"
    return f"{worker.what} {worker.microbatch} stage {worker.stage}"


def bar(worked: float, waited: float) -> Text:
    """Shares of the time as a bar: work in green, waiting in yellow, and the share of work."""
    full = round(_BAR * worked)
    half = min(_BAR - full, round(_BAR * waited))
    text = Text("█" * full, style="green")
    text.append("▒" * half, style="yellow")
    text.append("·" * (_BAR - full - half), style="dim")
    text.append(f" {100 * worked:3.0f}%", style="default")
    return text
