"""Which ranks have memory of each other's devices: those who may, and have tried it."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from penstock.workers.ranks import sharing
from penstock.workers.ranks.rendezvous import RankEntry
from penstock.workers.ranks.sharing import crossing
from tests.support.simulated.apart import sharing as can_share
from tests.support.simulated.module import install, simulated

install()

BOTH = ("GPU one", "GPU two")
PATIENCE = 20.0


class Together:
    """Ranks that are threads here; counts what they do together."""

    def __init__(self, count: int) -> None:
        self.values: list[Any] = [None] * count
        self.barrier = threading.Barrier(count, timeout=PATIENCE)
        self.operations: list[str] = []


class OneOf:
    """What `crossing` needs of `Ranks`."""

    def __init__(self, rank: int, together: Together) -> None:
        self.rank, self._together = rank, together

    @contextmanager
    def operation(self, what: str) -> Iterator[None]:
        self._together.operations.append(what)
        yield

    def end(self, value: Any) -> list[Any]:
        together = self._together
        together.values[self.rank] = value
        together.barrier.wait()
        found = list(together.values)
        together.barrier.wait()
        return found


def entry(device: str, devices: Sequence[str] = BOTH, machine: str = "here") -> RankEntry:
    return RankEntry(machine, "host", 1, device, 1, "", 0, "", tuple(devices))


def found(pairs: dict[int, tuple[int, int]], *entries: RankEntry) -> tuple[set[int], int]:
    """What all ranks find, and how many operations that took each of them."""
    together = Together(len(entries))
    with simulated(count=2), can_share(), ThreadPoolExecutor(len(entries)) as pool:
        run: Callable[[int], set[int]] = lambda rank: crossing(  # noqa: E731
            pairs,
            entries,
            OneOf(rank, together),  # type: ignore[arg-type]
        )
        each = list(pool.map(run, range(len(entries))))
    assert all(one == each[0] for one in each)
    return each[0], len(together.operations) // len(entries)


def test_neighbours_on_one_machine_share_memory() -> None:
    entries = entry("sim:0"), entry("sim:1"), entry("sim:1", machine="there")
    assert found({0: (0, 1), 1: (1, 2), 2: (1, 0), 3: (0, 0)}, *entries) == ({0, 2}, 2)


def test_cpus_try_nothing() -> None:
    assert found({0: (0, 1), 1: (1, 0)}, entry("cpu", ()), entry("cpu", ())) == (set(), 0)
    assert found({0: (0, 1)}, entry("sim:0"), entry("cpu", ())) == (set(), 0)


@pytest.mark.parametrize("devices", [BOTH[::-1], BOTH[:1], (), ("", "")])
def test_a_number_that_names_another_device_is_not_tried(devices: Sequence[str]) -> None:
    """As with another `CUDA_VISIBLE_DEVICES` in each process."""
    assert found({0: (0, 1)}, entry("sim:0"), entry("sim:1", devices)) == (set(), 0)


def test_one_device_with_another_name_is_enough() -> None:
    """Of either end; and names have to be known."""
    entries = entry("sim:0", ("one", "two")), entry("sim:1", ("other", "two"))
    assert found({0: (0, 1)}, *entries) == (set(), 0)
    assert found({0: (1, 0)}, *entries) == (set(), 0)
    nameless = entry("sim:0", ("", "")), entry("sim:1", ("", ""))
    assert found({0: (0, 1)}, *nameless) == (set(), 0)


def test_a_rank_whose_driver_refuses_goes_by_way_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One end that cannot is enough; other connections stay."""
    whole, me = pickle.loads, threading.local()
    can_open = sharing._can_open

    def refuse(handles: bytes) -> Any:
        if getattr(me, "peer", None) == 2:
            raise RuntimeError("invalid resource handle")
        return whole(handles)

    def noted(handles: bytes, rank: int) -> bool:
        me.peer = rank
        return can_open(handles, rank)

    monkeypatch.setattr(sharing, "_can_open", noted)
    monkeypatch.setattr(sharing.pickle, "loads", refuse)
    entries = entry("sim:0"), entry("sim:1"), entry("sim:0")
    assert found({0: (0, 1), 1: (1, 2), 2: (2, 0)}, *entries) == ({0}, 2)


def test_a_rank_whose_allocator_refuses_goes_by_way_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: Any) -> Any:
        raise RuntimeError("expandable segments cannot be shared")

    monkeypatch.setattr("tests.support.simulated.apart._shared", refuse)
    monkeypatch.setattr("tests.support.simulated.apart._new_shared_event", refuse)
    assert found({0: (0, 1)}, entry("sim:0"), entry("sim:1")) == (set(), 2)


def test_memory_with_something_else_in_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the handle had led to another device."""
    offer = sharing._Offer
    monkeypatch.setattr(sharing, "_Offer", lambda device, rank: offer(device, rank + 1))
    assert found({0: (0, 1)}, entry("sim:0"), entry("sim:1")) == (set(), 2)
