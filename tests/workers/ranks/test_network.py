"""Ranks listen where they must, and talk to nobody who has not proven to be one of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.links.handshake import Listener
from penstock.workers.ranks import rendezvous
from penstock.workers.ranks.process_groups import on_loopback
from penstock.workers.ranks.rendezvous import RankEntry
from tests.workers.ranks.launching import Launcher


def entries(*machines: str) -> list[RankEntry]:
    return [
        RankEntry(machine, f"host of {machine}", 1, "cpu", 1, "secret", 0) for machine in machines
    ]


def on_all(
    ranks: list[RankEntry], work: Callable[[int], Any], patch: pytest.MonkeyPatch
) -> list[Any]:
    """Let threads be the ranks; what each has found, or its error."""
    said: list[Any] = [None] * len(ranks)
    barrier, me = threading.Barrier(len(ranks), timeout=10), threading.local()

    def gathered(value: Any, group: Any) -> list[Any]:
        barrier.wait()
        said[me.rank] = value
        barrier.wait()
        return list(said)

    def run(rank: int) -> Any:
        me.rank = rank
        try:
            return work(rank)
        except Exception as error:
            return error

    patch.setattr(rendezvous, "_gathered", gathered)
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, range(len(ranks))))


def listening(ranks: list[RankEntry], patch: pytest.MonkeyPatch) -> list[Any]:
    """Where each of them listens to other machines."""
    kept: list[Listener] = []

    def work(rank: int) -> Any:
        listener, addresses = rendezvous._listening(rank, ranks, ["master"], None)  # type: ignore
        kept.append(listener)
        far = listener._far
        return (far and far.getsockname()[0]), addresses

    found = on_all(ranks, work, patch)
    for listener in kept:
        listener.close()
    return found


def test_nobody_listens_to_other_machines_if_there_are_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PENSTOCK_LISTEN", "0.0.0.0")
    for bound, addresses in listening(entries("a", "a", "a"), monkeypatch):
        assert bound is None
        assert [address.port for address in addresses] == [0, 0, 0]


def test_ranks_listen_on_the_address_by_which_others_know_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0's machine on that of `MASTER_ADDR`, others on their own on the way there."""
    monkeypatch.setattr(rendezvous, "route_to", lambda hosts: ("127.0.0.2", "127.0.0.3"))
    found = listening(entries("a", "a", "b"), monkeypatch)
    assert [bound for bound, _ in found] == ["127.0.0.2", "127.0.0.2", "127.0.0.3"]
    assert [address.host for address in found[0][1]] == [bound for bound, _ in found]
    assert all(address.port for address in found[0][1])


def test_all_addresses_if_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "route_to", lambda hosts: ("127.0.0.2", "127.0.0.3"))
    monkeypatch.setenv("PENSTOCK_LISTEN", "0.0.0.0")
    found = listening(entries("a", "b"), monkeypatch)
    assert [bound for bound, _ in found] == ["0.0.0.0", "0.0.0.0"]
    assert [address.host for address in found[0][1]] == ["127.0.0.2", "127.0.0.3"]


@pytest.mark.parametrize("route", ["192.0.2.1", ""])
def test_an_address_that_a_machine_has_not(monkeypatch: pytest.MonkeyPatch, route: str) -> None:
    """Behind a router, say; or there is no way at all. Every rank is told."""
    monkeypatch.setattr(rendezvous, "route_to", lambda hosts: (route, "127.0.0.3"))
    for error in listening(entries("a", "b"), monkeypatch):
        assert isinstance(error, ps.InputError)
        assert "rank 0 cannot listen on" in str(error)
        assert "MASTER_ADDR" in str(error)
        assert "PENSTOCK_LISTEN" in str(error)


@pytest.mark.parametrize("scenario", ["listening", "listening_apart"])
def test_what_ranks_listen_on(launcher: Launcher, tmp_path: Path, scenario: str) -> None:
    """Besides torch's own sockets: nothing on one machine, one address between machines.

    A pipeline that is closed leaves no socket, of torch's neither.
    """
    for while_connecting, afterwards, left in launcher.run(scenario, tmp_path):
        expected = [] if scenario == "listening" else ["127.0.0.1"]
        assert while_connecting == expected
        assert afterwards == []
        assert left <= 0


def test_gloo_listens_to_this_machine_only_if_all_ranks_are_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By what torchrun says, and unless the user has chosen an interface."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with on_loopback():
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # others are elsewhere
    with on_loopback():
        assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.delenv("LOCAL_WORLD_SIZE")  # nobody knows
    with on_loopback():
        assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")  # the user knows better
    with on_loopback():
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
