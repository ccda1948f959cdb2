"""Generalising a recording to any size of the inputs, by recording at several and comparing.

A whole number that differs between recordings is a sum of products of what varies, `k * rows + d`
in the simplest case; one more recording checks it. Python may have it as a float. Anything else
that differs cannot be generalised, and closes the module whose Python made it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from itertools import combinations, product, zip_longest
from math import prod
from typing import Any

import torch

from penstock.capture.calls import (
    ROWS,
    Call,
    Irregular,
    Reads,
    Size,
    Sizes,
    TensorInfo,
    Trace,
    Unrecordable,
)
from penstock.capture.equality import same, same_constant
from penstock.capture.functions import Applied
from penstock.capture.numbers import Number
from penstock.capture.trees import flatten, tree_leaves, unflatten


class Undecided(Unrecordable):
    """Recordings at several sizes decide differently on their inputs' values."""


class SizedByValues(Unrecordable):
    """The sizes of the results of the closed module `path` depend on values."""

    def __init__(self, path: str) -> None:
        super().__init__(path, "its results are as large as values say")


def generalise(traces: Sequence[Trace], points: Sequence[Sizes]) -> Trace:
    """One trace for inputs of every size out of recordings at these points.

    Args:
        traces: the recordings.
        points: how large the inputs were, in the order of `Varying.attempts`.

    Raises:
        Unrecordable: the recordings differ in more than whole numbers that grow with the inputs.
    """
    first = traces[0]
    _check_same_decisions(traces)
    _check_same_calls(traces, points)
    merge = _Merge(points)
    calls = [merge.calls([t.calls[i] for t in traces]) for i in range(len(first.calls))]
    return Trace(
        merge.leaves([t.inputs for t in traces], "", "an input"),
        first.input_structure,
        calls,
        merge.leaves([t.outputs for t in traces], "", "the result"),
        first.output_structure,
        {a: merge.leaf([t.attributes[a] for t in traces], "", str(a)) for a in first.attributes},
        first.changed,
        first.rewritten,
        first.decisions,
        reads=reduce(Reads.with_all_of, (trace.reads for trace in traces)),
        handed_back=first.handed_back,
    )


def adapted(general: Trace, one: Trace, sizes: Sizes) -> Trace | None:
    """Adapt the trace of one mode to the other mode, if that makes the same calls.

    Args:
        general: the trace of one mode, for inputs of every size.
        one: a recording of the other mode, for inputs of one size.
        sizes: the sizes of the inputs of `one`.

    Returns:
        the other mode's trace for every size; `None` if it differs in more than booleans and zeros
        among arguments, what is random, and what is changed in place.
    """
    try:
        return _Adapter(sizes).trace(general, one)
    except _DifferentError:
        return None


def differs_from(again: Trace, first: Trace, sizes: Sizes) -> str | None:
    """Return the open module that does something else in another recording; `None` if none does.

    Args:
        again: the other recording.
        first: the recording that it is compared with.
        sizes: the sizes of the inputs of both.
    """
    try:
        _check_same_calls([first, again], [sizes, sizes])
        _Comparison(sizes).trace(first, again)
    except Unrecordable as problem:
        return problem.path
    except _DifferentError as difference:
        return difference.path
    return None


def may_be_sized_by_values(trace: Trace) -> set[str]:
    """The closed modules whose results may have sizes that depend on values.

    They look at values, and a size of their result that grows with the inputs is neither a size of
    what they are given nor a product of such sizes. That it grew evenly in the recordings may be
    chance.

    Raises:
        Unrecordable: the result of a custom `autograd.Function` may have such sizes.
    """
    found = set()
    for call in trace.calls:
        if isinstance(call.target, str):
            if call.may_size and _grows_otherwise(trace, call):
                found.add(call.target)
        elif isinstance(call.target, Applied) and _grows_otherwise(trace, call):
            raise Unrecordable(
                call.path,
                f"it applies {call.target.function.__name__}, an autograd.Function of its own, "
                "whose result may be as large as values say",
            )
    return found


def _grows_otherwise(trace: Trace, call: Call) -> bool:
    """Whether a size of a result is neither given to the call nor a product of given sizes."""
    given = [trace.info(value) for value in call.reads()]
    numbers = [n for n in tree_leaves((call.args, call.kwargs)) if isinstance(n, Size)]
    known = {*map(_terms, numbers), *_products(given)}
    made = (info for info in call.outputs if isinstance(info, TensorInfo))
    sizes = (n for info in made if not info.dynamic for n in info.shape)
    return any(isinstance(n, Size) and _terms(n) not in known for n in sizes)


