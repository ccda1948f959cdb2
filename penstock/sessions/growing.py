"""Which sizes grow in a session: found by watching the arguments of its calls.

The states of a session are longer at every call, and so are masks and counts that go with them. A
recording for one length holds for all others if it is known which dimensions grow together. For
states the recording that made them says which dimensions depend on lengths; everything else shows
by the difference between two calls. What is guessed wrong at the first call with states (two sizes
may be equal by chance) differs at the next one, and is found then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from penstock.capture.calls import ROWS, Irregular, Size
from penstock.capture.dims import Axis, BatchDim, Dynamic, Varying
from penstock.capture.trees import Structure, leaf_paths
from penstock.errors import InputError
from penstock.sessions.resident import Resident

SizePlace = tuple[tuple[Any, ...], int]
"""Where a size is: the path of a leaf, and its dimension; -1 for an integer itself."""


class _Item(NamedTuple):
    """A size that may grow.

    Attributes:
        leaf: of the arguments.
        dim: of it; -1 for an integer.
        now: the size.
        before: what it was at the call before, if it was there.
        name: that the user has given the dimension; empty if there is none.
        surely: whether it grows; else it may have come to an end, as a sliding window does.
    """

    leaf: int
    dim: int
    now: int
    before: int | None
    name: str = ""
    surely: bool = True

    def goes_with(self, other: _Item) -> bool:
        """Whether both seem to count the same."""
        if self.name and other.name:
            return self.name == other.name and self.now == other.now
        if self.before is not None and other.before is not None:
            return self.now - other.now == self.before - other.before
        return abs(self.now - other.now) <= 1


class Growing:
    """What varies in the arguments of a session's calls.

    Args:
        batch_dim: as of `Pipeline`.
        dynamic: as of `Pipeline`.
    """

    def __init__(self, batch_dim: BatchDim = 0, dynamic: Dynamic | None = None) -> None:
        self._batch_dim = batch_dim
        self._dynamic = dynamic or {}
        self._last: tuple[Structure | None, list[Any]] = (None, [])

    def note(self, leaves: Sequence[Any], structure: Structure | None) -> None:
        """Remember the sizes of a call."""
        sizes = [x.shape if isinstance(x, torch.Tensor) else x for x in leaves]
        self._last = structure, sizes

    def varying_of(
        self, leaves: Sequence[Any], structure: Structure | None, dynamic: Dynamic | None = None
    ) -> Varying:
        """What varies in these leaves.

        Args:
            leaves: of `(args, kwargs)`; states that stay with workers are `Resident`s.
            structure: theirs, with objects opened.
            dynamic: dimensions that vary in this call; `None` for those of the session.

        Raises:
            InputError: none of them has rows.
        """
        paths = leaf_paths(structure)
        dynamic = self._dynamic if dynamic is None else dynamic
        rows = self._rows(leaves, paths)
        sources = _named_sizes(leaves, paths, dynamic)
        last = self._sizes()
        axes: list[dict[int, Axis]] = [{} for _ in leaves]
        items: list[_Item] = []
        for k, (leaf, path) in enumerate(zip(leaves, paths, strict=True)):
            if type(leaf) is int:
                items += _number(k, leaf, last.get((path, -1)), is_inside=len(path) > 2)
            elif isinstance(leaf, Resident):
                before = [last.get((path, dim)) for dim in range(leaf.ndim)]
                axes[k] = _rows_of(leaf, rows)
                items += _grown(k, leaf, before, sources, axes[k])
            elif isinstance(leaf, torch.Tensor) and leaf.ndim:
                argument = _argument(path)
                dim = self._dim_of(argument)
                if dim is not None and _has(leaf, dim) and leaf.shape[dim] == rows:
                    axes[k][dim % leaf.ndim] = Axis(ROWS)
                for named, name in dynamic.get(argument, {}).items():
                    _check_has(leaf, named, argument, name)
                    place = named % leaf.ndim
                    items.append(_Item(k, place, leaf.shape[place], last.get((path, place)), name))
        numbers: dict[int, Axis] = {}
        for name, group in _groups(items):
            for item in group:
                axis = Axis(name, 1, item.now - group[0].now)
                if item.dim < 0:
                    numbers[item.leaf] = axis
                else:
                    axes[item.leaf].setdefault(item.dim, axis)
        return Varying(tuple(axes), numbers)

    def _sizes(self) -> dict[SizePlace, int]:
        """The sizes of the call before, by their places."""
        structure, sizes = self._last
        found: dict[SizePlace, int] = {}
        for size, path in zip(sizes, leaf_paths(structure) if sizes else [], strict=True):
            if type(size) is int:
                found[path, -1] = size
            elif isinstance(size, torch.Size):
                found.update(((path, dim), n) for dim, n in enumerate(size))
        return found

    def _dim_of(self, argument: Any) -> int | None:
        """The dimension of an argument that counts the rows."""
        if isinstance(self._batch_dim, int):
            return self._batch_dim
        dim = self._batch_dim.get(argument, 0)
        if isinstance(dim, tuple):
            raise InputError("sessions take inputs with one entry for each row only")
        return dim

    def _rows(self, leaves: Sequence[Any], paths: Sequence[tuple[Any, ...]]) -> int:
        """How many rows there are: those of the first argument that has some.

        Raises:
            InputError: none has.
        """
        for leaf, path in zip(leaves, paths, strict=True):
            dim = self._dim_of(_argument(path))
            is_given = isinstance(leaf, torch.Tensor) and not isinstance(leaf, Resident)
            if is_given and dim is not None and _has(leaf, dim):
                return int(leaf.shape[dim])
        raise InputError("no argument of this call has rows: none is a tensor with dimensions")


def _groups(items: Sequence[_Item]) -> list[tuple[str, list[_Item]]]:
    """Sizes that grow together, each group under a name of its own."""
    groups: list[list[_Item]] = []
    for item in sorted(items, key=lambda item: not item.surely):
        group = next((g for g in groups if item.goes_with(g[0])), None)
        if group is None and item.surely:
            groups.append([item])
        elif group is not None:
            group.append(item)
    return [(f"length {k}", group) for k, group in enumerate(groups)]


def _has(tensor: torch.Tensor, dim: int) -> bool:
    """Whether a tensor has this dimension."""
    return -tensor.ndim <= dim < tensor.ndim


def _check_has(tensor: torch.Tensor, dim: int, argument: Any, name: str) -> None:
    """Raise unless an argument has the dimension that was named.

    Raises:
        InputError: it has not.
    """
    if not _has(tensor, dim):
        raise InputError(
            f"dynamic: dimension {dim} ({name}) does not exist in argument {argument!r}, of shape "
            f"{tuple(tensor.shape)}"
        )


def _argument(path: tuple[Any, ...]) -> Any:
    """The name or the position of the argument in which a leaf is."""
    return path[1][1] if len(path) > 1 and path[1] else None


def _number(leaf: int, now: int, before: int | None, is_inside: bool) -> list[_Item]:
    """An integer in an object or a container, if it has changed."""
    has_changed = is_inside and now > 0 and before is not None and before != now
    return [_Item(leaf, -1, now, before)] if has_changed else []


def _rows_of(leaf: Resident, rows: int) -> dict[int, Axis]:
    """The dimensions of a state that count rows."""
    found = {}
    for dim, size in enumerate(leaf.shape):
        per = _per_row(_made(leaf, dim))
        if per is not None and size == per * rows:
            found[dim] = Axis(ROWS, per)
    return found


def _grown(
    k: int,
    leaf: Resident,
    before: Sequence[int | None],
    sources: Mapping[int, str],
    others: Mapping[int, Axis],
) -> list[_Item]:
    """The dimensions of a state that grow, or are as long as an argument.

    Args:
        k: the number of the leaf.
        leaf: the state.
        before: its sizes at the call before.
        sources: names of sizes of arguments.
        others: its dimensions that count something else.
    """
    items = []
    for dim, (now, was) in enumerate(zip(leaf.shape, before, strict=True)):
        made = _made(leaf, dim)
        if dim in others or not now:  # nothing is known yet of what has no entries
            continue
        if was != now if was is not None else isinstance(made, (Size, Irregular)):
            surely = was is not None or isinstance(made, Size)
            items.append(_Item(k, dim, now, was, surely=surely))
        elif was is not None and now in sources:
            items.append(_Item(k, dim, now, was, sources[now]))
    return items


def _named_sizes(
    leaves: Sequence[Any], paths: Sequence[tuple[Any, ...]], dynamic: Dynamic
) -> dict[int, str]:
    """The sizes of dimensions that have names, with these, where a state may be as long."""
    found: dict[int, str] = {}
    for leaf, path in zip(leaves, paths, strict=True):
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Resident):
            for dim, name in dynamic.get(_argument(path), {}).items():
                if _has(leaf, dim):
                    found[leaf.shape[dim]] = name
    return found


def _made(leaf: Resident, dim: int) -> int | Size | Irregular | None:
    """How the size of a state depends on those of the call that made it; `None` if unknown."""
    made = leaf.seen.value.made
    return made[dim] if len(made) == leaf.ndim else None


def _per_row(made: int | Size | Irregular | None) -> int | None:
    """How many entries there are for each row, if it counts rows."""
    if isinstance(made, Size) and len(made.terms) == 1 and made.terms[0][1] == (ROWS,):
        return made.terms[0][0]
    return None
