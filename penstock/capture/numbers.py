"""Numbers in attributes and arguments that change, passed in instead of being recorded.

While a forward is recorded, an object stands for such a number that follows what Python makes of
it: arithmetic gives an expression, and comparisons are noted.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, SupportsIndex

from torch import nn

from penstock.capture.places import MISSING, Place, attributes_of
from penstock.capture.trees import Leaf

Numeric = int | float
"""A number of Python's that may be passed in."""

PASSED = "@"
"""Names of numbers that are passed in begin with it, among those of sizes."""

_ARITHMETIC: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs")
}
_COMPARISONS: dict[str, Callable[..., Any]] = {
    name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")
}
# Their results are constants of the recording, which holds only if they are the same again.
_STEPS: dict[str, Callable[..., Any]] = {
    "int": int,
    "float": float,
    "round": round,
    "floor": math.floor,
    "ceil": math.ceil,
    "trunc": math.trunc,
    "divmod": divmod,
    "format": format,
    "str": str,
    "repr": repr,
    **{name: getattr(operator, name) for name in ("lshift", "rshift", "xor", "invert")},
    "and": operator.and_,
    "or": operator.or_,
    "is_integer": lambda number: number.is_integer(),
    "bit_length": lambda number: number.bit_length(),
}
_OPERATORS = _ARITHMETIC | _COMPARISONS | _STEPS
_UNARY = ("neg", "pos", "abs")


@dataclass(frozen=True, slots=True)
class Number(Leaf):
    """A number made of those that are passed in.

    Attributes:
        made: the operator that makes it; `"named"` if it is one that is passed in.
        of: the operands; for `"named"` the name alone.
    """

    made: str
    of: tuple[Any, ...]

    def at(self, sizes: Mapping[str, Any]) -> Any:
        """The number, from those that were passed in."""
        if self.made == "named":
            return sizes[self.of[0]]
        operands = (o.at(sizes) if isinstance(o, Number) else o for o in self.of)
        return _OPERATORS[self.made](*operands)

    def names(self) -> frozenset[str]:
        """The names of the passed-in numbers of which it is made."""
        if self.made == "named":
            return frozenset(self.of)
        return frozenset().union(*(o.names() for o in self.of if isinstance(o, Number)))

    def __str__(self) -> str:
        if self.made == "named":
            return str(self.of[0]).removeprefix(PASSED)
        return f"{self.made}({', '.join(map(str, self.of))})"


Outcome = tuple[Number, bool]
"""A comparison that Python has made, and what came of it."""


def come_out(outcomes: Iterable[Outcome], passed: Mapping[str, Any]) -> bool:
    """Whether comparisons have the same results with these numbers.

    Args:
        outcomes: the comparisons, with their results.
        passed: the numbers that are passed in, by name.
    """
    try:
        return all(number.at(passed) is outcome for number, outcome in outcomes)
    except (ArithmeticError, ValueError):  # 1 / 0, int(nan): it is another way at least
        return False


def at(number: Number, sizes: Mapping[str, Any]) -> Any:
    """The value of a number for these sizes; a function of its own, since lowered code calls it."""
    return number.at(sizes)


@dataclass(frozen=True, slots=True)
class Given:
    """The place of a number that is an argument.

    Attributes:
        leaf: its index among the leaves of the inputs.
    """

    leaf: int

    def __str__(self) -> str:
        return f"input {self.leaf}"


Where = Place | Given
"""The place of a number that can be passed in."""


def found(model: nn.Module, leaves: Sequence[Any], where: Where) -> Any:
    """The number at a place of the model, or among the leaves of the inputs."""
    return leaves[where.leaf] if isinstance(where, Given) else where.find(model)


def name_of(place: Where) -> str:
    """The name by which the number there is passed in, among those of sizes."""
    return f"{PASSED}{place}"


class Followed:
    """Base of numbers that remember how others are made of them, `_Float` and `_Int`.

    Attributes:
        plain: the plain Python number.
        number: the expression that it is.
        note: called with every comparison that Python makes of it.
    """

    plain: Numeric
    number: Number
    note: Callable[[Outcome], None]

    def __hash__(self) -> int:
        self.note((Number("eq", (self.number, self.plain)), True))
        return hash(self.plain)

    def __bool__(self) -> bool:
        self.note((Number("ne", (self.number, 0)), self.plain != 0))
        return self.plain != 0

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        return type(self.plain), (self.plain,)

    def __copy__(self) -> Numeric:
        return self.plain

    def __deepcopy__(self, memo: object) -> Numeric:
        return self.plain


class _Float(Followed, float):
    __hash__ = Followed.__hash__


class _Int(Followed, int):
    __hash__ = Followed.__hash__


