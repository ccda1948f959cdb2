"""The peers that Penstock is measured beside, each a function that starts one and returns a `Peer`.

A peer is started once and then runs one training step per call of `step()`, so that contestants
can take turns in one run; between its steps its processes wait without using a processor. All of
them train the same ResNet-50 from the same parameters on the same synthetic batch, and their
processes keep freed memory as Penstock's do (`penstock.devices.allocator`).
"""

from benchmarks.peers.data_parallel import data_parallel
from benchmarks.peers.one_process import all_cores, one_core
from benchmarks.peers.torch_pipelining import (
    COUNTS,
    LOOPED,
    SCHEDULES,
    SINGLE,
    torch_pipelining,
    torch_pipelining_of,
)
from penstock.bench.peers.models import quarter_cut, resnet50, tutorial_cut
from penstock.bench.peers.peer import Peer
from penstock.bench.peers.rpc_pipeline import rpc_pipeline

__all__ = [
    "COUNTS",
    "LOOPED",
    "SCHEDULES",
    "SINGLE",
    "Peer",
    "all_cores",
    "data_parallel",
    "one_core",
    "quarter_cut",
    "resnet50",
    "rpc_pipeline",
    "torch_pipelining",
    "torch_pipelining_of",
    "tutorial_cut",
]
