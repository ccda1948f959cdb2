"""Links and overheads are measured with real workers, and the workers are gone afterwards."""

from __future__ import annotations

import pytest
import torch

from penstock.engine import replicas
from penstock.links.local import LocalLink
from penstock.profile.data import Link
from penstock.workers import probe
from penstock.workers.probe import LinkProbe, measure_links, with_links
from penstock.workers.thread_probe import ThreadProbe
from tests.profile.test_data import device, profile
from tests.support.threads import NewThreads

CPU = torch.device("cpu")
OTHER = torch.device("cpu", 0)


def test_on_one_device_only_the_latency_counts(new_threads: NewThreads) -> None:
    links = measure_links([CPU, CPU, CPU], ThreadProbe())
    assert links.keys() == {"cpu>cpu"}
    assert links["cpu>cpu"].latency_seconds > 0
    assert links["cpu>cpu"].bytes_per_second == 0
    assert new_threads() == []


def test_every_pair_of_kinds_that_are_neighbours_in_both_directions() -> None:
    """`cpu:0` stands for a second device: what goes there is no longer handed over."""
    links = measure_links([CPU, OTHER, OTHER, CPU], ThreadProbe())
    assert links.keys() == {"cpu>cpu:0", "cpu:0>cpu", "cpu:0>cpu:0"}
    assert links["cpu>cpu:0"].bytes_per_second > 0
    assert links["cpu>cpu:0"] == links["cpu:0>cpu"]
    assert measure_links([CPU], ThreadProbe()) == {}


def test_each_pair_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def note(one: torch.device, other: torch.device, where: LinkProbe) -> Link:
        asked.append(f"{one}>{other}")
        return Link()

    monkeypatch.setattr(probe, "_measured", note)
    measure_links([CPU, OTHER, CPU, OTHER, OTHER], ThreadProbe())
    assert asked == ["cpu>cpu:0", "cpu:0>cpu:0"]


def test_overhead(new_threads: NewThreads) -> None:
    assert ThreadProbe().overhead(CPU, CPU) > 0
    assert new_threads() == []


def test_adding_is_what_gradients_take_that_are_added_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a clock that stands still, but for a second for every gradient that is added by itself."""
    clock = [0.0]

    def slowly(terms: replicas.Terms) -> None:
        clock[0] += len(terms)
        added.append([float(gradient) for _, gradient in terms])
        accumulate(terms)

    added: list[list[float]] = []
    accumulate = replicas.accumulate
    monkeypatch.setattr(replicas, "accumulate", slowly)
    monkeypatch.setattr(probe, "now", lambda _: clock[0])
    assert probe.adding_here(CPU) == 1.0
    assert set(map(tuple, added)) == {(1.0,) * probe._PARAMETERS}
    monkeypatch.setattr(probe, "now", lambda _: -clock[0])
    assert probe.adding_here(CPU) == 0.0  # noise


def test_a_profile_with_both() -> None:
    costs = with_links(profile(device((1,), 1.0)), [CPU, CPU], ThreadProbe())
    assert costs.links.keys() == {"cpu>cpu"}
    assert costs.overhead_seconds > 0
    alone = with_links(profile(device((1,), 1.0), adding_seconds=1.0), [CPU], ThreadProbe())
    assert (alone.overhead_seconds, alone.adding_seconds) == (0.0, 0.0)


def test_a_failure_is_raised_and_leaves_nothing_running(
    new_threads: NewThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ArithmeticError("no answer")

    monkeypatch.setattr(LocalLink, "send_gradients", fail)
    with pytest.raises(ArithmeticError, match="no answer"):
        measure_links([CPU, CPU], ThreadProbe())
    assert new_threads() == []
