"""The thread of a rank: what it holds ends with it."""

from __future__ import annotations

import os

import torch

from penstock.workers.ranks.thread import RankThread


def test_no_file_descriptor_is_left() -> None:
    before = set(os.listdir("/proc/self/fd"))
    thread = RankThread(torch.device("cpu"), 1, lambda: None, lambda: "idle")
    assert thread.run([lambda: 7]) == [7]
    assert set(os.listdir("/proc/self/fd")) != before
    thread.close()
    thread.release()
    thread.release()
    thread.give_up(KeyboardInterrupt())
    assert set(os.listdir("/proc/self/fd")) == before
