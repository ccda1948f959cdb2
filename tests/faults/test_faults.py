"""Some faults of each sort; all of them, many times, where there is time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
QUICK = (
    "SIGKILL to a worker",
    "Ctrl-C",
    "SIGKILL to the driver",
)


BAD = """
import subprocess, termios
from tests.faults import kinds, outside

def careless(session):
    subprocess.Popen(["sleep", "30"], start_new_session=True)
    session.dead = subprocess.Popen(["true"])  # kept, or it might be waited for
    mode = termios.tcgetattr(0)
    mode[3] &= ~termios.ECHO
    termios.tcsetattr(0, termios.TCSANOW, mode)
    session.file = open("/dev/null")
    session.nothing_is_left()

kinds.KINDS["careless"] = kinds.Kind("careless", careless, exit_code=3, last="a word")
outside.SOON = 0.3
outside.adopt_orphans()
print(*outside.run("careless", 0).problems, sep="\\n")
"""


def python(*options: str) -> subprocess.CompletedProcess[str]:
    """Run Python in a process that has never computed anything, and so may fork."""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH')}"}
    command = [sys.executable, *options]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )


def faults(*options: str) -> None:
    """Run the command; a machine that is busy with other tests may be slow."""
    found = python("-m", "tests.faults", "--patient", *options)
    assert found.returncode == 0, found.stderr


def test_the_watch_sees_what_is_wrong() -> None:
    found = python("-c", BAD).stdout
    for words in (
        *("processes are left: ['sleep 30 ', 'a zombie']", "files are open: ['/dev/null']"),
        *("left behind: sleep 30", "the terminal is not as it was"),
        *("the driver ended with 0", "the screen does not end with 'a word'"),
    ):
        assert words in found, found


def test_some_faults() -> None:
    only = [option for name in QUICK for option in ("--only", name)]
    faults("--runs", str(len(QUICK)), *only)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(5))
def test_all_faults_at_random_moments(seed: int) -> None:
    """One run of each kind."""
    faults("--seed", str(seed))
