"""Sizes, times and speeds as people write them."""

from __future__ import annotations

import pytest

from penstock.errors import InputError
from penstock.units import parse_bytes, parse_seconds, parse_speed, show_bytes, show_seconds


@pytest.mark.parametrize(
    ("text", "count"),
    [("8GiB", 8 << 30), ("500 MB", 500_000_000), ("1.5kb", 1500), ("12", 12), (7, 7), ("2B", 2)],
)
def test_sizes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


def test_times_and_speeds() -> None:
    assert parse_seconds("10us") == pytest.approx(1e-5, rel=1e-12)
    assert parse_seconds("2") == 2.0
    assert parse_speed("25GB/s") == 25e9
    assert parse_speed("100MB") == 100e6


@pytest.mark.parametrize("text", ["", "GiB", "8 gallons", "-3MB", "1e999", "nan"])
def test_anything_else_is_an_error(text: str) -> None:
    with pytest.raises(InputError, match=r"write it like 8GiB|not finite"):
        parse_bytes(text)


def test_a_speed_is_per_second() -> None:
    with pytest.raises(InputError, match="'25GB/h' is not a speed; write it like 25GB/s"):
        parse_speed("25GB/h")


def test_a_dead_link_is_refused() -> None:
    with pytest.raises(InputError, match="'0GB/s' must be greater than 0"):
        parse_speed("0GB/s")


def test_shown_as_a_person_reads_it() -> None:
    assert [show_bytes(n) for n in (12, 1500, 2_340_000, 5e9, 7.1e12)] == [
        "12 B",
        "1.5 kB",
        "2.3 MB",
        "5.0 GB",
        "7.1 TB",
    ]


def test_times_as_a_person_reads_them() -> None:
    times = (12.34, 0.456, 0.0456, 0.00456, 45.6e-6)
    assert [show_seconds(s) for s in times] == ["12.3 s", "0.46 s", "45.6 ms", "4.56 ms", "45.6 us"]
