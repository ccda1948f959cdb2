"""Objects on their way to another process: tensors travel beside the pickle, in shared memory."""

from __future__ import annotations

import importlib
import io
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import cloudpickle
import torch
from torch import nn
from torch.nn.utils import parametrize

from penstock.errors import WorkerError
from penstock.links.local import Aborted
from penstock.links.segment import TensorPlace, alone, brought, shift_of
from penstock.links.slots import Layout, is_plain, laid_out
from penstock.torch_internals import inject_parametrized_class, inject_parametrized_property

DeviceFor = Callable[[torch.device], torch.device]
"""The device on which a process wants what was on this device of another process."""


class Packed(NamedTuple):
    """An object as bytes, and the tensors in it."""

    data: bytes
    tensors: Sequence[torch.Tensor]


def pack(obj: Any) -> Packed:
    """An object as bytes, and the tensors in it.

    Functions and classes of the user's script or notebook travel by value, so the other process
    need not import it.
    """
    tensors: list[torch.Tensor] = []
    numbers: dict[int, int] = {}

    def number(found: Any) -> int | None:
        if not (isinstance(found, torch.Tensor) and is_plain(found)):
            return None
        if id(found) not in numbers:
            numbers[id(found)] = len(tensors)
            tensors.append(found)
        return numbers[id(found)]

    buffer = io.BytesIO()
    _Packer(buffer, number).dump(obj)
    return Packed(buffer.getvalue(), tensors)


def unpack(data: bytes, tensors: Sequence[torch.Tensor], to: DeviceFor | None = None) -> Any:
    """The object that `pack` made into these bytes and tensors.

    Args:
        data: the bytes.
        tensors: on the CPU, as they have travelled.
        to: where tensors go that were on another device, by that device; without it they stay on
            the CPU.
    """
    return _Unpacker(io.BytesIO(data), tensors.__getitem__, to).load()


def pack_apart(obj: Any, known: Mapping[int, int]) -> Packed:
    """As `pack`, but what the other process has already is only referred to.

    Args:
        obj: the object.
        known: numbers from 0 for tensors and modules that it has, by id.
    """
    tensors: list[torch.Tensor] = []
    buffer = io.BytesIO()
    _ReferringPacker(buffer, tensors, known).dump(obj)
    return Packed(buffer.getvalue(), tensors)


def unpack_with(data: bytes, find: Callable[[int], Any]) -> Any:
    """The object that `pack_apart` made into these bytes.

    Args:
        data: the bytes.
        find: gives the tensor of a number; for -1 - n, what has the number n in `known`.
    """
    return _Unpacker(io.BytesIO(data), find).load()


@torch.no_grad()
def packed_together(obj: Any) -> tuple[bytes, Layout, torch.Tensor]:
    """An object as bytes, where each of its tensors is, and uint8 memory that has them all."""
    data, tensors = pack(obj)
    layout, size = laid_out(tensors)
    base = torch.empty(size, dtype=torch.uint8)
    for place, tensor in zip(layout, tensors, strict=True):
        if isinstance(place, TensorPlace):
            place.target(base).fill(tensor)
    return data, layout, base


def to_bytes(obj: Any) -> bytes:
    """An object with the tensors in it, for a process that shares no memory with this one."""
    data, layout, base = packed_together(obj)
    return pickle.dumps((data, layout, bytes(base.numpy())))


def from_bytes(data: bytes) -> Any:
    """The object; its tensors are on the CPU, in memory of their own."""
    data, layout, content = pickle.loads(data)
    base = torch.empty(len(content), dtype=torch.uint8)  # aligned, as bytes are not
    if content:
        base.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    memory = base.numpy().data
    tensors = alone(memory, layout)
    for tensor, place in zip(tensors, layout, strict=True):
        tensor.requires_grad_(place.requires_grad)
    return unpack(data, tensors)


