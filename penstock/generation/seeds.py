"""Seeds of groups of sequences."""

from __future__ import annotations

import numpy as np


def seed_of(seed: int, row: int) -> int:
    """The seed of torch's generators for a group of sequences.

    That of the first group is the seed of the batch. Those of the others are hashes, by numpy's
    `SeedSequence`, whose results stay the same: no row of a batch draws what another row of a batch
    with another seed draws, as it would if the seed were `seed + row`.

    Args:
        seed: of the batch.
        row: the number of the group's first sequence in the batch.
    """
    if not row:
        return seed
    mixed = np.random.SeedSequence(seed % 2**64, spawn_key=(row,))
    return int(mixed.generate_state(1, np.uint64)[0])
