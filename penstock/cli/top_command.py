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

from penstock.cli.common import reported, show
from penstock.errors import InputError
from penstock.files import save_whole

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.observe.watch import Watch

_LOOKS = 20  # a second
_FIGURE = 130  # columns


@click.command("top")
@click.argument("pid", type=int, required=False)
@click.option("--once", is_flag=True, help="Print the state once, and end.")
@click.option("--stacks", is_flag=True, help="With what the threads of the workers are doing.")
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="Over which the share of work is reckoned.",
)
@click.option(
    "--figure",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the state to an SVG file, and end.",
)
@reported
def command(
    pid: int | None,
    once: bool,
    stacks: bool,
    interval: float,
    figure: Path | None,
    as_json: bool,
) -> None:
    """Show what the workers of running pipelines do, of those in process PID or of all.

    It looks at memory that they write, so it disturbs nobody, and works while a pipeline hangs. It
    shows the pipelines of this user on this machine; under torchrun those of all its ranks.

    Bars: work in green, waiting for other workers in yellow. On the right what was seen at the
    latest looks, 20 in a second: 0-9 forwards and a-z backwards of micro-batches, dots for waiting.
    Keys: q ends, s shows stacks, space pauses.
    """
    from rich.console import Console

    from penstock.observe.watch import Watch

    watch = Watch(pid)
    watch.find()
    if not watch.jobs:
        of = f"process {pid} drives none" if pid else "none is running"
        raise InputError(
            f"no pipeline of this user is to be seen on this machine: {of}. It is seen from when "
            "it is built until it is closed, by the same user with the same XDG_RUNTIME_DIR"
        )
    console = Console()
    if once or figure or as_json or not console.is_terminal:
        watch.reckon()
        for _ in range(max(2, round(_LOOKS * interval))):
            watch.look()
            time.sleep(1 / _LOOKS)
        watch.reckon()
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
        _live(watch, console, interval, stacks, pressed)


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


def _live(
    watch: Watch, console: Console, interval: float, stacks: bool, pressed: Iterator[str]
) -> None:
    """Show it until q is pressed."""
    from rich.live import Live

    paused, last = False, 0.0
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            key = next(pressed)
            if key in ("q", "Q"):
                return
            stacks ^= key == "s"
            paused ^= key == " "
            now = time.monotonic()
            if not paused:
                watch.look()
                if now - last >= interval:
                    last = now
                    watch.find()
                    watch.reckon()
                    watch.stacks = {}
                    if stacks:
                        watch.ask_for_stacks()
            live.update(watch.view(console.width, keys=True), refresh=True)


@contextmanager
def _keys() -> Iterator[Iterator[str]]:
    """What is pressed: at every look a key, or nothing after a twentieth of a second."""

    def waited() -> Iterator[str]:
        while True:
            time.sleep(1 / _LOOKS)
            yield ""

    def pressed() -> Iterator[str]:
        while True:
            ready, _, _ = select.select([sys.stdin], [], [], 1 / _LOOKS)
            # not by sys.stdin, which keeps what it has read too much of; at its end it is over
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