def portable(error: BaseException, where: str = "the worker's process") -> BaseException:
    """The exception, so that it can be pickled; its traceback is a note."""
    if isinstance(error, Aborted):
        return Aborted(*error.args)
    text = "".join(traceback.format_exception(error.__cause__ or error)).rstrip()
    found = _pickled(error)
    if found is None and isinstance(error, WorkerError):
        stand_in = _stand_in(error.__cause__ or error)
        found = WorkerError(error.stage, error.microbatch, error.action, stand_in, error.worker)
    found = found or _stand_in(error)
    if "\n" in text:  # it has a traceback
        found.add_note(f"In {where}:\n{text}")
    return found


def _pickled(error: BaseException) -> Any:
    """The exception as it arrives elsewhere; `None` if it does not."""
    try:
        found = unpack(*pack(error))
    except Exception:
        return None
    return found if isinstance(found, type(error)) else None


def _stand_in(error: BaseException) -> RuntimeError:
    return RuntimeError(f"{type(error).__name__}: {error}")


class Outbox:
    """Packs several objects, one after the other, that have parts in common.

    What was in an earlier one is only referred to, so the other process has it once.

    Args:
        number: gives the number by which the other process knows a tensor, or `None` if it does
            not, and the tensor is to be packed.
    """

    def __init__(self, number: Callable[[Any], int | None]) -> None:
        self._buffer = io.BytesIO()
        self._packer = _LastingPacker(self._buffer, number)

    def pack(self, obj: Any) -> bytes:
        """An object as bytes; what earlier ones had in common with it is only referred to."""
        self._buffer.seek(0)
        self._buffer.truncate()
        self._packer.dump(obj)
        return self._buffer.getvalue()

    @property
    def modules(self) -> list[nn.Module]:
        """All modules that have been packed, by whatever way objects lead to them."""
        return list(self._packer.modules.values())


class Inbox:
    """Unpacks what an `Outbox` has packed, all of it, in that order.

    Args:
        find: gives the tensor that has a number.
    """

    def __init__(self, find: Callable[[int], Any]) -> None:
        self._buffer = io.BytesIO()
        self._unpacker = _Unpacker(self._buffer, find)

    def unpack(self, data: bytes) -> Any:
        """The object that the outbox packed; they must come in the outbox's order."""
        self._buffer.seek(0)
        self._buffer.truncate()
        self._buffer.write(data)
        self._buffer.seek(0)
        return self._unpacker.load()


class _Packer(cloudpickle.Pickler):  # type: ignore[misc]
    """Numbers tensors.

    In `reducer_override`, as `persistent_id` would be called for every object, and steps are short.
    """

    def __init__(self, buffer: io.BytesIO, number: Callable[[Any], int | None]) -> None:
        super().__init__(buffer)
        self._number = number

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            number = self._number(obj)
            if number is None:
                return super().reducer_override(obj)
            if obj.device.type != "cpu":
                return _found_on, (number, str(obj.device), shift_of(obj))
            return _found, (number,)
        if isinstance(obj, (type, FunctionType)) and _is_ours(obj):  # every process can import it
            return NotImplemented
        if isinstance(obj, BaseException) and type(obj).__reduce__ is BaseException.__reduce__:
            return _made_again, (type(obj), obj.args), vars(obj) or None
        if isinstance(obj, CodeType):  # cloudpickle 3.1.3 forgets the file, which tracebacks show
            make, args = self.dispatch_table[CodeType](obj)
            return _code_of, (obj.co_filename, make, args)
        if isinstance(obj, ContextVar):  # among the globals of a hook that travels by value
            return _reduced_context_variable(obj)
        if isinstance(obj, nn.Module) and parametrize.is_parametrized(obj):
            kind = type(obj).__bases__[0]  # its own class was made for it alone
            names = tuple(obj.parametrizations)  # type: ignore[arg-type]
            return _parametrized, (kind, names), kind.__getstate__(obj)  # type: ignore[call-arg]
        return super().reducer_override(obj)


