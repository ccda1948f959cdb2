"""What is known of a session after a call, so that the next call costs little if it is like it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count, repeat
from operator import getitem, is_
from typing import Any, NamedTuple

import torch

from penstock.capture import Attribute, Ref, Size, Sizes, Trace
from penstock.capture.calls import TensorInfo
from penstock.capture.dims import Axis
from penstock.capture.numbers import Number
from penstock.capture.signatures import Inputs, Signature
from penstock.capture.trees import Structure, unflatten


class Familiar:
    """A call of a session, which the next one is compared with.

    The containers and objects in the arguments have to be the same ones, but for tuples, which need
    as many entries; what is in them is looked up where it was, and has to have the same signature.

    Args:
        args, kwargs: of the call.
        leaves: of them.
        trace: that the call took.
        way: its number.
        training: in which mode.

    Attributes:
        signature: of the call.
        may_assume: whether a pass may be begun before it is known that the model is as it was.
        trace, way, training: as given.
    """

    def __init__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        leaves: Inputs,
        trace: Trace,
        way: int,
        training: bool,
    ) -> None:
        self.signature, self.trace, self.way, self.training = leaves.signature, trace, way, training
        self.may_assume = trace.leaves_no_trace
        self._given: dict[int, Any] = {0: list(args), 1: dict(kwargs)}
        self._names = list(kwargs)
        self._tuples: list[tuple[Any, Any, list[Any]]] = []  # where each is, and what was in it
        cells: list[tuple[Any, Any]] = []
        inner: list[tuple[Any, Any, Any]] = []
        assert self.signature.structure is not None  # it is that of a pair
        pairs = zip(range(2), self.signature.structure.children, strict=True)
        try:
            self._is_usable = all(self._look(self._given, k, s, cells, inner) for k, s in pairs)
        except (KeyError, IndexError):  # the forward has changed the structure of objects
            self._is_usable = False
        self._let_go()
        self._containers = [container for container, _ in cells]
        self._keys = [key for _, key in cells]
        self._inner_containers = [container for container, _, _ in inner]
        self._inner_keys = [key for _, key, _ in inner]
        self._inner = [value for *_, value in inner]
        self._counts = [len(held) for held in self._countable()]
        self._types = list(map(type, leaves))
        self._where = list(_where(self.signature))
        self._patterns = _patterns(self.signature)
        self._constants = [
            (k, known, self.signature.varying.numbers.get(k))
            for k, known in enumerate(self.signature.inputs)
            if not isinstance(known, TensorInfo)
        ]

    def _look(
        self, container: Any, key: Any, structure: Structure | None, cells: list[Any], inner: Any
    ) -> bool:
        """Note where all leaves are; whether each can be reached."""
        if structure is None:
            cells.append((container, key))
            return True
        value = container[key]
        if container is not self._given and structure.kind is tuple and type(value) is tuple:
            self._tuples.append((container, key, list(value)))
            value = self._tuples[-1][-1]
        elif container is not self._given:
            inner.append((container, key, value))
        for reached, child in zip(structure.keys, structure.children, strict=True):
            if reached is None:
                return False
            how, name = reached
            held = vars(value) if how == "attribute" and hasattr(value, "__dict__") else value
            if how == "attribute" and held is value:
                return False
            if not self._look(held, name, child, cells, inner):
                return False
        return True

    def _countable(self) -> list[Any]:
        """What may grow: containers, and the attributes of objects."""
        found = [
            v if isinstance(v, (list, dict)) else getattr(v, "__dict__", None) for v in self._inner
        ]
        return [each for each in found if each is not None]

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inputs | None:
        """The leaves of a call's arguments; `None` if they are unlike those of the last one."""
        if not self._is_usable or len(args) != len(self._given[0]) or list(kwargs) != self._names:
            return None
        self._given[0][:] = args
        self._given[1].update(kwargs)
        try:
            for container, key, entries in self._tuples:
                value = container[key]
                if type(value) is not tuple or len(value) != len(entries):
                    return None
                entries[:] = value
            if not all(
                map(is_, map(getitem, self._inner_containers, self._inner_keys), self._inner)
            ):
                return None
            leaves = list(map(getitem, self._containers, self._keys))
        except (KeyError, IndexError):
            return None
        finally:
            self._let_go()
        if list(map(len, self._countable())) != self._counts:
            return None
        return Inputs(leaves, self.signature) if list(map(type, leaves)) == self._types else None

    def _let_go(self) -> None:
        """Have no reference to the arguments: states live as long as the script has one."""
        self._given[0][:] = repeat(None, len(self._given[0]))
        self._given[1].update(zip(self._names, repeat(None)))
        for _, _, entries in self._tuples:
            entries[:] = repeat(None, len(entries))

    def sizes(self, leaves: Sequence[Any]) -> Sizes | None:
        """How large these leaves are; `None` if they have not the signature of the last call."""
        sizes: dict[str, int] = {}
        for leaf, dim, axis in self._where:
            now = leaves[leaf] if dim < 0 else leaves[leaf].shape[dim]
            sizes[axis.name] = (now - axis.plus) // axis.per
        for shape, dtype, numbers in self._patterns:
            size = tuple([n.at(sizes[n.name]) if isinstance(n, Axis) else n for n in shape])
            for k in numbers:
                if leaves[k].shape != size or leaves[k].dtype != dtype:
                    return None
        for k, known, grows in self._constants:
            wanted = known if grows is None else grows.at(sizes[grows.name])
            if leaves[k] is not wanted and leaves[k] != wanted:
                return None
        return sizes if min(sizes.values()) > 0 else None


