"""Which parts of a model's result are states, that stay with the workers in a session."""

from __future__ import annotations

from collections.abc import Collection

from penstock.capture.calls import Trace
from penstock.capture.trees import leaf_paths, leaves_in_objects
from penstock.errors import InputError


def states_in(trace: Trace, parts: Collection[int | str] = ()) -> set[int]:
    """The leaves of a result that are states: those in objects of plain classes, and these parts.

    Args:
        trace: of the forward.
        parts: positions in a tuple, or names.
    """
    found = set(leaves_in_objects(trace.output_structure))
    if parts:
        paths = enumerate(leaf_paths(trace.output_structure))
        found |= {k for k, path in paths if path and path[0] and path[0][1] in parts}
    return found


def check_parts(trace: Trace, parts: Collection[int | str]) -> None:
    """Raise unless the result has these parts.

    Raises:
        InputError: it does not have one of them.
    """
    paths = leaf_paths(trace.output_structure)
    known = dict.fromkeys(path[0][1] for path in paths if path and path[0])
    for part in parts:
        if part not in known:
            there = ", ".join(map(repr, known)) or "no parts: it is a single value"
            raise InputError(
                f"states={list(parts)!r}: the result for the example has no part {part!r}; it has "
                f"{there}"
            )
