"""Traces of a forward that hold for all sizes, from recordings at some."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from penstock.capture.calls import ROWS, Call, Sizes, TensorInfo, Trace, Unrecordable
from penstock.capture.forward import KEY, Forward
from penstock.capture.meta import completed
from penstock.capture.opening import Opening
from penstock.capture.sizes import (
    SizedByValues,
    adapted,
    decided_otherwise,
    differently_sized,
    differs_from,
    generalise,
    may_be_sized_by_values,
)
from penstock.errors import CaptureError

T = TypeVar("T")

_LARGE = 32 << 20  # bytes of results; smaller models are run sooner than their shapes are known
_SOME = 8  # recordings where random numbers may decide how large a result is
_MORE = 32  # recordings where random numbers may decide
_ROWS = 4  # recordings where rows may decide how large a result is


def traced(forward: Forward, points: Sequence[Sizes], training: bool) -> tuple[Trace, list[Any]]:
    """The forward in this mode, generalised, and the leaves of its result at the first point."""
    first = forward.record(points[0], training)
    while forward.opening.force(first[0].pruned()):
        first = forward.record(points[0], training)
    try:
        trace = _generalised(forward, first[0], points, training)
    except SizedByValues:
        raise
    except Unrecordable:
        _check_repeats(forward, first[0], points[0], training)
        raise
    if any(_may_vary(forward.opening, call) for call in trace.calls):
        _check_more(forward, first[0], points[0], training)
    return trace, first[1]


def _generalised(forward: Forward, first: Trace, points: Sequence[Sizes], training: bool) -> Trace:
    """A recording at the first point, generalised by others, of shapes alone where they suffice."""

    def at(k: int, without: bool) -> Trace:  # what random numbers decide may show
        key = KEY._replace(microbatch=k)
        trace = forward.record(points[k], training, key, shapes=without)[0]
        return completed(trace, first) if without else trace

    others = range(1, len(points))
    trace = by_shapes(
        forward.opening,
        first,
        points[0],
        lambda: generalise([first, *(at(k, True) for k in others)], points),
    )
    return trace or generalise([first, *(at(k, False) for k in others)], points)


def traced_evaluation(
    forward: Forward, points: Sequence[Sizes], train: Trace
) -> tuple[Trace, list[Any]]:
    """The forward in evaluation mode, generalised, and the leaves of its result at the first point.

    Where evaluation makes the same calls as training, two recordings are enough: a number that
    grows with the inputs cannot equal a constant at both points.
    """
    first, expected = forward.record(points[0], training=False)
    trace = adapted(train, first, points[0])
    if trace is not None:

        def agrees(without: bool) -> bool:
            last = forward.record(points[-1], training=False, shapes=without)[0]
            last = completed(last, first) if without else last
            return adapted(train, last, points[-1]) == trace

        if by_shapes(forward.opening, first, points[0], lambda: agrees(True)) or agrees(False):
            return trace, expected
    return _generalised(forward, first, points, training=False), expected


def by_shapes(
    opening: Opening, trace: Trace, sizes: Sizes, shown_by: Callable[[], T | None]
) -> T | None:
    """The result of `shown_by`, which records shapes alone; `None` if values are needed.

    They are needed if recording shapes fails or is not possible. Small forwards are quicker with
    values, so `None` is returned for them as well.

    Args:
        opening: says whether shapes may be recorded; notes it if they cannot.
        trace: a recording of the forward, by which its size is judged.
        sizes: the sizes of that recording's inputs.
        shown_by: makes recordings of shapes, and returns what they show.
    """
    if not opening.without_values or _num_bytes(trace, sizes) < _LARGE:
        return None
    try:
        return shown_by()
    except Unrecordable:  # perhaps for want of values
        return None
    except Exception:
        opening.without_values = False
        return None


def _may_vary(opening: Opening, call: Call) -> bool:
    """Whether random numbers may decide what a closed module gives: layers that are dropped."""
    return call.random and call.result is not None and call.target in opening.closed


def _check_more(forward: Forward, first: Trace, sizes: Sizes, training: bool) -> None:
    """Raise for a module that does something else with other random numbers."""
    for k in range(_MORE):
        other = forward.record(sizes, training, KEY._replace(step=1, microbatch=k))[0]
        path = differs_from(other, first, sizes)
        if path is not None:
            raise Unrecordable(path, "what it is given depends on random numbers")


def sized_by_values(forward: Forward, trace: Trace, sizes: Sizes, training: bool) -> set[str | int]:
    """The calls whose results change their sizes with the random numbers or the rows' values.

    They are named as by `Call.sized_as`.

    Args:
        forward: the forward; it is recorded again if there may be such calls.
        trace: its trace in this mode, generalised.
        sizes: the sizes at which to record it.
        training: whether in training mode.

    Raises:
        Unrecordable: a call decides by values something else about its result.
    """
    looking = [call for call in trace.calls if call.by_inputs and call.may_matter]
    inspected = {c.sized_as for c in looking if c.inspected} - forward.opening.sized
    suspected = may_be_sized_by_values(trace) - forward.opening.sized
    chance = bool(suspected) and any(call.random for call in trace.calls)
    if not (looking or chance):
        return set()
    found: set[str | int] = set()
    first = forward.record(sizes, training)[0]
    for k in range(_SOME if chance else 0):
        other = forward.record(sizes, training, KEY._replace(step=1, microbatch=k))[0]
        found |= differently_sized(first, other, suspected)
    for other in _of_single_rows(forward, sizes, training) if looking else ():
        found |= differently_sized(first, other, inspected)
        if (call := decided_otherwise(first, other)) is not None:
            raise Unrecordable(
                call.path, f"{call.label} looks at values, and gives something else for other ones"
            )
    return found


def _of_single_rows(forward: Forward, sizes: Sizes, training: bool) -> Iterator[Trace]:
    """Recordings of inputs whose rows are all like one of the example's, for some of these."""
    last = forward.varying.sizes(forward.leaves)[ROWS] - 1
    for row in sorted({k * last // (_ROWS - 1) for k in range(_ROWS)}):
        try:
            yield forward.of_row(row).record(sizes, training)[0]
        except Exception:
            continue  # the model does not take rows that are all like this one


def _check_repeats(forward: Forward, first: Trace, sizes: Sizes, training: bool) -> None:
    """Raise if recordings at the same sizes differ, which explains why others could not be merged.

    Raises:
        CaptureError: a module does something else every time.
    """
    again = forward.record(sizes, training)[0]
    path = differs_from(again, first, sizes)
    if path is not None:
        kind = type(forward.model.get_submodule(path)).__name__
        raise CaptureError(
            f"the forward of {path or 'the model'} ({kind}) does something else every time it "
            "is called with the same inputs. It may depend only on its inputs, its weights, "
            "and the random numbers of torch, numpy and Python; keep_closed="
            f"[{path!r}] keeps it as one call, whose results are then not reproducible"
        )


def _num_bytes(trace: Trace, sizes: Sizes) -> int:
    """The bytes of all results of a trace's calls; a view counts in addition to its base."""
    infos = (info for call in trace.calls for info in call.outputs)
    return sum(info.num_bytes(sizes) for info in infos if isinstance(info, TensorInfo))
