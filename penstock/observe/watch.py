"""A live view of running pipelines, for a terminal: `penstock top`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.board.control import SUFFIX, ask
from penstock.board.memory import Reading
from penstock.board.runs import Run, find
from penstock.board.status import Status, WorkerStatus, status_of
from penstock.units import show_bytes, show_seconds

LEGEND = "0-9 forwards, a-z backwards, . waits, space idle"
KEYS = "q quit   s stacks   space pause"

_BAR = 10  # columns
_NARROW = 100  # columns, below which less is shown
_HISTORY = 512  # looks that are remembered


@dataclass
class _Seen:
    """What was seen of a worker.

    Attributes:
        marks: one for each look at it, see `LEGEND`.
        before: when it was last reckoned, and how long it had worked and waited by then, in
            nanoseconds.
        shares: of the time since then in which it worked and waited.
    """

    marks: deque[str] = field(default_factory=lambda: deque(maxlen=_HISTORY))
    before: tuple[int, int, int] | None = None
    shares: tuple[float, float] = (0.0, 0.0)


class Watch:
    """Looks at pipelines again and again.

    Args:
        pid: of a process that drives one, or has a worker of it; `None` for all of this user.
    """

    def __init__(self, pid: int | None = None) -> None:
        self._pid = pid
        self._seen: dict[tuple[str, int], _Seen] = {}
        self.jobs: list[list[Run]] = []
        self.stacks: Mapping[str, str] = {}

    def find(self) -> None:
        """Look which pipelines there are; the ranks of a job are one."""
        known = {run.path: run for job in self.jobs for run in job}
        jobs: dict[str, list[Run]] = {}
        for found in find(self._pid):
            run = known.get(found.path, found)
            jobs.setdefault(run.description.job or str(run.path), []).append(run)
        self.jobs = [sorted(job, key=lambda run: run.description.rank) for job in jobs.values()]

    def look(self) -> None:
        """Note what every worker is doing at this moment."""
        for job in self.jobs:
            for number, reading in _readings(job).items():
                self._of(job, number).marks.append(mark(reading))

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
        found = {}
        for run in (run for job in self.jobs for run in job):
            if run.path is None:
                continue
            title = f"process {run.description.pid}"
            try:
                stacks = ask(run.path.with_suffix(SUFFIX), "stacks")
            except (OSError, ValueError) as error:
                found[title] = f"no answer: {error}"
                continue
            found |= {f"{title}, {name}": stack for name, stack in stacks.items()}
        self.stacks = found

    def statuses(self) -> list[Status]:
        """The state of every pipeline."""
        return [
            status_of(job[0].description, _readings(job), job[0].board.counted())
            for job in self.jobs
        ]

    def view(self, width: int, keys: bool = False) -> RenderableType:
        """All of it, for a screen of so many columns."""
        parts: list[RenderableType] = []
        for job, status in zip(self.jobs, self.statuses(), strict=True):
            seen = {worker.number: self._of(job, worker.number) for worker in status.workers}
            parts += [*_headline(status), Text(), _table(status.workers, seen, width), Text()]
        if not self.jobs:
            parts.append(Text("no pipeline is running", style="yellow"))
        for title, stack in self.stacks.items():
            parts += [Text(title, style="bold"), Text(stack), Text()]
        parts.append(Text(f"{LEGEND}{f'      {KEYS}' if keys else ''}", style="dim"))
        return Group(*parts)

    def _of(self, job: Sequence[Run], number: int) -> _Seen:
        return self._seen.setdefault((str(job[0].path), number), _Seen())


def _readings(job: Sequence[Run]) -> dict[int, Reading]:
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
    return chr(ord("a") + activity.microbatch % 26)


def _headline(status: Status) -> list[Text]:
    first, *others = status.headline
    return [Text(first, style="bold", overflow="fold"), *map(Text, others)]


def _table(
    workers: Sequence[WorkerStatus], seen: Mapping[int, _Seen], width: int
) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 1), expand=True)
    is_wide = width >= _NARROW
    table.add_column("worker", no_wrap=True)
    table.add_column("now", no_wrap=True, ratio=2 if is_wide else 3)
    table.add_column("for", no_wrap=True, justify="right")
    table.add_column("busy", no_wrap=True, min_width=_BAR + 5)
    table.add_column("latest looks", no_wrap=True, ratio=4 if is_wide else 2)
    table.add_column("memory", no_wrap=True, justify="right")
    if is_wide:
        table.add_column("peak", no_wrap=True, justify="right")
        table.add_column("of", no_wrap=True, justify="right")
    room = max(8, (width - 60) // 2) if is_wide else max(8, (width - 56) // 2)
    for worker in workers:
        own = seen[worker.number]
        cells: list[RenderableType] = [
            f"{worker.number} {worker.device}",
            Text(worker.doing, style=_STYLES.get(worker.state, ""), overflow="ellipsis"),
            show_seconds(worker.seconds) if worker.what else "",
            bar(*own.shares),
            Text("".join(list(own.marks)[-room:]).rjust(room)),
            show_bytes(worker.memory) if worker.memory else "",
        ]
        if is_wide:
            cells.append(show_bytes(worker.most_memory) if worker.most_memory else "")
            cells.append(show_bytes(worker.limit) if worker.limit else "")
        table.add_row(*cells)
    return table


_STYLES = {"stopped": "red", "gone": "red", "elsewhere": "dim"}


def bar(worked: float, waited: float) -> Text:
    """Shares of the time as a bar: work in green, waiting in yellow, and the share of work."""
    full = round(_BAR * worked)
    half = min(_BAR - full, round(_BAR * waited))
    text = Text("█" * full, style="green")
    text.append("▒" * half, style="yellow")
    text.append("·" * (_BAR - full - half), style="dim")
    text.append(f" {100 * worked:3.0f}%", style="default")
    return text
