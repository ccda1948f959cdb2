"""How the result of a batch is made of those of its micro-batches, as the model would give it.

Sizes say which leaves can have one entry, or a fixed number of entries, for each row. They cannot
say in which order, nor whether rows look at each other: `z.flip(0)`, a `cumsum` over rows, or
`torch.arange(len(x))` have the sizes of any other result. So the program is run on two pieces of
the example one by one, and on both together in either order, and what it gives is compared. What
it gives in the example's own order is known from its recording, where that had these rows. Single
rows are enough for pieces, and take the least memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntFlag
from typing import Any

import torch
from torch import nn

from penstock.capture.calls import (
    INPUTS,
    ROWS,
    Attribute,
    Call,
    Join,
    Ref,
    Size,
    Sizes,
    TensorInfo,
    Trace,
    Value,
    ambient,
    function_name,
)
from penstock.capture.dims import Varying
from penstock.capture.distinct import with_distinct_rows
from penstock.capture.trees import leaf_paths, leaves_of, tree_leaves
from penstock.devices.settings import TF32, float32_rounding
from penstock.torch_internals import BatchNorm

Make = Callable[[], Callable[[Sequence[Any]], Any]]
"""Makes what runs a trace on the leaves of inputs, with the same random numbers every time."""

MIXED = "its rows depend on the other rows of the batch, or on their place among them"


class _Made(IntFlag):
    """What a value depends on."""

    NOTHING = 0
    ROWS = 1
    """The rows of the batch, or how many there are."""
    DRAWS = 2
    """Random numbers."""
    STATE = 4
    """A state that every call changes, or the statistics of a BatchNorm."""


def joined(
    model: nn.Module,
    trace: Trace,
    varying: Varying,
    inputs: Sequence[Any],
    points: Sequence[Sizes],
    make: Make | None,
    known: Sequence[Any] = (),
    other: Trace | None = None,
) -> tuple[Join, ...]:
    """For every leaf of a trace's result, how it is put together from micro-batches.

    Args:
        model: the recorded module.
        trace: a recording of it, for inputs of every size.
        varying: what varies in the inputs.
        inputs: their leaves.
        points: sizes that the model takes; the first two differ in their rows alone.
        make: makes what runs the trace; `None` if there are no values to compare.
        known: the leaves of the trace's result at the first of the points, if they are known.
        other: the trace of the other mode. Its joins are taken for leaves that cannot be compared
            here because of a BatchNorm; also because of random numbers, if both traces make the
            same calls.
    """
    made = _what_makes(model, trace, varying)
    found = [_by_sizes(trace, leaf, made) for leaf in trace.outputs]
    names = _names(trace)
    helps = other is not None and _does_alike(trace, other)
    exact_ones, drawn_ones = {}, {}
    for k, each in enumerate(found):
        if each.compare and not each.varies:
            exact_ones[k] = each.join.dim or 0
        elif each.varies == _Made.DRAWS and not (helps and _is_alike(trace, other, k)):
            drawn_ones[k] = each.join.dim or 0
    verdicts: dict[int, bool] = {}
    if make is not None:
        comparison = _Comparison(trace, varying, inputs, points[0], make, known)
        verdicts = comparison.of(exact_ones) | comparison.of_drawn(drawn_ones)
    joins = []
    for k, each in enumerate(found):
        join, verdict = each.join, verdicts.get(k)
        if each.compare and verdict is None and _is_alike(trace, other, k):
            join = other.joins[k]  # type: ignore[union-attr]
        elif each.compare and verdict is False:
            join = replace(join, why=f"{names[k]}, of which {MIXED}", mixes=True)
        elif each.compare and verdict is None and not each.exact:
            join = replace(join, why=f"{names[k]}, which has not one entry a row")
        elif join.why:
            join = replace(join, why=f"{names[k]}, {join.why}")
        joins.append(join)
    return tuple(joins)


def _is_alike(trace: Trace, other: Trace | None, leaf: int) -> bool:
    """Whether another trace has the same leaf there, as far as sizes tell."""
    if other is None or other.output_structure != trace.output_structure or not other.joins:
        return False
    mine, theirs = (_shape(t, t.outputs[leaf]) for t in (trace, other))
    return mine == theirs and mine is not None


def _does_alike(trace: Trace, other: Trace) -> bool:
    """Whether two traces make the same calls, as those of the two modes often do."""
    return [call.target for call in trace.calls] == [call.target for call in other.calls]


def _shape(trace: Trace, leaf: object) -> Any:
    info = trace.info(leaf) if isinstance(leaf, (Ref, Attribute)) else None
    return info.shape if isinstance(info, TensorInfo) else None


@dataclass(frozen=True)
class _Found:
    """What the sizes say of a leaf.

    Attributes:
        join: how it may be put together.
        compare: whether a comparison has to confirm that.
        exact: whether it has exactly one entry for each row.
        varies: what it depends on besides the rows: random numbers, a state.
    """

    join: Join
    compare: bool = False
    exact: bool = False
    varies: _Made = _Made.NOTHING


def _by_sizes(trace: Trace, leaf: object, made: dict[Value, _Made]) -> _Found:
    if not isinstance(leaf, (Ref, Attribute)):
        return _Found(Join())  # a number that is known from the sizes, or a constant
    info = trace.info(leaf)
    if not isinstance(info, TensorInfo):
        return _Found(Join(why="which is neither a tensor nor plain data"))
    if info.dynamic:
        return _Found(Join(why="whose size depends on values"))
    growing = [d for d, n in enumerate(info.shape) if not isinstance(n, int) and n.grows_with(ROWS)]
    if not growing:
        if not made[leaf]:
            return _Found(Join())
        return _Found(Join(why="which has no batch dimension"))
    if len(growing) > 1:
        dims = " and ".join(map(str, growing))
        why = f"whose dimensions {dims} all grow with the rows of the batch"
        return _Found(Join(why=why, mixes=True))
    dim = growing[0]
    size = info.shape[dim]
    if not isinstance(size, Size) or any(names.count(ROWS) != 1 for _, names in size.terms):
        return _Found(Join(why=f"which has {size} entries in dimension {dim}"))
    exact = size.terms == ((1, (ROWS,)),)
    return _Found(Join(dim), True, exact, made[leaf] & ~_Made.ROWS)


def _names(trace: Trace) -> list[str]:
    """Every leaf of the result in words: `float32[Bx10] as result['logits']`."""
    paths = leaf_paths(trace.output_structure)
    whats = [trace.info(v) if isinstance(v, (Ref, Attribute)) else v for v in trace.outputs]
    names = []
    for path, what in zip(paths, whats, strict=True):
        keys = [k for k in path if k is not None]
        place = "".join(f"[{k!r}]" if how == "item" else f".{k}" for how, k in keys)
        names.append(f"{what}{f' as result{place}' if place else ''}")
    return names


# -- what makes a value ---------------------------------------------------------------------


def _what_makes(model: nn.Module, trace: Trace, varying: Varying) -> dict[Value, _Made]:
    """What every value of a trace depends on; what was written into its memory counts, too."""
    made: dict[Value, _Made] = {}
    memory: dict[int, _Made] = {}
    changed = set(trace.changed)
    named: dict[str, Value] = {}  # results of calls that closed modules have inside

    def note(value: Value, what: _Made) -> None:
        info = trace.info(value)
        made[value] = what
        if isinstance(info, TensorInfo):
            memory[info.storage] = memory.get(info.storage, _Made.NOTHING) | what

    def of(value: Value) -> _Made:
        info = trace.info(value)
        written = memory.get(info.storage, _Made.NOTHING) if isinstance(info, TensorInfo) else 0
        return made[value] | written

    for attribute in trace.attributes:
        note(attribute, _Made.ROWS | _Made.STATE if attribute.name in changed else _Made.NOTHING)
    for leaf, axes in enumerate(varying.axes):
        has_rows = any(axis.name == ROWS for axis in axes.values())
        note(Ref(INPUTS, leaf), _Made.ROWS if has_rows else _Made.NOTHING)
    for number, call in enumerate(trace.calls):
        what = _own(model, call, changed)
        for value in (*call.reads(), *(named[name] for name in call.hidden if name in named)):
            what |= of(value)
        for value in call.mutates:
            note(value, made[value] | what)
        for k in range(len(call.outputs)):
            note(Ref(number, k), what)
            named[str(Ref(number, k))] = Ref(number, k)
    return {v: of(v) for v in trace.outputs if isinstance(v, (Ref, Attribute))}


def _own(model: nn.Module, call: Call, changed: set[str]) -> _Made:
    """What the results of a call depend on besides its arguments."""
    sizes = (x for x in tree_leaves((call.args, call.kwargs)) if isinstance(x, Size))
    what = _Made.ROWS if any(size.grows_with(ROWS) for size in sizes) else _Made.NOTHING
    if call.random:
        what |= _Made.DRAWS | _Made.ROWS
    if not changed.isdisjoint(call.hidden) or _normalises_batches(model, call):
        what |= _Made.STATE
    return what


def _normalises_batches(model: nn.Module, call: Call) -> bool:
    """Whether a call may be a BatchNorm that has no other statistics than those of the batch."""
    if not isinstance(call.target, str):
        return function_name(call.target) == "batch_norm"
    modules = model.get_submodule(call.target).modules()
    return any(isinstance(m, BatchNorm) and m.running_mean is None for m in modules)


# -- comparing ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Comparison:
    """Compares the results of two pieces of a batch with the result of the whole batch.

    Attributes:
        trace: the trace that gives the results.
        varying: what varies in the inputs.
        inputs: the leaves of the inputs.
        sizes: sizes of inputs that the model takes.
        make: makes what runs the trace.
        known: the leaves of the result at these sizes; empty if they are not known.
    """

    trace: Trace
    varying: Varying
    inputs: Sequence[Any]
    sizes: Sizes
    make: Make
    known: Sequence[Any]

    def of(self, dims: Mapping[int, int]) -> dict[int, bool]:
        """Whether leaves of the results of two pieces, put together, are those of the whole batch.

        Pieces are single rows where the model takes these, else as many as it was recorded at. What
        looks wrong with single rows is compared again: a `squeeze` may have made it so.

        Args:
            dims: for leaves of the result the dimension along which pieces follow one another.

        Returns:
            for each of the leaves whether it is; empty if the model takes neither number of rows.
        """
        verdicts: dict[int, bool] = {}
        for rows in sorted({1, self.sizes[ROWS]}):
            left = {k: dim for k, dim in dims.items() if not verdicts.get(k)}
            try:
                verdicts |= self.with_rows(rows, left)
            except Exception:
                continue
            if all(verdicts.values()):
                break
        return verdicts

    def of_drawn(self, dims: Mapping[int, int]) -> dict[int, bool]:
        """Whether each piece's part of the result stays the same when the other piece changes.

        This can be compared for results that are made with random numbers, as batches of the same
        size draw the same ones. It does not show what depends on the place of a row.

        Args:
            dims: see `of`.
        """
        if not dims:
            return {}
        for rows in sorted({1, self.sizes[ROWS]}):
            for apart in (True, False):
                try:
                    return self.when_exchanged(rows, dims, apart)
                except Exception:
                    continue
        return {}

    def with_rows(self, rows: int, dims: Mapping[int, int]) -> dict[int, bool]:
        """Like `of`, for pieces of this many rows.

        Rows that are alike are changed first, unless the model refuses the changed ones.
        """
        try:
            return self.when_apart(rows, dims, True)
        except Exception:
            return self.when_apart(rows, dims, False)

    def when_apart(self, rows: int, dims: Mapping[int, int], apart: bool) -> dict[int, bool]:
        """Like `of`, with the pieces in either order, as a batch may happen to be sorted.

        Args:
            rows: the number of rows of each piece.
            dims: see `of`.
            apart: whether rows that are alike are changed first.
        """
        batch = self.batch(rows, apart)
        results = self.results(rows, batch)
        is_known = bool(self.known) and self.is_given(rows, batch)
        with torch.no_grad():
            parts = [{k: found[k] for k in dims} for found in (results(0), results(1))]
            bound = _bound(self.trace, any(x.device.type != "cpu" for x in parts[0].values()))
            verdicts = dict.fromkeys(dims, True)
            for one, other in ((0, 1), (1, 0)):
                whole = self.known if is_known and one < other else results(one, other)
                for k, dim in dims.items():
                    same = _is_joined(whole[k], (parts[one][k], parts[other][k]), dim, bound)
                    verdicts[k] = verdicts[k] and same
        return verdicts

    def when_exchanged(self, rows: int, dims: Mapping[int, int], apart: bool) -> dict[int, bool]:
        """Whether each half of a result stays when the other piece of the batch is exchanged."""
        results = self.results(rows, self.batch(rows, apart))
        with torch.no_grad():
            both = results(0, 1)
            halves = [
                {k: both[k].chunk(2, dim)[half] for k, dim in dims.items()} for half in (0, 1)
            ]
            bound = _bound(self.trace, any(x.device.type != "cpu" for x in halves[0].values()))
            verdicts = dict.fromkeys(dims, True)
            for half in (0, 1):
                twice = results(half, half)
                for k, dim in dims.items():
                    part = twice[k].chunk(2, dim)[half]
                    same = _is_joined(halves[half][k], (part,), dim, bound)
                    verdicts[k] = verdicts[k] and same
        return verdicts

    def batch(self, rows: int, apart: bool) -> list[Any]:
        """Inputs of two pieces of so many rows, the second after the first."""
        batch = self.varying.rows_of(self.inputs, self.sizes, (rows, rows), (0, 1))
        return with_distinct_rows(batch, self.varying.batch_dims) if apart else batch

    def results(self, rows: int, batch: Sequence[Any]) -> Callable[..., Sequence[Any]]:
        """A function from numbers of pieces of a batch to the leaves of their result."""
        replay = self.make()
        sizes = {**self.sizes, ROWS: 2 * rows}

        def of(*pieces: int) -> Sequence[Any]:
            chosen = self.varying.rows_of(batch, sizes, (rows, rows), pieces)
            return leaves_of(replay(chosen), self.trace.output_structure)

        return of

    def is_given(self, rows: int, batch: Sequence[Any]) -> bool:
        """Whether the known result is that of this batch: of the inputs' own first rows."""
        there = self.varying.sizes(self.inputs)[ROWS]
        if not self.sizes[ROWS] == 2 * rows <= there:
            return False
        own = self.varying.rows_of(self.inputs, self.sizes, (rows, rows), (0, 1))
        pairs = zip(own, batch, strict=True)
        return all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))


