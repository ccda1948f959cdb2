"""All checks, one after the other. No torch in this process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

import penstock
from penstock.display.terminal import Progress
from penstock.doctor import packages, system
from penstock.doctor.findings import Finding, made

_TORCH = 120.0  # seconds that importing torch and looking at its devices may take
_TRIAL = 120.0  # seconds that training a tiny model may take
_LETTING_GO = 5.0  # seconds for what was killed
_LAST = 400  # characters of what a process has written that says why it failed


def examine(
    quick: bool = False, progress: Progress | None = None, timeout: float | None = None
) -> Iterator[Finding]:
    """Look at the machine, at what is installed and at the devices, and start workers.

    Args:
        quick: start no workers.
        progress: called with checks done, checks in all, and what is being done.
        timeout: seconds that each process which looks may take; by default two minutes.

    Returns:
        the findings, as they come.
    """
    kinds = () if quick else ("threads", "processes")
    total = 3 + len(kinds)

    def report(done: int, what: str) -> None:
        if progress is not None:
            progress(done, total, what)

    report(0, "looking at the machine")
    yield from made("machine", system.CHECKS)
    report(1, "looking at what is installed")
    yield from made("packages", packages.CHECKS)
    report(2, "importing torch")
    yield from findings_of("torch", ["penstock.doctor.devices"], timeout or _TORCH)
    for k, kind in enumerate(kinds):
        report(3 + k, f"starting workers: {kind}")
        yield from findings_of(
            f"workers: {kind}", ["penstock.doctor.trial", kind], timeout or _TRIAL
        )


def findings_of(name: str, module: Sequence[str], timeout: float) -> list[Finding]:
    """Run a module as a process; its findings, or a finding that it failed or did not answer.

    Args:
        name: the name of that finding.
        module: the module's name, and its command-line arguments.
        timeout: seconds after which the process is killed.
    """
    home = str(Path(penstock.__file__).parents[1])
    paths = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", *module],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # so that what it has started ends with it
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        return [
            Finding(
                name,
                "problem",
                f"no answer within {timeout:.0f} s",
                f"run it to see where it hangs: {sys.executable} -X faulthandler -m "
                f"{' '.join(module)}",
            )
        ]
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # who has left the group may keep the pipes open
            process.communicate(timeout=_LETTING_GO)
    lines = out.strip().splitlines()
    try:
        return msgspec.json.decode(lines[-1] if lines else "", type=list[Finding])
    except msgspec.MsgspecError:
        written = (err.strip() or out.strip()).splitlines()
        last = written[-1].strip()[:_LAST] if written else "nothing was written"
        ended = f"ended with {process.returncode}"
        return [Finding(name, "problem", f"the process that looks {ended}: {last}", _cause(err))]


def _cause(text: str) -> str:
    """What to do where a process could not look."""
    if "No module named" in text:
        return "pip install torch, into the environment that has penstock"
    return "mend what the message says, and run penstock doctor again"
