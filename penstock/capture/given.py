"""Arguments of a model that are neither tensors nor plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from penstock.capture.objects import GENERATORS
from penstock.capture.preserve import put_state, same_state, state_of
from penstock.capture.trees import Structure, leaf_paths
from penstock.errors import InputError


def not_passed_on(leaf: object, number: int, structure: Structure | None) -> InputError:
    """The error for an argument that no call of a program can be given.

    Args:
        leaf: the argument, or a part of one.
        number: which leaf of `(args, kwargs)` it is.
        structure: the structure of `(args, kwargs)`.
    """
    keys = [key[1] if key else "?" for key in leaf_paths(structure)[number][1:]]
    kind = type(leaf).__name__
    if isinstance(leaf, GENERATORS):
        works = (
            "Leave it out, as every call that draws is seeded by torch.manual_seed, the step and "
            "the micro-batch; or draw the numbers before, and give them as a tensor"
        )
    elif "Cache" in kind:
        works = "Leave it out (use_cache=False), or use Pipeline.session or Pipeline.generate"
    else:
        works = (
            "Give what is in it: tensors, numbers and text, also in tuples, dicts and dataclasses; "
            "or let the model keep the object in an attribute"
        )
    return InputError(
        f"the argument {'.'.join(map(repr, keys))} is a {kind}, which the forward draws from, "
        "gives to a module or a function, or returns. A pipeline cannot do that: its calls run for "
        "several micro-batches, in several threads or processes, and are given only tensors and "
        f"plain data. {works}"
    )


@contextmanager
def generators_given(leaves: Sequence[Any], structure: Structure | None) -> Iterator[None]:
    """Afterwards, generators among arguments are as they were.

    Args:
        leaves: the leaves of `(args, kwargs)`.
        structure: the structure of `(args, kwargs)`.

    Raises:
        InputError: Python has drawn from one of them, which the program would not repeat.
    """
    states = [(k, x, state_of(x)) for k, x in enumerate(leaves) if isinstance(x, GENERATORS)]
    try:
        yield
        for k, generator, state in states:
            if not same_state(state_of(generator), state):
                raise not_passed_on(generator, k, structure)
    finally:
        for _, generator, state in states:
            put_state(generator, state)
