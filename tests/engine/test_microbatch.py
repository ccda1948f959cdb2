"""Splitting a batch adds no row and loses none; merging undoes it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.capture import Join
from penstock.engine.microbatch import check_mergeable, merge, split
from penstock.errors import InputError
from penstock.profile.rows import split_rows

counts = st.integers(1, 9)


@given(rows=st.integers(1, 40), count=counts)
def test_rows_are_those_of_tensor_split(rows: int, count: int) -> None:
    count = min(count, rows)
    parts = torch.arange(rows).tensor_split(count)
    assert split_rows(rows, count) == [len(part) for part in parts]


@given(rows=st.integers(1, 12), count=counts, dim=st.sampled_from([0, 1, -1]))
def test_what_is_split_is_merged_again(rows: int, count: int, dim: int) -> None:
    count = min(count, rows)
    shape = [3, 2, 4]
    shape[dim] = rows
    whole = torch.randn(shape)
    parts = [part for (part,) in split([whole], [dim], count)]
    assert torch.equal(merge([Join(dim)], [[part] for part in parts])[0], whole)


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
    table = torch.randn(3)
    assert merge([Join()], [[table], [table]])[0] is table


def test_a_result_that_cannot_be_put_together() -> None:
    joins = [Join(0), Join(why="a mean, which has no batch dimension")]
    with pytest.raises(InputError, match=r"has no batch dimension.*num_microbatches=1"):
        check_mergeable(joins)
    with pytest.raises(InputError, match=r"has no batch dimension.*num_microbatches=1"):
        check_mergeable(joins, anyway=True)
    mixed = [Join(0, "of which rows depend on the other rows")]
    with pytest.raises(InputError, match=r'depend on the other rows.*"rows" to concatenate them'):
        check_mergeable(mixed)
    check_mergeable(mixed, anyway=True)
