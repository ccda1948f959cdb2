"""The closed formulas of the literature, to the last bit: quarters are exact in binary."""

from __future__ import annotations

import math
from collections.abc import Callable

from hypothesis import assume, given
from hypothesis import strategies as st

from penstock.schedule import Action, Kind, build
from penstock.simulate import simulate

stages = st.integers(1, 16)
workers = st.integers(1, 16)
microbatches = st.integers(1, 64)
positive = st.integers(1, 40).map(lambda quarters: quarters / 4)
quarters = st.integers(0, 40).map(lambda quarters: quarters / 4)


def equal(forward: float, backward: float, weight: float = math.nan) -> Callable[[Action], float]:
    """Stages that are all alike."""
    table = {
        Kind.FORWARD: forward,
        Kind.BACKWARD: backward,
        Kind.INPUT: backward - weight,
        Kind.WEIGHT: weight,
    }
    return lambda action: table[action.kind]


@given(p=stages, m=microbatches, f=positive, b=positive, c=quarters)
def test_naive(p: int, m: int, f: float, b: float, c: float) -> None:
    step = simulate(build("naive", p, m), equal(f, b), [c] * (p - 1)).seconds
    assert step == m * p * (f + b) + 2 * m * (p - 1) * c


@given(p=stages, m=microbatches, f=positive, b=positive, c=quarters)
def test_gpipe(p: int, m: int, f: float, b: float, c: float) -> None:
    step = simulate(build("gpipe", p, m), equal(f, b), [c] * (p - 1)).seconds
    assert step == (m + p - 1) * (f + b) + 2 * (p - 1) * c


@given(p=stages, m=microbatches, f=positive, b=positive, c=quarters)
def test_1f1b(p: int, m: int, f: float, b: float, c: float) -> None:
    step = simulate(build("1f1b", p, m), equal(f, b), [c] * (p - 1)).seconds
    round_trips = (p - 1) + (m - 1) - math.ceil((m - 1) / p)
    assert step == (m + p - 1) * (f + b) + 2 * c * round_trips


@given(p=st.integers(2, 16), rounds=st.integers(1, 4), f=positive, b=positive, c=quarters)
def test_1f1b_in_whole_rounds(p: int, rounds: int, f: float, b: float, c: float) -> None:
    """Where `p` divides `m` the formula takes the form known from the literature."""
    m = rounds * p
    step = simulate(build("1f1b", p, m), equal(f, b), [c] * (p - 1)).seconds
    assert step == (m + p - 1) * (f + b) + c * (2 * rounds * (p - 1) + 2 * (p - 2))


@given(p=stages, m=microbatches, f=positive, b=positive, share=st.integers(0, 4))
def test_eager_1f1b(p: int, m: int, f: float, b: float, share: int) -> None:
    """While a round trip to the next stage takes no longer than its work."""
    c = (f + b) * share / 8
    step = simulate(build("eager-1f1b", p, m), equal(f, b), [c] * (p - 1)).seconds
    assert step == (m + p - 1) * (f + b) + 2 * (p - 1) * c


@given(
    name=st.sampled_from(["interleaved", "breadth-first"]),
    w=workers,
    v=st.integers(1, 4),
    m=microbatches,
    f=positive,
    b=positive,
)
def test_loops(name: str, w: int, v: int, m: int, f: float, b: float) -> None:
    """`f` and `b` are those of one stage, `v f` and `v b` those of a worker."""
    step = simulate(build(name, v * w, m, num_workers=w), equal(f, b)).seconds
    assert step == ((v - 1) * max(m, w) + m + w - 1) * (f + b)
    if m >= w:
        assert step == m * v * (f + b) + (w - 1) * (f + b)


@given(p=stages, m=microbatches, f=positive, i=positive, w=positive)
def test_zero_bubble(p: int, m: int, f: float, i: float, w: float) -> None:
    step = simulate(build("zero-bubble", p, m), equal(f, i + w, w)).seconds
    if m >= p:
        assert step == m * (f + i + w) + (p - 1) * (f + i - min(f, i, w))
    elif w <= min(f, i):
        assert step == (m + p - 1) * (f + i) + w


@given(w=workers, more=st.integers(0, 40), f=positive)
def test_zero_bubble_v(w: int, more: int, f: float) -> None:
    m = 2 * w - 1 + more
    step = simulate(build("zero-bubble-v", 2 * w, m), equal(f, 2 * f, f)).seconds
    assert step == m * 6 * f + (w - 1) * f


@given(p=stages, m=microbatches, f=positive, b=positive)
def test_fitted_to_equal_stages_is_as_fast_as_any(p: int, m: int, f: float, b: float) -> None:
    assume(m >= p)
    assert simulate(build("fitted", p, m), equal(f, b)).seconds == (m + p - 1) * (f + b)
