"""New lengths are compared with the model's forward, ever more seldom once they are as expected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.capture import forward, generalising

LENGTH: dict[str | int, Any] = {0: {1: "length"}}


class Odd(nn.Module):
    """Whatever a function makes of a length in between two layers."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.between = between
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.between(self.a(x)))


def compared(
    program: ps.Program, monkeypatch: pytest.MonkeyPatch, lengths: list[int], rows: int = 2
) -> list[int]:
    """The lengths of these at which the model's forward is run."""
    source, found = program.recordings._source, []
    check = source.check_at

    def counted(trace: Any, leaves: Any, training: bool) -> None:
        found.append(leaves[0].shape[1])
        check(trace, leaves, training)

    monkeypatch.setattr(source, "check_at", counted)
    for length in lengths:
        x = torch.randn(rows, length, 4)
        assert torch.equal(program(x), program.model(x))
    return found


def test_ever_fewer_lengths_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    program = ps.capture(Odd(torch.relu), (torch.randn(6, 65, 4),), dynamic=LENGTH)
    found = compared(program, monkeypatch, [129, 3, *range(5, 128, 2)])
    # 129 and 3 are beyond what was seen; then the 3rd, 4th, 8th, 16th, 32nd and 64th; 65 is known.
    assert found == [129, 3, 5, 7, 15, 31, 63]
    assert not compared(program, monkeypatch, list(range(5, 128, 2)))  # none twice


def test_beyond_what_was_seen_each_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    program = ps.capture(Odd(torch.relu), (torch.randn(6, 9, 4),), dynamic=LENGTH)
    longer = list(range(11, 60, 2))
    assert compared(program, monkeypatch, longer) == longer


def test_lengths_that_other_powers_of_two_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    program = ps.capture(Odd(torch.relu), (torch.randn(6, 9, 4),), dynamic=LENGTH)
    found = compared(program, monkeypatch, [101, 1, *range(11, 30, 2), 16, 48, 32, 20, 28, 24])
    assert {16, 32, 20} <= set(found)
    assert not {48, 28, 24} & set(found)  # like 16, 20, and 8, which the capture has seen


def test_a_model_that_pads_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Multiples of 16 only, at first."""

    def padded(x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] > 40 and x.shape[1] % 16:
            x = x.tanh()
        return x

    program = ps.capture(Odd(padded), (torch.randn(6, 8, 4),), dynamic=LENGTH)
    compared(program, monkeypatch, [*range(16, 257, 16)])
    x = torch.randn(2, 100, 4)
    with pytest.raises(ps.CaptureError, match="does something else"):
        program(x)
    with pytest.raises(ps.CaptureError, match="does something else"):
        program(x)  # and it is not forgotten


def test_rows_are_between_those_seen_or_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    program = ps.capture(Odd(torch.relu), (torch.randn(6, 65, 4),), dynamic=LENGTH)
    compared(program, monkeypatch, [129, 3, *range(5, 50, 2)])
    assert compared(program, monkeypatch, [9], rows=40) == [9]


def test_floats_that_grow_with_a_length_are_always_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = ps.capture(
        Odd(lambda x: x / float(x.shape[1])), (torch.randn(6, 65, 4),), dynamic=LENGTH
    )
    lengths = [129, 3, *range(5, 30, 2)]
    assert compared(program, monkeypatch, lengths) == lengths


def test_large_models_run_no_forward_of_a_length_that_shapes_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generalising, "_LARGE", 0)
    program = ps.capture(Odd(torch.relu), (torch.randn(6, 9, 4),), dynamic=LENGTH)
    record, real = forward.record, []

    def counted(model: nn.Module, is_open: Any, args: Any, *others: Any, **more: Any) -> Any:
        real.append(not next(model.parameters()).is_meta)
        return record(model, is_open, args, *others, **more)

    monkeypatch.setattr(forward, "record", counted)
    lengths = list(range(11, 51, 2))
    assert compared(program, monkeypatch, lengths[:2]) == lengths[:2]
    found = compared(program, monkeypatch, lengths[2:])
    # The 3rd, the 4th, the 8th and the 16th; and 23 and 47, beyond twice 11 and 23.
    assert found == [15, 17, 23, 25, 41, 47]
    assert not any(real)
    assert len(real) == 11  # with those of 22, 46 and 94, ahead


def test_a_length_that_decides_is_found_out_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generalising, "_LARGE", 0)
    program = ps.capture(
        Odd(lambda x: x.tanh() if x.shape[1] > 40 else x), (torch.randn(6, 9, 4),), dynamic=LENGTH
    )
    compared(program, monkeypatch, list(range(11, 41, 2)))
    with pytest.raises(ps.CaptureError, match="does something else"):
        program(torch.randn(2, 41, 4))
