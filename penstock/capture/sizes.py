"""Generalising a recording to any batch size, by recording at several and comparing.

An integer that differs between two recordings is `k * rows + d`; a third recording checks it.
Anything else that differs cannot be generalised, and closes the module whose Python made it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import torch

from penstock.capture.calls import Call, Size, TensorInfo, Trace
from penstock.capture.recorder import Unrecordable
from penstock.capture.trees import flatten, unflatten
from penstock.errors import InputError

BatchDim = int | Mapping[str | int, int | None]
"""One dimension for every input, or one per argument (by position or name); `None`: not split."""


def batch_dims(args: Sequence[Any], kwargs: Mapping[str, Any], batch_dim: BatchDim) -> list[Any]:
    """For every leaf of `(args, kwargs)` the dimension to split, or `None` to pass it whole.

    Only tensors with at least one dimension are ever split.
    """
    dims: list[int | None] = []
    named: list[tuple[str | int, Any]] = [*enumerate(args), *kwargs.items()]
    for name, argument in named:
        dim = batch_dim if isinstance(batch_dim, int) else batch_dim.get(name, 0)
        for leaf in flatten(argument)[0]:
            splits = isinstance(leaf, torch.Tensor) and leaf.ndim > 0
            dims.append(dim if splits else None)
    return dims


def num_rows(leaves: Sequence[Any], dims: Sequence[int | None]) -> int:
    """The batch size that all split inputs agree on.

    Raises:
        InputError: none is split, a dimension does not exist, or two inputs disagree.
    """
    sizes: dict[int, int] = {}
    for k, (leaf, dim) in enumerate(zip(leaves, dims, strict=True)):
        if dim is None:
            continue
        if not -leaf.ndim <= dim < leaf.ndim:
            raise InputError(
                f"batch_dim={dim} does not exist in input {k}, of shape {tuple(leaf.shape)}; "
                "give each argument its own with batch_dim={argument: dimension}"
            )
        sizes[k] = leaf.shape[dim]
    if not sizes:
        raise InputError(
            "no input can be split into micro-batches: none is a tensor with a batch dimension"
        )
    if len(set(sizes.values())) > 1:
        listed = ", ".join(f"input {k} has {n}" for k, n in sizes.items())
        raise InputError(
            f"the inputs have different batch sizes: {listed}; an input that every micro-batch "
            "needs whole is named with batch_dim={argument: None}"
        )
    return next(iter(sizes.values()))


def with_rows(leaves: Sequence[Any], dims: Sequence[int | None], rows: int) -> list[Any]:
    """The same inputs with `rows` rows, the example's own repeated in turn; always copies."""
    result = []
    for leaf, dim in zip(leaves, dims, strict=True):
        if not isinstance(leaf, torch.Tensor):
            result.append(leaf)
        elif dim is None:
            result.append(leaf.detach().clone())
        else:
            index = torch.arange(rows, device=leaf.device) % leaf.shape[dim]
            result.append(leaf.detach().index_select(dim, index))
    return result


class Undecided(Unrecordable):
    """Recordings at several batch sizes read different answers off their inputs."""


def generalise(traces: Sequence[Trace], rows: Sequence[int]) -> Trace:
    """One trace for every batch size out of three recordings at `rows`.

    Raises:
        Unrecordable: the recordings differ in more than integers that grow with the batch.
    """
    first = traces[0]
    _check_same_decisions(traces)
    _check_same_calls(traces, rows)
    merge = _Merge(rows)
    calls = [merge.calls([t.calls[i] for t in traces]) for i in range(len(first.calls))]
    return Trace(
        merge.leaves([t.inputs for t in traces], "", "an input"),
        first.input_structure,
        calls,
        merge.leaves([t.outputs for t in traces], "", "the result"),
        first.output_structure,
        {a: merge.leaf([t.attributes[a] for t in traces], "", str(a)) for a in first.attributes},
        first.changed,
        first.decisions,
    )


