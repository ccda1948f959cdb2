"""What capturing takes in memory, beside one forward and backward of plain PyTorch."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Large blocks go back to the kernel when they are freed, so that a peak is one of what is in use.
SETTINGS = {"MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}


def peak(way: str, weights: str) -> int:
    """Bytes beyond the model, at most, in a process of its own."""
    command = [sys.executable, "-m", "tests.trust.unet", way, weights]
    environment = {**os.environ, **SETTINGS}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.parametrize("weights", ["trained", "frozen"])
def test_capturing_takes_little_more_than_a_step(weights: str) -> None:
    step, capture = peak("plain", weights), peak("capture", weights)
    print(f"{capture / step:.2f}: {capture / 1e6:.0f} MB, and {step / 1e6:.0f} MB for a step")
    assert step > 50e6
    assert capture < 1.3 * step
