"""Which dimensions of the inputs vary: the rows of the batch, and those that the user names."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

import torch
from torch import nn

from penstock.capture.calls import ROWS, Size, Sizes
from penstock.capture.memory_layout import laid_out_like
from penstock.capture.trees import tree_leaves
from penstock.errors import InputError

Dim = int | tuple[int, int] | None
"""The dimension of the rows, or a pair of it and the entries per row; `None` for no rows."""

BatchDim = int | Mapping[str | int, Dim]
"""One dimension for every input, or one per argument (by position or name)."""

Dynamic = Mapping[str | int, Mapping[int, str]]
"""For an argument (by position or name) the dimensions that vary, each with its name."""

T = TypeVar("T")

_SMALL_BATCHES = (2, 3, 4)
_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Axis(NamedTuple):
    """How the size of a dimension, or a number, depends on a count: `per * count + plus`.

    Attributes:
        name: the name of the count: `"B"` for the rows, or one that the user has given.
        per: the entries for each that is counted.
        plus: the entries that are always there.
    """

    name: str
    per: int = 1
    plus: int = 0

    @property
    def size(self) -> Size:
        """The number of entries, for any count."""
        constant = ((self.plus, ()),) if self.plus else ()
        return Size(((self.per, (self.name,)), *constant))

    def at(self, count: int) -> int:
        """The number of entries for this count."""
        return self.per * count + self.plus


@dataclass(frozen=True)
class Varying:
    """The dimensions of a program's inputs that vary.

    Attributes:
        axes: for every leaf of the inputs its dimensions that vary; `"B"` names the one that
            counts the rows, along which micro-batches are split.
        numbers: the leaves that are integers which grow with the inputs, such as the length of a
            cache.
    """

    axes: tuple[Mapping[int, Axis], ...]
    numbers: Mapping[int, Axis] = field(default_factory=dict)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all dimensions that vary, the rows first."""
        named = (a.name for axes in (*self.axes, self.numbers) for a in axes.values())
        return tuple(dict.fromkeys([ROWS, *named]))

    @cached_property
    def batch_dims(self) -> tuple[Dim, ...]:
        """For every leaf the dimension that counts its rows; `None` for one that has no rows."""
        return tuple(
            next(
                ((dim, a.per) if a.per > 1 else dim for dim, a in axes.items() if a.name == ROWS),
                None,
            )
            for axes in self.axes
        )

    def sizes(self, leaves: Sequence[Any]) -> Sizes:
        """The size of every dimension that varies in these inputs.

        Raises:
            InputError: two inputs disagree, one does not divide into rows, or a dimension other
                than the rows is empty.
        """
        found: dict[str, list[tuple[int, int]]] = {name: [] for name in self.names}
        for k, (leaf, axes) in enumerate(zip(leaves, self.axes, strict=True)):
            for dim, (name, per, plus) in axes.items():
                count, rest = divmod(leaf.shape[dim] - plus, per)
                if rest:
                    raise InputError(
                        f"input {k} has {leaf.shape[dim]} entries in dimension {dim}, which are "
                        f"not {per} for each row"
                    )
                found[name].append((k, count))
        for k, (name, per, plus) in self.numbers.items():
            found[name].append((k, (leaves[k] - plus) // per))
        for name, sizes in found.items():
            if name != ROWS and any(n == 0 for _, n in sizes):
                raise InputError(f"the dimension {name!r} is empty: there is nothing to compute")
            if len({n for _, n in sizes}) > 1:
                listed = ", ".join(f"input {k} has {n}" for k, n in dict.fromkeys(sizes))
                raise InputError(_disagreement(name, listed))
        return {name: sizes[0][1] for name, sizes in found.items()}

    def agrees(self, leaves: Sequence[Any]) -> bool:
        """Whether the sizes of these inputs fit together."""
        try:
            self.sizes(leaves)
        except InputError:
            return False
        return True

    def resized(self, leaves: Sequence[Any], sizes: Sizes) -> list[Any]:
        """The inputs resized to these sizes, by repeating or dropping entries; tensors are copies.

        The copies have the memory layout of the tensors given.
        """
        result = []
        for k, (given, axes) in enumerate(zip(leaves, self.axes, strict=True)):
            leaf = given
            if k in self.numbers:
                leaf = self.numbers[k].at(sizes[self.numbers[k].name])
            if isinstance(leaf, torch.Tensor):
                leaf = leaf.detach().clone() if not axes else leaf.detach()
                for dim, axis in axes.items():
                    count = axis.at(sizes[axis.name])
                    index = torch.arange(count, device=leaf.device) % leaf.shape[dim]
                    leaf = leaf.index_select(dim, index)
                leaf = laid_out_like(leaf, given)
            result.append(leaf)
        return result

    def one_row(self, leaves: Sequence[Any], row: int) -> list[Any]:
        """The inputs of this row alone; copies where there are rows."""
        result = []
        for leaf, dim in zip(leaves, self.batch_dims, strict=True):
            if dim is not None:
                axis, per = dim if isinstance(dim, tuple) else (dim, 1)
                leaf = laid_out_like(leaf.detach().narrow(axis, row * per, per).clone(), leaf)
            result.append(leaf)
        return result

    def rows_of(
        self, leaves: Sequence[Any], sizes: Sizes, counts: Sequence[int], pieces: Sequence[int]
    ) -> list[Any]:
        """Inputs made of pieces, each of them one of two sequences of rows; always copies.

        The rows are the inputs' own, in their order. Where there are too few for both sequences,
        the second takes them in another order than the first, so that means over rows and the order
        of rows differ. A row that occurs again is rolled, so that all its values remain valid.

        Args:
            leaves: the leaves of the inputs.
            sizes: the sizes to give to the dimensions other than the rows.
            counts: how many rows the first and the second sequence have.
            pieces: which of the two, 0 or 1, comes at every place.
        """
        first, second = counts
        there = self.sizes(leaves)[ROWS]
        if there >= first + second:
            index = list(range(first + second))
        else:
            others = [k * k if there > 2 else k // 3 for k in range(second)]
            index = [k % there for k in (*range(first), *others)]
        again = [index[:k].count(row) for k, row in enumerate(index)]
        both = range(first), range(first, first + second)
        chosen = [k for piece in pieces for k in both[piece]]
        result = []
        resized = self.resized(leaves, {**sizes, ROWS: there})
        for leaf, dim in zip(resized, self.batch_dims, strict=True):
            if dim is not None:
                axis, per = dim if isinstance(dim, tuple) else (dim, 1)
                others = [d for d in range(leaf.ndim) if d != axis]
                rows = [leaf.narrow(axis, index[k] * per, per) for k in chosen]
                if others:
                    rolls = [again[k] for k in chosen]
                    rows = [
                        r.roll(n, others[-1]) if n else r for r, n in zip(rows, rolls, strict=True)
                    ]
                leaf = torch.cat(rows, axis)
            result.append(leaf)
        return result

    def without(self, names: Collection[str]) -> Varying:
        """A copy in which the dimensions and numbers of these names do not vary."""
        axes = [{d: a for d, a in own.items() if a.name not in names} for own in self.axes]
        numbers = {k: axis for k, axis in self.numbers.items() if axis.name not in names}
        return Varying(tuple(axes), numbers)

    @property
    def lengths(self) -> tuple[str, ...]:
        """The names of all dimensions that vary but the rows."""
        return self.names[1:]

    def attempts_in_session(self, sizes: Sizes) -> list[list[Sizes]]:
        """Like `attempts`, for a session, whose inputs are longer at every call.

        Larger sizes come first: later calls have them, and a cache that is already filled may not
        become shorter.
        """
        longer = {n: (k, k + 1, k + 2) for n, k in sizes.items()}
        shorter = {n: _near(k) for n, k in sizes.items()}
        multiples = {n: (k, 2 * k, 3 * k) for n, k in sizes.items()}
        rows = multiples[ROWS]
        return [_grid({**choice, ROWS: rows}) for choice in (longer, shorter, multiples)]

    def attempts(self, example: Sizes) -> list[list[Sizes]]:
        """The sizes at which to record: several attempts, to be tried in this order.

        Each attempt is a list of sizes for `generalise`: one to start from, each name varied
        alone, each pair of names together, and at last all at once, which checks the others. Small
        batches come first, because they are quick. Some models need particular sizes, or decide by
        the values of all rows; for these, the example's sizes and multiples of them may work. If
        rows have to be sorted by lengths that are values of the inputs, neither smaller sizes nor
        repeated rows are possible.
        """
        near = {n: _near(k) for n, k in example.items()}
        multiples = {n: (k, 2 * k, 3 * k) for n, k in example.items()}
        given = {**near, ROWS: multiples[ROWS]}
        few = {ROWS: _SMALL_BATCHES}
        found = [near | few, given, multiples | few, multiples]
        return [_grid(choice) for k, choice in enumerate(found) if choice not in found[:k]]


def _near(size: int) -> tuple[int, int, int]:
    """A size and two others: smaller if it is above 4, as positions may end with the example's."""
    return (size, size - 1, size - 3) if size > 4 else (size, size + 1, size + 2)


def _grid(choices: Mapping[str, tuple[int, int, int]]) -> list[Sizes]:
    start = {name: values[0] for name, values in choices.items()}
    second = {name: values[1] for name, values in choices.items()}
    varied = [(name,) for name in choices], list(combinations(choices, 2))
    some = [start | {n: second[n] for n in names} for group in varied for names in group]
    return [start, *some, {name: values[2] for name, values in choices.items()}]


def varying(
    args: Sequence[Any], kwargs: Mapping[str, Any], batch_dim: BatchDim, dynamic: Dynamic
) -> Varying:
    """What varies in the leaves of `(args, kwargs)`: dimensions of tensors, and nothing else.

    Raises:
        InputError: a dimension or an argument does not exist, nothing has rows, or a dimension is
            named twice.
    """
    named: list[tuple[str | int, Any]] = [*enumerate(args), *kwargs.items()]
    _check_names(dict(named), batch_dim, dynamic)
    axes: list[Mapping[int, Axis]] = []
    for name, argument in named:
        dim = batch_dim if isinstance(batch_dim, int) else batch_dim.get(name, 0)
        for leaf in tree_leaves(argument):
            if isinstance(leaf, torch.Tensor) and leaf.ndim > 0:
                axes.append(_axes_of(leaf, len(axes), dim, dynamic.get(name, {})))
            else:
                axes.append({})
    if not any(axis.name == ROWS for leaf in axes for axis in leaf.values()):
        raise InputError(
            "no input can be split into micro-batches: none is a tensor with a batch dimension"
        )
    return Varying(tuple(axes))


def varying_of_some(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    batch_dim: BatchDim,
    dynamic: Dynamic,
    names: Sequence[str],
    optional: Collection[str | int] | None = None,
) -> Varying:
    """Like `varying`, where arguments may be left out, or given by name or by position.

    Args:
        args, kwargs: the arguments that are given.
        batch_dim, dynamic: as for `penstock.capture`.
        names: of the arguments that may be given by position, in order.
        optional: the names of those that may be missing; `None` for any.

    Raises:
        InputError: as `varying` does.
    """
    there = {*range(len(args)), *kwargs}

    def counts(name: str | int) -> bool:
        return name in there or (optional is not None and name not in optional)

    if not isinstance(batch_dim, int):
        batch_dim = as_given(batch_dim, names, len(args))
        batch_dim = {name: dim for name, dim in batch_dim.items() if counts(name)}
    dynamic = as_given(dynamic, names, len(args))
    return varying(args, kwargs, batch_dim, {n: d for n, d in dynamic.items() if counts(n)})


def positional_names(model: nn.Module) -> tuple[str, ...]:
    """The names of the arguments that a model's forward takes by position, in order."""
    parameters = inspect.signature(model.forward).parameters
    return tuple(name for name, p in parameters.items() if p.kind in _BY_POSITION)


def as_given(
    setting: Mapping[str | int, T], names: Sequence[str], count: int
) -> dict[str | int, T]:
    """A setting for arguments, by position for those that are given so, by name for the others.

    Args:
        setting: a value for each argument, by its position or name, whichever way it is given.
        names: the names of the arguments that may be given by position, in order.
        count: how many arguments are given by position.

    Raises:
        InputError: an argument is there by position and by name.
    """
    positions = {name: k for k, name in enumerate(names[:count])}
    later = {k: name for k, name in enumerate(names) if k >= count}
    found: dict[str | int, T] = {}
    for key, value in setting.items():
        place = positions.get(key, key) if isinstance(key, str) else later.get(key, key)
        if place in found:
            name = names[place] if isinstance(place, int) else place
            raise InputError(
                f"argument {names.index(name)} and {name!r} are the same argument of the model's "
                "forward: name it once in dynamic= or batch_dim="
            )
        found[place] = value
    return found


def _axes_of(
    leaf: torch.Tensor, number: int, dim: Dim, named: Mapping[int, str]
) -> Mapping[int, Axis]:
    if leaf.is_nested:
        raise InputError(
            f"input {number} is a nested tensor, whose rows have sizes of their own. Pad it "
            "(torch.nested.to_padded_tensor(x, 0.0)), and give a mask or the lengths as well"
        )
    axes: dict[int, Axis] = {}
    rows, per = dim if isinstance(dim, tuple) else (dim, 1)
    for axis, name in [*([] if rows is None else [(rows, ROWS)]), *named.items()]:
        if not -leaf.ndim <= axis < leaf.ndim:
            setting = f"batch_dim={axis}" if name == ROWS else f"dynamic: dimension {axis} ({name})"
            raise InputError(
                f"{setting} does not exist in input {number}, of shape {tuple(leaf.shape)}; "
                "give each argument its own with batch_dim={argument: dimension}"
            )
        if axis % leaf.ndim in axes:
            raise InputError(
                f"dynamic: dimension {axis} ({name}) of input {number} already is "
                f"{axes[axis % leaf.ndim].name!r}, with B for the rows of the batch"
            )
        axes[axis % leaf.ndim] = Axis(name, per if name == ROWS else 1)
    return axes


def _check_names(arguments: Mapping[Any, Any], batch_dim: BatchDim, dynamic: Dynamic) -> None:
    for name, axes in dynamic.items():
        pairs = axes.items() if isinstance(axes, Mapping) else [(axes, None)]
        if not all(isinstance(dim, int) and isinstance(named, str) for dim, named in pairs):
            raise InputError(
                f"dynamic: {name!r} has {axes!r}, not a dictionary of dimensions and their names, "
                'like {1: "length"}'
            )
    given = {"dynamic": dynamic} | ({} if isinstance(batch_dim, int) else {"batch_dim": batch_dim})
    for setting, mapping in given.items():
        for name in mapping:
            if name not in arguments:
                known = ", ".join(map(repr, arguments))
                raise InputError(
                    f"{setting} names the argument {name!r}, which the example does not have; "
                    f"it has {known}"
                )
    if ROWS in (name for axes in dynamic.values() for name in axes.values()):
        raise InputError(f"dynamic: {ROWS!r} is the name of the rows; choose another")


def _disagreement(name: str, listed: str) -> str:
    if name != ROWS:
        return f"the inputs disagree on the dimension {name!r}: {listed}"
    return (
        f"the inputs have different batch sizes: {listed}; an input that every micro-batch "
        "needs whole is named with batch_dim={argument: None}, and one that has 4 entries in "
        "dimension 0 for each row with batch_dim={argument: (0, 4)}"
    )
