"""When things are looked at: again and again for a while, or which of many events."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def is_power_of_two(number: int) -> bool:
    """Whether this is the 1st, 2nd, 4th, 8th, … event, for checks that matter most at the start.

    Args:
        number: of the event, from 1.
    """
    return number > 0 and number & (number - 1) == 0


def wait_until(look: Callable[[], T], seconds: float, pause: float) -> T:
    """Look until something true is seen, or the time is over; returns what was seen last.

    Args:
        look: is called once at least.
        seconds: after which it is not called again.
        pause: seconds between two looks.
    """
    end = time.monotonic() + seconds
    while not (found := look()) and time.monotonic() < end:
        time.sleep(pause)
    return found
