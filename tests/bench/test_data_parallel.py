"""`penstock bench data-parallel`: what replicas see, hold and take, and what is said of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.nn import functional as F

from penstock.bench import replica_training
from penstock.bench.data_parallel import DataParallelSettings, Trained, up_to
from penstock.bench.footprint import Held
from penstock.bench.peers.data_parallel import Buckets
from penstock.bench.peers.data_parallel import data_parallel as ddp
from penstock.bench.peers.gathering import gathering
from penstock.bench.peers.workload import Workload
from penstock.bench.replica_memory import Memory, Process, Scheme
from penstock.bench.replica_sizes import Batch, NotedLinear, Seen, noted, replica_sizes
from penstock.bench.replica_training import Bits, Measured, Ratio, Training, check_same_weights
from penstock.bench.subjects import classifier, gpt2_logits, labelled, language_loss, tokens
from penstock.bench.turns import Contestant
from penstock.cli import main
from penstock.devices.cores import cores, only_cores
from penstock.errors import PenstockError
from tests.bench.test_bench import png_size
from tests.support.pool import pooled

SMALL = Workload(partial(classifier, 6, 8), partial(labelled, 6, 8), F.cross_entropy, 4, 0.5)


# -- C1: what every replica sees ----------------------------------------------------------


@pytest.mark.parametrize(
    ("replicas", "of_30", "of_10"),
    [(2, [15] * 2, [5] * 2), (3, [10] * 3, [4, 3, 3]), (8, [4] * 6 + [3] * 2, [2] * 2 + [1] * 6)],
)
def test_every_replica_prints_what_it_sees(
    replicas: int, of_30: list[int], of_10: list[int]
) -> None:
    sizes = replica_sizes(replicas, "threads")
    assert [batch.inputs for batch in sizes.batches] == [(30, 5)] * 3 + [(10, 5), (1, 5)]
    for batch, rows in zip(sizes.batches, [of_30] * 3 + [of_10, [1]], strict=True):
        assert [each.inputs for each in batch.seen] == [(n, 5) for n in rows]
        assert [each.outputs for each in batch.seen] == [(n, 2) for n in rows]
        assert [each.replica for each in batch.seen] == list(range(len(rows)))
        assert batch.exact
    assert [batch.idle for batch in sizes.batches[:4]] == [()] * 4
    assert sizes.batches[4].idle == tuple(range(1, replicas))
    lines = list(sizes.lines())
    assert lines[0] == f"{replicas} replicas, workers=threads:"
    assert f"  In replica 1: input size [{of_30[1]}, 5], output size [{of_30[1]}, 2]" in lines
    assert "Outside: input size [10, 5], output size [10, 2]: the bits of one device" in lines
    assert lines[-1].endswith(f"idle: {', '.join(map(str, range(1, replicas)))}")


@pytest.mark.slow
def test_processes_see_the_same() -> None:
    with pooled():
        ours, theirs = (replica_sizes(2, kind) for kind in ("processes", "threads"))
    assert ours.batches == theirs.batches


def test_what_is_noted_is_what_the_layer_was_given(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    assert noted(notes) == []
    layer = NotedLinear(5, 2, str(notes))
    x = torch.randn(3, 5)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    layer(x[:1])
    assert [(i, o) for _, i, o in noted(notes)] == [((3, 5), (3, 2)), ((1, 5), (1, 2))]
    assert {process for (process, _), _, _ in noted(notes)} == {os.getpid()}


def batch(*rows: int, of: int, idle: int = 0, exact: bool = True) -> Batch:
    seen = tuple(Seen(k, (n, 5), (n, 2)) for k, n in enumerate(rows))
    resting = tuple(range(len(rows), len(rows) + idle))
    return Batch((of, 5), (of, 2), seen, resting, exact)


@pytest.mark.parametrize(
    ("found", "replicas", "words"),
    [
        (batch(4, 3, 2, of=10), 3, r"3 replicas saw 4 \+ 3 \+ 2 of a batch of 10 rows: 9 in all"),
        (batch(4, 3, 4, of=10), 3, "11 in all, so rows were lost or run twice"),
        (batch(of=10, idle=3), 3, "3 replicas saw none of a batch of 10 rows"),
        (batch(10, of=10, idle=2), 3, "1 replicas of 3 ran a batch of 10 rows, and 2 were idle"),
        (batch(4, 3, 3, of=10, exact=False), 3, "do not have the bits of one device"),
    ],
)
def test_a_run_that_is_wrong_is_an_error(found: Batch, replicas: int, words: str) -> None:
    with pytest.raises(PenstockError, match=words):
        found.check(replicas)


def test_runs_that_are_right() -> None:
    batch(4, 3, 3, of=10).check(3)
    batch(1, 1, of=2, idle=6).check(8)


class Twice(NotedLinear):
    """Runs the rows once more than it should."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        super().forward(x)
        return super().forward(x)


