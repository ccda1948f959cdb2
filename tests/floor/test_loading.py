"""Models and inputs by name."""

from __future__ import annotations

import pytest
import torch

import penstock as ps
from penstock.loading import load, load_model, parse_input


def test_models() -> None:
    assert type(load_model("torchvision.models:resnet18")).__name__ == "ResNet"
    assert load("torch.nn:functional.relu") is torch.nn.functional.relu


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("resnet50", "write package.module:callable"),
        ("no.such.module:f", "there is no module 'no'"),
        ("torch.nn:Linnear", "torch.nn has no 'Linnear'"),
        ("math:pi", "is a float, neither module nor callable"),
        ("os:getcwd", "returned a str, not an nn.Module"),
    ],
)
def test_models_that_are_not_there(target: str, words: str) -> None:
    with pytest.raises(ps.InputError, match=words):
        load_model(target)


@pytest.mark.parametrize(
    ("spec", "name", "dtype", "shape"),
    [
        ("8x3x4", None, torch.float32, (8, 3, 4)),
        ("float64[2, 3]", None, torch.float64, (2, 3)),
        ("int64[8,4]<5", None, torch.int64, (8, 4)),
        ("ids=int32[8]<3", "ids", torch.int32, (8,)),
        ("int64[8,4]<5>", None, torch.int64, (8, 4)),
    ],
)
def test_inputs(spec: str, name: str | None, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    found, tensor = parse_input(spec)
    assert (found, tensor.dtype, tuple(tensor.shape)) == (name, dtype, shape)
    if "<" in spec:
        assert 0 <= tensor.min() <= tensor.max() < int(spec.split("<")[1].strip(">"))


@pytest.mark.parametrize(
    "spec",
    [
        "",
        "8xx3",
        "int64[8",
        "int64[8,]",
        "int64[8 8]",
        "2x" + "9" * 5000,
        "float99[2]",
        "a-b=3x3",
        "3x3<2",
    ],
)
def test_inputs_that_make_no_sense(spec: str) -> None:
    with pytest.raises(ps.InputError, match="is not an input: write a shape"):
        parse_input(spec)


@pytest.mark.parametrize(
    "spec",
    [
        "int8[8,2]<50257",
        "bool[2]<9",
        "int64[2]<0",
        "int64[2]<" + "9" * 30,
        "9" * 30,
        "2x3x" + "9" * 17,
    ],
)
def test_inputs_that_torch_cannot_make(spec: str) -> None:
    with pytest.raises(ps.InputError, match="torch cannot make this tensor"):
        parse_input(spec)
