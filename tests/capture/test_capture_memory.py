"""What capturing takes in memory, beside one forward and backward of plain PyTorch."""

from __future__ import annotations

import pytest

from penstock.bench.capture_time import UNET, held


@pytest.mark.parametrize("frozen", [False, True])
def test_capturing_takes_little_more_than_a_step(frozen: bool) -> None:
    step, capture = (held(UNET, way, frozen)["resident"] for way in ("step", "capture"))
    print(f"{capture / step:.2f}: {capture / 1e6:.0f} MB, and {step / 1e6:.0f} MB for a step")
    assert step > 50e6
    assert capture < 1.3 * step