def test_rows_that_are_run_twice_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.bench.replica_sizes.NotedLinear", Twice)
    with pytest.raises(PenstockError, match="60 in all, so rows were lost or run twice"):
        replica_sizes(2, "threads")


class OtherBits(NotedLinear):
    """Has other bits in the threads of workers than elsewhere."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        in_a_worker = threading.current_thread().name.startswith("penstock-")
        return super().forward(x) * (1 + 2**-20 if in_a_worker else 1)


def test_other_bits_than_those_of_one_device_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.bench.replica_sizes.NotedLinear", OtherBits)
    with pytest.raises(PenstockError, match="do not have the bits of one device"):
        replica_sizes(2, "threads")


# -- C2: memory ---------------------------------------------------------------------------

MIB = 2**20

HOLDING = """
import mmap, sys
private = bytearray(b"x") * (int(sys.argv[1]) << 20)
shared = mmap.mmap(int(sys.argv[2]), 32 << 20)
for _ in range(int(sys.argv[3])):
    shared.write(b"x" * 2**20)
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def holding() -> Iterator[list[Held]]:
    """Processes that have nothing; 64 MiB of their own; and twice all of a shared segment."""
    segment = os.memfd_create("held")
    os.ftruncate(segment, 32 * MIB)
    found = [
        subprocess.Popen(
            [sys.executable, "-c", HOLDING, own, str(segment), shared],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[segment],
        )
        for own, shared in [("0", "0"), ("64", "0"), ("0", "32"), ("0", "32")]
    ]
    try:
        for process in found:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        yield [Held.by(process.pid) for process in found]
    finally:
        for process in found:
            process.communicate(b"\n")
        os.close(segment)


def test_private_and_shared_memory_are_told_apart(holding: list[Held]) -> None:
    nothing, own, *_ = holding
    first, second = holding[2:]
    assert own.private - nothing.private == pytest.approx(64 * MIB, abs=MIB)
    assert own.shared == nothing.shared
    for each in (first, second):
        assert each.shared - nothing.shared == pytest.approx(32 * MIB, abs=MIB)
        assert each.private - nothing.private == pytest.approx(0, abs=2 * MIB)
    assert first.part + second.part - 2 * nothing.part == pytest.approx(32 * MIB, abs=MIB)


def scheme(name: str, *private: int, part: int = 0, driver: int | None = None) -> Scheme:
    rest = Held(100, 1, 1)
    names = [f"worker {k}" for k in range(len(private))]
    if driver is not None:
        names, private = [*names, "driver"], (*private, driver)
    return Scheme(
        name,
        tuple(
            Process(n, rest, Held(100 + p, 1 + 2 * part, 1 + part))
            for n, p in zip(names, private, strict=True)
        ),
    )


def test_totals_of_a_scheme() -> None:
    ours = scheme("ours", 10, 12, 8, part=5, driver=40)
    assert [each.private for each in ours.processes] == [10, 12, 8, 40]
    assert len(ours.workers) == 3
    assert ours.shared == 20
    assert ours.total == 90
    assert ours.imbalance == 1.0
    assert scheme("theirs", 50, 10, 15).imbalance == 4.0
    text = "\n".join(Memory("MLP", 3, (ours, scheme("theirs", 50, 10, 15))).lines())
    assert "20 B shared, counted once" in text


def losses_of_one_device(workload: Workload, steps: int) -> list[float]:
    """Plain PyTorch on the whole batch."""
    model = workload.build()
    optimizer = workload.optimizer(model.parameters())
    inputs, target = workload.data()
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = workload.loss(model(inputs), target)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


@pytest.mark.slow
def test_the_gathering_peer_trains_as_one_device() -> None:
    """Broadcast, scatter, gather and reduce: the loss is that of the whole batch, every step."""
    losses = losses_of_one_device(SMALL, 3)
    assert losses[0] - losses[2] > 0.01
    peer = gathering(SMALL, processes=2)
    try:
        for loss in losses:
            assert peer.step() > 0
            assert peer.loss == pytest.approx(loss, rel=1e-5)
        (first,), (second,) = peer.call("held")
        assert first.private > 0
        assert second.private > 0
    finally:
        peer.close()


