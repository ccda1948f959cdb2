"""Some faults of each sort; all of them, many times, where there is time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICK = (
    "raise in a stage",
    "SIGKILL to a worker",
    "Ctrl-C",
    "SIGKILL to the driver",
    "the script ends without close()",
)


def faults(*options: str) -> None:
    """Run the command, in a process that has never computed anything and so may fork."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH')}"}
    command = [sys.executable, "-m", "tests.faults", *options]
    found = subprocess.run(
        command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, check=False
    )
    assert found.returncode == 0, found.stderr


def test_some_faults() -> None:
    only = [option for name in QUICK for option in ("--only", name)]
    faults("--runs", str(len(QUICK)), *only)


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_all_faults_at_random_moments() -> None:
    faults("--runs", "200")
