"""Forks of this process (data loaders, say) let go of its workers, and of its locks.

They have copies of the sockets and pipes, and with those the end of the original would not be
noticed; a lock would outlive it; and they have none of its threads.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Disowns(Protocol):
    """What forks are kept from."""

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
