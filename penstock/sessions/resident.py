"""A value that stays on its worker, as the script sees it: a tensor without its elements."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from penstock.capture.calls import Irregular, Size
from penstock.capture.trees import map_leaves, tree_leaves
from penstock.engine.residents import Operand, Operation, Shape
from penstock.errors import InputError
from penstock.torch_internals import wrapper_subclass

_CLONE = Operation("aten::clone", "default", (Operand(),), {})


class _Held(weakref.ref["Value"]):
    """A value that somebody has, and what is known of it.

    When nobody has it any more, a method written in C is called, for in the Python of a callback
    or of `__del__` a Ctrl-C would be lost.
    """

    __slots__ = ("number", "session", "shape", "stage")

    number: int
    session: int
    shape: Shape
    stage: int


class Living:
    """The values that somebody has, and those that nobody has any more."""

    def __init__(self) -> None:
        self._held: dict[int, _Held] = {}
        self._gone: deque[_Held] = deque()  # of which the workers have not heard yet
        self._lost: deque[int] = deque()  # nor of these

    def add(self, value: Value, shape: Shape, session: int) -> None:
        """Note a value of a session that a worker keeps as long as somebody has it."""
        held = _Held(value, self._gone.append)
        held.number, held.stage, held.shape = value.number, value.stage, shape
        held.session = session
        self._held[value.number] = held

    def abandon(self, session: int) -> None:
        """Note that all values of a session can go, whoever has them: a traceback, say."""
        for number in [k for k, held in self._held.items() if held.session == session]:
            del self._held[number]
            self._lost.append(number)

    def lose(self, numbers: Iterable[int]) -> None:
        """Note values that workers may have and that nobody will ever have."""
        self._lost.extend(numbers)

    def drain(self) -> list[int]:
        """The numbers of values that the workers are to let go of with what is sent next."""
        died = [self._gone.popleft().number for _ in range(len(self._gone))]
        gone = [number for number in died if self._held.pop(number, None) is not None]
        return gone + [self._lost.popleft() for _ in range(len(self._lost))]

    def by_stage(self) -> dict[int, int]:
        """The bytes of all values of each stage."""
        found: dict[int, int] = {}
        for held in list(self._held.values()):
            if held() is not None:
                size = prod(held.shape.size) * held.shape.dtype.itemsize
                found[held.stage] = found.get(held.stage, 0) + size
        return dict(sorted(found.items()))


class Value:
    """A value that a worker keeps as long as somebody has this.

    Args:
        number: by which the workers know it.
        stage: that has it.
        replica: of that stage.
        shape: of the value.
        made: how its sizes depend on those of the inputs of the pass that made it.
        session: the number of the session that it belongs to.
        living: notes this value, and when nobody has it any more.

    Attributes:
        is_copied: whether the script has copies of it, so that no forward may change it in place.
    """

    __slots__ = ("__weakref__", "is_copied", "living", "made", "number", "replica", "stage")

    def __init__(
        self,
        number: int,
        stage: int,
        replica: int,
        shape: Shape,
        made: tuple[int | Size | Irregular, ...],
        session: int,
        living: Living,
    ) -> None:
        self.number = number
        self.stage = stage
        self.replica = replica
        self.made = made
        self.living = living
        self.is_copied = False
        living.add(self, shape, session)

    def __reduce__(self) -> Any:
        """As it is in another process, which gets results but not the workers' values."""
        return _known_elsewhere, (self.number, self.stage, self.replica, self.made)

    def __deepcopy__(self, memo: dict[int, Any]) -> Value:
        """Itself: whoever reads it next has the worker copy it first, see `Seen.on_worker`."""
        self.is_copied = True
        return self


def _known_elsewhere(
    number: int, stage: int, replica: int, made: tuple[int | Size | Irregular, ...]
) -> Value:
    """A value of which another process says when nobody has it any more."""
    found = Value.__new__(Value)
    found.number, found.stage, found.replica, found.made = number, stage, replica, made
    found.living, found.is_copied = Living(), False
    return found


class Seen(NamedTuple):
    """What a resident is made of.

    Attributes:
        value: the worker's.
        operations: that are applied to it when it is next read.
    """

    value: Value
    operations: tuple[Operation, ...] = ()

    def on_worker(self) -> tuple[Operation, ...]:
        """What the worker does to the value before a forward reads it, and may change it."""
        return (_CLONE, *self.operations) if self.value.is_copied else self.operations


class Resident(torch.Tensor):
    """A tensor whose elements are with a worker.

    Its shape, dtype and device are known. Rows can be chosen, repeated and cut off: the worker does
    the same to the value when it is next read. Everything that needs the elements is an error;
    `Session.fetch` gives them.

    Args:
        shape: its sizes, strides and dtype.
        device: of its worker.
        seen: what it is made of.

    Attributes:
        seen: what it is made of.
    """

    seen: Seen

    @staticmethod
    def __new__(cls, shape: Shape, device: torch.device, seen: Seen) -> Resident:
        made: Resident = wrapper_subclass(
            cls, shape.size, strides=shape.stride, dtype=shape.dtype, device=device
        )
        made.seen = seen
        return made

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"Resident({tuple(self.shape)}, {self.dtype}, stage {self.seen.value.stage})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = tuple(args), dict(kwargs or {})
        residents = [leaf for leaf in tree_leaves(given) if isinstance(leaf, Resident)]
        one = residents[0]
        if func._schema.is_mutable or any(other is not one for other in residents):
            raise InputError(_cannot(func))
        try:
            as_meta = map_leaves(_on_meta, given)
            result = func(*as_meta[0], **as_meta[1])
        except (RuntimeError, NotImplementedError) as error:
            raise InputError(_cannot(func)) from error
        if not isinstance(result, torch.Tensor):
            raise InputError(_cannot(func))
        args, kwargs = map_leaves(lambda x: Operand() if x is one else _kept(x), given)
        name, _, overload = func.name().partition(".")
        operation = Operation(name, overload or "default", tuple(args), kwargs)
        seen = one.seen._replace(operations=(*one.seen.operations, operation))
        return Resident(Shape.of(result), one.device, seen)


def _kept(leaf: Any) -> Any:
    """An argument of an operation that is done later, until when the script may change tensors."""
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _on_meta(leaf: Any) -> Any:
    if isinstance(leaf, Resident):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf


def _cannot(func: Any) -> str:
    return (
        f"{func.name()} needs the elements of a state that stays with its worker. Rows of states "
        "can be chosen, repeated and cut off; session.fetch(state) brings a copy to the script"
    )
