"""What workers need beside calls is measured once on a machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from msgspec.structs import replace

import penstock as ps
from penstock.planning import overheads
from penstock.planning.overheads import are_known, with_overheads
from penstock.profile.cache import ProfileCache
from tests.profile.test_data import device, profile

CPU = torch.device("cpu")


class Probe:
    """Says what it is asked for, and counts how often; every answer is another one."""

    kind = "one"

    def __init__(self) -> None:
        self.times = 0

    def overlaps(self, one: torch.device, other: torch.device) -> bool:
        return True

    def copies(self, one: torch.device, other: torch.device) -> bool:
        return False

    def one_way(
        self, one: torch.device, other: torch.device, size: int, rounds: int
    ) -> Sequence[float]:
        self.times += 1
        return [2e-6 * self.times]

    def overhead(self, one: torch.device, other: torch.device) -> float:
        return 3e-6 * self.times

    def adding(self, one: torch.device, other: torch.device) -> float:
        return 5e-6 * self.times


class OtherProbe(Probe):
    """Workers of another kind."""

    kind = "another"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ProfileCache:
    monkeypatch.setattr(overheads, "pass_overhead", lambda workers: 1e-3 * workers)
    monkeypatch.setattr(overheads, "flow_overhead", lambda workers: 2e-3 * workers)
    return ProfileCache(tmp_path)


def measured(
    probe: Probe, cache: ProfileCache, *devices: str, threads: int = 1, fresh: bool = False
) -> ps.Profile:
    costs = replace(profile(device((1,), 1.0)), threads=threads)
    there = [torch.device(name) for name in devices or ("cpu", "cpu")]
    return with_overheads(costs, there, probe, cache=cache, fresh=fresh)


def test_it_is_measured_once(cache: ProfileCache) -> None:
    probe = Probe()
    first = measured(probe, cache)
    assert probe.times == 1
    assert first.link("cpu", "cpu").latency_seconds == 1e-6
    assert (first.overhead_seconds, first.adding_seconds, first.pass_seconds) == (3e-6, 5e-6, 2e-3)
    assert measured(probe, cache) == first
    more = measured(probe, cache, *["cpu"] * 3)
    assert (more.links, more.pass_seconds) == (first.links, 3e-3)
    assert probe.times == 1


def test_a_flow_has_overheads_of_its_own(cache: ProfileCache) -> None:
    costs = replace(profile(device((1,), 1.0)), inference=True)
    assert with_overheads(costs, [CPU] * 2, Probe(), cache=cache).pass_seconds == 4e-3


def test_a_fresh_measurement_is_kept(cache: ProfileCache) -> None:
    probe = Probe()
    first = measured(probe, cache)
    second = measured(probe, cache, fresh=True)
    assert first != second == measured(probe, cache)
    assert probe.times == 2


def test_other_workers_are_measured_by_themselves(cache: ProfileCache) -> None:
    probe, other = Probe(), OtherProbe()
    measured(probe, cache)
    measured(probe, cache, threads=2)
    measured(probe, cache, "cpu", "cpu", "meta")
    assert probe.times == 4  # and two pairs
    measured(other, cache)
    assert other.times == 1


def test_one_device_needs_nothing(cache: ProfileCache) -> None:
    found = measured(Probe(), cache, "cpu")
    assert (found.links, found.overhead_seconds, found.adding_seconds) == ({}, 0.0, 0.0)


def test_a_file_that_is_broken_is_as_good_as_none(cache: ProfileCache, tmp_path: Path) -> None:
    probe = Probe()
    measured(probe, cache)
    (path,) = tmp_path.iterdir()
    path.write_text("{}")
    measured(probe, cache)
    assert probe.times == 2


def test_what_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    assert not are_known([CPU] * 2, "one", 1)
    measured(Probe(), ProfileCache())
    assert are_known([CPU] * 2, "one", 1)
    assert are_known([CPU] * 5, "one", 1)
    assert are_known([CPU], "another", 1)
    assert not are_known([CPU] * 2, "one", 2)
    assert not are_known([CPU] * 2, "another", 1)


def test_gpus_have_no_intra_op_threads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So their overheads are those of any number of them."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert not are_known(gpus, "one", 4)
    nothing = overheads.Overheads(links={}, overhead_seconds=0, adding_seconds=0, overlap=True)
    ProfileCache().write(overheads._key(gpus, "one", 0), msgspec.json.encode(nothing))
    assert are_known(gpus, "one", 4)


def test_a_damaged_file_is_measured_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    ProfileCache().write(overheads._key([CPU, CPU], "one", 1), b'{"links": {"\xff>cpu": {}}}')
    assert not are_known([CPU, CPU], "one", 1)
