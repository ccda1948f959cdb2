"""Many interleavings one after the other, in a process of their own."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import NamedTuple

import torch

from tests.interleavings.mutations import MUTATIONS
from tests.interleavings.running import interleaving, names


class Found(NamedTuple):
    """What became of some interleavings.

    Attributes:
        cases: how many of each case were run.
        wrong: what went wrong, in words.
    """

    cases: Counter[str]
    wrong: list[str]


def right_ones(start: int, count: int) -> Found:
    """Run the engine as it is, with the detector."""
    every = names(start + count)
    wrong = []
    for seed in range(start, start + count):
        outcome = interleaving(every[seed], seed, detect=True)
        if not outcome.is_right or outcome.races:
            what = outcome.error or ", ".join(outcome.wrong) or outcome.races[0]
            wrong.append(f"{every[seed]}, seed {seed}: {what}")
    return Found(Counter(every[start:]), wrong)


def mistaken(name: str, count: int) -> tuple[int, int]:
    """In how many of so many orders of a mistake bits were wrong, and in how many were races."""
    mutation = MUTATIONS[name]
    wrong = races = 0
    with mutation.made():
        for seed in range(count):
            case = mutation.cases[seed % len(mutation.cases)]
            outcome = interleaving(case, seed, detect=True)
            wrong += not outcome.is_right
            races += bool(outcome.races)
    return wrong, races


def quiet() -> None:
    """For a process of its own: no warnings, one thread."""
    warnings.simplefilter("ignore")  # of losses that are no numbers, which mistakes make
    torch.set_num_threads(1)
