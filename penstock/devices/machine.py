"""What machine this is. No torch here."""

from __future__ import annotations

import platform
from contextlib import suppress
from functools import cache
from pathlib import Path


@cache
def processor() -> str:
    """The name of this machine's processor."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
