"""What was found. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Literal

import msgspec

State = Literal["ok", "info", "warning", "problem"]


class Finding(msgspec.Struct, frozen=True):
    """What was found of one thing.

    Attributes:
        name: of the thing.
        state: `"ok"`; `"info"` for what is neither good nor bad; `"warning"` for what makes some
            uses slow or impossible; `"problem"` for what has to be mended first.
        found: in words.
        to_do: in words; empty if there is nothing to do.
    """

    name: str
    state: State
    found: str
    to_do: str = ""


Check = Callable[[], Iterable[Finding]]
"""Looks at some things. What it raises is a finding, too."""


def made(name: str, checks: Sequence[Check]) -> Iterator[Finding]:
    """What checks have found; one that fails does not keep others from looking.

    Args:
        name: of all of them.
        checks: to be made.
    """
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            what = check.__name__.strip("_").replace("_", " ")
            yield Finding(
                f"{name}: {what}",
                "warning",
                f"could not look: {type(error).__name__}: {error}",
                "this is an error of Penstock or of the machine; please report it",
            )


def size(count: float) -> str:
    """Bytes in words, as memory is counted: `"1.5 GiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
