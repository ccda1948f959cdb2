"""The long tail: tests that `make test`, which is to be quick, leaves to the shares of slow ones.

python -m tests.support.tail OUTPUT [--seconds 400]

OUTPUT is what `pytest --durations 0` has printed for the tests that are not marked `slow`; those of
the tail may be among them (`--whole`), else they stay there. In the tail is what takes longest, so
that the others take so many seconds together; but of what takes less than five seconds, neither the
quickest test of a file nor any of the house's (tests/house), as any change can break those. It is
kept in tests/long_tail.txt.
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

FILE = Path(__file__).parents[1] / "long_tail.txt"
HOUSE = "tests/house/"
_LONG = 5.0  # seconds of a test that is not run every time, whatever it is
_TAKEN = re.compile(r"^([\d.]+)s (?:setup|call|teardown) +(\S.*)$", re.MULTILINE)


def tail() -> set[str]:
    """The names of the tests in it."""
    return set(FILE.read_text().splitlines()) if FILE.exists() else set()


def durations(output: str) -> dict[str, float]:
    """What every test has taken, in seconds, by its name."""
    found: dict[str, float] = defaultdict(float)
    for seconds, name in _TAKEN.findall(output):
        found[name] += float(seconds)
    return dict(found)


def longest(taken: Mapping[str, float], seconds: float) -> set[str]:
    """The tests that are left out so that the others take at most so long.

    Args:
        taken: seconds, by the name of the test.
        seconds: all others together.
    """
    quickest: dict[str, str] = {}
    for name in sorted(taken, key=lambda name: (taken[name], name)):
        quickest.setdefault(name.partition("::")[0], name)
    kept = set(quickest.values()) | {name for name in taken if name.startswith(HOUSE)}
    kept = {name for name in kept if taken[name] < _LONG}
    total, found = sum(taken.values()), set()
    for name in sorted(taken.keys() - kept, key=lambda name: (-taken[name], name)):
        if total <= seconds:
            break
        found.add(name)
        total -= taken[name]
    return found


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--seconds", type=float, default=400.0, help="of all others together")
    options = parser.parse_args()
    taken = durations(options.output.read_text())
    found = longest(taken, options.seconds) | (tail() - taken.keys())
    FILE.write_text("".join(f"{name}\n" for name in sorted(found)))
    rest = sum(seconds for name, seconds in taken.items() if name not in found)
    print(f"{len(found)} tests are in the tail; the others take {rest:.0f} s")


if __name__ == "__main__":
    main()
