"""Threads that run a model keep the memory of large tensors, as other threads' heaps cannot."""

from __future__ import annotations

import subprocess
import sys

import pytest

from penstock.devices.allocator import keep_freed_memory

pytestmark = pytest.mark.skipif(not keep_freed_memory(), reason="the allocator is not glibc's")

_START = """
import threading, torch
import penstock as ps
from torch import nn
from penstock.devices.allocator import is_on_main_heap, start_on_main_heap

heaps = []

class Large(nn.Linear):
    def forward(self, x):
        if threading.current_thread().name == "penstock-1":
            heaps.append(is_on_main_heap())
        return super().forward(x)

def losses(allocator, width):
    torch.manual_seed(0)
    heaps.clear()
    model = nn.Sequential(nn.Linear(4, 16), Large(16, width))
    x = torch.randn(2048, 4)
    with ps.Pipeline(model, (x,), devices=["cpu"] * 2, num_microbatches=1, replicas=1, cuts=[1],
                     allocator=allocator, threads_per_worker=1, audit=None, progress=None) as pipe:
        optimizer = pipe.optimizer(torch.optim.SGD, lr=0.1)
        heaps.clear()
        found = []
        for step in range(9):
            optimizer.zero_grad()
            found.append(pipe.train_step(x, loss_fn=lambda y: y.square().mean()).item())
            optimizer.step()
        return found
"""
_WIDE = 16384  # 128 MiB for a micro-batch of 2048 rows


def _run(script: str) -> list[str]:
    """The lines that a script prints, in a process whose heaps are those of a new one."""
    command = [sys.executable, "-W", "ignore", "-c", _START + script]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.split("\n")


def test_a_thread_with_large_tensors_gives_way_to_one_on_the_main_heap() -> None:
    script = """
from penstock.devices.allocator import keep_freed_memory
from penstock.workers.thread_pool import ThreadPool
keep_freed_memory()
threads = []
def job():
    threads.append(threading.get_ident())
    heaps.append(is_on_main_heap())
    torch.ones(20 << 20)
    return len(heaps)
pool = ThreadPool([torch.device("cpu")], 1, lambda: None, lambda: None)
under_way = [pool.start([job]) for _ in range(9)]
print([pool.finish(each)[0] for each in under_way])
print(heaps)
print(len(set(threads)))
pool.close()
pool.join(10)
print([thread.name for thread in threading.enumerate()])
"""
    results, heaps, threads, left, *_ = _run(script)
    assert results == str([*range(1, 10)])
    assert heaps == str([False] * 5 + [True] * 4)
    assert threads == "2"
    assert left == "['MainThread']"


def test_a_pipeline_with_large_tensors_has_the_same_losses_with_any_allocator() -> None:
    first, second, *_ = _run(
        f'found = losses("keep", {_WIDE}); print(heaps)\n'
        f'print(found == losses("system", {_WIDE}))\n'
    )
    assert first.endswith("True, True]")
    assert second == "True"


def test_a_worker_with_small_tensors_has_its_own_heap() -> None:
    assert _run('losses("keep", 64); print(heaps)')[0] == str([False] * 9)


def test_nothing_changes_where_the_allocator_is_left_alone() -> None:
    assert _run(f'losses("system", {_WIDE}); print(heaps)')[0] == str([False] * 9)


def test_the_main_heap_is_found_among_those_of_other_threads() -> None:
    script = """
from penstock.devices.allocator import keep_freed_memory
keep_freed_memory()
held, found = threading.Event(), []
def hold(): found.append(is_on_main_heap()); held.wait()
for _ in range(4): threading.Thread(target=hold, daemon=True).start()
for _ in range(3): start_on_main_heap(hold, name="worker")
while len(found) < 7: pass
print(found)
"""
    assert _run(script)[0] == str([False] * 4 + [True] * 3)