# -- C3, C4: time and bits ----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("as_view", [True, False])
def test_ddp_accumulates_its_micro_batches_without_synchronising(as_view: bool) -> None:
    losses = losses_of_one_device(SMALL, 2)
    model = SMALL.build()
    inputs, target = SMALL.data()
    SMALL.loss(model(inputs), target).backward()
    peer = ddp(SMALL, processes=2, buckets=Buckets(1, as_view)).start()
    try:
        ours, theirs = peer.call("gradients")
        for own, other, parameter in zip(ours, theirs, model.parameters(), strict=True):
            assert (own == other).all()
            torch.testing.assert_close(torch.from_numpy(own), parameter.grad)
        for loss in losses:
            peer.step()
            assert peer.loss == pytest.approx(loss, rel=1e-5)
    finally:
        peer.close()


def test_micro_batches_that_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match="4 micro-batches do not divide by 3 ranks"):
        ddp(SMALL, processes=3)


def measured(workers: str, replicas: int, seconds: list[float], bits: Bits) -> Measured:
    facts = {"workers": workers, "replicas": replicas}
    name = f"{replicas} {workers}"
    return Measured(Contestant(name, lambda: 0.0, facts, seconds=seconds), bits)


def test_ratios_are_those_of_the_same_rounds() -> None:
    same, off = Bits(2, 2, 0.0, 1.0), Bits(2, 1, 1e-9, 1.0)
    training = Training(
        "MLP",
        4,
        (
            measured("threads", 1, [4.0, 8.0, 16.0], same),
            measured("threads", 2, [2.0, 4.0, 12.0], same),
            measured("ddp", 2, [4.0, 4.0, 6.0], off),
        ),
        {"buckets of 1 MB": [1.0]},
    )
    one, two, ddp_ = training.measured
    assert training.to_one(one) == Ratio(1.0, 0.0)
    assert training.to_one(two) == Ratio(0.5, 0.125)
    assert training.to_one(ddp_) is None
    assert training.to_ddp(two) == Ratio(1.0, 0.75)
    assert training.to_ddp(one) is None
    rows = training.to_dict()["rows"]
    assert rows[1]["to_one_replica"] == {"median": 0.5, "spread": 0.125}
    assert rows[2]["bits"] == {
        "parameters": 2, "equal": 1, "difference": 1e-9, "largest": 1.0, "exact": False,
    }  # fmt: skip
    text = "\n".join(training.lines())
    assert "0.500 ± 0.125" in text
    assert "off by up to 1e-09, in 1 gradients" in text


def test_a_bit_that_differs_is_an_error() -> None:
    one, other = [torch.ones(2), torch.zeros(3)], [torch.ones(2), torch.zeros(3)]
    same = Bits.of(one, other)
    assert same.exact
    same.check("2 replicas")
    other[1][2] = 1e-30
    bits = Bits.of(one, other)
    assert (bits.equal, bits.difference, bits.largest) == (1, pytest.approx(1e-30), 1.0)
    with pytest.raises(PenstockError, match="2 replicas: the gradients of 1 of 2 parameters"):
        bits.check("2 replicas")
    check_same_weights("MLP", {"a": one, "b": [one[0].clone(), one[1].clone()]})
    with pytest.raises(PenstockError, match="weights of b do not have the bits of those of a"):
        check_same_weights("MLP", {"a": one, "b": other})


def test_a_benchmark_of_gradients_that_are_not_those_of_one_device_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = replica_training.on_one_device(SMALL)
    wrong = [gradient * (1 + 2**-20) for gradient in right]
    monkeypatch.setattr(replica_training, "on_one_device", lambda _: wrong)
    monkeypatch.setattr(replica_training, "_scouted", lambda *_: {})
    with pytest.raises(PenstockError, match="MLP, 1 replica, threads: the gradients of"):
        replica_training.train(
            "MLP", SMALL, counts=(1, 2), kinds=("threads",), buckets=(), rounds=2, steps=1,
            progress=lambda *_: None,
        )  # fmt: skip


def test_the_language_model_is_the_same_every_time_and_draws_nothing() -> None:
    one, other = gpt2_logits(1, 16, 8), gpt2_logits(1, 16, 8)
    text, following = tokens(2, 8)
    assert torch.equal(one(text), other(text))
    assert torch.equal(one(text), one(text))
    assert language_loss(one(text), following).ndim == 0


def test_workers_get_some_of_the_cores() -> None:
    before = cores()
    with only_cores(1):
        assert cores() == 1
    with only_cores(10**6):
        assert cores() == before
    assert cores() == before


