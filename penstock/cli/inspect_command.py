"""`penstock inspect`"""

from __future__ import annotations

import time
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from penstock.capture import capture
from penstock.capture.explain import Explanation
from penstock.cli.options import load_example, model_options, reported, show, talk


@click.command("inspect")
@model_options
@reported
def command(
    model: str, inputs: tuple[str, ...], example: str | None, seed: int, as_json: bool
) -> None:
    """Show what MODEL does, call by call, and where it can be cut."""
    module, args, kwargs = load_example(model, inputs, example, seed)
    start = time.perf_counter()
    explanation = capture(module, args, kwargs).explain()
    seconds = time.perf_counter() - start
    data: dict[str, Any] = {**explanation.to_dict(), "capture_seconds": seconds}
    console = Console()
    if as_json or not console.is_terminal:
        show(data, str(explanation), as_json)
    else:
        _render(explanation, console)
    talk(f"captured in {seconds:.2f} s")


def _render(explanation: Explanation, console: Console) -> None:
    heading, *rows = explanation.cells()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for k, name in enumerate(heading):
        table.add_column(name, justify="right" if k in (0, 2, 3) else "left", overflow="fold")
    for cells in rows:
        table.add_row(*cells)
    console.print(table, highlight=False, markup=False)
    for note in explanation.notes():
        console.print(note, highlight=False, markup=False)
