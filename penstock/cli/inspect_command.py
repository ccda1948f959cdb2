"""`penstock inspect`"""

from __future__ import annotations

import click

from penstock.cli.common import empty_option, model_options, reported, show, width_of_stdout

_ROWS = 4  # enough to see where the time goes


@click.command("inspect")
@model_options
@empty_option
@click.option("--calls", is_flag=True, help="List every call instead of the tree of modules.")
@click.option(
    "--depth",
    type=click.IntRange(min=1),
    help="Levels of the tree; default: as many as fit the screen.",
)
@click.option("--no-time", is_flag=True, help="Do not measure how long calls take.")
@reported
def command(
    model: str,
    inputs: tuple[str, ...],
    example: str | None,
    seed: int,
    empty: bool,
    calls: bool,
    depth: int | None,
    no_time: bool,
    as_json: bool,
) -> None:
    """Show what MODEL is made of: its modules, their weights and time, and where it can be cut.

    `enters` is the size of the values that would cross a cut before a module, `cut after` that for
    a cut after a call, with the example's number of rows. Time is that of forward and backward of a
    few rows on one core.
    """
    import time
    from dataclasses import replace

    from penstock.capture import capture
    from penstock.cli.arguments import load_example
    from penstock.display.progress import callback
    from penstock.profile.measure import profile

    module, args, kwargs = load_example(model, inputs, example, seed, empty)
    start = time.perf_counter()
    program = capture(module, args, kwargs)
    took = time.perf_counter() - start
    seconds = None
    if not no_time:
        few = max(1, program.example_sizes["B"] // _ROWS)
        with callback("measuring") as progress:
            costs = profile(program, devices=["cpu"], num_microbatches=few, progress=progress)
        seconds = costs.call_seconds()
    explanation = replace(program.explain(seconds), capture_seconds=took)
    width = width_of_stdout()
    text = explanation.table(width) if calls else explanation.tree(depth, width)
    show(explanation.to_dict(), text, as_json)
