"""Optimizer state that outlives the process of a worker, and steps that may be interrupted.

What a part of an optimizer remembers is in memory that the driver has as well. A step updates it
and the parameters in place, so a process that ends in the midst of one leaves some half updated.
Therefore it goes chunk by chunk: a few parameters, small enough for the processor's caches, are
first copied with their state to a journal, and then updated. Whoever takes over puts the one chunk
back that was under way, and goes on with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from ctypes import memmove
from dataclasses import dataclass
from operator import is_
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.board.activity import UPDATING
from penstock.engine.stage import Before
from penstock.links.segment import ALIGNMENT, Segment, TensorPlace, aligned, place_of
from penstock.workers.optimizer_parts import part_of, step_part
from penstock.workers.processes.shared_model import Gradients
from penstock.workers.processes.worker_state import WorkerState

_CHUNK = 1 << 18
"""Bytes of parameters in a chunk. With gradients and state it fits into most second-level caches,
so the journal costs no memory bandwidth; one large parameter makes a chunk of its own."""

_HEADER = 64  # bytes of a journal for what it says of itself

Numbered = dict[Any, dict[str, Any]]
"""What is remembered of parameters, by the numbers by which a process knows them."""


def chunks_of(parameters: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Parameters in chunks, in order."""
    chunks: list[list[torch.Tensor]] = []
    size = _CHUNK
    for parameter in parameters:
        if size >= _CHUNK:
            chunks.append([])
            size = 0
        chunks[-1].append(parameter)
        size += parameter.nbytes
    return chunks


Spans = Sequence[tuple[int, int]]
"""Stretches of memory that are copied one behind the other: for each the index of its first tensor
in the chunk, and its size in bytes."""


def spans_of(tensors: Sequence[torch.Tensor], segments: Sequence[object]) -> list[tuple[int, int]]:
    """The memory of tensors in as few pieces as possible.

    Between two tensors of a segment that are less than `ALIGNMENT` bytes apart there is no other.

    Args:
        tensors: of a chunk.
        segments: for each the segment in which it is.
    """
    order = sorted(range(len(tensors)), key=lambda k: tensors[k].data_ptr())
    found: list[tuple[int, int]] = []
    end, home = 0, None
    for k in order:
        start, size = tensors[k].data_ptr(), _extent(tensors[k])
        if found and segments[k] is home and 0 <= start - end < ALIGNMENT:
            first = found[-1][0]
            found[-1] = first, start + size - tensors[first].data_ptr()
        elif size:
            found.append((k, size))
        end, home = start + size, segments[k]
    return found


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last of a tensor."""
    place = place_of(tensor.detach(), 0)
    return place.end - place.offset


class Journal:
    """Where a chunk is copied to before it is updated; both the driver and a worker have one.

    Args:
        segment: the memory, of `size_of(spans)` bytes.
        chunks: for each its tensors: parameters, and what is remembered of them.
        spans: for each the memory of these tensors.
    """

    def __init__(
        self,
        segment: Segment,
        chunks: Sequence[Sequence[torch.Tensor]],
        spans: Sequence[Spans],
    ) -> None:
        self._header = segment.integers()
        self._kept = segment, chunks  # whose memory it is
        self._moves: list[list[tuple[int, int, int]]] = []  # from, to, and bytes
        for tensors, own in zip(chunks, spans, strict=True):
            to = segment.base.data_ptr() + _HEADER
            moves = []
            for first, size in own:
                moves.append((tensors[first].data_ptr(), to, size))
                to += aligned(size)
            self._moves.append(moves)

    @staticmethod
    def size_of(spans: Iterable[Spans]) -> int:
        """How many bytes a journal of these chunks takes; a multiple of 8."""
        return _HEADER + max((sum(aligned(size) for _, size in own) for own in spans), default=0)

    def clear(self) -> None:
        """Note that no chunk was begun. The driver does, before every step."""
        self._header[0] = self._header[1] = 0

    def begin(self, number: int) -> None:
        """Copy a chunk that is about to be updated."""
        for there, here, size in self._moves[number]:
            memmove(here, there, size)
        self._header[0] = number + 1

    def end(self, number: int) -> None:
        """Note that a chunk was updated."""
        self._header[1] = number + 1

    def put_back(self) -> int:
        """Put back the chunk that was being updated; returns how many were before it."""
        begun, ended = self._header[0], self._header[1]
        if begun > ended:
            for there, here, size in self._moves[ended]:
                memmove(there, here, size)
            self._header[0] = ended
        return int(ended)


class Chunks:
    """A worker's part of an optimizer, in chunks that it updates one after the other.

    Args:
        part: the whole part.
        options: the arguments of its class.
        chunks: the parameters of every chunk; what is remembered of them is in shared memory.
        journal: the segment for it.
        spans: the memory of every chunk.
    """

    def __init__(
        self,
        part: Optimizer,
        options: Mapping[str, Any],
        chunks: Sequence[Sequence[torch.Tensor]],
        journal: Segment,
        spans: Sequence[Spans],
    ) -> None:
        self._state = part.state
        self._chunks = chunks
        self._steps = [part_of(type(part), part.param_groups, options, chunk) for chunk in chunks]
        for each in self._steps:
            each.state = part.state
        self._expected = [self._remembered(chunk) for chunk in chunks]
        tensors = [[*chunk, *own] for chunk, own in zip(chunks, self._expected, strict=True)]
        self._journal = Journal(journal, tensors, spans)

    def _remembered(self, chunk: Sequence[torch.Tensor]) -> list[Any]:
        state = self._state
        return [value for p in chunk if p in state for value in state[p].values()]

    def step(self, settings: Sequence[Mapping[str, Any]]) -> bool:
        """Update every chunk; whether all that is remembered is still in shared memory."""
        is_there = True
        for number, (chunk, each) in enumerate(zip(self._chunks, self._steps, strict=True)):
            self._journal.begin(number)
            step_part(each, settings)
            now, expected = self._remembered(chunk), self._expected[number]
            if len(now) != len(expected) or not all(map(is_, now, expected)):
                is_there &= self._bring(chunk, expected)
            self._journal.end(number)
        return is_there

    @torch.no_grad()
    def _bring(self, chunk: Sequence[torch.Tensor], expected: Sequence[Any]) -> bool:
        """Copy what a step has replaced to where it was; whether that was possible."""
        states = [self._state[p] for p in chunk if p in self._state]
        places = [(own, name) for own in states for name in own]
        if len(places) != len(expected):
            return False
        for (own, name), old in zip(places, expected, strict=True):
            new = own[name]
            if new is not old:
                is_like = isinstance(new, torch.Tensor) and new.shape == old.shape
                if not (is_like and new.dtype == old.dtype):
                    return False
                old.copy_(new)
                own[name] = old
        return True


@dataclass(frozen=True)
class Adopt:
    """Keep what a part of an optimizer remembers in memory that outlives this process.

    Attributes:
        number: of the optimizer.
        state: the grant and the size of that memory.
        entries: for each tensor in it the number of its parameter, its name in the state, and its
            place in the memory.
        journal: the grant and the size of the journal's memory.
        chunks: for each chunk the numbers of its parameters.
        spans: the memory of every chunk.
    """

    number: int
    state: tuple[int, int]
    entries: Sequence[tuple[int, str, TensorPlace]]
    journal: tuple[int, int]
    chunks: Sequence[Sequence[int]]
    spans: Sequence[Spans]

    def __call__(self, own: WorkerState) -> None:
        """Replace the part's state by what is in that memory."""
        part, options = own.optimizers[self.number], own.options[self.number]
        memory = own.segment(*self.state).tensors([place for *_, place in self.entries])
        part.state.clear()
        for (number, name, _), tensor in zip(self.entries, memory, strict=True):
            part.state[own.tensors[number]][name] = tensor
        chunks = [[own.tensors[number] for number in chunk] for chunk in self.chunks]
        journal = own.segment(*self.journal)
        own.chunks[self.number] = Chunks(part, options, chunks, journal, self.spans)


