"""Which tests are left to the shares of the slow ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.tail import durations, longest

ROOT = Path(__file__).parents[2]
PRINTED = """
============================= slowest durations ==============================
7.50s call     tests/a/test_a.py::test_long[two words-1]
2.00s setup    tests/a/test_a.py::test_long[two words-1]
3.00s call     tests/a/test_a.py::test_short
4.90s call     tests/a/test_b.py::test_alone
0.50s teardown tests/a/test_a.py::test_short
4.00s call     tests/a/test_a.py::test_middle
"""


def test_what_tests_have_taken() -> None:
    assert durations(PRINTED) == {
        "tests/a/test_a.py::test_long[two words-1]": 9.5,
        "tests/a/test_a.py::test_short": 3.5,
        "tests/a/test_a.py::test_middle": 4.0,
        "tests/a/test_b.py::test_alone": 4.9,
    }


def test_nor_the_quickest_of_a_file_unless_it_is_long_itself() -> None:
    found = longest({"tests/a/test_a.py::test_a": 6.0, "tests/a/test_b.py::test_b": 4.0}, 1)
    assert found == {"tests/a/test_a.py::test_a"}


@pytest.mark.parametrize(
    ("seconds", "left_out"),
    [
        (30, set()),
        (26, set()),
        (20, {"test_long[two words-1]"}),
        (1, {"test_long[two words-1]", "test_middle"}),
    ],
)
def test_the_longest_are_left_out_but_not_a_whole_file(seconds: int, left_out: set[str]) -> None:
    found = longest(durations(PRINTED), seconds)
    assert found == {f"tests/a/test_a.py::{name}" for name in left_out}


def test_what_any_change_can_break_is_always_run() -> None:
    house = {"tests/house/test_a.py::test_a": 2.0, "tests/house/test_a.py::test_b": 4.0}
    found = longest(house | {"tests/house/test_a.py::test_c": 6.0}, 1)
    assert found == {"tests/house/test_a.py::test_c"}


SCRIPT = """
import pytest
from tests.support import tail

tail.tail = lambda: {"tests/support/test_tail.py::test_what_tests_have_taken"}
raise SystemExit(pytest.main(["--collect-only", "-p", "no:cacheprovider", *OPTIONS]))
"""


@pytest.mark.parametrize(
    ("options", "is_there"),
    [
        ([], False),
        (["-m", "slow"], True),
        (["-m", "slow", "--share", "1/1"], True),
        (["--whole"], True),
        (["tests/support/test_tail.py::test_what_tests_have_taken"], True),
    ],
)
def test_they_are_slow_ones_unless_they_are_named(options: list[str], is_there: bool) -> None:
    where = [] if any("::" in option for option in options) else ["tests/support/test_tail.py"]
    code = SCRIPT.replace("OPTIONS", repr([*options, *where]))
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout
    assert ("test_what_tests_have_taken" in found) == is_there, found
