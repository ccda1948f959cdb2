"""The C library's allocator, configured to keep freed memory.

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

_GROWING, _OFTEN = 3, 2  # jobs
_LARGE = 64 << 10  # bytes: more than a thread keeps of what others have freed
_PROBE = 4 << 20  # bytes
_OF_ANOTHER_HEAP = 4  # a bit of the size before every block
_TRIES = 16  # more heaps than there are, usually

_knows_heaps = threading.Event()  # set when glibc, which has them, keeps freed memory here


def keep_freed_memory() -> bool:
    """Make this process keep freed memory; whether its C library has the setting (glibc has)."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl has no mallopt
        return False
    accepted = [mallopt(option, value) == 1 for option, value in _SETTINGS]
    if all(accepted) and not _knows_heaps.is_set() and _allocates():
        _knows_heaps.set()
    return all(accepted)


def give_back_freed_memory() -> None:
    """Return what was freed so far to the system; what is freed from now on is kept again."""
    if _knows_heaps.is_set():
        ctypes.CDLL(None).malloc_trim(0)


class _Mallinfo(ctypes.Structure):
    """What glibc's allocator says of itself, in bytes."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in _names.split()]


def _allocates() -> bool:
    """Whether it is glibc that allocates, and not a library that was loaded before it."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:  # glibc before 2.33
        return False
    mallinfo.restype = _Mallinfo
    library = _allocator()
    before = mallinfo().uordblks
    block = library.malloc(_PROBE)  # nobody writes to it, so that it takes no memory
    more = mallinfo().uordblks - before
    library.free(block)
    return block is not None and more > _PROBE // 2  # other threads may free some


def _allocator() -> ctypes.CDLL:
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    return library


class Mapped:
    """Notices that a thread's jobs map much memory anew; made by that thread.

    The first jobs do not count, as the heap grows in them. Nothing is noticed if freed memory is
    not kept, or if the kernel is configured to give pages of 2 MiB.
    """

    def __init__(self) -> None:
        self._pages = _pages()
        self._jobs, self._large = 0, 0

    def after_job(self) -> bool:
        """Whether two jobs or more have mapped 64 MiB anew; to be called after each job."""
        if not _knows_heaps.is_set():
            return False
        before, self._pages = self._pages, _pages()
        self._jobs += 1
        if self._jobs > _GROWING:  # steps of optimizers come between passes, so not in a row
            self._large += (self._pages - before) * mmap.PAGESIZE >= HEAP
        return self._large >= _OFTEN


def _pages() -> int:
    """How many pages this thread has had mapped at first use; 0 if freed memory is not kept."""
    if not _knows_heaps.is_set():
        return 0
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def start_on_main_heap(
    work: Callable[..., None], *arguments: Any, name: str
) -> threading.Thread | None:
    """Start a daemon thread that uses the main heap.

    glibc makes heaps for new threads up to a limit, and then gives them the existing ones in turn.
    So the limit is set to 1, for the rest of the process, and threads are started, and wait, until
    one has got the main heap.

    Args:
        work: what the thread does.
        arguments: of `work`.
        name: of the thread.

    Returns:
        the thread; `None` if none has got the main heap: freed memory is not kept, or glibc had
        already fixed a higher limit, and goes on making heaps.
    """
    if not _knows_heaps.is_set():
        return None
    over = threading.Event()
    answers: SimpleQueue[bool] = SimpleQueue()

    def run() -> None:
        suits = False
        try:
            suits = is_on_main_heap()
        finally:
            answers.put(suits)
        if suits:
            work(*arguments)
        else:
            over.wait()

    ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)
    try:
        for _ in range(_TRIES):
            thread = threading.Thread(target=run, name=name, daemon=True)
            thread.start()
            if answers.get():
                return thread
    finally:
        over.set()
    return None


def is_on_main_heap() -> bool:
    """Whether the calling thread is known to use the main heap; others have 64 MiB at a time."""
    if not _knows_heaps.is_set():
        return False
    library = _allocator()
    block = library.malloc(_LARGE)
    if block is None:
        return False
    size = ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value
    library.free(block)
    return not size & _OF_ANOTHER_HEAP


def give_freed_memory_back() -> None:
    """Give what this process has freed so far back to the system, where its C library can."""
    if sys.platform.startswith("linux"):
        with suppress(AttributeError):  # musl has no malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
