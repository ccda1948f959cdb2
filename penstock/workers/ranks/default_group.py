"""The default process group of ranks that torchrun has started, and perhaps restarted.

torchrun's agent lends the ranks its own store, and keeps it when it restarts them. There they would
find the addresses of the processes that are gone, and try to connect to them. So every attempt has
a part of the store for itself. Its name has to be agreed on: the number of restarts that an agent
tells its ranks is its own, which differs between machines, and stays when a machine joins.

Every rank leaves a random word. Rank 0 answers with a new name for the attempt and the words that
it has found. Whose word is among them says so; others, whose place had the word of an earlier
attempt, are noticed when they have left theirs, and get another answer. When all have said that
they know the name, that is what counts.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Callable

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

_PREFIX = "penstock"
_TIMEOUT = 300.0  # seconds in which all ranks have to be there, as torch has it
_PAUSE = 0.02  # seconds between two looks


def init_process_group() -> None:
    """As `torch.distributed.init_process_group("gloo")`, in every attempt of torchrun anew.

    Raises:
        TimeoutError: not all ranks came.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        dist.init_process_group("gloo")
        return
    store, rank, count = next(rendezvous("env://"))
    part = attempt_of(store, rank, count, _TIMEOUT)
    dist.init_process_group("gloo", store=part, rank=rank, world_size=count)


def attempt_of(store: Store, rank: int, count: int, timeout: float) -> Store:
    """The part of a store for this attempt of these ranks, who all call this.

    Args:
        store: which may have been used by earlier attempts of any number of ranks.
        rank: of this process.
        count: of ranks.
        timeout: seconds.

    Raises:
        TimeoutError: not all ranks came.
    """
    shared = PrefixStore(_PREFIX, store)
    word = secrets.token_hex(8)
    shared.set(f"word {rank}", word)
    look = _leading(shared, count) if rank == 0 else _following(shared, rank, word)
    deadline = time.monotonic() + timeout
    while not (name := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank} waited {timeout:.0f} s for {count - 1} other ranks")
        time.sleep(_PAUSE)
    return PrefixStore(f"{_PREFIX} {name}", store)


def _leading(store: Store, count: int) -> Callable[[], str]:
    """What rank 0 does again and again, until there is a name."""
    name, answered = "", [""] * count

    def look() -> str:
        nonlocal name, answered
        words = [_read(store, f"word {k}") for k in range(count)]
        if all(words) and words != answered:
            name, answered = secrets.token_hex(8), words
            store.set("name", " ".join([name, *words]))
        if not name or any(_read(store, f"knows {k}") != name for k in range(1, count)):
            return ""
        store.set("agreed", name)
        return name

    return look


def _following(store: Store, rank: int, word: str) -> Callable[[], str]:
    """What the other ranks do again and again, until there is a name."""

    def look() -> str:
        name, *words = _read(store, "name").split() or [""]
        if rank >= len(words) or words[rank] != word:
            return ""
        store.set(f"knows {rank}", name)
        return name if _read(store, "agreed") == name else ""

    return look


def _read(store: Store, key: str) -> str:
    """What a store has; an empty text if nothing."""
    return store.get(key).decode() if store.check([key]) else ""
