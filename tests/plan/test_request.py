"""Cuts that the user insists on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.plan.request import Cut, positions
from tests.support.models import mlp

LABELS = ("conv1", "relu()", "layer1.0.conv", "layer1.0.add()", "layer2", "layer10.a", "head")


@pytest.mark.parametrize(
    ("cuts", "expected"),
    [
        (["layer1", "layer2"], (2, 4)),
        (["layer1.0", "layer10"], (2, 5)),
        ([1, "head"], (1, 6)),
    ],
)
def test_before_the_first_call_of_a_module(cuts: Sequence[Cut], expected: tuple[int, ...]) -> None:
    assert positions(LABELS, {}, 3, cuts) == expected


@pytest.mark.parametrize(
    ("cuts", "message"),
    [
        (["layer3"], "named 'layer3'; there are 'layer"),
        (["layer2.0.conv"], "inside 'layer2', which is one call"),
        (["layer1.0"], "before 'layer1.0': it shares memory"),
        (["conv1"], "before 'conv1': it has to be between"),
        ([7], "before call 7: it has to be between two of the 7 calls, so from 1 to 6"),
        (["layer1", "layer2"], "2 cuts make 3 stages, but there are 2 devices"),
    ],
)
def test_cuts_that_are_not_possible(cuts: Sequence[Cut], message: str) -> None:
    with pytest.raises(ps.PlanError, match=message) as caught:
        positions(LABELS, {2: "it shares memory"}, 2, cuts)
    assert isinstance(caught.value, ps.InputError)  # so that a command ends with 2


def test_cuts_out_of_order() -> None:
    with pytest.raises(ps.PlanError, match="order of the program: 'layer2' at call 4, 'layer1' at"):
        positions(LABELS, {}, 3, ["layer2", "layer1"])


def test_a_pipeline_cut_as_asked() -> None:
    model = nn.Sequential(mlp(4, 4, 4), mlp(4, 4, 4))
    x = torch.randn(4, 4)
    with ps.Pipeline(
        model,
        (x,),
        devices=["cpu", "cpu"],
        cuts=["1.1"],
        keep_closed=["0"],
        num_microbatches=1,
        replicas=1,
    ) as pipe:
        assert [stage.first for stage in pipe.plan.stages] == ["0", "1.1"]
        with pytest.raises(ps.InputError, match="give plan= or cuts="):
            ps.Pipeline(model, (x,), devices=["cpu", "cpu"], cuts=["1"], plan=pipe.plan)
    with pytest.raises(ps.PlanError, match="inside '0'"):
        ps.Pipeline(
            model, (x,), devices=["cpu", "cpu"], cuts=["0.2"], keep_closed=["0"], replicas=1
        )
