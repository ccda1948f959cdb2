"""Splitting a batch adds no row and loses none; merging undoes it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.capture import Origin, Ref, Size, TensorInfo, Trace
from penstock.capture.calls import Call
from penstock.engine.microbatch import merge, split, split_rows, unmerge
from penstock.errors import InputError

counts = st.integers(1, 9)
ROW = Size(((1, ("B",)),))


def trace_of(*infos: TensorInfo) -> Trace:
    """A trace whose only call returns these values."""
    return Trace((), None, [Call("call", (), {}, "", outputs=infos)])


def growing(*shape: int | Size, origin: Origin = Origin.MODEL) -> TensorInfo:
    return TensorInfo(shape, torch.float32, True, 0, origin)


@given(rows=st.integers(1, 40), count=counts)
def test_rows_are_those_of_tensor_split(rows: int, count: int) -> None:
    count = min(count, rows)
    parts = torch.arange(rows).tensor_split(count)
    assert split_rows(rows, count) == [len(part) for part in parts]


@given(rows=st.integers(1, 12), count=counts, dim=st.sampled_from([0, 1, -1]))
def test_what_is_split_is_merged_again(rows: int, count: int, dim: int) -> None:
    count = min(count, rows)
    shape, sizes = [3, 2, 4], [3, 2, 4]
    shape[dim] = rows
    sizes[dim] = ROW  # type: ignore[call-overload]
    whole = torch.randn(shape)
    parts = [part for (part,) in split([whole], [dim], count)]
    trace, value = trace_of(growing(*sizes)), Ref(0, 0)
    assert torch.equal(merge(trace, [value], [[part] for part in parts])[0], whole)
    again = unmerge(trace, value, whole, [{"B": n} for n in split_rows(rows, count)])
    assert all(torch.equal(a, b) for a, b in zip(again, parts, strict=True))


def test_sizes_that_grow_faster_than_the_rows() -> None:
    """Three results per row and two more for every micro-batch, as `view(B * T, ...)` gives."""
    trace, value, rows = trace_of(growing(Size(((3, ("B",)), (2, ()))), 4)), Ref(0, 0), [3, 2]
    parts = [torch.randn(3 * n + 2, 4) for n in rows]
    whole = merge(trace, [value], [[part] for part in parts])[0]
    assert len(whole) == 3 * 5 + 2 * 2
    pieces = unmerge(trace, value, whole, [{"B": n} for n in rows])
    assert all(torch.equal(a, b) for a, b in zip(pieces, parts, strict=True))


def test_what_has_no_rows_is_in_every_microbatch() -> None:
    table, label = torch.randn(2), "mean"
    parts = split([torch.arange(5), table, label], [0, None, None], 2)
    assert [list(part[0]) for part in parts] == [[0, 1, 2], [3, 4]]
    assert all(part[1] is table and part[2] is label for part in parts)


def test_slices_share_memory_but_not_their_version() -> None:
    """A model that writes to its input must not make autograd distrust the other slices."""
    batch = torch.zeros(4, 2)
    (first,), (second,) = split([batch], [0], 2)
    first.add_(1)
    assert second._version == 0
    assert batch[:, 0].tolist() == [1, 1, 0, 0]


def test_slices_of_an_input_with_gradient_lead_back_to_it() -> None:
    batch = torch.zeros(4, 2, requires_grad=True)
    for part in split([batch], [0], 2):
        part[0].sum().backward()
    assert batch.grad is not None
    assert batch.grad.eq(1).all()


def test_the_same_value_in_every_microbatch_is_returned_once() -> None:
    trace = trace_of(growing(3, origin=Origin.NOTHING))
    table = torch.randn(3)
    assert merge(trace, [Ref(0, 0)], [[table], [table]])[0] is table
    assert unmerge(trace, Ref(0, 0), table, [{"B": 1}] * 2)[1] is None


@pytest.mark.parametrize("info", [growing(3), growing(), growing(ROW, ROW)])
def test_a_result_without_one_batch_dimension_cannot_be_merged(info: TensorInfo) -> None:
    part = torch.zeros(1)
    with pytest.raises(InputError, match=r"has no batch dimension.*num_microbatches=1"):
        merge(trace_of(info), [Ref(0, 0)], [[part], [part]])
    assert merge(trace_of(info), [Ref(0, 0)], [[part]]) == [part]
