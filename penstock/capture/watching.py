"""What a call does besides giving a result: what it writes, and whether it looks at values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from penstock.capture.attributes import REGISTRIES
from penstock.capture.calls import Assigned, Call, Origin, Unrecordable
from penstock.capture.casts import Casts
from penstock.capture.code import calls_compiled, is_made_by_compile
from penstock.capture.equality import same_tensor
from penstock.capture.known_shapes import KnownShapes
from penstock.capture.preserve import own_generators, same_state, state_of
from penstock.torch_internals import TO_COPY, PlainDispatchMode

_COPIED = 1 << 16  # bytes
_PART = 1 << 16  # elements
_ODD = 0x2545F4914F6CDD1D
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


_SIZED_BY_VALUES = frozenset(
    """
    aten.tensor_split.tensor_indices_or_sections aten._indices.default aten._values.default
    aten.indices.default aten.values.default aten.crow_indices.default aten.col_indices.default
    aten.ccol_indices.default aten.row_indices.default aten._nnz.default
    """.split()
)
"""Operators whose results have sizes that depend on values, though no tag says so."""

KNOWN_OPERATORS = frozenset(["aten", "prim", "prims"])
"""Namespaces of operators whose tags say whether they look at values."""


class OperatorWatch(PlainDispatchMode):
    """While open, notes whether operators look at values, and whether they draw random numbers.

    Args:
        known: runs the operators; `None` to run them as usual.
        casts: notes weights that are cast; `None` if nobody wants to know.

    Attributes:
        looks: whether an operator looked at values to size its result, gave Python a value, or may
            have done so because it is not torch's own.
        may_size: whether sizes can come from the values; a boolean gives none.
        draws: whether an operator may have drawn random numbers.
    """

    def __init__(self, known: KnownShapes | None = None, casts: Casts | None = None) -> None:
        super().__init__()
        self.looks = self.may_size = False
        self.draws = False
        self._known = known
        self._casts = casts

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known = self._known
        if self._casts is not None and func is TO_COPY:
            self._casts.note(args[0])
        self.looks |= func.namespace not in KNOWN_OPERATORS
        if str(func) in _SIZED_BY_VALUES:
            self.looks = self.may_size = True
        result = func(*args, **kwargs) if known is None else known.run(func, args, kwargs)
        self.draws |= torch.Tag.nondeterministic_seeded in func.tags
        if torch.Tag.data_dependent_output in func.tags:
            # by a yes or no, functions check what they are given, as `torch.istft` does
            self.may_size |= type(result) is not bool
            self.looks = True
        elif torch.Tag.dynamic_output_shape in func.tags:
            self.may_size |= func is not torch.ops.aten.index.Tensor or any(
                index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1]
            )
            self.looks |= self.may_size
        return result


class Contents:
    """What a tensor held at some moment, to tell whether it has been changed in place since.

    Its version counter says so, except for the running statistics of `F.batch_norm`, which change
    without it. So tensors that need no gradient are compared as well, large ones by a number that
    is made of their contents.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._version = version_of(tensor)
        compared = not tensor.requires_grad and tensor.layout is torch.strided
        self._held = _held(tensor) if compared and not tensor.is_meta else None

    def differs_from(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor`, the same one, holds something else now."""
        if version_of(tensor) != self._version:
            return True
        if isinstance(self._held, torch.Tensor):
            return not same_tensor(self._held, tensor)
        return self._held is not None and self._held != _digest(tensor)


def _held(tensor: torch.Tensor) -> torch.Tensor | int:
    """A copy of the tensor, or a number that stands for what is in it, if it is large."""
    plain = not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
    if plain and tensor.nbytes > _COPIED and _is_dense(tensor):
        return _digest(tensor)
    return tensor.detach().clone()


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements are all that is between the first and the last of them in memory."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))


def _digest(tensor: torch.Tensor) -> int:
    """A number made of all the bits of a dense tensor and of their places."""
    with torch.no_grad():
        flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(_INTEGERS[tensor.itemsize])
        weights = torch.arange(1, _PART + 1, device=tensor.device) * _ODD
        total = torch.zeros((), dtype=torch.int64, device=tensor.device)
        for part in flat.split(_PART):
            total = total * _ODD + (part * weights[: len(part)]).sum()
        return int(total)


def check_decision(call: Call, origin: Origin, leaves: Sequence[Any]) -> None:
    """Raise unless what Python reads is a yes or no about the inputs."""
    if origin is Origin.MODEL:
        raise Unrecordable(
            call.path,
            f"its Python reads a tensor's value ({call.label}) that depends on a parameter, "
            "a buffer or a random number",
        )
    if call.result is not None or type(leaves[0]) is not bool:
        raise Unrecordable(
            call.path,
            f"its Python reads a tensor's value ({call.label}) that depends on the inputs, "
            "and that is more than a yes or no",
        )


def version_of(tensor: torch.Tensor) -> int:
    """A number that writing to a tensor raises; 0 for an inference tensor."""
    return 0 if tensor.is_inference() else tensor._version


def changed(buffers: Sequence[tuple[str, torch.Tensor, Contents]]) -> tuple[str, ...]:
    """The names of the buffers that were written since, and of the others of the same modules.

    A write that happens to leave a tensor as it was must not hide that its module writes it.
    """
    owners = {name.rpartition(".")[0] for name, b, before in buffers if before.differs_from(b)}
    return tuple(name for name, _, _ in buffers if name.rpartition(".")[0] in owners)


def compiled(model: nn.Module) -> set[str]:
    """The names of the modules that torch.compile has compiled, and of those that they are in."""
    names: set[str] = set()
    for path, module in model.named_modules(remove_duplicate=False):
        if is_compiled(module):
            names.update(with_owners(path))
    return names


def is_compiled(module: nn.Module) -> bool:
    """Whether torch.compile has compiled it, around it or in place, or functions that it calls."""
    whole = type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None
    held = any(map(is_made_by_compile, vars(module).values()))
    kind: Any = type(module)
    return whole or held or calls_compiled(kind)


def with_owners(path: str) -> Iterator[str]:
    """A module's qualified name, and those of the modules that it is in."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


class OpenAttributes:
    """The attributes of open modules: their own Python must not keep anything there.

    Nor may it draw from generators there: the replay would have the numbers that were drawn once.

    Args:
        model: whose modules.
        is_open: whether the program looks inside the module of this qualified name.
    """

    def __init__(self, model: nn.Module, is_open: Callable[[str], bool]) -> None:
        self._model = model
        self._is_open = is_open
        self._ids = {id(module) for module in model.modules()}
        self._before = self._now()
        self._drawn_from = [
            (path, name, generator, state_of(generator))
            for path, module in model.named_modules()
            if is_open(path)
            for name, generator in own_generators(module)
        ]

    def _now(self) -> dict[str, dict[str, list[Any]]]:
        """The attributes of every open module, as they are, with what containers hold."""
        return {
            path: {
                name: _with_contents(name, value)
                for name, value in {**vars(m), **m._buffers, **m._parameters}.items()
            }
            for path, m in self._model.named_modules()
            if id(m) in self._ids and self._is_open(path)
        }

    def check_unchanged(self) -> None:
        """Raise if the forward of an open module assigned to an attribute, or drew from one."""
        for path, module in self._model.named_modules():
            if id(module) not in self._ids and self._is_open(""):
                raise Unrecordable("", f"its forward puts another module in the place of {path}")
        for path, attributes in self._now().items():
            for name, now in attributes.items():
                old = self._before[path].get(name, [])
                if len(old) != len(now) or any(a is not b for a, b in zip(old, now, strict=True)):
                    raise Assigned(path, f"its forward assigns to self.{name}")
        for path, name, generator, state in self._drawn_from:
            if not same_state(state_of(generator), state):
                raise Unrecordable(path, f"its Python draws random numbers from self.{name}")


def _with_contents(name: str, value: Any) -> list[Any]:
    """An attribute, and what it holds if it is a plain container."""
    if name in REGISTRIES:
        return [value]
    if type(value) is dict:
        return [value, *value, *value.values()]
    return [value, *value] if type(value) in (list, set) else [value]
