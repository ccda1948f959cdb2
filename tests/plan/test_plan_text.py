"""A plan as text: what wins comes first, then the stages, then why the others lost."""

from __future__ import annotations

import msgspec
import pytest

import penstock as ps
from penstock.plan import Plan
from penstock.plan.text import considered, launches, stages, verdict, winner
from tests.plan.test_plan import profile


def plan(alone: float | None, parallel: float | None, devices: int = 2) -> Plan:
    """A plan of one second, and what it is compared with."""
    found = ps.plan(profile([1, 2, 3, 4], devices), replicas=1)
    return msgspec.structs.replace(
        found,
        predicted_step_seconds=1.0,
        bound_seconds=0.9,
        one_device_seconds=alone,
        data_parallel_seconds=parallel,
    )


@pytest.mark.parametrize(
    ("alone", "parallel", "way", "words"),
    [
        (2.0, 1.5, "pipeline", "2.00 times as fast as one device (2.00 s), 1.50 times as fast as"),
        (0.5, 0.6, "one device", "One device alone is predicted to be faster (0.50 s): splitting"),
        (
            0.6,
            0.5,
            "data parallel",
            "Data parallelism is predicted to be faster (0.50 s): a replica",
        ),
        (1.0, None, "one device", "One device alone"),  # as fast, and simpler
        (None, None, "pipeline", "and data parallelism does not fit the memory."),
        (None, 0.5, "data parallel", "Data parallelism"),
    ],
)
def test_what_wins_is_said_first(
    alone: float | None, parallel: float | None, way: str, words: str
) -> None:
    found = plan(alone, parallel)
    assert winner(found) == way
    assert words in verdict(found)
    assert str(found).splitlines()[0] == verdict(found)


@pytest.mark.parametrize(
    ("devices", "note", "words"),
    [
        (("cpu", "cpu"), "", "every device; replicas=2 does that, and sums gradients in the order"),
        (("cuda:0", "cuda:1"), "", "device; in threads and under torchrun, replicas=2 does that"),
        (("cpu", "cuda:0"), "", "every device; as with DistributedDataParallel, which sums"),
        (("cpu", "cpu"), "There is one replica, as", "a replica of the model on every device."),
    ],
)
def test_how_to_have_replicas_that_would_win(
    devices: tuple[str, ...], note: str, words: str
) -> None:
    found = plan(0.6, 0.5)
    stages = [
        msgspec.structs.replace(stage, device=devices[stage.worker]) for stage in found.stages
    ]
    assert words in verdict(msgspec.structs.replace(found, stages=tuple(stages), note=note))


def test_one_device_has_nothing_to_split() -> None:
    found = plan(0.5, 0.5, devices=1)
    assert winner(found) == "one device"
    assert verdict(found) == "There is one device: nothing to split."
    assert "one device" not in found.summary


def test_the_sentence() -> None:
    found = msgspec.structs.replace(
        plan(2.0, None), schedule="1f1b", rules=None, num_microbatches=5
    )
    assert found.summary == (
        "1f1b, 5 micro-batches of up to 4 rows: 1.00 s predicted, 90% of the bound (0.90 s); "
        "one device 2.00 s; data parallel does not fit"
    )
    one = msgspec.structs.replace(found, num_microbatches=16)
    assert ", 16 micro-batches of 1 row:" in one.summary
    assert (
        ", 1 micro-batch of 16 rows:" in msgspec.structs.replace(found, num_microbatches=1).summary
    )


def test_the_stages_say_what_is_recomputed_only_if_something_is() -> None:
    costs = profile([1.0, 1.0, 1.0, 1.0], saved=(100.0,) * 4)
    plain = stages(ps.plan(costs, num_microbatches=4, schedule="gpipe", replicas=1))
    assert plain[0].split()[-1] == "memory"
    assert plain[1].split()[:5] == ["0", "0", "cpu", "call0", "…"]
    thrifty = stages(
        ps.plan(costs, num_microbatches=4, schedule="gpipe", recompute="all", replicas=1)
    )
    assert thrifty[1].endswith("recomputes 2 of 2 calls")


def test_the_best_of_every_schedule_with_its_count() -> None:
    found = ps.plan(profile([1, 2, 3, 4, 3, 2, 1]), replicas=1)
    heading, *lines = considered(found)
    assert heading.split()[:3] == ["considered", "replicas", "stages"]
    names = [line.split("  ")[0] for line in lines[:-1]]
    assert len(names) == len(set(names))
    assert {"one device", "data parallel", "gpipe", "naive", "1f1b"} <= set(names)
    gpipe = next(line for line in lines if line.startswith("gpipe")).split()
    best = next(c for c in found.considered if c.schedule == "gpipe")
    assert int(gpipe[3]) == best.num_microbatches
    assert f"and {len(found.considered) - len(names)} other" in lines[-1]
    assert any("slower" in line for line in lines)
    assert sum("chosen" in line for line in lines) == 1


def test_what_does_not_fit_says_so() -> None:
    costs = profile([1.0] * 4, saved=(100.0,) * 4)
    found = ps.plan(costs, num_microbatches=4, memory_limit=1500, recompute="none", replicas=1)
    lines = considered(found)
    gpipe = next(line for line in lines if line.startswith("gpipe"))
    assert "does not fit the memory by" in gpipe
    assert "-" in gpipe.split()


def test_what_is_for_one_replica_is_not_proposed_to_several() -> None:
    costs = profile([1, 2, 3, 4])
    kind = costs.on("cpu")
    gpu = msgspec.structs.replace(kind, kind="cuda:0", launching=1e9)
    on_gpus = msgspec.structs.replace(costs, devices=("cuda:0",) * 2, kinds={"cuda:0": gpu})
    assert "cuda_graphs=True" in launches(ps.plan(on_gpus, replicas=1), on_gpus)[0]
    (found,) = launches(ps.plan(on_gpus, replicas=2), on_gpus)
    assert "larger micro-batches" in found
    assert "cuda_graphs" not in found
    assert "processes" not in found