def followed(plain: Numeric, number: Number, note: Callable[[Outcome], None]) -> Any:
    """Return a number that remembers that it is this expression, and notes comparisons of it."""
    kind = _Float if type(plain) is float else _Int
    made = kind(plain)
    made.plain, made.number, made.note = plain, number, note
    return made


def plain(value: object) -> Any:
    """The plain Python number behind one that is followed; anything else as it is."""
    return value.plain if isinstance(value, Followed) else value


def _number(value: object) -> Any:
    return value.number if isinstance(value, Followed) else value


def _method(name: str, reflected: bool) -> Callable[..., Any]:
    function = _OPERATORS[name]

    def method(self: Followed, *others: Any) -> Any:
        if not all(isinstance(o, (int, float)) for o in others):
            return NotImplemented
        operands = (*others, self) if reflected else (self, *others)
        result = function(*map(plain, operands))
        made = Number(name, tuple(map(_number, operands)))
        if name in _COMPARISONS:
            self.note((made, result))
            return result
        return followed(result, made, self.note) if type(result) in (int, float) else result

    return method


for _name in _OPERATORS:
    for _kind in (_Float, _Int):
        setattr(_kind, f"__{_name}__", _method(_name, reflected=False))
        if _name in _ARITHMETIC and _name not in _UNARY:
            setattr(_kind, f"__r{_name}__", _method(_name, reflected=True))


def _step(name: str, reflected: bool) -> Callable[..., Any]:
    function = _OPERATORS[name]

    def method(self: Followed, *others: Any) -> Any:
        operands = (*others, self) if reflected else (self, *others)
        result = function(*map(plain, operands))
        made = Number(name, tuple(map(_number, operands)))
        self.note((Number("eq", (made, result)), True))
        return result

    return method


for _name in _STEPS:
    for _kind, _base in ((_Float, float), (_Int, int)):
        for _method_name in (_name, f"__{_name}__"):
            if hasattr(_base, _method_name):
                setattr(_kind, _method_name, _step(_name, reflected=False))
        if hasattr(_base, f"__r{_name}__"):
            setattr(_kind, f"__r{_name}__", _step(_name, reflected=True))


@contextmanager
def put(model: nn.Module, leaves: list[Any], numbers: Mapping[Where, Numeric]) -> Iterator[None]:
    """While open, these places of the model, and of `leaves`, have these numbers."""
    before: list[tuple[dict[str, Any], str, Any]] = []
    given = list(leaves)
    try:
        for place, number in numbers.items():
            if isinstance(place, Given):
                leaves[place.leaf] = number
                continue
            own = attributes_of(place.owner(model))
            before.append((own, place.last, own.get(place.last, MISSING)))
            own[place.last] = number
        yield
    finally:
        leaves[:] = given
        for own, name, value in reversed(before):
            own.pop(name, None)
            if value is not MISSING:
                own[name] = value


def can_be_put(model: nn.Module, place: Where) -> bool:
    """Whether a number there can be replaced: it is an argument, or its owner has a `__dict__`."""
    if isinstance(place, Given):
        return True
    owner = place.owner(model)
    return owner is not MISSING and not isinstance(owner, type) and hasattr(owner, "__dict__")


def alternatives(
    now: Mapping[Where, Numeric], then: Mapping[Where, Numeric], outcomes: Sequence[Outcome]
) -> list[dict[Where, Numeric]]:
    """Other values of these numbers, with which all comparisons come out as they did.

    Args:
        now: the numbers with their present values.
        then: the same numbers with other values, which are tried first; then values in between,
            closer and closer to `now`.
        outcomes: the comparisons, with their results.
    """
    found = []
    for share in (1, 0.5, 0.125, 0.015625):
        near = {place: _between(now[place], then[place], share) for place in now}
        passed = {name_of(place): number for place, number in near.items()}
        same = come_out(outcomes, passed)
        if same and near not in found and all(near[place] != now[place] for place in now):
            found.append(near)
    return found


def further(
    now: Mapping[Where, Numeric], then: Mapping[Where, Numeric], outcomes: Sequence[Outcome]
) -> list[dict[Where, Numeric]]:
    """Values that these numbers would come to if they went on changing as from `then` to `now`.

    What C makes of a number cannot be followed (`range(self.k)`, `numpy.interp`), and may stay the
    same for small changes.
    """
    found = []
    floats = any(type(number) is float for number in now.values())
    for times in (4, 16, 64) if floats else (4, 16):  # whole numbers may be sizes
        far = {place: now[place] + (now[place] - then[place]) * times for place in now}
        if come_out(outcomes, {name_of(place): number for place, number in far.items()}):
            found.append(far)
    return found


def _between(now: Numeric, then: Numeric, share: float) -> Numeric:
    if share == 1:
        return then
    between = now + (then - now) * share
    return round(between) if type(now) is int else between
