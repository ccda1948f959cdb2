"""A profile as data: times of sizes that were not measured, how sure it is, and its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import penstock as ps
from penstock.errors import InputError
from penstock.profile.data import Confidence, DeviceProfile, Link


def device(rows: tuple[int, ...], *seconds: float, **changes: Any) -> DeviceProfile:
    """One call; `seconds` of its forward at every size, its backward takes twice as long."""
    forward = tuple((s,) for s in seconds)
    backward = tuple((2 * s,) for s in seconds)
    found = DeviceProfile(kind="cpu", rows=rows, forward=forward, backward=backward, spread=0.02)
    return msgspec.structs.replace(found, **changes)


def profile(kind: DeviceProfile, **changes: Any) -> ps.Profile:
    found = ps.Profile(
        fingerprint="f",
        batch_size=8,
        devices=("cpu", "cpu"),
        kinds={"cpu": kind},
        labels=("a",),
        weights=(12,),
        boundary=(4.0, 4.0),
        forbidden={1: "because"},
    )
    return msgspec.structs.replace(found, **changes)


# -- times --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "expected"),
    [(2, 5.0), (3, 6.0), (4, 7.0), (6, 9.0), (8, 11.0), (16, 22.0), (1, 4.0), (0.5, 3.5)],
)
def test_launch_and_rate(rows: float, expected: float) -> None:
    """A launch of 3 and 1 for every row, but in proportion to the largest beyond it."""
    forward, backward = device((2, 4, 8), 5.0, 7.0, 11.0).seconds(rows)
    assert forward[0] == pytest.approx(expected)
    assert backward[0] == pytest.approx(2 * expected)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((5.0, 4.0), 5.0),  # noise: a larger one was faster, so there is no rate to go by
        ((1.0, 9.0), 0.5),  # noise: the line would have a negative launch
    ],
)
def test_neither_launch_nor_rate_is_negative_below(
    seconds: tuple[float, float], expected: float
) -> None:
    assert device((2, 4), *seconds).seconds(1)[0][0] == pytest.approx(expected)


def test_a_single_size_promises_nothing_of_smaller_ones() -> None:
    kind = device((4,), 8.0)
    assert [kind.seconds(rows)[0][0] for rows in (1, 4, 8)] == [8.0, 8.0, 16.0]


def test_the_part_that_can_be_put_off() -> None:
    kind = device((2, 4), 1.0, 3.0, weight=((1.9,), (2.0,)))
    assert kind.weight_seconds(3)[0] == pytest.approx(1.95)
    assert kind.weight_seconds(1)[0] == kind.seconds(1)[1][0] < 1.9  # never more than all of it
    assert np.array_equal(device((2,), 1.0).weight_seconds(2), [0.0])


def test_one_worker_alone_is_not_slowed_down() -> None:
    kind = device(
        (2, 4),
        *(4.0, 6.0),
        weight=((2.0,), (3.0,)),
        halving=(1.0, 1.5),
        contention=(2.0, 1.5),
    )
    found = profile(kind).alone("cpu")
    assert found.devices == ("cpu",)
    assert found.kinds == {
        "cpu": device((2, 4), 2.0, 4.0, weight=((1.0,), (2.0,)), halving=(0.5, 1.0))
    }
    unmeasured = device((2, 4), 4.0, 6.0)
    assert unmeasured.alone() == unmeasured
    alone = device((2, 4), 4.0, 6.0, contention=(2.0, 2.0)).alone()
    assert (alone.weight, alone.halving) == ((), ())


def test_backwards_of_a_replica_add_gradients_in_order() -> None:
    kind = device((2, 4), 4.0, 6.0)
    found = profile(kind, parameters=(3,), adding_seconds=0.5).of_replica
    assert found.kinds["cpu"].forward == kind.forward
    assert found.kinds["cpu"].backward == ((9.5,), (13.5,))
    unknown = profile(kind, adding_seconds=0.5)
    assert unknown.of_replica == unknown


# -- confidence ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "spread", "level", "error"),
    [
        ((1.0, 2.0, 4.0), 0.02, "high", 0.02),
        ((1.0, 2.0, 4.0), 0.1, "fair", 0.1),
        ((1.0, 4.0, 4.0), 0.02, "low", 0.5),
    ],
)
def test_confidence(seconds: tuple[float, ...], spread: float, level: str, error: float) -> None:
    sure = profile(device((1, 2, 4), *seconds, spread=spread)).confidence
    assert (sure.level, sure.error) == (level, pytest.approx(error))
    assert str(sure).startswith(
        f"{level}, about ±{error:.0%}: repeated measurements lie {spread:.0%}"
    )


def test_the_worst_kind_decides() -> None:
    kinds = {"cpu": device((1, 2), 1.0, 2.0), "cuda:0": device((1, 2), 1.0, 2.0, spread=0.3)}
    assert profile(kinds["cpu"], kinds=kinds).confidence == Confidence(spread=0.3, between=0.0)


# -- files --------------------------------------------------------------------------------


def test_saved_and_loaded(tmp_path: Path) -> None:
    kind = device((1, 2), 0.5, 1.25, weight=((0.25,), (0.5,)), contention=(1.5, 1.25))
    found = profile(
        kind,
        saved=(16.0,),
        outputs=(4.0,),
        links={"cpu>cpu": Link(latency_seconds=1e-5)},
        capacity={"cpu": 1 << 30},
        parameters=(2,),
        overhead_seconds=2e-5,
        adding_seconds=3e-6,
    )
    path = tmp_path / "profile.json"
    path.write_text("an older one")
    found.save(path)
    assert ps.Profile.load(path) == found
    assert list(tmp_path.iterdir()) == [path]


def test_numbers_have_six_digits_and_lists_a_line(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    profile(device((1, 2), 1 / 3, 2e-7 / 3)).save(path)
    lines = [line.strip() for line in path.read_text().splitlines()]
    assert "[0.333333]," in lines
    assert "[6.66667e-8]" in lines or "[6.66667e-08]" in lines
    assert '"weights": [12],' in lines


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read the profile .*p.json: No such file"),
        (b"{", "p.json is not a profile that Profile.save wrote"),
        (b"\xff", "p.json is not a profile that Profile.save wrote"),
        (b'{"fingerprint": 3}', "p.json is not a profile that Profile.save wrote"),
    ],
)
def test_what_is_no_profile_is_an_error(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    path = tmp_path / "p.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        ps.Profile.load(path)


def test_another_version_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    profile(device((1,), 1.0), version=99).save(path)
    with pytest.raises(InputError, match="is a profile of version 99, this Penstock reads version"):
        ps.Profile.load(path)
    path.write_text('{"version": 2, "kinds": {"cpu": {"halving": 0.04}}}')
    with pytest.raises(InputError, match="is a profile of version 2, this Penstock reads version"):
        ps.Profile.load(path)


def test_tables_of_another_length_than_the_sizes_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    given = profile(device((1, 2), 1.0, 2.0))
    given.save(path)
    content = json.loads(path.read_text())
    for wrong in ([], [1.0], [1.0, 2.0, 3.0]):
        content["kinds"]["cpu"]["halving"] = wrong
        path.write_text(json.dumps(content))
        if not wrong:
            assert ps.Profile.load(path) == given
            continue
        with pytest.raises(InputError, match=f"halving has {len(wrong)} entries, but 2 sizes were"):
            ps.Profile.load(path)
    with pytest.raises(InputError, match="contention has 1 entries, but 2 sizes were"):
        device((1, 2), 1.0, 2.0, contention=(1.0,))
    with pytest.raises(InputError, match="forward has 0 entries, but 1 sizes were measured"):
        DeviceProfile(kind="cpu", rows=(1,), forward=(), backward=((1.0,),), spread=0.0)


def test_where_nothing_can_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot write the profile to .*No such file"):
        profile(device((1,), 1.0)).save(tmp_path / "missing" / "p.json")


def test_what_cannot_be_moved_into_place_leaves_nothing_behind(tmp_path: Path) -> None:
    taken = tmp_path / "p.json"
    taken.mkdir()
    with pytest.raises(InputError, match="cannot write the profile to"):
        profile(device((1,), 1.0)).save(taken)
    assert list(tmp_path.iterdir()) == [taken]


def test_what_halving_costs_lies_where_weight_halves_are() -> None:
    found = DeviceProfile(
        kind="cpu",
        rows=(1, 2),
        forward=((1.0, 1.0, 1.0), (2.0, 2.0, 2.0)),
        backward=((2.0, 3.0, 2.0), (4.0, 6.0, 4.0)),
        spread=0.0,
        weight=((1.0, 0.0, 1.5), (2.0, 0.0, 3.0)),
        halving=(0.5, 0.6),
    )
    for rows, more in ((1, 0.5), (1.5, 0.55), (2, 0.6), (4, 1.2)):
        extra = found.halving_seconds(rows)
        assert extra.sum() == pytest.approx(more)
        assert extra[1] == 0
        assert extra[2] == pytest.approx(1.5 * extra[0])
    whole = DeviceProfile(
        kind="cpu", rows=(1,), forward=((1.0,),), backward=((1.0,),), spread=0.0, halving=(0.5,)
    )
    assert whole.halving_seconds(1).tolist() == [0.0]
