"""What the ranks run: `script.py SCENARIO DIRECTORY`; each leaves its findings in the directory."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.torchrun import scenarios


def main() -> None:
    """Run it."""
    name, directory = sys.argv[1], Path(sys.argv[2])
    rank = int(__import__("os").environ["RANK"])
    found = getattr(scenarios, name)(rank)
    torch.save(found, directory / f"{rank}.part")
    (directory / f"{rank}.part").rename(directory / f"{rank}.pt")


if __name__ == "__main__":
    main()