def differently_sized(one: Trace, other: Trace, among: Collection[str | int]) -> set[str | int]:
    """Those of these calls that give other sizes in the one recording than in the other.

    Both are of inputs of the same sizes.

    Args:
        one: a recording.
        other: another one.
        among: the names of closed modules, and the identities of other calls.
    """
    found = {call.identity: call.outputs for call in other.calls}
    return {
        call.sized_as
        for call in one.calls
        if call.sized_as in among and _shapes(call.outputs) != _shapes(found.get(call.identity, ()))
    }


def decided_otherwise(one: Trace, other: Trace) -> Call | None:
    """A call that looks at values, and that gives something of another kind in the other recording.

    Both are of inputs of the same sizes.
    """
    found = {call.identity: call for call in other.calls}
    for call in one.calls:
        again = found.get(call.identity, call)
        data = ([x for x in c.outputs if not isinstance(x, TensorInfo)] for c in (call, again))
        alike = call.result == again.result and call.same == again.same and same(*data)
        if call.looks and call.target and not alike:
            return call
    return None


def _shapes(outputs: Iterable[Any]) -> list[Any]:
    return [info.shape for info in outputs if isinstance(info, TensorInfo)]


_Terms = frozenset[tuple[tuple[str, ...], int]]
"""The products that a size is the sum of, with their factors, in any order."""


def _terms(size: int | Size) -> _Terms:
    terms = size.terms if isinstance(size, Size) else ((size, ()),)
    return frozenset((tuple(sorted(names)), factor) for factor, names in terms)


def _products(given: Iterable[Any]) -> Iterator[_Terms]:
    """All sizes of these tensors, and all products of sizes of one of them."""
    for info in given:
        if isinstance(info, TensorInfo):
            sizes = [_terms(n) for n in info.shape if not isinstance(n, Irregular)]
            for count in range(1, len(sizes) + 1):
                yield from (reduce(_multiplied, some) for some in combinations(sizes, count))


def _multiplied(one: _Terms, other: _Terms) -> _Terms:
    terms: Counter[tuple[str, ...]] = Counter()
    for (names, factor), (others, again) in product(one, other):
        terms[tuple(sorted(names + others))] += factor * again
    return frozenset(terms.items())


class _DifferentError(Exception):
    """Two traces differ in what the open module `path` does."""

    def __init__(self, path: str = "") -> None:
        super().__init__()
        self.path = path


