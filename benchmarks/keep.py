"""Keeps what another command has measured: `python -m benchmarks.keep FILE NAME`.

The file goes to docs/data/NAME.json, with the commit, the day and the machine.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks import record


def main(path: str, name: str) -> None:
    """Keep it."""
    record.save(name, json.loads(Path(path).read_text()), None, record=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
