"""Cuts that the user insists on, by the names of modules or the numbers of calls."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from itertools import pairwise
from operator import index
from typing import Any

from penstock.errors import InputError, PlanError

Cut = int | str
"""A cut before the call of this number, or before the first call of the module of this name."""


def positions(
    labels: Sequence[str], forbidden: Mapping[int, str], devices: int, cuts: Sequence[Cut]
) -> tuple[int, ...]:
    """The calls before which these cuts are.

    Args:
        labels: of every call of the program.
        forbidden: where no cut is possible, and why.
        devices: how many there are, for a stage each.
        cuts: one fewer, in the order of the program.

    Raises:
        InputError: they are no list of names and numbers.
        PlanError: a cut is not possible, or they are too many, too few or not in order.
    """
    _check_kinds(cuts)
    found = tuple(_before(labels, cut) if isinstance(cut, str) else index(cut) for cut in cuts)
    if len(cuts) != devices - 1:
        raise PlanError(
            f"{len(cuts)} cuts make {len(cuts) + 1} stages, but there are {devices} devices: "
            "one stage on each"
        )
    for cut, name in zip(found, cuts, strict=True):
        if not 0 < cut < len(labels):
            raise PlanError(
                f"no cut is possible before {_shown(name)}: it has to be between two of the "
                f"{len(labels)} calls, so from 1 to {len(labels) - 1}"
            )
        if cut in forbidden:
            raise PlanError(f"no cut is possible before {_shown(name)}: {forbidden[cut]}")
    if any(b <= a for a, b in pairwise(found)):
        listed = ", ".join(f"{name!r} at call {k}" for name, k in zip(cuts, found, strict=True))
        raise PlanError(f"the cuts are not in the order of the program: {listed}")
    return found


def _check_kinds(cuts: Any) -> None:
    if not isinstance(cuts, (list, tuple)):
        raise InputError(f'cuts={cuts!r} is no list; write cuts=["layer2", "layer4"]')
    for cut in cuts:
        if isinstance(cut, bool) or not (isinstance(cut, str) or hasattr(cut, "__index__")):
            raise InputError(f"cuts: {cut!r} is neither a module's name nor the number of a call")


def _before(labels: Sequence[str], name: str) -> int:
    """The number of the module's first call."""
    for number, label in enumerate(labels):
        if label == name or label.startswith(f"{name}."):
            return number
    whole = next((label for label in labels if name.startswith(f"{label}.")), None)
    if whole is not None:
        raise PlanError(
            f"no cut is possible before {name!r}: it is inside {whole!r}, which is one call of "
            "the program (program.explain() says why); cut before that, or after"
        )
    close = difflib.get_close_matches(name, _modules(labels), n=3, cutoff=0.4)
    hint = ", ".join(map(repr, close or _modules(labels)[:5]))
    raise PlanError(f"no call of the program is in a module named {name!r}; there are {hint}")


def _modules(labels: Sequence[str]) -> list[str]:
    """The names of all modules that make a call or are one."""
    names: dict[str, None] = {}
    for label in labels:
        path = label.rpartition(".")[0] if label.endswith("()") else label
        while path:
            names.setdefault(path)
            path = path.rpartition(".")[0]
    return list(names)


def _shown(cut: Cut) -> str:
    return repr(cut) if isinstance(cut, str) else f"call {cut}"
