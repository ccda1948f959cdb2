"""`penstock report`"""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli.common import reported, show, talk, width_of_stdout


@click.command("report")
@click.argument("run", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the report to an HTML file, which needs no network.",
)
@click.option(
    "--compare",
    type=click.Path(path_type=Path),
    metavar="OTHER",
    help="The folder of another run, which the HTML file compares this one with.",
)
@reported
def command(run: Path, output: Path | None, compare: Path | None, as_json: bool) -> None:
    """Say where the time of a run's steps went, and why.

    RUN is the folder that Pipeline(run=...) writes. It may be read while the run goes on.
    """
    from penstock.account.history import read_run
    from penstock.errors import InputError
    from penstock.observe.report import report_data, report_text, save_report

    if compare is not None and output is None:
        raise InputError("--compare is shown by the HTML file: give --output report.html as well")
    history = read_run(run)
    other = read_run(compare) if compare is not None else None
    if output is not None:
        save_report(history, output, other)
    data = report_data(history) if as_json else {}
    text = "" if as_json else report_text(history, width_of_stdout())
    show(data, text, as_json)
    if output is not None:
        talk(f"wrote {output}")
