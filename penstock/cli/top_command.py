"""`penstock top`"""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.cli.common import Finite, reported, show
from penstock.errors import InputError
from penstock.files import save_whole

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.observe.live import LiveView
    from penstock.observe.watch import Watch

_LOOKS = 20  # a second
_FIGURE = 130  # columns


@click.command("top")
@click.argument("which", metavar="[PID | HOST:PORT | FOLDER]", required=False)
@click.option("--once", is_flag=True, help="Print the state once, and exit.")
@click.option("--stacks", is_flag=True, help="Show the stacks of the workers' threads as well.")
@click.option(
    "--interval",
    type=Finite(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Time over which the share of work is computed.",
)
@click.option(
    "--figure",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the state to an SVG file, and exit.",
)
@click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Record the next step, write its timeline for ui.perfetto.dev, and exit.",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a report of the run so far, in HTML, and exit.",
)
@reported
def command(
    which: str | None,
    once: bool,
    stacks: bool,
    interval: float,
    figure: Path | None,
    record: Path | None,
    report: Path | None,
    as_json: bool,
) -> None:
    """Show what the workers of all running pipelines, or of one, are doing.

    PID is a process of the pipeline; HOST:PORT the address where the metrics of a pipeline on any
    machine are served; FOLDER what Pipeline(run=...) writes.

    It reads shared memory that workers write, so it does not disturb them, and works while a
    pipeline hangs. It shows the pipelines of this user on this machine; under torchrun those of all
    its ranks.

    Bars: work in green, waiting for other workers in yellow. On the right are the latest samples,
    20 per second: 0-9 forwards and a-z backwards of micro-batches, L for the loss, R for
    recomputation, > for sends, + for what is no part of a pass, dots for waiting.

    Keys: q ends, s shows stacks, space pauses, t writes a timeline of the next step and r a report
    of the run, both into the current folder. With several pipelines, 1-9 select one.
    """
    from rich.console import Console

    from penstock.observe.live import LiveView

    watch = _watch(which)
    watch.find()
    if not watch.jobs:
        of = f"process {which} drives none" if which else "none is running"
        raise InputError(
            f"no pipeline of this user is to be seen on this machine: {of}. It is seen from when "
            "it is built until it is closed, by the same user with the same XDG_RUNTIME_DIR"
        )
    if record or report:
        _write(watch, record, report, as_json)
        return
    console = Console()
    if once or figure or as_json or not console.is_terminal:
        watch.reckon()
        for _ in range(max(2, round(_LOOKS * interval))):
            watch.look()
            time.sleep(1 / _LOOKS)
        watch.reckon()
        watch.ask_for_news()
        if stacks:
            watch.ask_for_stacks()
        if figure:
            _draw(watch, figure)
        data: dict[str, object] = {"pipelines": [status.to_dict() for status in watch.statuses()]}
        if stacks:
            data["stacks"] = dict(watch.stacks)
        text = "" if as_json else _printed(watch, console)
        show(data, text, as_json)
        return
    with _keys() as pressed:
        _live(LiveView(watch, interval, stacks, Path()), console, pressed)


def _watch(which: str | None) -> Watch:
    """Looks at all pipelines of this user, or at the one that is named.

    Raises:
        InputError: there is none of this name.
    """
    from penstock.observe.remote import Served, Written
    from penstock.observe.watch import Watch

    if which is None or which.isdecimal():
        return Watch(int(which) if which else None)
    if Path(which).is_dir():
        written = Written(Path(which))
        watch = Watch(source=written.find)
        watch.nothing = lambda: written.nothing
        return watch
    if ":" not in which:
        raise InputError(
            f"{which!r} is neither the PID of a process, nor HOST:PORT where metrics are served, "
            "nor a folder that Pipeline(run=...) writes"
        )
    served = Served(which)
    click.get_current_context().call_on_close(served.close)
    served.wait_for_others()
    watch = Watch(source=served.find)
    watch.nothing = lambda: served.nothing
    return watch


def _write(watch: Watch, record: Path | None, report: Path | None, as_json: bool) -> None:
    """Write a timeline or a report of the pipeline that runs.

    Raises:
        InputError: there are several.
    """
    from penstock.observe.on_demand import save_report_of, save_timeline

    job, *others = watch.jobs
    if others:
        pids = ", ".join(str(each[0].description.pid) for each in watch.jobs)
        raise InputError(
            f"{len(watch.jobs)} pipelines are running, in the processes {pids}: give the PID of "
            "one that drives a single pipeline, or choose one in the view: 1-9, then t or r"
        )
    data: dict[str, object] = {"pid": job[0].description.pid}
    lines = []
    if record:
        step, path = save_timeline(job, record)
        data |= {"step": step, "timeline": str(path)}
        lines.append(f"wrote the timeline of step {step} to {path}; ui.perfetto.dev shows it")
    if report:
        save_report_of(job, report)
        data["report"] = str(report)
        lines.append(f"wrote the report to {report}")
    show(data, "\n".join(lines), as_json)


def _printed(watch: Watch, console: Console) -> str:
    with console.capture() as captured:
        console.print(watch.view(console.width))
    return captured.get().rstrip()


def _draw(watch: Watch, path: Path) -> None:
    """Write what a terminal would show to an SVG file.

    Raises:
        InputError: it cannot be written.
    """
    from io import StringIO

    from rich.console import Console

    console = Console(record=True, width=_FIGURE, file=StringIO())
    console.print(watch.view(_FIGURE))
    save_whole(path, console.export_svg(title="penstock top").encode(), "figure")


def _live(view: LiveView, console: Console, pressed: Iterator[str]) -> None:
    """Show it until q is pressed."""
    from rich.live import Live

    with Live(console=console, screen=True, auto_refresh=False) as live:
        while view.press(next(pressed)):
            view.look()
            live.update(view.screen(console), refresh=True)


@contextmanager
def _keys() -> Iterator[Iterator[str]]:
    """An iterator over pressed keys, with an empty string after 1/20 s without one."""

    def waited() -> Iterator[str]:
        while True:
            time.sleep(1 / _LOOKS)
            yield ""

    def pressed() -> Iterator[str]:
        while True:
            ready, _, _ = select.select([sys.stdin], [], [], 1 / _LOOKS)
            # os.read: sys.stdin would buffer keys that `select` does not see; the end of input is q
            yield (os.read(sys.stdin.fileno(), 1).decode(errors="replace") or "q") if ready else ""

    if not sys.stdin.isatty():
        yield waited()
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield pressed()
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