class FamiliarResult:
    """The result of a call, whose objects are arguments of it, so that they can be filled again.

    Args:
        cells: the leaves in such objects that differ from call to call: the container, the key in
            it, and the number of the leaf in the result.
        outer: what is outside of such objects: the numbers of leaves, and the objects themselves.
        structure: of the result, with one leaf for each entry of `outer`.
    """

    def __init__(
        self,
        cells: Sequence[tuple[Any, Any, int]],
        outer: Sequence[Any],
        structure: Structure | None,
    ) -> None:
        self._cells = cells
        self._outer = outer
        self._structure = structure

    @classmethod
    def of(cls, result: Any, trace: Trace) -> FamiliarResult | None:
        """That of a trace; `None` if its objects cannot be used again."""
        found = _Cells(trace)
        try:
            structure = found.look_outside(result, trace.output_structure)
        except _CannotBeUsedAgainError:
            return None
        return cls(found.cells, found.outer, structure)

    def put(self, leaves: Sequence[Any]) -> Any:
        """The result with these leaves."""
        for container, key, leaf in self._cells:
            container[key] = leaves[leaf]
        outer = [x.value if isinstance(x, _Object) else leaves[x] for x in self._outer]
        return unflatten(self._structure, outer)


class _Cells:
    """Where the leaves of a result are. (No closures: a cycle would keep states for a while.)"""

    def __init__(self, trace: Trace) -> None:
        self._outputs, self._handed_back = trace.outputs, trace.handed_back
        self._number = count()
        self.cells: list[tuple[Any, Any, int]] = []
        self.outer: list[Any] = []

    def look_outside(self, value: Any, structure: Structure | None) -> Structure | None:
        """Look at what is in no object; returns the structure with objects as leaves."""
        if structure is None:
            self.outer.append(next(self._number))
            return None
        if structure.is_object:
            if len(self.outer) not in self._handed_back:  # the forward makes a new one every time
                raise _CannotBeUsedAgainError
            self._look(value, structure, None, None)
            self.outer.append(_Object(value))
            return None
        inner = tuple(map(self.look_outside, _parts(value, structure), structure.children))
        return replace(structure, children=inner)

    def _look(self, value: Any, structure: Structure | None, container: Any, key: Any) -> None:
        """Look at what is in an object."""
        if structure is None:
            leaf = next(self._number)
            if isinstance(self._outputs[leaf], (Ref, Attribute, Size, Number)):
                self.cells.append((container, key, leaf))
            return
        for reached, child in zip(structure.keys, structure.children, strict=True):
            if reached is None or isinstance(value, tuple):
                raise _CannotBeUsedAgainError
            how, name = reached
            held = vars(value) if how == "attribute" else value
            self._look(held[name], child, held, name)


class _Object(NamedTuple):
    value: Any


class _CannotBeUsedAgainError(Exception):
    """An object is new every time, or something in it is in a tuple, or cannot be reached."""


def _parts(value: Any, structure: Structure) -> list[Any]:
    """The children of a container."""
    parts = []
    for reached in structure.keys:
        if reached is None:
            raise _CannotBeUsedAgainError
        how, name = reached
        parts.append(value[name] if how == "item" else getattr(value, name))
    return parts


def _where(signature: Signature) -> Iterator[tuple[int, int, Axis]]:
    """For every size that varies a leaf and a dimension that has it; -1 for a number."""
    seen: set[str] = set()
    varying = signature.varying
    for leaf, axes in enumerate(varying.axes):
        for dim, axis in axes.items():
            if axis.name not in seen:
                seen.add(axis.name)
                yield leaf, dim, axis
    for leaf, axis in varying.numbers.items():
        if axis.name not in seen:
            seen.add(axis.name)
            yield leaf, -1, axis


def _patterns(
    signature: Signature,
) -> list[tuple[tuple[int | Axis, ...], torch.dtype, list[int]]]:
    """The shapes that tensors have, with the leaves that have them."""
    found: dict[tuple[tuple[int | Axis, ...], torch.dtype], list[int]] = {}
    for k, (known, axes) in enumerate(zip(signature.inputs, signature.varying.axes, strict=True)):
        if isinstance(known, TensorInfo):
            shape = tuple(axes.get(dim, n) for dim, n in enumerate(known.shape))
            found.setdefault((shape, known.dtype), []).append(k)  # type: ignore[arg-type]
    return [(shape, dtype, leaves) for (shape, dtype), leaves in found.items()]