def test_numbers_of_replicas() -> None:
    assert [up_to(n) for n in (1, 2, 6, 8)] == [(1,), (1, 2), (1, 2, 4, 6), (1, 2, 4, 8)]


# -- end to end ---------------------------------------------------------------------------


def small() -> DataParallelSettings:
    model = Trained(
        "small MLP",
        "small",
        partial(classifier, 6, 8),
        partial(labelled, 6),
        F.cross_entropy,
        rows=4,
        rows_in_memory=4,
    )
    return DataParallelSettings(
        (model,),
        sizes=(2,),
        kinds=("threads",),
        in_memory=2,
        steps=1,
        buckets=(Buckets(),),
        tries=1,
        rounds=3,
    )


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, ["bench", "data-parallel", *arguments])
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.slow
def test_everything_is_measured_drawn_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = lambda output: replace(small(), output=output)  # noqa: E731
    monkeypatch.setattr(DataParallelSettings, "quick", quick)
    code, stdout, stderr = run("--quick", "--json", "--output", str(tmp_path))
    assert code == 0, stderr
    assert "figures and raw data are in" in stderr
    data = json.loads(stdout)
    assert data == json.loads((tmp_path / "data-parallel.json").read_text())
    assert data["machine"]["cores"] == cores()
    assert data["commit"]
    assert data["settings"]["models"] == ["small MLP"]
    assert data["settings"]["tried"] == ["buckets of 25 MB, gradients as views"]

    (sizes,) = data["C1"]
    assert [each["inputs"] for each in sizes["batches"][3]["seen"]] == [[5, 5], [5, 5]]
    assert sizes["batches"][4]["idle"] == [1]

    (memory,) = data["C2"]
    ours, theirs = memory["schemes"]
    assert [p["name"] for p in ours["processes"]] == ["replica 0", "replica 1", "driver"]
    assert [p["name"] for p in theirs["processes"]] == ["device 0", "device 1"]
    for each in (*ours["processes"], *theirs["processes"]):
        assert each["training"]["private"] > 50 * MIB
    assert ours["processes"][0]["training"]["shared"] > 0

    (training,) = data["C3_C4"]
    assert training["num_microbatches"] == 4
    names = [row["name"] for row in training["rows"]]
    assert names[:3] == ["1 replica, threads", "2 replicas, threads", "2 replicas, ranks"]
    assert names[3].startswith("DistributedDataParallel, m=4, buckets of 25 MB")
    assert {len(row["seconds"]) for row in training["rows"]} == {3}
    assert {row.get("threads", 1) for row in training["rows"]} == {1}
    one, two, ranks, theirs_ = training["rows"]
    assert all(each["bits"]["exact"] for each in (one, two, ranks))
    assert theirs_["bits"]["difference"] < 1e-6
    assert one["to_one_replica"] == {"median": 1.0, "spread": 0.0}
    assert two["to_ddp"]["median"] > 0
    assert ranks["to_ddp"]["median"] > 0
    for name in ("memory-small.png", "steps-small.png"):
        width, height = png_size(tmp_path / name)
        assert 900 < width < 1500
        assert 400 < height < 900
    assert {p.name for p in tmp_path.iterdir()} == {
        "data-parallel.json", "memory-small.png", "steps-small.png",
    }  # fmt: skip


def test_rows_that_do_not_add_up_end_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.bench.replica_sizes.NotedLinear", Twice)
    code, stdout, stderr = run("--quick", "--output", str(tmp_path))
    assert code == 1
    assert "rows were lost or run twice" in stderr
    assert stdout == ""
    assert list(tmp_path.iterdir()) == []


def test_what_the_command_takes(tmp_path: Path) -> None:
    code, _, stderr = run("--devices", "cpu,cpu", "--output", str(tmp_path / "no"))
    assert code == 2
    assert "takes no input, example, loss, devices or seed" in stderr
    assert not (tmp_path / "no").exists()
    code, stdout, _ = run("--help")
    assert code == 0
    assert "data-parallel" in stdout


def test_quick_and_full_settings(tmp_path: Path) -> None:
    quick, full = DataParallelSettings.quick(tmp_path), DataParallelSettings.full(tmp_path)
    assert [model.name for model in quick.models] == ["MLP"]
    assert [model.name for model in full.models] == ["MLP", "deep MLP", "GPT-2"]
    assert quick.kinds == ("threads",)
    assert full.kinds == ("threads", "processes")
    assert quick.counts == full.counts == up_to(max(2, cores()))
    for each in (*full.models, *quick.models):
        workload = each.workload(2, 3)
        inputs, target = workload.data()
        assert len(inputs) == len(target) == 6
