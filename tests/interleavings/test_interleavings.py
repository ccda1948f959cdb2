"""The engine on simulated accelerators: right in any order, and mistakes are found.

`python -m tests.interleavings` tries many more orders.
"""

from __future__ import annotations

import pytest

from tests.interleavings.cases import CASES
from tests.interleavings.mutations import MUTATIONS
from tests.interleavings.running import interleaving

_ORDERS = 16  # in which a mistake has to be found


_LIKE_OTHERS = {  # run by `python -m tests.interleavings`, and with the slow tests
    *("chain, naive", "chain, eager-1f1b", "chain, breadth-first", "chain, zero-bubble"),
    *("skips, two workers", "tied, gpipe, three devices", "images, deferred"),
    *("images, own streams", "one device twice", "replicas on one device", "pinned inputs"),
    *("replicas of images, recomputed", "replicas of stages on the same devices"),
}
_CASES = [pytest.param(n, marks=pytest.mark.slow) if n in _LIKE_OTHERS else n for n in CASES]


@pytest.mark.parametrize("name", _CASES)
def test_bits_are_those_of_one_device(name: str) -> None:
    outcome = interleaving(name, seed=sum(map(ord, name)), detect=True)
    assert outcome.is_right, outcome.error or outcome.wrong
    assert outcome.races == []


@pytest.mark.filterwarnings("ignore::penstock.errors.RowsWarning")
@pytest.mark.parametrize("name", MUTATIONS)
def test_mistakes_are_found(name: str) -> None:
    mutation = MUTATIONS[name]
    with mutation.made():
        assert any(
            not interleaving(mutation.cases[seed % len(mutation.cases)], seed).is_right
            for seed in range(_ORDERS)
        )


@pytest.mark.filterwarnings("ignore::penstock.errors.RowsWarning")
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_detector_finds_mistakes_in_one_order(name: str) -> None:
    """Even if everything is done as soon as it is given, so that nothing goes wrong."""
    mutation = MUTATIONS[name]
    with mutation.made():
        outcome = interleaving(mutation.cases[0], 0, detect=True, is_late=False)
    assert outcome.is_right or mutation.always or name == "memory freed early"  # its owner reads it
    assert bool(outcome.races) == mutation.leaves_races


def test_a_seed_is_an_order() -> None:
    first, again, other = (interleaving("skips", seed).order for seed in (3, 3, 4))
    assert first == again
    assert sorted(first) != first
    assert first != other
