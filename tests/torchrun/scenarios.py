"""What the ranks of the tests do, each as a function of its rank; they return what is compared."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.links import meeting
from penstock.loading import tolerate_missing_torchvision_operators
from tests.torchrun.steps import EXACT, LARGER, X, Y, everything, small_pipe


def same_bits(rank: int) -> Any:
    """Everything that threads do as well."""
    return everything({}, EXACT)


def same_bits_of_larger_models(rank: int) -> Any:
    """The same, with models that take longer to import."""
    tolerate_missing_torchvision_operators()
    return everything({}, LARGER)


def by_process_group(rank: int) -> Any:
    """The same, as if every rank were on a machine of its own."""
    meeting.this_machine = lambda: f"machine {rank}"
    os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])  # intra-op threads make bits differ
    return everything({}, EXACT)
