"""What counts as the same: bits, with a NaN like any other NaN."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.capture.equality import same

NAN, INF = float("nan"), float("inf")
T = torch.tensor


class Plain:
    """Does not say when it is equal."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.itself = self


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (T([1.0, NAN]), T([1.0, NAN]), True),
        (T([1.0, NAN]), T([NAN, 1.0]), False),
        (T([NAN]), T([0.0]), False),
        (T([INF, NAN]), T([torch.finfo(torch.float32).max, NAN]), False),
        (T([0.0]), T([-0.0]), False),
        (T([NAN + 1j]), T([NAN + 1j]), True),
        (T([1.0]), T([1.0], dtype=torch.double), False),
        (T([1.0]), T(1.0), False),
        (T([1, 2]), T([1, 2]), True),
        (torch.ones(3, 2).T, torch.ones(2, 3), True),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), True),
        (torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse(), False),
        (torch.ones(2).to(torch.float8_e5m2), torch.ones(2).to(torch.float8_e5m2), True),
        (torch.ones(2, device="meta"), torch.zeros(2, device="meta"), True),
        (np.array([1.0, NAN]), np.array([1.0, NAN]), True),
        (np.array([1, 2]), np.array([1, 3]), False),
        (np.array(["a"]), np.array(["a"]), True),
        (1, 1.0, False),
        (NAN, NAN, True),
        ({"a": [T([NAN]), 1]}, {"a": [T([NAN]), 1]}, True),
        ({"a": [T([NAN]), 1]}, {"a": [T([NAN]), 2]}, False),
        ((1, 2), [1, 2], False),
        (Plain(T([1.0])), Plain(T([1.0])), True),
        (Plain(T([1.0])), Plain(T([2.0])), False),
        (Plain({"a": {1, 2}}), Plain({"a": {2, 1}}), True),
    ],
)
def test_same(one: Any, other: Any, expected: bool) -> None:
    assert same(one, other) is expected
    assert same(other, one) is expected
