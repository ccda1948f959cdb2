"""Which workers a pipeline gets, and how their links are called."""

from __future__ import annotations

import pytest
import torch

import penstock as ps
from penstock.workers.joining import is_torchrun
from tests.models import mlp
from tests.pool import pooled

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
            mlp(4, 4, 4), (X,), devices=["cpu"] * 2, workers=kind, num_microbatches=2
        ) as pipe,
    ):
        assert len(pipe.links) == len(pipe.plan.stages) - 1
        assert any(link in name for name in pipe.links)
