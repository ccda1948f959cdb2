"""What the user insists on: where to cut, and what to recompute, by the names of modules."""

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


def spans(
    labels: Sequence[str], forbidden: Mapping[int, str], modules: Sequence[str]
) -> tuple[tuple[int, int], ...]:
    """The calls of these modules that are to be recomputed, in the order of the program.

    A module whose calls are not all in a row has several spans. One inside another adds nothing.

    Args:
        labels: of every call of the program.
        forbidden: where no cut is possible, and why: nor can a span begin or end there.
        modules: their qualified names.

    Returns:
        for every span its first call, and the one after its last.

    Raises:
        PlanError: a module is not in the program, or cannot be recomputed on its own.
    """
    found: dict[tuple[int, int], str] = {}
    for name in modules:
        numbers = _calls_of(labels, name, f"recompute {name!r}", "recompute that as a whole")
        firsts = [k for k in numbers if k - 1 not in numbers]
        ends = [k + 1 for k in numbers if k + 1 not in numbers]
        found |= dict.fromkeys(zip(firsts, ends, strict=True), name)
    outer = [s for s in found if not any(o != s and o[0] <= s[0] and s[1] <= o[1] for o in found)]
    for span in outer:
        for edge in span:
            if edge in forbidden:
                where = "begins" if edge == span[0] else "ends"
                raise PlanError(
                    f"{found[span]!r} cannot be recomputed on its own, as no cut is possible where "
                    f"it {where}: {forbidden[edge]}. Name a module around it"
                )
    return tuple(sorted(outer))


def check_modules(recompute: Any) -> None:
    """Raise unless this is a list of names.

    Raises:
        InputError: it is something else.
    """
    if not isinstance(recompute, (list, tuple)) or not all(isinstance(n, str) for n in recompute):
        raise InputError(
            f'recompute={recompute!r} is no list of modules; write recompute=["layer2", "layer4"]'
        )


def _calls_of(labels: Sequence[str], name: str, what: str, instead: str) -> list[int]:
    """The numbers of a module's calls.

    Raises:
        PlanError: it has none; `what` is not possible, `instead` may be.
    """
    numbers = [k for k, label in enumerate(labels) if _is_in(label, name)]
    if numbers:
        return numbers
    whole = next((label for label in labels if name.startswith(f"{label}.")), None)
    if whole is not None:
        raise PlanError(
            f"it is not possible to {what}: it is inside {whole!r}, which is one call of "
            f"the program (program.explain() says why); {instead}"
        )
    close = difflib.get_close_matches(name, _modules(labels), n=3, cutoff=0.4)
    hint = ", ".join(map(repr, close or _modules(labels)[:5]))
    raise PlanError(f"no call of the program is in a module named {name!r}; there are {hint}")


def _before(labels: Sequence[str], name: str) -> int:
    """The number of the module's first call."""
    return _calls_of(labels, name, f"cut before {name!r}", "cut before that, or after")[0]


def _is_in(label: str, module: str) -> bool:
    return label == module or label.startswith(f"{module}.")


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
