"""Sizes, times and speeds as people write them: `8GiB`, `10us`, `25GB/s`."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from penstock.errors import InputError

_BYTES = {
    "B": 1,
    **{f"{letter}B": 1000 ** (k + 1) for k, letter in enumerate("kMGT")},
    **{f"{letter}iB": 1024 ** (k + 1) for k, letter in enumerate("KMGT")},
}
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(size: str | int) -> int:
    """Bytes, of `"8GiB"`, `"500 MB"` or a plain number.

    Raises:
        InputError: it is none of these.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        return size
    return round(_parse(str(size), _BYTES, "a size", "8GiB"))


def parse_seconds(text: str) -> float:
    """Seconds, of `"10us"`, `"0.5ms"` or a plain number.

    Raises:
        InputError: it is none of these.
    """
    return _parse(text, _SECONDS, "a time", "10us")


def parse_speed(text: str) -> float:
    """Bytes per second, of `"25GB/s"` or a plain number.

    Raises:
        InputError: it is none of these.
    """
    size, per, unit = text.partition("/")
    if per and unit.strip() != "s":
        raise InputError(f"{text!r} is not a speed; write it like 25GB/s")
    speed = _parse(size, _BYTES, "a speed", "25GB/s", whole=text)
    if not speed:
        raise InputError(f"{text!r} must be greater than 0; leave it out for a free link")
    return speed


def show_bytes(count: float) -> str:
    """Bytes as `1.5 GB`, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def show_seconds(seconds: float) -> str:
    """Seconds as `12.3 s`, `0.46 s`, `3.21 ms` or `45.6 us`."""
    if seconds >= 0.1:
        return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s"
    if seconds >= 1e-4:
        return f"{1e3 * seconds:.1f} ms" if seconds >= 0.01 else f"{1e3 * seconds:.2f} ms"
    return f"{1e6 * seconds:.1f} us"


def _parse(
    text: str, units: Mapping[str, float], what: str, example: str, whole: str | None = None
) -> float:
    match = _NUMBER.fullmatch(text)
    lowered = {name.lower(): factor for name, factor in units.items()}
    unit = match.group(2) if match else ""
    if match is None or (unit and unit.lower() not in lowered):
        raise InputError(
            f"{whole or text!r} is not {what}; write it like {example}, in {', '.join(units)}"
        )
    value = float(match.group(1)) * (lowered[unit.lower()] if unit else 1.0)
    if not math.isfinite(value):
        raise InputError(f"{whole or text!r} is not {what}: it is not finite")
    return value
