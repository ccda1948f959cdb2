"""The cores that a thread may use for one operation."""

from __future__ import annotations

import torch


def use_threads(count: int) -> None:
    """Give the calling thread this many intra-op threads, for good.

    torch looks up a thread's number when it is first needed, and takes what any thread has set
    last. Asked before it is set, it stays what is set here.
    """
    torch.get_num_threads()
    torch.set_num_threads(count)
