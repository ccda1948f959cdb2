"""Which workers a pipeline gets, and how their links are called."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import penstock as ps
from penstock.workers.ranks.backend import RankBackend
from penstock.workers.ranks.process_groups import backend_for
from penstock.workers.ranks.rendezvous import is_torchrun
from tests.support.models import mlp
from tests.support.pool import pooled

X = torch.randn(6, 4)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "1"}, True),
        ({"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "1"}, False),
        ({"RANK": "0", "WORLD_SIZE": "2"}, False),
    ],
)
def test_torchrun_is_noticed(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: bool
) -> None:
    for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_torchrun() is expected


def test_torchrun_without_torchrun() -> None:
    with pytest.raises(ps.InputError, match=r"needs MASTER_ADDR.*torchrun --nproc-per-node"):
        ps.Pipeline(mlp(4, 4, 4), (X,), workers="torchrun")


@pytest.mark.parametrize(("kind", "link"), [("threads", "by reference"), ("processes", "shared")])
def test_links_are_reported(kind: str, link: str) -> None:
    with (
        pooled(),
        ps.Pipeline(
            mlp(4, 4, 4), (X,), devices=["cpu"] * 2, workers=kind, num_microbatches=2, replicas=1
        ) as pipe,
    ):
        assert len(pipe.links) == len(pipe.plan.stages) - 1
        assert any(link in name for name in pipe.links)


def test_rank_0_cannot_plan_for_devices_that_it_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    ranks = RankBackend.__new__(RankBackend)  # as if all ranks had joined
    ranks._names = ["cuda:0", "cpu"]
    with pytest.raises(ps.PlanError, match=r"rank 0 plans for cuda:0, cpu .*give it a plan"):
        _ = ranks.devices
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    ranks._names = ["cuda:3", "cpu"]
    assert ranks.devices == [torch.device("cuda", 1), torch.device("cpu")]


@pytest.mark.parametrize(
    ("default", "devices", "gloo", "nccl", "expected"),
    [
        ("mpi", ("cpu", "cpu"), True, True, "mpi"),
        ("gloo", ("cuda:0", "cuda:1"), True, True, "nccl"),
        ("gloo", ("cuda:0", "cpu"), True, True, "gloo"),
        ("gloo", ("cuda:0", "cuda:1"), True, False, "gloo"),
        ("nccl", ("cpu", "cpu"), False, True, None),
    ],
)
def test_what_carries_values_between_machines(
    monkeypatch: pytest.MonkeyPatch,
    default: str,
    devices: tuple[str, str],
    gloo: bool,
    nccl: bool,
    expected: str | None,
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: default)
    monkeypatch.setattr(dist, "is_gloo_available", lambda: gloo)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: nccl)
    one, other = map(torch.device, devices)
    if expected is None:
        with pytest.raises(ps.InputError, match=r"no backend for cpu and cpu.* without gloo"):
            backend_for(one, other)
    else:
        assert backend_for(one, other) == expected
