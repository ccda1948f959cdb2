"""Which of many events are looked at: many at the beginning, then fewer and fewer."""

from __future__ import annotations


def is_power_of_two(number: int) -> bool:
    """Whether this is the 1st, 2nd, 4th, 8th, … event. Most that is wrong is so from the first on.

    Args:
        number: of the event, from 1.
    """
    return number > 0 and number & (number - 1) == 0