class _LastingPacker(_Packer):
    """Packs several objects. A tensor that had no number may have one later.

    Attributes:
        modules: those that were packed, by id.
    """

    def __init__(self, buffer: io.BytesIO, number: Callable[[Any], int | None]) -> None:
        super().__init__(buffer, number)
        self.modules: dict[int, nn.Module] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module):
            self.modules[id(obj)] = obj
        return super().reducer_override(obj)

    def persistent_id(self, obj: Any) -> int | None:
        return self._number(obj) if isinstance(obj, torch.Tensor) else None


class _ReferringPacker(_Packer):
    """Numbers tensors, and what the other process knows."""

    def __init__(
        self, buffer: io.BytesIO, tensors: list[torch.Tensor], known: Mapping[int, int]
    ) -> None:
        super().__init__(buffer, self._number_of)
        self._tensors = tensors
        self._known = known
        self._numbers: dict[int, int] = {}

    def _number_of(self, found: torch.Tensor) -> int | None:
        if not is_plain(found):
            return None
        if id(found) not in self._numbers:
            self._numbers[id(found)] = len(self._tensors)
            self._tensors.append(found)
        return self._numbers[id(found)]

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (torch.Tensor, nn.Module)) and id(obj) in self._known:
            return _found, (-1 - self._known[id(obj)],)
        return super().reducer_override(obj)


def _is_ours(obj: type | FunctionType) -> bool:
    """Whether this is at the top of one of Penstock's modules; cloudpickle takes long to see it."""
    module = obj.__module__ or ""
    own = module.startswith("penstock.") and getattr(sys.modules.get(module), obj.__name__, None)
    return own is obj


def _code_of(filename: str, make: Callable[..., CodeType], args: tuple[Any, ...]) -> CodeType:
    """Code that cloudpickle has taken apart, of this file."""
    return make(*args).replace(co_filename=filename)


def _made_again(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """An exception with these `args`, whatever its class is usually made from."""
    error = kind.__new__(kind, *args)
    error.args = args
    return error


def _parametrized(kind: type[nn.Module], names: Sequence[str]) -> nn.Module:
    """A module without contents, of a class that computes what has these names."""
    module = kind.__new__(kind)
    inject_parametrized_class(module)
    for name in names:
        inject_parametrized_property(module, name)
    return module


def _reduced_context_variable(variable: ContextVar[Any]) -> tuple[Any, tuple[Any, ...]]:
    """By the module that has it, or what makes a new one of it."""
    for name, module in list(sys.modules.items()):
        for attribute, value in list(vars(module).items()) if name != "__main__" else ():
            if value is variable:
                return _attribute_of, (name, attribute)
    with suppress(LookupError):
        return _context_variable, (variable.name, variable.get())
    return _context_variable, (variable.name,)


def _attribute_of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def _context_variable(name: str, *value: Any) -> ContextVar[Any]:
    """A new one, with the value or the default of the other one, if it had one."""
    return ContextVar(name, default=value[0]) if value else ContextVar(name)


def _found(number: int) -> Any:
    """In a pickle this stands for the unpickler's `find`."""
    raise pickle.UnpicklingError(f"tensor {number} of this pickle is not in it")


def _found_on(number: int, device: str, shift: int) -> Any:
    """In a pickle this stands for the unpickler's `_brought`."""
    raise pickle.UnpicklingError(f"tensor {number} of this pickle is not in it")


class _Unpacker(pickle.Unpickler):
    def __init__(
        self, buffer: io.BytesIO, find: Callable[[int], Any], to: DeviceFor | None = None
    ) -> None:
        super().__init__(buffer)
        self._find, self._to = find, to

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name == _found.__name__:
            return self._find
        if module == __name__ and name == _found_on.__name__:
            return self._brought
        return super().find_class(module, name)

    def _brought(self, number: int, device: str, shift: int) -> Any:
        """A tensor that was on this device, so many bytes behind an alignment."""
        found = self._find(number)
        if self._to is None:
            return found
        copy = brought(found.detach(), self._to(torch.device(device)), shift)
        return copy.requires_grad_(found.requires_grad)

    def persistent_load(self, pid: Any) -> Any:
        return self._find(pid)
