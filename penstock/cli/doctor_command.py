"""`penstock doctor`"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from penstock.cli.common import reported, show, width_of_stdout

if TYPE_CHECKING:
    from penstock.doctor import Finding

_MARKS = {"ok": "ok", "info": "-", "warning": "!", "problem": "X"}
_STYLES = {"ok": "green", "info": "dim", "warning": "yellow", "problem": "bold red"}
_WIDTH = 80  # where there is no terminal


@click.command("doctor")
@click.option("--quick", is_flag=True, help="Start no workers.")
@reported
def command(quick: bool, as_json: bool) -> None:
    """Look at this machine: what would hinder a pipeline, and what to do.

    Every line is ok, neither good nor bad (-), a warning (!), or a problem (X), with what to do
    below it. Exit code 0 if there is no problem, else 1.
    """
    from penstock.display.progress import callback
    from penstock.doctor import examine

    with callback("looking") as progress:
        findings = list(examine(quick, progress))
    problems = sum(each.state == "problem" for each in findings)
    data = {
        "ok": problems == 0,
        "findings": [
            {"name": f.name, "state": f.state, "found": f.found, "to_do": f.to_do} for f in findings
        ],
    }
    show(data, "" if as_json else _text(findings), as_json)
    sys.exit(0 if problems == 0 else 1)


def _text(findings: Sequence[Finding]) -> str:
    """The findings as lines that fit the terminal, and the number of problems and warnings."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from penstock.display.safe import printable

    console = Console(width=width_of_stdout() or _WIDTH, highlight=False)
    table = Table.grid(padding=(0, 1))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold", max_width=20)
    table.add_column(overflow="fold")
    for each in findings:
        style = _STYLES[each.state]
        mark = Text(_MARKS[each.state], style)
        table.add_row(mark, printable(each.name), Text(printable(each.found)))
        if each.to_do:
            table.add_row("", "", Text(f"→ {printable(each.to_do)}", style))
    counts = [
        f"{number} {state}{'s' if number > 1 else ''}"
        for state in ("problem", "warning")
        if (number := sum(each.state == state for each in findings))
    ]
    with console.capture() as captured:
        console.print(table)
        console.print()
        console.print(", ".join(counts) or "all is well")
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())
