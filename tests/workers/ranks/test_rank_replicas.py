"""Replicas whose workers are ranks: the bits of one device, and errors for what cannot be."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training import USES, assert_same, used_plainly
from tests.workers.ranks import replicated
from tests.workers.ranks.launching import Launcher
from tests.workers.ranks.test_torchrun import assert_equal

SHAPES = {"1x2": 2, "1x3": 3, "2x2": 4}
"""Stages x replicas, and how many ranks that takes."""


@functools.cache
def expected() -> dict[str, dict[str, Any]]:
    """By threads, in two stages of one replica."""
    return replicated.reference({"workers": "threads", "devices": ["cpu"] * 2})


@pytest.mark.timeout(300)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_of_one_device(shape: str, launcher: Launcher, tmp_path: Path) -> None:
    ranks = launcher.run(f"replicas:{shape}", tmp_path, SHAPES[shape], seconds=250)
    stages = int(shape[0])
    for name in USES:
        plain = used_plainly(name)
        for found in ranks if stages == 1 else ():
            assert_same(found[name], plain)
    assert_as_expected(ranks, stages, expected().keys())


@pytest.mark.timeout(200)
def test_the_bits_of_one_device_over_a_process_group(launcher: Launcher, tmp_path: Path) -> None:
    ranks = launcher.run("replicas_by_process_group:1x3", tmp_path, 3)
    assert_as_expected(ranks, 1, replicated.SOME)


def assert_as_expected(ranks: list[dict[str, Any]], stages: int, names: Iterable[str]) -> None:
    """Every rank has the same losses and states as threads, and the gradients of its stages."""
    for name in names:
        theirs = expected()[name]
        for rank, found in enumerate(ranks):
            mine = dict(found[name])
            here = mine.pop("gradients", {})
            assert here or "gradients" not in theirs
            assert_equal(f"rank {rank}, {name}", here, some(theirs.get("gradients", {}), here))
            inputs = mine.pop("x", None)
            if inputs is not None and inputs["x"] is not None:
                assert_equal(f"rank {rank}, {name}", inputs, theirs["x"])
            rest = {k: v for k, v in theirs.items() if k not in ("gradients", "x")}
            assert_equal(f"rank {rank}, {name}", mine, rest)
            if stages == 1 and "gradients" in theirs:
                assert here.keys() == theirs["gradients"].keys()


def some(whole: dict[str, torch.Tensor], names: Any) -> dict[str, torch.Tensor]:
    """Those of these names."""
    return {name: whole[name] for name in names}


def test_what_cannot_be(launcher: Launcher, tmp_path: Path) -> None:
    found, other = launcher.run("refused", tmp_path)
    assert found.keys() == other.keys()
    texts = {
        "buffers": '\'1\', .* workers="threads" or "processes"',
        "attributes": "'1' remembers something",
        "again": "runs again in a backward",
        "strided": "gets strided inputs",
        "loss that remembers": "has changed when it was called",
        "loss with a parameter": "no parameter of the model",
        "other inputs": "has other inputs than the rank",
        "other targets": "given different targets",
        "other weights": "different weights or buffers",
        "loss that cannot be pickled": "cannot be known, as pickling it fails: .*_thread.lock",
        "hook that remembers": "the hook Growing has changed",
        "module hook that remembers": "the hook hooked.<locals>.<lambda> has changed",
        "hook that reads statistics": "reads or changes the running statistics",
        "forward that reads statistics": "reads or changes the running statistics",
        "strided, deferred": "",
        "nothing": "",
    }
    assert found.keys() == texts.keys()
    for name, text in texts.items():
        for said in (found[name], other[name]):
            assert bool(said) == bool(text), (name, said)
            assert re.search(text, said, re.IGNORECASE), (name, said)
            assert not said or said.startswith("InputError"), said


def test_a_failed_step_leaves_no_different_weights(launcher: Launcher, tmp_path: Path) -> None:
    ranks = launcher.run("failed_step", tmp_path)
    for found in ranks:
        assert found["step"] == "RuntimeError: the step has failed"
        for name in ("after", "again"):
            assert re.match("InputError: the replicas have different weights", found[name])
    assert torch.equal(ranks[0]["loss"], ranks[1]["loss"])