def _is_joined(whole: torch.Tensor, pieces: Sequence[torch.Tensor], dim: int, bound: float) -> bool:
    """Whether pieces that follow one another are the whole, up to rounding.

    Entries may differ by `bound` times the largest number in the same column (across the rows), or
    in a usual column if that is larger. Columns whose entries are all the same, such as those that
    a mask fills with -1e9, do not count as usual.
    """
    merged = torch.cat(list(pieces), dim)
    if merged.shape != whole.shape or not (whole.is_floating_point() or whole.is_complex()):
        return torch.equal(merged, whole)
    if torch.equal(merged, whole):  # also if they are empty
        return True
    merged, whole = (_columns(x, dim) for x in (merged, whole))
    scale = whole.abs().amax(0)
    if not scale.isfinite().all():  # unusual: those that are numbers are compared
        odd = ~whole.isfinite()
        if not torch.allclose(merged[odd], whole[odd], rtol=0.0, atol=0.0, equal_nan=True):
            return False
        merged, whole = merged.masked_fill(odd, 0.0), whole.masked_fill(odd, 0.0)
        scale = whole.abs().amax(0)
    varies = (whole != whole[:1]).any(0) | (merged != whole[:1]).any(0)
    if not varies.any():
        return True
    usual = scale[varies].median()
    return bool(((merged - whole).abs() <= bound * scale.maximum(usual)).all())


def _columns(values: torch.Tensor, dim: int) -> torch.Tensor:
    """Entries along a dimension as rows of real numbers, in float32 at least."""
    rows = values.movedim(dim, 0).reshape(values.shape[dim], -1)
    if rows.is_complex():
        rows = torch.view_as_real(rows.resolve_conj()).flatten(1)
    return rows if rows.element_size() >= 4 else rows.float()


def _bound(trace: Trace, is_accelerator: bool) -> float:
    """How far rounding may take results apart, as a share of the largest one.

    Half of the digits of the least precise type that is in use: batches of another size are
    summed in another order.
    """
    infos = [*trace.inputs, *(info for call in trace.calls for info in call.outputs)]
    dtypes = {i.dtype for i in infos if isinstance(i, TensorInfo) and i.dtype.is_floating_point}
    dtypes |= {dtype for _, dtype in ambient().casting}
    coarsest = max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)
    if torch.float32 in dtypes:
        coarsest = max(coarsest, float32_rounding())
    if is_accelerator:  # where float32 may be multiplied as TF32, whatever torch says
        coarsest = max(coarsest, TF32)
    return float(coarsest**0.5)
