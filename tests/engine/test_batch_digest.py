"""The checksum by which processes notice that their batches differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from penstock.engine.batch import digest

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*tensor support is in beta state:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]
ROWS = torch.arange(12.0).reshape(4, 3)
SHOWN = torch.complex(ROWS, ROWS + 1)
KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "every other row": lambda x: x[::2],
    "transposed": lambda x: x.t(),
    "bfloat16": lambda x: x.bfloat16(),
    "booleans": lambda x: x > 5,
    "a number": lambda x: x.sum(),
    "nothing": lambda x: torch.cat((x[:0], x[1:1])),
    "coo": lambda x: x.to_sparse(),
    "coo, not coalesced": lambda x: torch.sparse_coo_tensor([[0, 0]], x[0, :2], (3,)),
    "csr": lambda x: x.to_sparse_csr(),
    "csc": lambda x: x.to_sparse_csc(),
    "bsr": lambda x: x.to_sparse_bsr((2, 3)),
    "conjugated": lambda x: torch.complex(x, x + 1).conj(),
    "negated": lambda x: torch.complex(x, x + 1).conj().imag,
}


@pytest.mark.parametrize("name", KINDS)
def test_it_depends_on_the_values(name: str) -> None:
    make = KINDS[name]
    assert digest([make(ROWS)]) == digest([make(ROWS.clone())])
    if name != "nothing":
        assert digest([make(ROWS)]) != digest([make(2 * ROWS + 1)])


def test_it_depends_on_where_entries_of_sparse_tensors_are() -> None:
    moved = ROWS.flip(0)
    for make in (Tensor.to_sparse, Tensor.to_sparse_csr, Tensor.to_sparse_csc):
        assert digest(make(ROWS)) != digest(make(moved))


def test_a_lazy_conjugate_is_what_it_stands_for() -> None:
    assert digest(SHOWN.conj()) == digest(SHOWN.conj().resolve_conj())
    assert digest(SHOWN.conj()) != digest(SHOWN)
    negated = SHOWN.conj().imag
    assert negated.is_neg()
    assert digest(negated) == digest(negated.resolve_neg())
