"""Writes measurements with their origin: the commit, the machine, the date, and torch's version.

    python -m penstock.bench record FILE NAME

puts what `penstock bench` has written to FILE into docs/data/NAME.json, where `--record` of the
other benchmarks puts their data. The tables of README and of the docs are made from these files
(`python -m penstock.bench tables`).
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from penstock.devices.kinds import accelerator
from penstock.devices.machine import processor

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs/data"
_PATIENCE = 1200.0  # seconds


def machine() -> dict[str, Any]:
    """The machine that this process runs on: processor, cores, GPUs, versions and threads."""
    kind = accelerator()
    return {
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "cuda": [kind.name(device) for device in kind.devices()] if kind else [],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }


def origin() -> dict[str, Any]:
    """The commit, with a `+` if files have changed since; the machine, the day, and torch."""
    return {
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "machine": machine(),
    }


def in_own_process(module: str, *arguments: str, **environment: str) -> Any:
    """Run a module in a new process without warnings; returns the JSON in the last line it prints.

    Args:
        module: the name of the module.
        *arguments: the arguments of its command line.
        **environment: variables that are added to the environment.

    Raises:
        RuntimeError: it failed, or did not end within twenty minutes.
    """
    command = [sys.executable, "-W", "ignore", "-m", module, *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{' '.join(command)} has not ended in {_PATIENCE:g} s") from error
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def commit() -> str:
    """The commit that is checked out, with a `+` if tracked files outside docs/ have changed.

    It is `unknown` without git, or where Penstock is installed.
    """
    if not (ROOT / ".git").exists():
        return "unknown"
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


def parser(name: str, doc: str | None) -> ArgumentParser:
    """A benchmark's parser, with the options that say where the data go.

    Args:
        name: the name of the benchmark.
        doc: the docstring of its module, which `--help` prints.
    """
    made = ArgumentParser(
        f"python -m penstock.bench {name}",
        description=doc,
        formatter_class=RawDescriptionHelpFormatter,
    )
    made.add_argument("--json", type=Path, help="write everything that was measured to this file")
    made.add_argument(
        "--record", action="store_true", help="write it to docs/data, from which the docs are made"
    )
    return made


def check_whole(parser: ArgumentParser, options: Namespace, *names: str) -> None:
    """End with an error if only a part is to be recorded, as docs/data has all of it in one file.

    Args:
        parser: of the benchmark.
        options: what it has parsed.
        *names: the options that choose a part, or smaller models; with their defaults all is run.
    """
    chosen = [f"--{n}" for n in names if getattr(options, n) != parser.get_default(n)]
    if options.record and chosen:
        parser.error(
            f"--record replaces all that is in docs/data for this benchmark: leave out "
            f"{' and '.join(chosen)}, or write to a file with --json"
        )


def save(name: str, report: dict[str, Any], options: Namespace) -> dict[str, Any]:
    """Write a report where the options say; returns it with its origin."""
    whole = {**origin(), **report}
    for path in filter(None, (options.json, options.record and DATA / f"{name}.json")):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(whole, indent=1) + "\n")
    return whole


def save_models(
    name: str, measured: dict[str, dict[str, Any]], options: Namespace
) -> dict[str, Any]:
    """Write the measurements of some models; docs/data keeps those of other models.

    Args:
        name: the name of the benchmark.
        measured: the measurements by the names of the models; an origin is added to each.
        options: those of `parser`, which say where the measurements go.
    """
    path = DATA / f"{name}.json"
    kept = json.loads(path.read_text())["models"] if options.record and path.exists() else []
    own = [{"model": model, **origin(), **found} for model, found in measured.items()]
    others = [found for found in kept if found["model"] not in measured]
    return save(name, {"models": [*others, *own]}, options)


def main(arguments: Sequence[str]) -> int:
    """Copy a report to docs/data, with its origin, or that of this checkout if it has none."""
    parser = ArgumentParser(
        "python -m penstock.bench record",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, help="what penstock bench --json has written")
    parser.add_argument("name", help="of the file in docs/data, without .json")
    given = parser.parse_args(arguments)
    try:
        report = json.loads(given.file.read_text())
    except (OSError, ValueError) as error:
        parser.error(f"{given.file} cannot be read as JSON: {error}")
    if not isinstance(report, dict):
        parser.error(f"{given.file} has no report: it is a JSON {type(report).__name__}")
    save(given.name, report, Namespace(json=None, record=True))
    return 0
