"""Tables as text. No torch here."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import zip_longest
from textwrap import wrap

_TEXT = 16  # the least width to which a column of text is reduced
_NAMES = 24  # the least width to which the first column is reduced

Row = Sequence[str]


def aligned(
    cells: Sequence[Row], left: Sequence[int] = (0,), width: int | None = None
) -> list[str]:
    """Lines of text out of a table's cells; columns that are empty below the heading are left out.

    Args:
        cells: the heading and the rows.
        left: the columns that are text; numbers stand on the right.
        width: how long lines may be. Headings then take several lines where they must, texts are
            wrapped, names in the first column are shortened in the middle, and what is still too
            much stands below, next to the first column once more.
    """
    used = [k for k, column in enumerate(zip(*cells[1:], strict=True)) if any(column)]
    texts = {place for place, k in enumerate(used) if k in left}
    heading, *rows = [[row[k] for k in used] for row in cells]
    if width is None or _width([heading, *rows]) <= width:
        return _lines([heading, *rows], texts)
    parts = (
        [name] if k in texts else re.split(r"(?<=-)| ", name) for k, name in enumerate(heading)
    )
    heads = _below(list(parts))
    limits = _limits([*heads, *rows], texts, width)
    rows = [line for row in rows for line in _wrapped(row, limits)]
    lines: list[str] = []
    for columns in _blocks([*heads, *rows], width):
        block = [[row[k] for k in columns] for row in (*heads, *rows)]
        lines += [""] * bool(lines)
        block = [row for row in block if any(row)]
        lines += _lines(block, {place for place, k in enumerate(columns) if k in texts})
    return lines


def _widths(rows: Sequence[Row]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


def _width(rows: Sequence[Row]) -> int:
    widths = _widths(rows)
    return sum(widths) + 2 * (len(widths) - 1)


def _lines(rows: Sequence[Row], texts: Collection[int]) -> list[str]:
    widths = _widths(rows)
    return [
        "  ".join(
            cell.ljust(widths[k]) if k in texts else cell.rjust(widths[k])
            for k, cell in enumerate(row)
        ).rstrip()
        for row in rows
    ]


def _below(parts: Sequence[Sequence[str]]) -> list[list[str]]:
    """Rows of the parts of cells, one below the other."""
    return [list(row) for row in zip_longest(*parts, fillvalue="")]


def _limits(rows: Sequence[Row], texts: Collection[int], width: int) -> list[int]:
    """How wide every column may be: those of text give way, the widest first, names last."""
    whole = _widths(rows)
    limits = list(whole)
    while sum(limits) + 2 * (len(limits) - 1) > width:
        wide = [k for k in texts if k and limits[k] > _TEXT]
        if not wide and 0 in texts and limits[0] > _NAMES:
            wide = [0]
        if not wide:  # they will not all stand next to each other
            alone = max(_TEXT, width - limits[0] - 2)
            return [limits[0], *(min(most, alone) for most in whole[1:])]
        limits[max(wide, key=limits.__getitem__)] -= 1
    return limits


def _wrapped(row: Row, limits: Sequence[int]) -> list[list[str]]:
    """A row, and the rows below it that have the rest of its texts."""
    name = row[0]
    if len(name) > limits[0]:
        end = (limits[0] - 1) // 2
        name = f"{name[: limits[0] - 1 - end]}…{name[-end:]}"
    texts = (wrap(cell, most) for cell, most in zip(row[1:], limits[1:], strict=True))
    return _below([[name], *(parts or [""] for parts in texts)])


def _blocks(rows: Sequence[Row], width: int) -> list[list[int]]:
    """Which columns stand next to each other; the first one is in every block."""
    first, *others = _widths(rows)
    blocks, room = [[0]], width - first
    for column, needed in enumerate(others, start=1):
        if needed + 2 > room and len(blocks[-1]) > 1:
            blocks.append([0])
            room = width - first
        blocks[-1].append(column)
        room -= needed + 2
    return blocks
