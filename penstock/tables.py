"""Tables as text. No torch here."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(cells: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Lines of text out of a table's cells; columns that are empty below the heading are left out.

    Args:
        cells: the heading and the rows.
        left: the columns that are text; numbers stand on the right.
    """
    used = [k for k, column in enumerate(zip(*cells[1:], strict=True)) if any(column)]
    widths = {k: max(len(row[k]) for row in cells) for k in used}
    return [
        "  ".join(
            row[k].ljust(widths[k]) if k in left else row[k].rjust(widths[k]) for k in used
        ).rstrip()
        for row in cells
    ]
