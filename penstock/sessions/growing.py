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

Place = tuple[tuple[Any, ...], int]
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
        self._before: dict[Place, int] = {}

    def note(self, leaves: Sequence[Any], structure: Structure | None) -> None:
        """Remember the sizes of a call."""
        self._before = dict(_sizes(leaves, structure))

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
        axes: list[dict[int, Axis]] = [{} for _ in leaves]
        items: list[_Item] = []
        sources = _named_sizes(leaves, paths, dynamic)
        for k, (leaf, path) in enumerate(zip(leaves, paths, strict=True)):
            if type(leaf) is int and len(path) > 2:  # in an object or a container
                before = self._before.get((path, -1))
                if before is not None and before != leaf:
                    items.append(_Item(k, -1, leaf, before))
            if not isinstance(leaf, torch.Tensor):
                continue
            argument = path[1][1] if len(path) > 1 and path[1] else None
            is_resident = isinstance(leaf, Resident)
            own = {} if is_resident else dynamic.get(argument, {})  # type: ignore[arg-type]
            for dim, size in enumerate(leaf.shape):
                before = self._before.get((path, dim))
                if is_resident:
                    made = _made(leaf, dim)
                    if (per := _per_row(made)) is not None and size == per * rows:
                        axes[k][dim] = Axis(ROWS, per)
                    elif before != size if before is not None else _grows(made):
                        surely = before is not None or isinstance(made, Size)
                        items.append(_Item(k, dim, size, before, surely=surely))
                    elif before is not None and size in sources:
                        items.append(_Item(k, dim, size, before, sources[size]))
                elif dim == self._dim_of(argument) and size % rows == 0 and size == rows:
                    axes[k][dim] = Axis(ROWS)
                elif dim in own or dim - leaf.ndim in own:
                    name = own.get(dim, own.get(dim - leaf.ndim, ""))
                    items.append(_Item(k, dim, size, before, name))
        numbers: dict[int, Axis] = {}
        for name, group in _groups(items):
            base = group[0].now
            for item in group:
                axis = Axis(name, 1, item.now - base)
                if item.dim < 0:
                    numbers[item.leaf] = axis
                else:
                    axes[item.leaf][item.dim] = axis
        return Varying(tuple(axes), numbers)

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
            argument = path[1][1] if len(path) > 1 and path[1] else None
            dim = self._dim_of(argument)
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Resident):
                if dim is not None and leaf.ndim > dim:
                    return leaf.shape[dim]
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


def _named_sizes(
    leaves: Sequence[Any], paths: Sequence[tuple[Any, ...]], dynamic: Dynamic
) -> dict[int, str]:
    """The sizes of dimensions that have names, with these, where a state may be as long."""
    found: dict[int, str] = {}
    for leaf, path in zip(leaves, paths, strict=True):
        argument = path[1][1] if len(path) > 1 and path[1] else None
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, Resident):
            for dim, name in dynamic.get(argument, {}).items():  # type: ignore[arg-type]
                if -leaf.ndim <= dim < leaf.ndim:
                    found[leaf.shape[dim]] = name
    return found


def _sizes(leaves: Sequence[Any], structure: Structure | None) -> list[tuple[Place, int]]:
    found: list[tuple[Place, int]] = []
    for leaf, path in zip(leaves, leaf_paths(structure), strict=True):
        if type(leaf) is int:
            found.append(((path, -1), leaf))
        elif isinstance(leaf, torch.Tensor):
            found += [((path, dim), size) for dim, size in enumerate(leaf.shape)]
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


def _grows(made: int | Size | Irregular | None) -> bool:
    return isinstance(made, (Size, Irregular))
