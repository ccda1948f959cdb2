"""What every file of measured data says of itself, and where it is kept.

Figures in README and in the docs are made from these files (`python -m benchmarks.tables`), which
lie in docs/data.
"""

from __future__ import annotations

import json
import subprocess
from argparse import ArgumentParser
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from penstock.bench.turns import machine

ROOT = Path(__file__).parent.parent
DATA = ROOT / "docs/data"


def origin() -> dict[str, Any]:
    """The commit, with a `+` if files have changed since; the machine, the day, and torch."""
    return {
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "machine": machine(),
    }


def commit() -> str:
    """The commit that is checked out; `unknown` without git."""
    try:
        head = _git("rev-parse", "--short=12", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ":!docs")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head}+" if changed else head


def _git(*words: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def add_options(parser: ArgumentParser) -> None:
    """The options that say where the data go."""
    parser.add_argument("--json", type=Path, help="write everything that was measured here")
    parser.add_argument(
        "--record", action="store_true", help="and to docs/data, from which the docs are made"
    )


def save(name: str, report: dict[str, Any], json_: Path | None, record: bool) -> dict[str, Any]:
    """Write a report where the options say; returns it with its origin."""
    whole = {**origin(), **report}
    for path in ([json_] if json_ else []) + ([DATA / f"{name}.json"] if record else []):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(whole, indent=1) + "\n")
    return whole
