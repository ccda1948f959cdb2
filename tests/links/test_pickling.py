"""Objects on their way to another process are there what they were here."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from penstock.links.pickling import to_bytes

SCRIPT = """
    import sys, traceback
    from penstock.links.pickling import from_bytes
    function = from_bytes(open(sys.argv[1], "rb").read())
    try:
        function()
    except KeyError:
        traceback.print_exc()
"""


def test_a_function_knows_its_file(tmp_path: Path) -> None:
    """So that tracebacks of other processes show its lines, whichever cloudpickle there is."""

    def inner() -> None:
        raise KeyError("mine")

    path = tmp_path / "function"
    path.write_bytes(to_bytes(lambda: inner()))
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), str(path)],
        env={**os.environ, "PYTHONPATH": os.getcwd()},
        capture_output=True,
        text=True,
        check=True,
    )
    assert 'raise KeyError("mine")' in ran.stderr
    assert f'File "{__file__}"' in ran.stderr
