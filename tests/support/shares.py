"""Shares of the slow tests: `pytest -m slow --share 3/8` runs the third of eight, and the core.

The *core* is run with every share. Of each parametrised test it has as many cases as it takes for
every two values of two parameters to meet in one of them (a case's parameters are its arguments,
or their fields, where they are records). Of the long tail (`tail.py`) none is in it. All other
cases are dealt to the shares in the order
of a hash of their names, so that each share has as many as any other of every test, and the same
ones on every machine.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations, cycle

import pytest

Pair = frozenset[tuple[str, Hashable]]

_FEW = 8  # a test with fewer cases has none in the core: each is dear, or it would be most of them


def parsed(text: str) -> tuple[int, int]:
    """The number of a share, and how many there are.

    Raises:
        pytest.UsageError: it is none.
    """
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise pytest.UsageError(f"--share {text}: give the share and their number, such as 3/8")
    return int(found[1]), int(found[2])


def chosen(items: Sequence[pytest.Item], share: int, shares: int) -> list[pytest.Item]:
    """The core, and this share of all others; in the order in which they came."""
    core = {item.nodeid for item in core_of(items)}
    mine = {item.nodeid for item in dealt(items, shares, core)[share - 1]}
    return [item for item in items if item.nodeid in core or item.nodeid in mine]


def dealt(
    items: Sequence[pytest.Item], shares: int, core: set[str] | None = None
) -> list[list[pytest.Item]]:
    """What is not in the core, as shares; those that may take longest come first."""
    hands: list[list[pytest.Item]] = [[] for _ in range(shares)]
    next_hand = cycle(hands)
    left = core_of(items) if core is None else core
    names = {item.nodeid for item in left} if core is None else core
    for group in sorted(by_function(items).values(), key=lambda g: (-limit_of(g[0]), g[0].nodeid)):
        for item in sorted(group, key=lambda item: hashed(item.nodeid)):
            if item.nodeid not in names:
                next(next_hand).append(item)
    return hands


def core_of(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Cases in which every two values of two parameters of a test meet."""
    found: list[pytest.Item] = []
    for group in by_function(i for i in items if "tail" not in i.keywords).values():
        if len(group) >= _FEW:
            found += covering(group)
    return found


def covering(group: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Greedily: in the order of their hashes, each case that brings a pair that none had."""
    order = sorted(group, key=lambda item: hashed(item.nodeid))
    pairs = {item.nodeid: pairs_of(item) for item in order}
    missing = set().union(*pairs.values())
    found: list[pytest.Item] = []
    while missing:
        best = max(order, key=lambda item: len(pairs[item.nodeid] & missing))
        missing -= pairs[best.nodeid]
        found.append(best)
    return found


def pairs_of(item: pytest.Item) -> set[Pair]:
    """Every two values of a case."""
    return {frozenset(two) for two in combinations(sorted(values_of(item).items(), key=str), 2)}


def values_of(item: pytest.Item) -> dict[str, str]:
    """The parameters of a case, flat, as text."""
    found: dict[str, str] = {}
    spec = getattr(item, "callspec", None)
    for name, value in (spec.params if spec else {}).items():
        fields = fields_of(value)
        found |= {f"{name}.{field}": str(getattr(value, field)) for field in fields}
        if not fields:
            found[name] = str(value)
    return found


def fields_of(value: object) -> tuple[str, ...]:
    """Those of a dataclass or of a named tuple; none of anything else."""
    if dataclasses.is_dataclass(value):
        return tuple(field.name for field in dataclasses.fields(value))
    return getattr(value, "_fields", ())


def by_function(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The cases of every test."""
    groups: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        groups[item.nodeid.partition("[")[0]].append(item)
    return groups


def limit_of(item: pytest.Item) -> float:
    """Seconds that a test may take at most, if it says so itself."""
    mark = item.get_closest_marker("timeout")
    return float(mark.args[0]) if mark and mark.args else 0.0


def hashed(name: str) -> bytes:
    """The same everywhere, and alike for no two names that are alike."""
    return hashlib.sha256(name.encode()).digest()
