"""Threads that run a model keep the memory of large tensors, as other threads' heaps cannot."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has heaps")

_START = """
import threading, torch
import penstock as ps
from torch import nn
from penstock.devices.allocator import is_on_main_heap, start_on_main_heap

heaps, threads = [], set()

class Large(nn.Linear):
    def forward(self, x):
        if threading.current_thread().name == "penstock-1":
            heaps.append(is_on_main_heap())
            threads.add(threading.get_ident())
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


def _run(script: str, **environment: str) -> list[str]:
    """The lines that a script prints, in a process whose heaps are those of a new one."""
    command = [sys.executable, "-W", "ignore", "-c", _START + script]
    env = {**os.environ, **environment}
    found = subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE, env=env)
    return found.stdout.split("\n")


_POOL = """
from penstock.devices.allocator import keep_freed_memory
from penstock.workers.thread_pool import ThreadPool
keep_freed_memory()
{before}
threads = []
def job():
    threads.append(threading.get_ident())
    heaps.append(is_on_main_heap())
    if len(heaps) % 2:  # an optimizer's step comes between
        torch.ones(20 << 20)
    return len(heaps)
pool = ThreadPool([torch.device("cpu")], 1, lambda: None, lambda: None)
under_way = [pool.start([job]) for _ in range(40)]
print([pool.finish(each)[0] for each in under_way])
print(heaps)
print(len(set(threads)))
pool.close()
pool.join(10)
print([thread.name for thread in threading.enumerate()])
"""


def test_a_thread_with_large_tensors_gives_way_once_to_one_on_the_main_heap() -> None:
    results, heaps, threads, left, *_ = _run(_POOL.format(before=""))
    assert results == str([*range(1, 41)])
    assert heaps == str([False] * 7 + [True] * 33)
    assert threads == "2"
    assert left == "['MainThread']"


def test_a_thread_stays_where_the_main_heap_cannot_be_had() -> None:
    results, heaps, threads, left, *_ = _run(_POOL.format(before=""), MALLOC_ARENA_MAX="128")
    assert results == str([*range(1, 41)])
    assert heaps == str([False] * 40)
    assert threads == "1"
    assert left == "['MainThread']"


def test_a_thread_stays_that_is_on_the_main_heap_though_its_memory_is_new() -> None:
    before = """
import mmap
class Pages:
    def ones(self, count):
        with mmap.mmap(-1, 4 * count) as memory:
            memory.write(bytes(4 * count))
    device = torch.device
torch = Pages()
"""
    _, heaps, threads, *_ = _run(_POOL.format(before=before))
    assert heaps == str([False] * 7 + [True] * 33)
    assert threads == "2"


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
    assert _run(f'losses("system", {_WIDE}); print(len(threads))')[0] == "1"


def test_the_main_heap_is_found_among_those_of_other_threads() -> None:
    script = """
from penstock.devices.allocator import keep_freed_memory
keep_freed_memory()
held, found = threading.Event(), []
def hold(): found.append(is_on_main_heap()); held.wait()
for _ in range(4): threading.Thread(target=hold, daemon=True).start()
while len(found) < 4: pass
for _ in range(3): start_on_main_heap(hold, name="worker")
while len(found) < 7: pass
print(found)
"""
    assert _run(script)[0] == str([False] * 4 + [True] * 3)


_PROFILED = """
import torch
import penstock as ps
from torch import nn
from penstock.devices.allocator import keep_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096

keep_freed_memory()
model = nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh())
program = ps.capture(model, (torch.randn(32768, 4),))
before = resident()
ps.profile(program, devices=["cpu"], seconds=1)
print(resident() - before < 130 << 20)
"""


def test_memory_of_profiles_is_given_back() -> None:
    """Each activation has 64 MiB. Imports take 50 MiB, and heaps keep a little; else it is 150."""
    command = [sys.executable, "-W", "ignore", "-c", _PROFILED]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert result.stdout == "True\n", result.stdout + result.stderr
