"""Forks of this process (data loaders, say) let go of its workers, and of its locks.

A fork has copies of the original's sockets, pipes and locks, but none of its threads. With these
copies open, nobody would notice the end of the original, and its locks would outlive it.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Disowns(Protocol):
    """Something that belongs to this process alone, of which its forks let go."""

    def disown(self) -> None:
        """Let go of everything; called in the fork."""


_owners: weakref.WeakSet[Disowns] = weakref.WeakSet()


def disown_in_forks(owner: Disowns) -> None:
    """Have every fork of this process call `owner.disown()`, as long as there is an owner."""
    _owners.add(owner)


def _disown_all() -> None:
    for owner in list(_owners):
        owner.disown()


os.register_at_fork(after_in_child=_disown_all)