def _check_same_decisions(traces: Sequence[Trace]) -> None:
    first = traces[0]
    for other in traces[1:]:
        for one, two in zip_longest(first.decisions, other.decisions):
            same = one is not None and two is not None and first.info(one) == other.info(two)
            if not same:
                trace, decision = (first, one) if one is not None else (other, two)
                path = trace.calls[decision.call].path if decision is not None else ""
                raise Undecided(path, "what it decides on its inputs' values depends on the rows")


def _check_same_calls(traces: Sequence[Trace], rows: Sequence[int]) -> None:
    """Raise for the module whose own Python calls something else at another batch size."""
    made = [_calls_by_path(trace) for trace in traces]
    for path in dict.fromkeys(call.path for trace in traces for call in trace.calls):
        for n, by_path in zip(rows, made, strict=True):
            if by_path.get(path) != made[0].get(path):
                while path and not all(_runs(path, other) for other in made):
                    path = path.rpartition(".")[0]  # whether it runs at all, its caller decides
                raise Unrecordable(
                    path,
                    "what it calls depends on the batch: "
                    f"at {n} rows it is not what it is at {rows[0]}",
                )
    for group in zip(*(trace.calls for trace in traces), strict=True):
        if len({(call.path, call.target) for call in group}) > 1:
            raise Unrecordable("", "the order of what it calls depends on the batch")


def _runs(path: str, made: Mapping[str, Any]) -> bool:
    return any(p == path or p.startswith(f"{path}.") for p in made)


def _calls_by_path(trace: Trace) -> dict[str, list[tuple[Any, ...]]]:
    """What the own Python of every open module called, in order."""
    made: dict[str, list[tuple[Any, ...]]] = {}
    for call in trace.calls:
        made.setdefault(call.path, []).append((call.target, call.random, call.ambient))
    return made


class _Merge:
    """Merges what three recordings say of the same thing."""

    def __init__(self, rows: Sequence[int]) -> None:
        self.rows = rows

    def calls(self, calls: Sequence[Call]) -> Call:
        first = calls[0]
        arguments = [flatten((c.args, c.kwargs)) for c in calls]
        structure = arguments[0][1]
        if any(s != structure for _, s in arguments) or any(
            c.result != first.result for c in calls
        ):
            raise Unrecordable(
                first.path, f"the structure of what {first.label} takes or gives varies"
            )
        what = f"an argument of {first.label}"
        leaves = self.leaves([a[0] for a in arguments], first.path, what)
        args, kwargs = unflatten(structure, leaves)
        outputs = self.leaves([c.outputs for c in calls], first.path, f"a result of {first.label}")
        return replace(first, args=args, kwargs=kwargs, outputs=outputs)

    def leaves(self, leaves: Sequence[Sequence[Any]], path: str, what: str) -> tuple[Any, ...]:
        return tuple(self.leaf(group, path, what) for group in zip(*leaves, strict=True))

    def leaf(self, group: Sequence[Any], path: str, what: str) -> Any:
        first = group[0]
        if isinstance(first, TensorInfo) and len({(len(g.shape), g.dtype) for g in group}) == 1:
            if first.dynamic:
                return first
            shape = tuple(
                self.leaf(sizes, path, what)
                for sizes in zip(*(g.shape for g in group), strict=True)
            )
            return replace(first, shape=shape)
        if all(type(g) is type(first) and (g is first or g == first) for g in group):
            return first
        if all(type(g) is int for g in group):
            return self._size(group, path, what)
        raise Unrecordable(
            path,
            f"{what} is {first!r} at {self.rows[0]} rows, {group[1]!r} at {self.rows[1]}, and that "
            "is not an integer that grows with them",
        )

    def _size(self, group: Sequence[int], path: str, what: str) -> Size:
        per_row, rest = divmod(group[1] - group[0], self.rows[1] - self.rows[0])
        size = Size(per_row, group[0] - per_row * self.rows[0])
        if rest or any(size.at(n) != g for g, n in zip(group, self.rows, strict=True)):
            seen = ", ".join(f"{g} at {n}" for g, n in zip(group, self.rows, strict=True))
            raise Unrecordable(path, f"{what} does not grow evenly with the rows: {seen}")
        return size
