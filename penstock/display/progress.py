"""Progress on stderr: a bar in a terminal, an occasional line anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from penstock.errors import PenstockError

try:
    from rich.console import Console
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress
except ModuleNotFoundError as error:
    raise PenstockError("progress bars need rich: pip install 'penstock[cli]'") from error

_LINES = 10  # in a log, for a whole training
_SECONDS_BETWEEN_LINES = 10.0  # at least, in a log of anything else


class Progress:
    """Counts units of work, and shows the loss and the speed.

    A run that Ctrl-C or an error ends leaves nothing on the screen.

    Args:
        total: how many units there are.
        unit: their name, `"samples"`.
        console: where to show it; stderr by default.
    """

    def __init__(self, total: int, unit: str = "samples", console: Console | None = None) -> None:
        self._total = total
        self._unit = unit
        self._console = console or Console(stderr=True)
        self._done = 0
        self._reported = 0
        self._start = time.perf_counter()
        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TaskProgressColumn(),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=total, loss="", speed="")

    def __enter__(self) -> Progress:
        self._start = time.perf_counter()
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._bar.live.transient = kind is not None
        self._bar.stop()

    def advance(self, count: int, loss: float | None = None) -> None:
        """Note that `count` units are done, with the loss they had."""
        self._done += count
        speed = f"{self._done / (time.perf_counter() - self._start):.1f} {self._unit}/s"
        shown = "" if loss is None else f"loss {loss:.3f}"
        self._bar.update(self._task, advance=count, loss=shown, speed=speed)
        if not self._console.is_terminal and self._is_time_for_a_line():
            parts = (f"{self._done / max(1, self._total):4.0%}", shown, speed)
            print("  ".join(filter(None, parts)), file=self._console.file, flush=True)

    def _is_time_for_a_line(self) -> bool:
        part = self._done * _LINES // max(1, self._total)
        due, self._reported = part > self._reported, max(part, self._reported)
        return due


@contextmanager
def callback(
    description: str, console: Console | None = None
) -> Iterator[Callable[[int, int, str], None]]:
    """A function for `Pipeline(progress=...)` that shows a bar while it is open.

    In a terminal the bar is gone afterwards. Elsewhere there is a line at the start, and then one
    every ten seconds at most, and never two that say that the same is being done.

    Args:
        description: shown until the first call says what is being done.
        console: where to show it; stderr by default.
    """
    console = console or Console(stderr=True)
    last, printed = float("-inf"), set[str]()

    def say(done: int, total: int, what: str) -> None:
        nonlocal last
        if what not in printed and time.monotonic() - last >= _SECONDS_BETWEEN_LINES:
            last = time.monotonic()
            printed.add(what)
            print(f"{done}/{total}  {what}", file=console.file, flush=True)

    with RichProgress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=None)

        def update(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)
            if not console.is_terminal:
                say(done, total, what)

        yield update
