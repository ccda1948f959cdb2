"""Flattening and putting together again."""

from __future__ import annotations

import pickle
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.capture.trees import flatten, leaf_paths, map_leaves, unflatten


class Point(NamedTuple):
    x: Any
    y: Any


@dataclass
class Record:
    first: Any
    second: Any


def containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.tuples(children, children)
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), children, max_size=3),
        pairs.map(lambda p: Point(*p)),
        pairs.map(lambda p: Record(*p)),
        pairs.map(lambda p: slice(*p)),
        pairs.map(lambda p: OrderedDict(a=p[0], b=p[1])),
    )


TREES = st.recursive(st.integers() | st.none() | st.text(max_size=3), containers)


@given(TREES)
def test_round_trip(tree: Any) -> None:
    leaves, structure = flatten(tree)
    assert unflatten(structure, leaves) == tree
    assert type(unflatten(structure, leaves)) is type(tree)
    assert flatten(tree)[1] == structure
    assert unflatten(pickle.loads(pickle.dumps(structure)), leaves) == tree


@given(TREES)
def test_paths_lead_to_the_leaves(tree: Any) -> None:
    leaves, structure = flatten(tree)
    for leaf, path in zip(leaves, leaf_paths(structure), strict=True):
        value = tree
        for key in path:
            assert key is not None
            how, name = key
            value = value[name] if how == "item" else getattr(value, name)
        assert value is leaf or value == leaf


def test_sizes_become_tuples_and_tensors_are_leaves() -> None:
    x = torch.zeros(2, 3)
    assert flatten((x, x.shape))[0] == [x, 2, 3] or flatten((x, x.shape))[0][1:] == [2, 3]
    assert map_leaves(lambda leaf: leaf + 1, {"a": [1, (2,)]}) == {"a": [2, (3,)]}


@dataclass(slots=True)
class Slotted:
    second: Any
    first: Any


@dataclass(slots=True, weakref_slot=True)
class Derived(Slotted):
    last: Any


@dataclass
class WithDict(Slotted):
    last: Any


@pytest.mark.parametrize("kind", [Derived, WithDict])
def test_a_dataclass_keeps_what_is_in_the_slots_of_its_bases(kind: type) -> None:
    leaves, structure = flatten(kind(1, 2, 3))
    assert leaves == [1, 2, 3]
    assert [key[1] for (key,) in leaf_paths(structure) if key] == ["second", "first", "last"]
    assert unflatten(structure, leaves) == kind(1, 2, 3)


def test_a_slot_may_be_empty() -> None:
    value = Slotted(1, 2)
    del value.first
    leaves, structure = flatten(value)
    assert leaves == [1]
    assert not hasattr(unflatten(structure, leaves), "first")
