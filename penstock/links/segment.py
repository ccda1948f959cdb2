"""Memory that several processes map, and tensors in it.

A segment has no name: it is a file descriptor that is handed from process to process, and the
memory is gone with the last process that maps it, however that ends. So nothing can be left behind.
"""

from __future__ import annotations

import mmap
import operator
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial, wraps
from typing import NamedTuple, ParamSpec, TypeVar

import torch

from penstock.devices import layout
from penstock.files import anonymous_memory
from penstock.forks import disown_in_forks

DEVICE_ALIGNMENT = layout.ALIGNMENT
ALIGNMENT = 64
"""Bytes to which tensors are aligned, as torch's own allocator does."""

_HEADER = ALIGNMENT  # its first byte says whether the segment is lent


P = ParamSpec("P")
T = TypeVar("T")


def _ordinary(make: Callable[P, T]) -> Callable[P, T]:
    """Tensors as they are outside of `torch.inference_mode()`, wherever they are made.

    Memory is used again, for training too, and what was made in that mode could not be filled then.
    """

    @wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> T:
        if not torch.is_inference_mode_enabled():
            return make(*args, **kwargs)
        with torch.inference_mode(False):
            return make(*args, **kwargs)

    return made


class _Lease(weakref.ref[memoryview]):
    """The use of a segment's content, which is marked as free when it is over.

    All of this is in C, for in the Python of a callback a Ctrl-C would be lost.
    """

    __slots__ = ("end",)

    def __new__(cls, memory: memoryview, whole: memoryview) -> _Lease:
        return super().__new__(cls, memory, operator.methodcaller("end"))

    def __init__(self, memory: memoryview, whole: memoryview) -> None:
        self.end = partial(operator.setitem, whole, 0, 0)


class Segment:
    """Shared memory of a fixed size.

    Args:
        size: bytes of the content.
        fd: of the memory, which becomes the segment's own; `None` makes new memory.

    Attributes:
        size: bytes of the content.
        room: bytes of values that it has room for.
        base: the content, as bytes.
        fd: to be sent to another process.
        close: closes it, when no other process needs it any more; the memory stays.
    """

    @_ordinary
    def __init__(self, size: int, fd: int | None = None) -> None:
        self.size = self.room = size
        self.fd = anonymous_memory(_HEADER + size) if fd is None else fd
        self.close = weakref.finalize(self, os.close, self.fd)
        self.close.atexit = False
        self._whole = memoryview(mmap.mmap(self.fd, _HEADER + size))
        if fd is not None:
            self.close()  # the mapping has one of its own
        self.base = torch.frombuffer(self._whole[_HEADER:], dtype=torch.uint8)
        self._lease: _Lease | None = None
        disown_in_forks(self)

    @property
    def lent(self) -> bool:
        """Whether somebody uses the content, in whatever process."""
        return self._whole[0] != 0

    def lend(self) -> None:
        """Mark the content as used; whoever borrows it marks it as free again."""
        self._whole[0] = 1

    def borrow(self) -> memoryview:
        """The content, as bytes; marked as free when no tensor uses this memory any more."""
        memory = self._whole[_HEADER:]
        self._lease = _Lease(memory, self._whole)
        return memory

    def free(self) -> None:
        """Mark the content as free, for whoever owns the segment to lend it again."""
        self._whole[0] = 0

    def disown(self) -> None:
        """In a fork: what is borrowed there is still used by the original."""
        self._lease = None

    def tensors(self, places: Sequence[TensorPlace]) -> list[torch.Tensor]:
        """Tensors in the content, each with a storage of its own."""
        memory = self._whole[_HEADER:]
        return alone(memory, places)

    def integers(self) -> memoryview:
        """The content as 64-bit integers."""
        return self._whole[_HEADER:].cast("q")


