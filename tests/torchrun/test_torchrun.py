"""The same script under torchrun: the bits of threads, and an error on every rank if one fails."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.torchrun.steps import EXACT, LARGER, Found, everything

ROOT = Path(__file__).parent.parent.parent


def environment() -> dict[str, str]:
    """For the ranks, and for torchrun itself."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}


def torchrun(scenario: str, directory: Path, ranks: int = 2, seconds: float = 100) -> list[Any]:
    """What every rank has found; `None` for one that did not get there."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "--monitor-interval", "5"]
    command += [str(ROOT / "tests/torchrun/script.py"), scenario, str(directory)]
    process = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=seconds, check=False
    )
    found = collected(directory, ranks)
    if not any(found):
        pytest.fail(process.stdout + process.stderr)
    return found


def collected(directory: Path, ranks: int) -> list[Any]:
    """What the ranks have left."""
    files = [directory / f"{rank}.pt" for rank in range(ranks)]
    return [torch.load(f, weights_only=False) if f.exists() else None for f in files]


def assert_equal(name: str, mine: Any, theirs: Any) -> None:
    """Bit for bit."""
    if isinstance(theirs, dict):
        assert mine.keys() == theirs.keys(), name
        for key, value in theirs.items():
            assert_equal(f"{name}, {key}", mine[key], value)
    elif isinstance(theirs, (list, tuple)):
        for k, (a, b) in enumerate(zip(mine, theirs, strict=True)):
            assert_equal(f"{name}, {k}", a, b)
    elif isinstance(theirs, torch.Tensor):
        assert torch.equal(mine, theirs), name
    else:
        assert mine == theirs, name


def assert_the_bits_of_threads(ranks: list[dict[str, Found]], exact: Any, link: str) -> None:
    """Every rank has the same losses and states, and between them they have all gradients."""
    threads = everything({"workers": "threads", "devices": ["cpu"] * 2}, exact)
    for name, expected in threads.items():
        gradients: dict[str, torch.Tensor] = {}
        for rank, found in enumerate(ranks):
            own = dict(found[name])
            for key in ("gradients", "x"):
                here = {k: v for k, v in own.pop(key, {}).items() if v is not None}
                assert not here.keys() & gradients.keys(), f"{name}: {here.keys()} on both"
                gradients |= here
            for other in own.pop("links", ()):
                assert other == link
            rest = {k: v for k, v in expected.items() if k in own}
            assert len(rest) >= 1
            assert_equal(f"rank {rank}, {name}", own, rest)
        assert_equal(name, gradients, expected["gradients"] | expected.get("x", {}))


def test_the_bits_of_threads(tmp_path: Path) -> None:
    assert_the_bits_of_threads(torchrun("same_bits", tmp_path), EXACT, "shared memory")


def test_the_bits_of_threads_over_a_process_group(tmp_path: Path) -> None:
    found = torchrun("by_process_group", tmp_path)
    assert_the_bits_of_threads(found, EXACT, "torch.distributed (gloo)")


@pytest.mark.slow
def test_the_bits_of_threads_with_larger_models(tmp_path: Path) -> None:
    found = torchrun("same_bits_of_larger_models", tmp_path, seconds=600)
    assert_the_bits_of_threads(found, LARGER, "shared memory")
