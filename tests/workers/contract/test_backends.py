"""Every kind of workers does what `penstock/workers/backend.py` says: the clauses, and each kind.

A new kind is added to `KINDS`, with what runs a clause for it.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

from penstock.workers.backend import WorkerKind
from tests.support.actors import lent_actors
from tests.support.pool import pooled
from tests.workers.contract.clauses import CLAUSES
from tests.workers.ranks.launching import Launcher


def here(kind: WorkerKind, name: str, launcher: Launcher) -> None:
    """In this process."""
    with pooled(again=name != "closing"):
        CLAUSES[name](kind)


@functools.cache
def launched(launcher: Launcher) -> list[dict[str, str]]:
    """What every rank of one launch says of every clause."""
    with tempfile.TemporaryDirectory() as folder:
        return launcher.run("contract", Path(folder), seconds=280)


def on_ranks(kind: WorkerKind, name: str, launcher: Launcher) -> None:
    """On both ranks, which have run all clauses, one after the other."""
    found = [rank[name] for rank in launched(launcher)]
    assert found == [""] * len(found), "\n\n".join(found)


def in_a_cluster(kind: WorkerKind, name: str, launcher: Launcher) -> None:
    """In this process, with actors that the clauses use one after the other."""
    with lent_actors(again=name != "closing"):
        CLAUSES[name](kind)


KINDS: dict[WorkerKind, Callable[[WorkerKind, str, Launcher], None]] = {
    "threads": here,
    "processes": here,
    "torchrun": on_ranks,
    "ray": in_a_cluster,
}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CLAUSES)
def test_clause(kind: WorkerKind, name: str, launcher: Launcher) -> None:
    KINDS[kind](kind, name, launcher)


def test_every_kind_is_tested() -> None:
    assert {*KINDS, "auto"} == set(get_args(WorkerKind))
