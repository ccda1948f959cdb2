"""The C library's allocator, told to keep what it has.

glibc returns large freed blocks to the kernel, which must clear and map them again for the next
step: 10 to 30 % of a ResNet-50 step on a CPU. CUDA's caching allocator does the same favour to
GPUs.

Threads other than the main one get heaps of their own, of 64 MiB at most, so that they do not wait
for each other. A larger block is a mapping of its own there, whatever the settings, which is mapped
and cleared anew each time: filling a tensor of 128 MiB takes eight times as long. So a thread that
runs a model with such tensors gives way to one that uses the main heap.
"""

from __future__ import annotations

import ctypes
import mmap
import resource
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Literal

Allocator = Literal["keep", "system"]
"""`"keep"`: freed memory stays with the process; `"system"`: the C library decides."""

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -4, -8
_SETTINGS = (
    (_M_MMAP_MAX, 0),  # no block is a mapping of its own, to be unmapped when it is freed
    (_M_TRIM_THRESHOLD, 2**31 - 1),  # the heap does not shrink
    (_M_TOP_PAD, 64 << 20),  # and grows by 64 MiB
)
HEAP = 64 << 20
"""Bytes of a heap that is not the main one."""

_GROWING, _IN_A_ROW = 3, 2  # jobs
_LARGE = 64 << 10  # bytes: more than a thread keeps of what others have freed
_OF_ANOTHER_HEAP = 4  # a bit of the size before every block
_TRIES = 16  # more heaps than there are, usually

_keeps = threading.Event()  # set when this process keeps freed memory: its C library cannot say it


def keep_freed_memory() -> bool:
    """Make this process keep freed memory; whether its allocator has the setting (glibc's has)."""
    if not sys.platform.startswith("linux") or not _is_glibcs():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    accepted = [mallopt(option, value) == 1 for option, value in _SETTINGS]
    if all(accepted):
        _keeps.set()
    return _keeps.is_set()


def _is_glibcs() -> bool:
    """Whether the allocator is glibc's, and not that of a library which was loaded before it."""
    try:
        used, own = (ctypes.CDLL(name).malloc for name in (None, "libc.so.6"))
    except (OSError, AttributeError):  # musl's is in another library
        return False
    first, second = (ctypes.cast(function, ctypes.c_void_p).value for function in (used, own))
    return first == second


class Mapped:
    """Notices that the memory of the thread that makes it is mapped anew in one job after another.

    Its first jobs do not count, in which its heap grows. If freed memory is not kept, nothing is
    noticed.
    """

    def __init__(self) -> None:
        self._pages = _pages()
        self._jobs, self._in_a_row = 0, 0

    def after_job(self) -> bool:
        """Whether it is so, once; to be called after each job."""
        if not _keeps.is_set():
            return False
        before, self._pages = self._pages, _pages()
        self._jobs += 1
        is_large = (self._pages - before) * mmap.PAGESIZE >= HEAP
        self._in_a_row = self._in_a_row + 1 if is_large and self._jobs > _GROWING else 0
        return self._in_a_row == _IN_A_ROW


def _pages() -> int:
    """How many were mapped as this thread used them for the first time."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt if _keeps.is_set() else 0


def start_on_main_heap(work: Callable[..., None], *arguments: Any, name: str) -> threading.Thread:
    """Start a daemon thread that uses the main heap, if freed memory is kept.

    glibc makes heaps for new threads until there are as many as it may, and then gives them those
    that there are, in turn. So it is to make no more, and threads are started, and wait, until one
    has got the main heap. If none has, as glibc had made many threads' heaps before, the last one
    does the work.

    Args:
        work: what the thread does.
        arguments: of `work`.
        name: of the thread.
    """
    over = threading.Event()
    answers: SimpleQueue[bool] = SimpleQueue()

    def run(is_last: bool) -> None:
        suits = is_last or is_on_main_heap()
        answers.put(suits)
        if suits:
            work(*arguments)
        else:
            over.wait()

    if _keeps.is_set():
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    try:
        for left in reversed(range(_TRIES if _keeps.is_set() else 1)):
            thread = threading.Thread(target=run, args=(left == 0,), name=name, daemon=True)
            thread.start()
            if answers.get():
                break
    finally:
        over.set()
    return thread


def is_on_main_heap() -> bool:
    """Whether the C library gives the calling thread memory of the main heap; it has to be glibc's.

    In its other heaps no block has more than 64 MiB.
    """
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.argtypes = [ctypes.c_void_p]
    block = library.malloc(_LARGE)
    try:
        size = ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value
    finally:
        library.free(block)
    return not size & _OF_ANOTHER_HEAP


def give_freed_memory_back() -> None:
    """Give what this process has freed so far back to the system, where its C library can."""
    if sys.platform.startswith("linux"):
        with suppress(AttributeError):  # musl has no malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