class _Adapter:
    """Carries the sizes of one trace over to another that is like it."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def trace(self, general: Trace, one: Trace) -> Trace:
        _demand(
            len(general.calls) == len(one.calls)
            and general.decisions == one.decisions
            and general.output_structure == one.output_structure
            and general.attributes.keys() == one.attributes.keys()
            and all(general.info(d) == one.info(d) for d in general.decisions)
        )
        infos = self.leaves([*general.attributes.values()], [*one.attributes.values()])
        return replace(
            general,
            inputs=self.leaves(general.inputs, one.inputs),
            calls=[self.call(*pair) for pair in zip(general.calls, one.calls, strict=True)],
            outputs=self.leaves(general.outputs, one.outputs),
            attributes=dict(zip(general.attributes, infos, strict=True)),
            changed=one.changed,
            rewritten=one.rewritten,
            reads=one.reads,
        )

    def call(self, general: Call, one: Call) -> Call:
        try:
            return self._call(general, one)
        except _DifferentError:
            raise _DifferentError(general.path) from None

    def _call(self, general: Call, one: Call) -> Call:
        mine, structure = flatten((general.args, general.kwargs))
        theirs, other = flatten((one.args, one.kwargs))
        _demand(
            structure == other
            and general.result == one.result
            and (general.target, general.path, general.ambient)
            == (one.target, one.path, one.ambient)
        )
        args, kwargs = unflatten(structure, self.leaves(mine, theirs))
        outputs = self.leaves(general.outputs, one.outputs)
        return replace(one, args=args, kwargs=kwargs, outputs=outputs)

    def leaves(self, general: Sequence[Any], one: Sequence[Any]) -> tuple[Any, ...]:
        _demand(len(general) == len(one))
        return tuple(self.leaf(*pair) for pair in zip(general, one, strict=True))

    def leaf(self, general: object, one: object) -> Any:
        if isinstance(general, Size):
            _demand(type(one) is general.kind and general.at(self.sizes) == one)
            return general
        if isinstance(general, Number) and type(one) is not Number:
            _demand(same_constant(general.at(self.sizes), one))
            return general
        if isinstance(general, TensorInfo) and isinstance(one, TensorInfo):
            _demand(general.dynamic == one.dynamic)
            _demand(general.dynamic or self.fits(general, one))
            return replace(one, shape=general.shape)
        _demand(type(general) is type(one) and self.alike(general, one))
        return one

    def fits(self, general: TensorInfo, one: TensorInfo) -> bool:
        """Whether a tensor has the shape that it is said to have, as far as that is known."""
        sizes = zip(general.shape, general.at(self.sizes), one.shape, strict=False)
        return len(general.shape) == len(one.shape) and all(
            stated == n or isinstance(known, Irregular) for known, stated, n in sizes
        )

    def alike(self, general: object, one: object) -> bool:
        """Whether a constant may have become another: `training=False`, `dropout_p=0.0`."""
        switched_off = type(one) is bool or (type(one) is float and one == 0.0)
        return switched_off or same_constant(general, one)


class _Comparison(_Adapter):
    """Compares two recordings like `_Adapter`, where nothing may have changed.

    Of a tensor only the sizes that grow with the rows have to be as stated: what uses another
    length is compared by itself, and only the rows of a result are ever needed.
    """

    def fits(self, general: TensorInfo, one: TensorInfo) -> bool:
        """Whether a tensor has the rows that it is said to have."""
        sizes = zip(general.shape, general.at(self.sizes), one.shape, strict=False)
        return len(general.shape) == len(one.shape) and all(
            stated == n or not (isinstance(known, Size) and known.grows_with(ROWS))
            for known, stated, n in sizes
        )

    def alike(self, general: object, one: object) -> bool:
        """Whether it is the same constant, or a device, for the model may have been moved."""
        return isinstance(one, torch.device) or same_constant(general, one)


def _demand(same: bool) -> None:
    if not same:
        raise _DifferentError


def _check_same_decisions(traces: Sequence[Trace]) -> None:
    first = traces[0]
    for other in traces[1:]:
        for one, two in zip_longest(first.decisions, other.decisions):
            same = one is not None and two is not None and first.info(one) == other.info(two)
            if not same:
                trace, decision = (first, one) if one is not None else (other, two)
                path = trace.calls[decision.call].path if decision is not None else ""
                raise Undecided(path, "what it decides on its inputs' values depends on the rows")


def _check_same_calls(traces: Sequence[Trace], points: Sequence[Sizes]) -> None:
    """Raise for the module whose own Python calls something else at another size."""
    made = [_calls_by_path(trace) for trace in traces]
    for path in dict.fromkeys(call.path for trace in traces for call in trace.calls):
        for point, by_path in zip(points, made, strict=True):
            if by_path.get(path) != made[0].get(path):
                while path and not all(_runs(path, other) for other in made):
                    path = path.rpartition(".")[0]  # whether it runs at all, its caller decides
                raise Unrecordable(
                    path,
                    "what it calls depends on the size of the inputs: "
                    f"with {describe(point)} it is not what it is with {describe(points[0])}",
                )
    for group in zip(*(trace.calls for trace in traces), strict=True):
        if len({(call.path, call.target) for call in group}) > 1:
            raise Unrecordable("", "the order of what it calls depends on the size of the inputs")


def _runs(path: str, made: Mapping[str, Any]) -> bool:
    return any(p == path or p.startswith(f"{path}.") for p in made)


def _calls_by_path(trace: Trace) -> dict[str, list[tuple[Any, ...]]]:
    """What the own Python of every open module called, in order."""
    made: dict[str, list[tuple[Any, ...]]] = {}
    for call in trace.calls:
        made.setdefault(call.path, []).append((call.target, call.ambient))
    return made


def describe(point: Sizes) -> str:
    """Sizes as text: `B=4, length=12`."""
    return ", ".join(f"{name}={size}" for name, size in point.items())


class _Merge:
    """Merges what the recordings say of the same thing."""

    def __init__(self, points: Sequence[Sizes]) -> None:
        self.points = points
        self.names = list(points[0])
        self._known: dict[tuple[int, ...], Size | None] = {}  # most sizes are there many times

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
        outputs = tuple(
            self.result(group, first) for group in zip(*(c.outputs for c in calls), strict=True)
        )
        random = any(call.random for call in calls)
        in_python = any(call.draws_in_python for call in calls)
        return replace(
            first,
            args=args,
            kwargs=kwargs,
            outputs=outputs,
            random=random,
            draws_in_python=in_python,
            keeps_states=any(call.keeps_states for call in calls),
            sets_states=any(call.sets_states for call in calls),
            casts=max(call.casts for call in calls),
        )

    def result(self, group: Sequence[Any], call: Call) -> Any:
        """A result of a call; sizes of the whole model's may stay unknown, as nobody reads them."""
        try:
            return self.leaf(group, call.path, f"a result of {call.label}")
        except Unrecordable:
            alike = all(isinstance(info, TensorInfo) for info in group)
            alike = alike and len({(len(info.shape), info.dtype) for info in group}) == 1
            if alike and call.target and call.may_size:
                raise SizedByValues(str(call.target)) from None
            if call.target != "" or not alike:
                raise
            return replace(group[0], dynamic=True)

    def leaves(self, leaves: Sequence[Sequence[Any]], path: str, what: str) -> tuple[Any, ...]:
        return tuple(self.leaf(group, path, what) for group in zip(*leaves, strict=True))

    def leaf(self, group: Sequence[Any], path: str, what: str) -> Any:
        first = group[0]
        if isinstance(first, TensorInfo) and len({(len(g.shape), g.dtype) for g in group}) == 1:
            if any(g.dynamic for g in group):
                return replace(first, dynamic=True)
            dims = zip(*(g.shape for g in group), strict=True)
            return replace(first, shape=tuple(self._dimension(sizes, path, what) for sizes in dims))
        if all(same_constant(g, first) for g in group):
            return first
        if all(type(g) is int for g in group):
            return self._size(group, path, what)
        if all(type(g) is float and g.is_integer() for g in group):
            return replace(self._size([int(g) for g in group], path, what), kind=float)
        other = next(k for k, g in enumerate(group) if not same_constant(g, first))
        raise Unrecordable(
            path,
            f"{what} is {first!r} with {describe(self.points[0])}, {group[other]!r} with "
            f"{describe(self.points[other])}, and that is no whole number that grows with them",
        )

    def _dimension(self, group: Sequence[int], path: str, what: str) -> int | Size | Irregular:
        """A size of a tensor; that of a result need not be known exactly."""
        if len(set(group)) == 1:
            return group[0]
        size = self._fitted(group)
        if size is not None:
            return size
        if group[self._varied(ROWS)] == group[0]:
            return Irregular(group[0])
        return self._size(group, path, what)

    def _size(self, group: Sequence[int], path: str, what: str) -> Size:
        size = self._fitted(group)
        if size is None:
            seen = ", ".join(
                f"{g} with {describe(p)}" for g, p in zip(group, self.points, strict=True)
            )
            raise Unrecordable(path, f"{what} does not grow evenly with the inputs: {seen}")
        return size

    def _fitted(self, group: Sequence[int]) -> Size | None:
        """The sum of products that gives these integers; `None` if none does."""
        key = tuple(group)
        if key not in self._known:
            self._known[key] = self._fit(group)
        return self._known[key]

    def _fit(self, group: Sequence[int]) -> Size | None:
        """Like `_fitted`, without a memo, by the differences between the recorded points."""
        start = self.points[0]
        terms: Counter[tuple[str, ...]] = Counter({(): group[0]})
        for names in [*((n,) for n in self.names), *combinations(self.names, 2)]:
            steps = [self.points[self._varied(*names)][n] - start[n] for n in names]
            parts = [names[:k] + names[k + 1 :] for k in range(len(names))]
            change = group[self._varied(*names)] - group[0]
            if len(names) > 1:
                change -= sum(group[self._varied(*part)] - group[0] for part in parts)
            slope, rest = divmod(change, prod(steps))
            if rest:
                return None
            _add_product(terms, slope, names, start)
        ordered = sorted(terms.items(), key=lambda term: (-len(term[0]), term[0]))
        size = Size(tuple((factor, names) for names, factor in ordered if factor))
        fits = all(size.at(p) == g for p, g in zip(self.points, group, strict=True))
        return size if fits else None

    def _varied(self, *names: str) -> int:
        """The index of the point at which just these names differ from the first point."""
        singles = [(n,) for n in self.names]
        return 1 + [*singles, *combinations(self.names, 2)].index(names)


def _add_product(
    terms: Counter[tuple[str, ...]], slope: int, names: tuple[str, ...], start: Sizes
) -> None:
    """Add `slope * (x - start[x]) * (y - start[y]) * ...`, multiplied out."""
    for count in range(len(names) + 1):
        for chosen in combinations(names, count):
            others = (-start[n] for n in names if n not in chosen)
            terms[chosen] += slope * prod(others)
