"""Groups draw numbers of their own, which no other group draws for a seed nearby."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.generation.seeds import seed_of
from tests.generation.subjects import expected, gpt2, padded, pipeline, tokens


def test_they_are_as_documented() -> None:
    assert seed_of(7, 0) == 7
    documented = np.random.SeedSequence(7, spawn_key=(3,)).generate_state(1, "uint64")[0]
    assert seed_of(7, 3) == int(documented) == 6823953754371609207


def test_seeds_nearby_have_none_in_common() -> None:
    found = [seed_of(seed, row) for seed in range(-20, 20) for row in range(20)]
    on_cpus = {seed % 2**32 for seed in found}  # which is what torch's generator of CPUs takes
    assert len(on_cpus) == len(found)


@pytest.mark.parametrize("seed", [-(2**63), -1, 2**63, 2**64 - 1])
def test_torch_takes_them(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed_of(seed, 5))
    assert generator.initial_seed() == seed_of(seed, 5)


def test_rows_do_not_draw_what_others_draw_with_the_next_seed() -> None:
    model, ids = gpt2(), tokens(1).repeat(3, 1)
    options = {"do_sample": True, "max_new_tokens": 8, "min_new_tokens": 8}
    with pipeline(model) as pipe:
        first, second = (pipe.generate(ids, rowwise=True, seed=k, **options) for k in (0, 1))
    assert torch.equal(first, padded(expected(model, list(ids.split(1)), seed=0, **options)))
    rows = {tuple(row.tolist()) for row in torch.cat([first, second])}
    assert len(rows) == 6
