"""What the ranks run: `script.py SCENARIO[:ARGUMENT] DIRECTORY`.

Each leaves its findings in the directory.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from tests.workers.ranks import scenarios


def main() -> None:
    """Run it."""
    name, *arguments = sys.argv[1].split(":")
    path = Path(sys.argv[2]) / f"{os.environ['RANK']}.pt"
    found = getattr(scenarios, name)(int(os.environ["RANK"]), *arguments)
    torch.save(found, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    main()
