"""How many rows each micro-batch of a batch has: one rule for measuring, planning and running."""

from __future__ import annotations


def split_rows(batch_size: int, num_microbatches: int) -> list[int]:
    """The rows of every micro-batch, as `torch.tensor_split` divides them: larger ones first."""
    small, larger = divmod(batch_size, num_microbatches)
    return [small + 1] * larger + [small] * (num_microbatches - larger)
