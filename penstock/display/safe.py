"""Makes text from outside, such as answers of other machines, safe to show in a terminal."""

from __future__ import annotations

_MARK = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    """The text with a mark instead of whatever a terminal would obey or not show.

    Those are control characters, of which terminals make commands, and those that change the
    direction of what follows. Line feeds and tabs stay.
    """
    return "".join(c if c.isprintable() or c in "\n\t" else _MARK for c in text)
