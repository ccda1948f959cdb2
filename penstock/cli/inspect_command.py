"""`penstock inspect`"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from penstock.cli.options import model_options, reported, show

if TYPE_CHECKING:
    from rich.console import Console

    from penstock.capture.explain import Explanation


@click.command("inspect")
@model_options
@reported
def command(
    model: str, inputs: tuple[str, ...], example: str | None, seed: int, as_json: bool
) -> None:
    """Show what MODEL does, call by call, and where it can be cut.

    `cut after` is what would cross a cut after the call, with the example's number of rows; B
    stands for that number. `random` marks calls that draw random numbers, `in place` those that
    change a value.
    """
    import time
    from dataclasses import replace

    from rich.console import Console

    from penstock.capture import capture
    from penstock.cli.arguments import load_example

    module, args, kwargs = load_example(model, inputs, example, seed)
    start = time.perf_counter()
    program = capture(module, args, kwargs)
    explanation = replace(program.explain(), capture_seconds=time.perf_counter() - start)
    console = Console()
    if as_json or not console.is_terminal:
        show(explanation.to_dict(), str(explanation), as_json)
    else:
        _render(explanation, console)


def _render(explanation: Explanation, console: Console) -> None:
    from rich.table import Table

    from penstock.capture.explain import TEXT_COLUMNS

    heading, *rows = explanation.cells()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in heading:
        is_text = name in TEXT_COLUMNS
        table.add_column(name, justify="left" if is_text else "right", overflow="fold")
    for row, cells in zip(explanation.rows, rows, strict=True):
        table.add_row(*cells, style="dim" if row.forbidden else None)
    console.print(table, highlight=False, markup=False)
    for note in explanation.notes():
        console.print(note, highlight=False, markup=False)
