"""The benchmark of sums in order and in no order."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch

from penstock.bench.data_parallel import DataParallelSettings, mlp
from penstock.bench.peers.peer import Recipe
from penstock.bench.replica_training import on_one_device
from penstock.bench.sums import AnyTurns, Unordered, UnorderedRank, configurations


def test_one_thread_has_the_turn_at_a_time_whatever_its_number() -> None:
    turns = AnyTurns()
    assert turns.has_come(3)
    assert turns.has_come(3)  # still
    found: list[bool] = []

    def other() -> None:
        found.append(turns.has_come(0))
        turns.done(0)  # it has none to give back
        waits.set()
        turns.wait(0)
        found.append(turns.has_come(0))
        turns.done(0)

    waits = threading.Event()
    thread = threading.Thread(target=other)
    thread.start()
    assert waits.wait(30)
    turns.done(3)
    thread.join(30)
    assert found == [False, True]


def test_in_memory_all_gradients_are_added() -> None:
    workload = mlp().workload(6, 8)
    expected = on_one_device(workload)
    unordered = Unordered(workload, 2)
    try:
        torch.testing.assert_close(unordered.gradients, expected)  # other sums: other roundings
    finally:
        unordered.close()


def test_on_ranks_all_gradients_are_added() -> None:
    workload = mlp().workload(6, 8)
    expected = on_one_device(workload)
    peer = Recipe("no order", [partial(UnorderedRank, workload)] * 3).start()
    try:
        of_ranks = peer.call("gradients")
    finally:
        peer.close()
    found = [[torch.from_numpy(each) for each in own] for own in of_ranks]
    torch.testing.assert_close(found[0], expected)
    assert not all(map(torch.equal, found[0], expected)), "this is the ordered sum"
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.slow
def test_both_places_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "sums.json"
    command = [sys.executable, "-m", "penstock.bench", "sums", "--quick", "--models", "mlp"]
    subprocess.run([*command, "--ranks", "2", "--json", str(path)], check=True)
    report = json.loads(path.read_text())
    assert [found["where"] for found in report["results"]] == ["2 threads", "2 ranks"]
    here, there = ([row["name"] for row in found["rows"]] for found in report["results"])
    assert here == ["in order", "no order"]
    assert there[:2] == here
    assert there[2].startswith("DDP, m=4, buckets of ")


def test_every_size_of_buckets_is_tried() -> None:
    """Names that differ in the number of micro-batches alone are tried until one is slower."""
    buckets = DataParallelSettings.full(None).buckets
    found = configurations(mlp().workload(4, 32), 2, buckets)
    assert len({name.partition(",")[2] for name in found}) == len(buckets) > 4