@dataclass(frozen=True)
class OutlivingStep:
    """Update this worker's parameters, so that others can take over amid it.

    Attributes:
        number, settings, gradients, before: as of `Step`.
        chunked: whether to go chunk by chunk, with a journal; else the driver has copies.
    """

    doing: ClassVar[int] = UPDATING

    number: int
    settings: Sequence[Mapping[str, Any]]
    gradients: Gradients
    before: Before
    chunked: bool

    def __call__(self, own: WorkerState) -> Numbered | None:
        """Step; gives what is remembered, unless it is in shared memory."""
        part = own.optimizers[self.number]
        own.begin(self.gradients, updates=True)
        for common in own.replica.common.values():
            common.wait_for(self.before)
        if self.chunked:
            is_there = own.chunks[self.number].step(self.settings)
            return None if is_there else own.remembered(self.number)
        step_part(part, self.settings)
        return own.remembered(self.number)


def entries_of(
    state: Mapping[torch.Tensor, Mapping[str, Any]], owned: Sequence[nn.Parameter]
) -> list[tuple[nn.Parameter, str, torch.Tensor]] | None:
    """What is remembered of these parameters, if shared memory can hold it.

    Returns:
        the parameter, the name and the tensor of each entry; `None` if an entry is not a plain
        tensor on the CPU, or if the state of a parameter is empty.
    """
    found = [(p, name, value) for p in owned if p in state for name, value in state[p].items()]
    tensors = [(p, name, v) for p, name, v in found if isinstance(v, torch.Tensor) and _is_plain(v)]
    is_whole = all(state[p] for p in owned if p in state)
    return tensors if len(tensors) == len(found) and is_whole else None


def _is_plain(tensor: torch.Tensor) -> bool:
    is_cpu = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return is_cpu and not tensor.requires_grad and type(tensor) is torch.Tensor