class TensorPlace(NamedTuple):
    """Where a tensor is in a segment, and what it is like.

    Attributes:
        dtype: its element type.
        shape: its sizes.
        stride: in elements.
        offset: in bytes.
        requires_grad: whether a gradient flows to it.
        shift: on another device than the CPU, the bytes from a multiple of 256 to its beginning.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    requires_grad: bool
    shift: int = 0

    @property
    def end(self) -> int:
        """The first byte behind it."""
        return self.offset + _span(self.shape, self.stride) * self.dtype.itemsize

    def alone(self, memory: memoryview) -> torch.Tensor:
        """The tensor alone in a storage, see `alone`."""
        return alone(memory, [self])[0]

    def _alone(self, memory: memoryview) -> torch.Tensor:
        count = _span(self.shape, self.stride)
        if not count:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        flat = torch.frombuffer(memory, dtype=self.dtype, count=count, offset=self.offset)
        return flat.as_strided_(self.shape, self.stride)

    @_ordinary
    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """The tensor, in the midst of others in this storage, to be filled or read here."""
        first = self.offset // self.dtype.itemsize
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, first, self.shape, self.stride
        )

    @_ordinary
    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of these bytes, to be copied from or to."""
        own = memory[self.offset : self.end].view(self.dtype)
        return own.as_strided(self.shape, self.stride)

    def target(self, memory: torch.Tensor) -> Target:
        """What to copy a tensor to that goes here, in these bytes."""
        if 0 not in self.stride:
            return Target(self.within(memory), None)
        sizes = zip(self.shape, self.stride, strict=True)
        once = tuple(min(n, 1) if s == 0 else n for n, s in sizes)
        return Target(self._replace(shape=once).within(memory), tuple(slice(n) for n in once))


@_ordinary
def alone(memory: memoryview, places: Iterable[TensorPlace]) -> list[torch.Tensor]:
    """The tensors in this memory, which they hold, each with a storage that has nothing else in it.

    What users may get must be such tensors: `torch.save`, `pickle` and `copy.deepcopy` write whole
    storages, and can read none that is used with several dtypes.
    """
    return [place._alone(memory) for place in places]


class Target(NamedTuple):
    """The memory behind a place.

    Attributes:
        memory: as a tensor in which every element is there once.
        part: of the tensor to be copied, if some of its elements are repeated by a stride of 0.
    """

    memory: torch.Tensor
    part: tuple[slice, ...] | None

    def fill(self, tensor: torch.Tensor) -> None:
        """Copy a tensor there; gradients are off."""
        self.memory.copy_(tensor if self.part is None else tensor[self.part])


@torch.no_grad()
def fill(memory: torch.Tensor, tensor: torch.Tensor) -> None:
    """Copy a tensor to memory of the same shape and stride; what is repeated there only once."""
    once = tuple(slice(1) if s == 0 else slice(None) for s in memory.stride())
    memory[once].copy_(tensor[once])


def place_of(tensor: torch.Tensor, start: int, alignment: int = ALIGNMENT) -> TensorPlace:
    """A place for a tensor behind byte `start`, where kernels compute the same bits with it.

    The place has the strides of the tensor, as libraries choose kernels by strides. So it may
    contain gaps, as with the queries in a projection of queries, keys and values, but it is no
    larger than the storage of which the tensor is a view. For a tensor on the CPU, it begins as far
    behind a multiple of 64 bytes. For one on another device, `shift` says how far behind 256, and
    so it begins in memory that is aligned as there.

    Args:
        tensor: the tensor.
        start: the first free byte.
        alignment: of the memory, in bytes.
    """
    shape, stride = tuple(tensor.shape), tensor.stride()
    is_here = tensor.device.type == "cpu"
    shift = shift_of(tensor)
    is_alike = is_here or alignment == DEVICE_ALIGNMENT
    offset = aligned(start, alignment) + (shift if is_alike else 0)
    of_device = 0 if is_here else shift
    return TensorPlace(tensor.dtype, shape, stride, offset, tensor.requires_grad, of_device)


def shift_of(tensor: torch.Tensor) -> int:
    """The bytes from an alignment, 64 on CPUs and 256 elsewhere, to the beginning of a tensor."""
    alignment = ALIGNMENT if tensor.device.type == "cpu" else DEVICE_ALIGNMENT
    shift = tensor.data_ptr() % alignment
    return 0 if shift % tensor.dtype.itemsize else shift


def brought(tensor: torch.Tensor, device: torch.device, shift: int) -> torch.Tensor:
    """A copy of a tensor on another device, with its strides, as far behind an alignment.

    Args:
        tensor: on the CPU.
        device: where it is wanted; if that is the CPU, the tensor itself is returned.
        shift: as of `TensorPlace`.
    """
    if device.type == "cpu":
        return tensor
    before, count = shift // tensor.dtype.itemsize, _span(tensor.shape, tensor.stride())
    memory = torch.empty(before + count, dtype=tensor.dtype, device=device)
    copy = memory.as_strided(tensor.shape, tensor.stride(), before)
    fill(copy, tensor)
    return copy


def aligned(offset: int, alignment: int = ALIGNMENT) -> int:
    """The next multiple of an alignment."""
    return -(-offset // alignment) * alignment


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor."""
    if 0 in shape:
        return 0
    last = 0
    for n, s in zip(shape, stride, strict=True):
        last += (n - 1) * s
    return last + 1
